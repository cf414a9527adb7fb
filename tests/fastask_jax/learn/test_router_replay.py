"""Router replay: the learner routes every token as the sampler did."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from fastask_jax.learn import (
    Objective,
    OptimizerConfig,
    PackConfig,
    make_train_step,
    pack,
    results,
)
from fastask_jax.learn.packing import micro_batches
from fastask_jax.model import forward

CONFIG = PackConfig((32,), micro_batch_rows=2, min_rows=4)
QUICK = {"xla_backend_optimization_level": 0}


@pytest.fixture(scope="module")
def items(toy, small_model):
    return [toy.trajectory(6 + 3 * n, n, small_model.vocab_size) for n in range(6)]


@pytest.fixture(scope="module")
def chosen(small_model, small_params, items):
    """The router's own experts for every token: [tokens, layers, K] each."""
    packed = pack(items, CONFIG)
    rows = packed.batch.tokens, packed.batch.positions, packed.batch.segment_ids
    run = jax.jit(
        partial(forward, small_model, return_expert_ids=True), compiler_options=QUICK
    )
    return packed.unpack(np.moveaxis(np.asarray(run(small_params, *rows)[1]["expert_ids"]), 0, 2))


@pytest.mark.slow
def test_the_routers_own_choice_changes_nothing_and_another_does(
    small_model, small_params, items, chosen
):
    step = make_train_step(small_model, Objective(), OptimizerConfig(), micro_batch_rows=2)
    run = jax.jit(partial(step.gradient, terms=step.objective.terms), compiler_options=QUICK)

    def gradient(experts):
        batch = items
        if experts is not None:
            batch = [replace(i, expert_ids=e) for i, e in zip(items, experts, strict=True)]
        micro = micro_batches(pack(batch, CONFIG).batch, 2)
        grads, metrics = run(small_params, jnp.int32(0), micro, step.objective)
        return grads, results(metrics)["loss/policy"]

    grads, loss = gradient(None)
    same_grads, same_loss = gradient(chosen)
    assert same_loss == pytest.approx(loss, rel=1e-5)
    for a, b in zip(jax.tree.leaves(same_grads), jax.tree.leaves(grads), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b) + 1e-7
    _, other = gradient([(experts + 1) % small_model.num_experts for experts in chosen])
    assert abs(other / loss - 1) > 1e-3


def test_experts_of_some_tokens_are_refused(small_model, items, chosen):
    first = replace(items[0], expert_ids=chosen[0])
    with pytest.raises(ValueError, match="expert_ids .* of every trajectory"):
        pack([first, items[1]], CONFIG)
    short = replace(items[1], expert_ids=chosen[1][:-1])
    with pytest.raises(ValueError, match="one entry per token"):
        pack([first, short], CONFIG)
    assert pack(items, CONFIG).batch.expert_ids is None
    assert pack([first], CONFIG).batch.expert_ids.shape[2:] == (small_model.num_layers, 2)
