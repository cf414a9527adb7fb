"""The train step: gradients against numpy, AdamW, and the invariances that keep it correct."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastask_jax.learn.checkpoint import Checkpointer
from fastask_jax.learn.losses import LossConfig
from fastask_jax.learn.metrics import results
from fastask_jax.learn.objective import Objective
from fastask_jax.learn.packing import PackConfig, micro_batches, pack
from fastask_jax.learn.score import make_scorer
from fastask_jax.learn.step import OptimizerConfig, TrainState, make_train_step

OPTIMIZER = OptimizerConfig(learning_rate=0.01)


def gradient(model, params, items, objective, config):
    """(flat gradient, loss) of the items as packed by config."""
    step = make_train_step(model, objective, OPTIMIZER, micro_batch_rows=config.micro_batch_rows)
    micro = micro_batches(pack(items, config).batch, config.micro_batch_rows)
    run = jax.jit(partial(step.gradient, terms=objective.terms))
    grads, metrics = run(params, jnp.int32(0), micro, objective)
    return np.concatenate([np.ravel(g) for g in jax.tree.leaves(grads)]), results(metrics)


def distance(first, second):
    return np.linalg.norm(first - second) / np.linalg.norm(second)


def test_gradient_of_reinforce_is_the_sum_worked_out_in_numpy(toy):
    params, temperature = toy.params(), 0.7
    items = [toy.trajectory(n, seed) for seed, n in enumerate([5, 9, 3, 6])]
    objective = Objective(loss="reinforce", temperature=temperature)
    grads, metrics = gradient(
        toy.scores, params, items, objective, PackConfig((16,), micro_batch_rows=2)
    )
    table, bias, loss, count = np.zeros((toy.VOCAB,) * 2), np.zeros(toy.VOCAB), 0.0, 0
    for item in items:
        log_probs = toy.log_softmax(params, item.ids[:-1], temperature)
        for t in np.flatnonzero(item.mask):
            previous, token = item.ids[t - 1], item.ids[t]
            loss -= item.advantage * log_probs[t - 1, token]
            slope = (np.exp(log_probs[t - 1]) - np.eye(toy.VOCAB)[token]) / temperature
            table[previous] += item.advantage * slope
            bias += item.advantage * slope
            count += 1
    assert metrics["loss/total"] == pytest.approx(loss / count, rel=1e-5)
    np.testing.assert_allclose(grads, np.concatenate([bias, table.ravel()]) / count, atol=1e-6)


LAYOUTS = [
    PackConfig((24,), micro_batch_rows=1, min_rows=16),
    PackConfig((24,), micro_batch_rows=4, min_rows=16),
    PackConfig((24,), micro_batch_rows=16, min_rows=16),
    PackConfig((40,), micro_batch_rows=2, min_rows=64),
]
GRADIENTS: dict = {}


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant"])
@settings(deadline=None, max_examples=25)
@given(sizes=st.lists(st.integers(1, 24), min_size=1, max_size=14), data=st.data())
def test_any_micro_batch_split_padding_and_packing_is_the_same_step(toy, reduction, sizes, data):
    objective = Objective(reduction=reduction, entropy_coef=0.01, bounds=LossConfig(clip_low=0.5))
    params = toy.params()
    items = [toy.trajectory(n, seed) for seed, n in enumerate(sizes)]
    order = data.draw(st.permutations(range(len(items))))
    layout = data.draw(st.sampled_from(LAYOUTS[1:]))

    def run(items, layout):
        key = (layout, reduction)
        if key not in GRADIENTS:  # one compilation per layout
            step = make_train_step(
                toy.scores, objective, OPTIMIZER, micro_batch_rows=layout.micro_batch_rows
            )
            GRADIENTS[key] = jax.jit(partial(step.gradient, terms=objective.terms))
        micro = micro_batches(pack(items, layout).batch, layout.micro_batch_rows)
        grads, metrics = GRADIENTS[key](params, jnp.int32(0), micro, objective)
        return np.concatenate([np.ravel(g) for g in jax.tree.leaves(grads)]), results(metrics)

    expected, metrics = run(items, LAYOUTS[0])
    actual, others = run([items[i] for i in order], layout)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    assert others == pytest.approx(metrics, rel=1e-5, abs=1e-6)


def check_invariance(model, params, vocab, lengths, layouts, toy):
    items = [toy.trajectory(int(n), seed, vocab) for seed, n in enumerate(lengths)]
    shuffled = [items[i] for i in np.random.default_rng(0).permutation(len(items))]
    objective = Objective(bounds=LossConfig(clip_low=0.9, clip_high=4.0))
    base, metrics = gradient(model, params, items, objective, layouts[0])
    for index, layout in enumerate(layouts[1:]):
        other, others = gradient(model, params, [items, shuffled][index % 2], objective, layout)
        assert distance(other, base) < 1e-5
        assert others["loss/total"] == pytest.approx(metrics["loss/total"], rel=1e-5)
        assert others["policy/ratio_max"] == pytest.approx(metrics["policy/ratio_max"], rel=1e-4)


@pytest.mark.slow
def test_real_model_gives_the_same_gradient_for_every_layout(small_model, small_params, toy):
    layouts = [
        PackConfig((20,), micro_batch_rows=1, min_rows=1),  # a row each: nothing packed
        PackConfig((64,), micro_batch_rows=1, min_rows=16),
        PackConfig((53,), micro_batch_rows=3, min_rows=1),
    ]
    lengths = [20, 11, 19, 13, 17, 12, 11, 16]
    check_invariance(small_model, small_params, 61, lengths, layouts, toy)


@pytest.mark.slow
def test_tiny_preset_gives_the_same_gradient_for_every_layout(toy):
    from fastask_jax.model import PRESETS, init_params

    layouts = [
        PackConfig((64,), micro_batch_rows=1, min_rows=1),
        PackConfig((160,), micro_batch_rows=2, min_rows=1),
    ]
    cfg = PRESETS["tiny"]
    params = init_params(cfg, jax.random.key(0))
    check_invariance(cfg, params, cfg.vocab_size, [64, 40, 33, 50, 36], layouts, toy)


@pytest.mark.slow
def test_scorer_matches_the_step_and_each_trajectory_alone(small_model, small_params, toy):
    """Sampler logprobs set to the learner's own make every ratio 1."""
    items = [toy.trajectory(n, seed, 61) for seed, n in enumerate([20, 11, 13, 7])]
    config = PackConfig((32,), micro_batch_rows=2, min_rows=1)
    scorer = make_scorer(small_model, micro_batch_rows=2)
    packed = pack(items, config)
    logprobs, entropy = scorer(small_params, packed, temperature=0.8)
    for item, together in zip(items, packed.unpack(logprobs), strict=True):
        alone = pack([item], config)
        single = alone.unpack(scorer(small_params, alone, temperature=0.8)[0])[0]
        np.testing.assert_allclose(together, single, atol=2e-5)
        assert (together[item.mask] < 0).all() and not together[~item.mask].any()
    assert scorer.traces == 1 and (entropy[packed.batch.mask] > 0).all()

    own = [
        type(item)(item.ids, item.mask, np.minimum(piece, 0), item.advantage)
        for item, piece in zip(items, packed.unpack(logprobs), strict=True)
    ]
    step = make_train_step(small_model, Objective(temperature=0.8), OPTIMIZER, micro_batch_rows=2)
    _, metrics = step(step.init(small_params), pack(own, config))
    values = results(metrics)
    assert values["policy/log_ratio_abs"] < 1e-5 and values["policy/mismatch_k3_max"] < 1e-8
    assert values["policy/sample_size"] == pytest.approx(1.0, abs=1e-6)
    assert values["policy/entropy"] == pytest.approx(entropy[packed.batch.mask].mean(), rel=1e-5)
    assert 0.5 <= values["model/busiest_expert"] <= 1.0


@pytest.fixture
def packed(toy):
    items = [toy.trajectory(n, seed) for seed, n in enumerate([9, 12, 4, 16])]
    return pack(items, PackConfig((16,), micro_batch_rows=2, min_rows=8))


def toy_step(toy, objective=None, optimizer=OPTIMIZER):
    return make_train_step(
        toy.scores, objective or Objective(loss="reinforce"), optimizer, micro_batch_rows=2
    )


def test_learning_rates_rise_and_fall_linearly():
    """Worked by hand: two updates up to 1, then 0.9 down over four."""
    optimizer = OptimizerConfig(
        learning_rate=1.0, warmup_steps=2, decay_steps=6, final_rate=0.1
    )
    rates = [float(optimizer.rate(jnp.int32(step))) for step in range(8)]
    assert rates == pytest.approx([0.5, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1, 0.1])
    constant = OptimizerConfig(learning_rate=0.3)
    assert [float(constant.rate(jnp.int32(s))) for s in (0, 5, 10**6)] == pytest.approx([0.3] * 3)
    with pytest.raises(ValueError, match="decay_steps must be positive"):
        OptimizerConfig(decay_steps=-1)


def test_first_adamw_update_by_hand(toy, packed):
    optimizer = OptimizerConfig(learning_rate=0.1, weight_decay=0.5, warmup_steps=4, eps=1e-8)
    step = toy_step(toy, optimizer=optimizer)
    params = toy.params()
    state, metrics = step(step.init(params), packed)
    values = results(metrics)
    assert values["optim/learning_rate"] == pytest.approx(0.025)
    # After one step Adam's moments are the gradient and its square, so it moves by its sign; the
    # bias is a vector and doesn't decay.
    micro = micro_batches(packed.batch, 2)
    grads, _ = step.gradient(params, jnp.int32(0), micro, step.objective, frozenset())
    assert values["optim/grad_norm"] == pytest.approx(float(optax_norm(grads)), rel=1e-5)
    move = np.where(np.abs(grads["table"]) > 0, np.sign(grads["table"]), 0) + 0.5 * params["table"]
    np.testing.assert_allclose(state.params["table"], params["table"] - 0.025 * move, atol=2e-5)
    np.testing.assert_allclose(
        state.params["bias"], params["bias"] - 0.025 * np.sign(grads["bias"]), atol=2e-5
    )
    assert int(state.step) == int(state.version) == 1


def optax_norm(tree):
    return np.sqrt(sum(np.sum(np.square(np.float64(leaf))) for leaf in jax.tree.leaves(tree)))


def test_global_norm_clipping(toy, packed):
    step = toy_step(toy, optimizer=OptimizerConfig(max_grad_norm=1e-3))
    state, metrics = step(step.init(toy.params()), packed)
    assert results(metrics)["optim/grad_norm"] > 1e-3  # logged before clipping
    first_moment = jax.tree.leaves(state.opt_state[1].mu)
    assert optax_norm(first_moment) == pytest.approx(1e-3 * 0.1, rel=1e-4)


def test_stacked_vectors_do_not_decay():
    tree = {
        "blocks": {"norm": jnp.ones((2, 3)), "proj": jnp.ones((2, 3, 3))},
        "head": jnp.ones((3, 3)),
    }
    optimizer = OptimizerConfig(learning_rate=1.0, weight_decay=0.5)
    transformation = optimizer.transformation()
    zero = jax.tree.map(jnp.zeros_like, tree)
    updates, _ = transformation.update(zero, transformation.init(tree), tree)
    assert float(jnp.abs(updates["blocks"]["norm"]).max()) == 0.0
    assert float(updates["blocks"]["proj"][0, 0, 0]) == float(updates["head"][0, 0]) == -0.5


def test_numbers_and_batches_change_without_compiling(toy, packed):
    step = toy_step(toy)
    state = step.init(toy.params())
    losses = set()
    for index in range(4):
        objective = Objective(
            loss="reinforce", temperature=1 + index / 10, bounds=LossConfig(clip_low=index / 10)
        )
        optimizer = OptimizerConfig(learning_rate=0.1 / (index + 1), warmup_steps=index)
        items = [toy.trajectory(3 + index, seed) for seed in range(1 + 2 * index)]
        batch = pack(items, PackConfig((16,), micro_batch_rows=2, min_rows=8))
        state, metrics = step(state, batch, objective=objective, optimizer=optimizer)
        losses.add(results(metrics)["loss/total"])
    assert step.traces == 1 and len(losses) == 4 and step._jitted._cache_size() == 1


def test_the_state_is_donated_and_the_given_params_survive(toy, packed):
    params = toy.params()
    before = np.array(params["table"])
    step = toy_step(toy)
    first = step.init(params)
    second, _ = step(first, packed)
    assert first.params["table"].is_deleted() and not second.params["table"].is_deleted()
    np.testing.assert_array_equal(params["table"], before)


def test_all_masked_batch_moves_nothing(toy):
    items = [toy.trajectory(5, 0)]
    object.__setattr__(items[0], "mask", np.zeros(5, bool))
    config = PackConfig((16,), micro_batch_rows=2, min_rows=8)
    step = toy_step(toy, Objective(entropy_coef=0.1))
    # After a real update, so that the optimizer has moments to go on with.
    state, metrics = step(step.init(toy.params()), pack([toy.trajectory(5, 1)], config))
    assert results(metrics)["optim/skipped"] == 0.0
    before = jax.tree.map(np.array, state)
    # A batch with no trajectory at all runs no micro-batch.
    for empty, tokens in ((items, 5), ([], 0)):
        state, metrics = step(state, pack(empty, config))
        values = results(metrics)
        assert values["optim/grad_norm"] == 0.0 and values["batch/sampled_tokens"] == 0
        assert values["optim/skipped"] == 1.0 and values["batch/tokens"] == tokens
        jax.tree.map(np.testing.assert_array_equal, state.params, before.params)
        jax.tree.map(np.testing.assert_array_equal, state.opt_state, before.opt_state)
    assert step.traces == 1 and int(state.version) == 3


def test_a_gradient_that_is_not_finite_changes_nothing_and_says_so(toy, packed):
    def broken(params, *arguments):
        scores = toy.scores(params, *arguments)
        return scores._replace(logprobs=scores.logprobs / params["scale"])

    step = make_train_step(broken, Objective(loss="reinforce"), OPTIMIZER, micro_batch_rows=2)
    params = toy.params() | {"scale": jnp.ones(())}
    state, metrics = step(step.init(params), packed)
    assert results(metrics)["optim/skipped"] == 0.0
    state = TrainState(
        state.params | {"scale": jnp.zeros(())}, state.opt_state, state.step, state.version
    )
    before = jax.tree.map(np.array, state)
    state, metrics = step(state, packed)
    assert results(metrics)["optim/skipped"] == 1.0
    jax.tree.map(np.testing.assert_array_equal, state.params, before.params)
    jax.tree.map(np.testing.assert_array_equal, state.opt_state, before.opt_state)
    assert int(state.step) == 2


def test_an_update_that_is_not_finite_changes_nothing_and_says_so(toy, packed):
    """The gradient is finite; the rate makes it overflow."""
    step = toy_step(toy)
    state = step.init(toy.params())
    before = jax.tree.map(np.array, state)
    state, metrics = step(state, packed, optimizer=OptimizerConfig(learning_rate=3e38))
    assert results(metrics)["optim/skipped"] == 1.0
    assert np.isfinite(results(metrics)["optim/grad_norm"])
    jax.tree.map(np.testing.assert_array_equal, state.params, before.params)
    jax.tree.map(np.testing.assert_array_equal, state.opt_state, before.opt_state)


@pytest.mark.parametrize("loss", ["aipo_clip", "aipo", "ppo", "cispo", "reinforce", "gspo", "ipo"])
def test_every_loss_raises_what_was_rewarded(toy, loss):
    """Sampling on policy, token 2 is rewarded and the others are not."""
    step = make_train_step(
        toy.scores, Objective(loss=loss), OptimizerConfig(learning_rate=0.1), micro_batch_rows=4
    )
    scorer = make_scorer(toy.scores, micro_batch_rows=4)
    state = step.init(toy.params())
    rng = np.random.default_rng(0)
    config = PackConfig((8,), micro_batch_rows=4, min_rows=8)

    def probability():
        return np.exp(toy.log_softmax(state.params, np.arange(toy.VOCAB)))[:, 2].mean()

    start = probability()
    for _ in range(12):
        items = []
        for _ in range(32):
            first = rng.integers(toy.VOCAB)
            token = rng.choice(toy.VOCAB, p=np.exp(toy.log_softmax(state.params, [first]))[0])
            item = toy.trajectory(2, 0, advantage=1.0 if token == 2 else -0.2)
            items.append(
                type(item)(np.array([first, token]), np.array([0, 1]), np.zeros(2), item.advantage)
            )
        recorded = pack(items, config)
        own = recorded.unpack(scorer(state.params, recorded)[0])
        items = [
            type(i)(i.ids, i.mask, np.minimum(p, 0), i.advantage)
            for i, p in zip(items, own, strict=True)
        ]
        state, _ = step(state, pack(items, config))
    assert probability() > start + 0.2


def test_killed_and_resumed_equals_uninterrupted(toy, packed, tmp_path):
    """Bit for bit, with a save that is still being written while the donated state moves on."""
    step = toy_step(toy)
    state = step.init(toy.params())
    history = []
    with Checkpointer(tmp_path) as checkpointer:
        for index in range(6):
            if index == 3:
                checkpointer.save(index, state, {"index": index})
            state, metrics = step(state, packed)
            history.append(results(metrics))
    fresh = toy_step(toy)
    with Checkpointer(tmp_path) as checkpointer:
        resumed, host = checkpointer.restore(fresh.abstract(toy.params()))
    again = []
    for _ in range(host["index"], 6):
        resumed, metrics = fresh(resumed, packed)
        again.append(results(metrics))
    assert again == history[3:] and fresh.traces == 1 and fresh._jitted._cache_size() == 1
    jax.tree.map(np.testing.assert_array_equal, resumed, state)


def test_rows_must_divide(toy, packed):
    with pytest.raises(ValueError, match="8 rows don't divide into micro-batches of 3"):
        step = make_train_step(toy.scores, Objective(), OPTIMIZER, micro_batch_rows=3)
        step(step.init(toy.params()), packed)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"learning_rate": -1.0}, "learning_rate must be positive"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be positive"),
        ({"weight_decay": float("nan")}, "weight_decay must be positive"),
        ({"learning_rate": float("inf")}, "learning_rate must be finite"),
        ({"weight_decay": float("inf")}, "weight_decay must be finite"),
        ({"b1": 1.0}, "b1 must be at least 0 and below 1, not 1.0"),
        ({"b2": float("nan")}, "b2 must be at least 0 and below 1"),
        ({"eps": 0.0}, "eps must be above 0 and finite"),
        ({"eps": float("nan")}, "eps must be above 0 and finite"),
        ({"eps": float("inf")}, "eps must be above 0 and finite"),
        ({"final_rate": 1.5}, "final_rate is a share, at most 1"),
        ({"warmup_steps": 5, "decay_steps": 4}, r"decay_steps \(4\) must be 0 or at least warmup"),
        ({"first_moment": "float16"}, "first_moment must be float32 or bfloat16"),
    ],
)
def test_bad_optimizers_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**fields)


def test_the_first_moment_may_be_kept_in_bfloat16(toy, packed):
    step = toy_step(toy, optimizer=OptimizerConfig(learning_rate=0.01, first_moment="bfloat16"))
    exact = toy_step(toy)
    state, _ = step(step.init(toy.params()), packed)
    wide, _ = exact(exact.init(toy.params()), packed)
    mu, nu = state.opt_state[1].mu, state.opt_state[1].nu
    assert {x.dtype.name for x in jax.tree.leaves((mu, nu))} == {"bfloat16", "float32"}
    for low, high in zip(jax.tree.leaves(mu), jax.tree.leaves(wide.opt_state[1].mu), strict=True):
        np.testing.assert_allclose(np.float32(low), high, rtol=1e-2)
    assert step.abstract(toy.params()).opt_state[1].mu["table"].dtype == jnp.bfloat16
