"""Reductions, rejection and optional terms against sums written out in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastask_jax.learn.losses import LossConfig
from fastask_jax.learn.metrics import results
from fastask_jax.learn.objective import Keep, Objective, objective_sum, reduction_weights
from fastask_jax.learn.packing import PackConfig, TrainableTokens, pack

# Two trajectories in one row: 3 and 1 sampled tokens, advantages 2 and -1.
FIRST = TrainableTokens(
    ids=np.arange(5),
    mask=np.array([0, 1, 0, 1, 1]),
    logprobs=np.log([1, 0.5, 1, 0.25, 0.2]),
    advantage=2.0,
    versions=np.array([0, 3, 0, 4, 5]),
)
SECOND = TrainableTokens(
    ids=np.arange(3),
    mask=np.array([0, 0, 1]),
    logprobs=np.log([1, 1, 0.4]),
    advantage=-1.0,
    versions=np.array([0, 0, 5]),
)
BATCH = pack([FIRST, SECOND], PackConfig((8,), micro_batch_rows=1, min_rows=1)).batch
NOW = np.zeros((1, 8), np.float32)
NOW[0, [1, 3, 4, 7]] = np.log([0.6, 0.25, 0.1, 0.4])  # ratios 1.2, 1, 0.5, 1
ENTROPY = np.full((1, 8), 0.5, np.float32)
A_LOG_PI = np.array([2, 2, 2, -1]) * np.log([0.6, 0.25, 0.1, 0.4])


def reduced(objective, batch=BATCH, version=5):
    total, metrics = objective_sum(
        objective, jnp.asarray(NOW), jnp.asarray(ENTROPY), batch, version, objective.terms
    )
    _, denominators = reduction_weights(objective, jnp.asarray(batch.mask), batch.segment_ids)
    return float(total / denominators.sum()), results(metrics)


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("token_mean", -A_LOG_PI.sum() / 4),
        ("sequence_mean", -(A_LOG_PI[:3].mean() + A_LOG_PI[3]) / 2),
        ("constant", -A_LOG_PI.sum() / (2 * 10)),
    ],
)
def test_reductions(reduction, expected):
    objective = Objective(loss="reinforce", reduction=reduction, constant_length=10)
    loss, metrics = reduced(objective)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert metrics["loss/total"] == metrics["loss/policy"] == pytest.approx(expected, rel=1e-6)
    assert metrics["policy/entropy"] == 0.5
    assert metrics["batch/sampled_tokens"] == 4 and metrics["batch/tokens"] == 8
    assert metrics["batch/advantage_abs"] == pytest.approx(7 / 4)


def test_an_empty_mask_has_loss_zero():
    blank = BATCH.__class__(**{**vars(BATCH), "mask": np.zeros_like(BATCH.mask)})
    for reduction in ("token_mean", "sequence_mean", "constant"):
        total, metrics = objective_sum(
            Objective(reduction=reduction, entropy_coef=0.1), NOW, ENTROPY, blank, 5, {"entropy"}
        )
        assert float(total) == 0.0
        assert "loss/total" not in results(metrics)  # a mean over nothing isn't reported


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (Keep(max_staleness=1), [0, 1, 1, 1]),  # versions 3, 4, 5, 5 at version 5
        (Keep(ratio_low=0.6, ratio_high=1.1), [0, 1, 0, 1]),
        (Keep(probability_gap=0.099), [0, 1, 0, 1]),  # gaps 0.1, 0, 0.1, 0
        (Keep(), [1, 1, 1, 1]),
    ],
)
def test_rejected_tokens_stay_in_the_denominator(keep, kept):
    loss, metrics = reduced(Objective(loss="reinforce", keep=keep))
    assert loss == pytest.approx(-(A_LOG_PI * kept).sum() / 4, rel=1e-6)
    assert metrics["policy/rejected"] == pytest.approx(1 - np.mean(kept))
    assert metrics["policy/staleness"] == pytest.approx(0.75)
    assert metrics["policy/staleness_max"] == 2


def test_entropy_bonus():
    objective = Objective(loss="reinforce", entropy_coef=0.1)
    assert reduced(objective)[0] == pytest.approx(-A_LOG_PI.sum() / 4 - 0.05, rel=1e-6)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_distance_to_a_reference(kind):
    reference = np.zeros_like(NOW)
    reference[0, [1, 3, 4, 7]] = np.log([0.3, 0.25, 0.2, 0.4])
    batch = BATCH.__class__(**{**vars(BATCH), "reference_logprobs": reference})
    ratio = np.array([2.0, 1.0, 0.5, 1.0])
    distance = {"k2": np.log(ratio) ** 2 / 2, "k3": 1 / ratio - 1 + np.log(ratio)}[kind].mean()
    objective = Objective(loss="reinforce", kl_coef=0.5, kl_kind=kind)
    loss, metrics = reduced(objective, batch)
    assert metrics["policy/reference_kl"] == pytest.approx(distance, rel=1e-5)
    assert loss == pytest.approx(-A_LOG_PI.sum() / 4 + 0.5 * distance, rel=1e-5)
    with pytest.raises(ValueError, match="no reference_logprobs"):
        reduced(objective)


def test_terms_that_are_off_stay_out_of_the_graph():
    assert Objective().terms == frozenset()
    assert Objective(entropy_coef=0.1, kl_coef=0.1).terms == {"entropy", "kl"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss": "grpo"}, "unknown loss 'grpo': choose one of aipo_clip, aipo, ppo"),
        ({"advantage": "gae"}, "unknown advantage 'gae'"),
        ({"reduction": "mean"}, "unknown reduction 'mean'"),
        ({"kl_kind": "k1"}, "unknown kl_kind 'k1'"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"entropy_coef": -1.0}, "entropy_coef must be at least 0"),
    ],
)
def test_bad_configs_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Objective(**fields)


def test_numbers_are_leaves_and_names_are_structure():
    base = jax.tree.structure(Objective())
    assert base == jax.tree.structure(Objective(bounds=LossConfig(clip_low=0.1), temperature=0.7))
    assert base != jax.tree.structure(Objective(loss="ppo"))
