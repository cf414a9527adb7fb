"""The train step with LoRA: the adapters' gradient and state, and nothing else moves."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from fastask_jax.learn import Objective, OptimizerConfig, PackConfig, make_train_step, pack, results
from fastask_jax.learn.score import score_fn
from fastask_jax.model.lora import (
    TARGETS,
    LoraConfig,
    attach,
    fingerprint,
    init_adapters,
    merge_adapters,
)

LORA = LoraConfig(rank=2, alpha=4.0, targets=TARGETS)
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, eps=1e-3)


@pytest.fixture(scope="module")
def packed(toy, small_model):
    items = [toy.trajectory(6 + n, n, small_model.vocab_size) for n in range(6)]
    return pack(items, PackConfig((32,), micro_batch_rows=2, min_rows=4))


@pytest.fixture(scope="module")
def adapters(small_model):
    return jax.tree.map(lambda x: x + 0.05, init_adapters(small_model, LORA, jax.random.key(1)))


@pytest.fixture(scope="module")
def after(small_model, small_params, adapters, packed):
    step = make_train_step(
        small_model, Objective(), OPTIMIZER, micro_batch_rows=2, lora=LORA, frozen=small_params
    )
    state, metrics = step(step.init(adapters), packed)
    return step, state, results(metrics)


@pytest.mark.slow
def test_the_step_is_that_of_a_model_whose_weights_are_merged(
    small_model, small_params, adapters, packed, after
):
    """Another way to the same gradient: through `W + s A B`, written out."""
    inner = score_fn(small_model)

    def scores(adapters, *rest):
        return inner(merge_adapters(small_model, LORA, small_params, adapters), *rest)

    plain = make_train_step(
        scores, Objective(), OPTIMIZER, micro_batch_rows=2, param_specs=PartitionSpec()
    )
    expected, metrics = plain(plain.init(adapters), packed)
    _, state, found = after
    wanted = results(metrics)
    for name in ("loss/total", "optim/grad_norm", "optim/update_norm"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-4), name
    for moment, theirs in zip(
        jax.tree.leaves(state.opt_state[1].mu), jax.tree.leaves(expected.opt_state[1].mu),
        strict=True,
    ):  # fmt: skip
        assert np.linalg.norm(moment - theirs) <= 1e-3 * np.linalg.norm(theirs) + 1e-7


@pytest.mark.slow
def test_only_adapters_move_and_have_state(small_params, adapters, after):
    step, state, _ = after
    frozen = zip(jax.tree.leaves(step.frozen), jax.tree.leaves(small_params), strict=True)
    assert all(np.array_equal(a, b) for a, b in frozen)
    shapes = [leaf.shape for leaf in jax.tree.leaves(adapters)]
    for moment in (state.opt_state[1].mu, state.opt_state[1].nu):
        assert [leaf.shape for leaf in jax.tree.leaves(moment)] == shapes
    # Adapters, two moments, and three counters: no array of the model's size.
    assert len(jax.tree.leaves(state)) == 3 * len(shapes) + 3
    moved = jax.tree.map(lambda x, y: float(np.abs(x - y).max()) > 0, state.params, adapters)
    assert all(jax.tree.leaves(moved))
    joined = jax.tree.structure(step.policy(state))
    assert joined == jax.tree.structure(attach(LORA, small_params, adapters))


def test_settings_that_do_not_fit_are_refused(toy, small_model, small_params):
    make = lambda model=small_model, **more: make_train_step(  # noqa: E731
        model, Objective(), OPTIMIZER, micro_batch_rows=2, **more
    )
    for lone in ({"lora": LORA}, {"frozen": small_params}):
        with pytest.raises(ValueError, match="come together"):
            make(**lone)
    with pytest.raises(ValueError, match="for a ModelConfig"):
        make(toy.scores, lora=LORA, frozen=small_params)
    assert make(lora=LoraConfig()).lora is None
    with pytest.raises(ValueError, match="none of the lora targets"):
        dense = replace(small_model, feed_forwards=("dense",))
        make(dense, lora=replace(LORA, targets=("moe.down",)), frozen=small_params)


def test_fingerprints_tell_weights_apart(small_params):
    first = int(fingerprint(small_params))
    assert int(fingerprint(jax.tree.map(lambda x: x + 0, small_params))) == first
    changed = small_params | {"embedding": small_params["embedding"].at[0, 0].add(1e-3)}
    assert int(fingerprint(changed)) != first
    low = jax.tree.map(lambda x: x.astype("bfloat16"), small_params)
    assert int(fingerprint(low)) != first
    # Within a leaf too, where all layers of a kind are stacked.
    swapped = small_params | {"embedding": small_params["embedding"][::-1]}
    assert int(fingerprint(swapped)) != first
    stack = jax.random.normal(jax.random.key(0), (3, 4, 4))
    turned = (stack, stack[::-1], stack[:, ::-1], stack.swapaxes(1, 2))
    assert len({int(fingerprint({"layers": x})) for x in turned}) == 4
