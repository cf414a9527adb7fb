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
    make_scorer,
    make_train_step,
    pack,
    results,
)
from fastask_jax.learn.packing import micro_batches
from fastask_jax.model import forward

CONFIG = PackConfig((32,), micro_batch_rows=2, min_rows=4)


@pytest.fixture(scope="module")
def items(toy, small_model):
    return [toy.trajectory(6 + 3 * n, n, small_model.vocab_size) for n in range(6)]


@pytest.fixture(scope="module")
def chosen(small_model, small_params, items):
    """The router's own experts for every token: [tokens, layers, K] each."""
    packed = pack(items, CONFIG)
    rows = packed.batch.tokens, packed.batch.positions, packed.batch.segment_ids
    run = jax.jit(partial(forward, small_model, return_expert_ids=True))
    return packed.unpack(np.moveaxis(np.asarray(run(small_params, *rows)[1]["expert_ids"]), 0, 2))


@pytest.mark.slow
def test_the_routers_own_choice_changes_nothing_and_another_does(
    small_model, small_params, items, chosen
):
    step = make_train_step(small_model, Objective(), OptimizerConfig(), micro_batch_rows=2)
    run = jax.jit(partial(step.gradient, terms=step.objective.terms))

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
    with pytest.raises(ValueError, match="expert_ids of type float64"):
        pack([replace(items[0], expert_ids=chosen[0] * 1.0)], CONFIG)
    assert pack(items, CONFIG).batch.expert_ids is None
    assert pack([first], CONFIG).batch.expert_ids.shape[2:] == (small_model.num_layers, 2)


@pytest.mark.parametrize(
    "experts, message",
    [([0, 99], "the expert 99 of"), ([-1, 0], "the expert -1 of"), ([1, 1], "twice for one token")],
)
def test_experts_that_the_layer_lacks_are_refused(
    small_model, small_params, items, chosen, experts, message
):
    wrong = chosen[0].copy()
    wrong[2, 1] = experts
    packed = pack([replace(items[0], expert_ids=wrong)], CONFIG)
    with pytest.raises(ValueError, match=message):
        make_scorer(small_model, micro_batch_rows=2)(small_params, packed)
    step = make_train_step(small_model, Objective(), OptimizerConfig(), micro_batch_rows=2)
    with pytest.raises(ValueError, match=message):
        step(step.init(small_params), packed)


@pytest.mark.parametrize("token", [-1, 10**6])
def test_tokens_that_the_model_lacks_are_refused(small_model, small_params, items, token):
    ids = np.array(items[0].ids)
    ids[0] = token
    packed = pack([replace(items[0], ids=ids)], CONFIG)
    with pytest.raises(ValueError, match=f"the token id {token}, and the model knows 0 to"):
        make_scorer(small_model, micro_batch_rows=2)(small_params, packed)
