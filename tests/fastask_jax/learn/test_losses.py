"""Every loss against a case worked by hand: value and gradient.

The case has six tokens: ratio 1.5, 1.5, 0.5, 0.5 (outside the clip range of 0.2 on both sides,
with both signs of the advantage), 1.1 (inside), and a masked token whose ratio overflows.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastask_jax.learn.losses import LOSSES, MAX_LOG_RATIO, Context, LossConfig, log_ratio
from fastask_jax.learn.metrics import results

RATIO = np.array([1.5, 1.5, 0.5, 0.5, 1.1])
ADVANTAGE = np.array([2.0, -2.0, 2.0, -2.0, 3.0])
BEHAVIOUR = np.log(np.array([0.2, 0.4, 0.6, 0.3, 0.5]))
LOGPROBS = BEHAVIOUR + np.log(RATIO)
CONFIG = LossConfig(clip_low=0.2, clip_high=0.2, weight_cap=1.4, ipo_threshold=0.16, ipo_tau=0.5)
R, A, LP = RATIO, ADVANTAGE, LOGPROBS

# name -> (values, gradients with respect to logprobs), written out from the formulas.
EXPECTED = {
    # Cut: r above 1.2 with A > 0 (value -1.2 A) and r below 0.8 with A < 0 (value -0.8 A).
    "aipo_clip": ([-2.4, 3.0, -1.0, 1.6, -3.3], [0.0, 3.0, -1.0, 0.0, -3.3]),
    "ppo": ([-2.4, 3.0, -1.0, 1.6, -3.3], [0.0, 3.0, -1.0, 0.0, -3.3]),
    # Weights min(r, 1.4), detached: no gradient is ever lost.
    "aipo": (
        [-2.8 * LP[0], 2.8 * LP[1], -1.0 * LP[2], 1.0 * LP[3], -3.3 * LP[4]],
        [-2.8, 2.8, -1.0, 1.0, -3.3],
    ),
    # Weights clip(r, 0.8, 1.2), detached.
    "cispo": (
        [-2.4 * LP[0], 2.4 * LP[1], -1.6 * LP[2], 1.6 * LP[3], -3.3 * LP[4]],
        [-2.4, 2.4, -1.6, 1.6, -3.3],
    ),
    "reinforce": ([-2 * LP[0], 2 * LP[1], -2 * LP[2], 2 * LP[3], -3 * LP[4]], [-2, 2, -2, 2, -3]),
    # |pi - mu| = 0.1, 0.2, 0.3, 0.15, 0.05: tokens 1 and 2 lose -r A; all keep 0.5 (log r)^2.
    "ipo": (
        np.array([-3.0, 0.0, 0.0, 1.0, -3.3]) + 0.5 * np.log(R) ** 2,
        np.array([-3.0, 0.0, 0.0, 1.0, -3.3]) + np.log(R),
    ),
}
CLIPPED = {  # fraction of the tokens with A > 0 (three) and A < 0 (two) that a bound cut
    "aipo_clip": (1 / 3, 1 / 2),
    "ppo": (1 / 3, 1 / 2),
    "aipo": (1 / 3, 1 / 2),
    "cispo": (2 / 3, 1.0),
    "reinforce": (0.0, 0.0),
    "ipo": (1 / 3, 1 / 2),
}


def case(masked_logprob=-1.0, masked_behaviour=-2000.0, masked_advantage=1e30):
    """The five tokens plus a masked one, as [1, 6] arrays."""
    row = lambda values, last: jnp.array([[*values, last]], jnp.float32)  # noqa: E731
    mask = jnp.array([[True] * 5 + [False]])
    return (
        row(LP, masked_logprob),
        row(BEHAVIOUR, masked_behaviour),
        row(A, masked_advantage),
        mask,
    )


def value_and_gradient(name, logprobs, behaviour, advantages, mask, config, **context):
    def total(logprobs):
        per_token, metrics = LOSSES[name](
            logprobs, behaviour, advantages, mask, config, context=Context(**context)
        )
        return per_token.sum(), (per_token, metrics)

    (_, (per_token, metrics)), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(logprobs)
    return np.asarray(per_token), np.asarray(gradient), results(metrics)


@pytest.mark.parametrize("name", EXPECTED)
def test_value_and_gradient_of_the_hand_worked_case(name):
    per_token, gradient, metrics = value_and_gradient(name, *case(), CONFIG)
    values, gradients = EXPECTED[name]
    np.testing.assert_allclose(per_token[0, :5], values, rtol=2e-6)
    np.testing.assert_allclose(gradient[0, :5], gradients, rtol=2e-6, atol=1e-7)
    assert per_token[0, 5] == 0.0 and gradient[0, 5] == 0.0
    positive, negative = CLIPPED[name]
    assert metrics["policy/clipped_positive"] == pytest.approx(positive)
    assert metrics["policy/clipped_negative"] == pytest.approx(negative)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    "poison",
    [(-1.0, -2000.0), (-2000.0, -1.0), (np.nan, np.nan), (-np.inf, -1.0), (np.inf, -np.inf)],
)
def test_a_masked_token_never_spoils_value_gradient_or_metrics(name, poison):
    ids = jnp.ones((1, 6), jnp.int32)
    clean = value_and_gradient(name, *case(-1.0, -1.0, 0.0), CONFIG, segment_ids=ids)
    dirty = value_and_gradient(name, *case(*poison, np.nan), CONFIG, segment_ids=ids)
    np.testing.assert_array_equal(dirty[0], clean[0])
    np.testing.assert_array_equal(dirty[1], clean[1])
    assert dirty[2] == clean[2]
    assert np.isfinite(dirty[0]).all() and np.isfinite(dirty[1]).all()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("gap", [-500.0, 500.0])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_a_wild_unmasked_token_stays_finite(name, gap, advantage):
    arrays = (
        jnp.full((1, 1), -600.0 if gap < 0 else -1.0),
        jnp.full((1, 1), -600.0 - gap if gap < 0 else -1.0 - gap),
        jnp.full((1, 1), advantage),
        jnp.ones((1, 1), bool),
    )
    per_token, gradient, metrics = value_and_gradient(
        name, *arrays, LossConfig(), segment_ids=jnp.ones((1, 1), jnp.int32)
    )
    assert np.isfinite(per_token).all() and np.isfinite(gradient).all()
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["policy/ratio_max"] <= np.exp(MAX_LOG_RATIO) * 1.0001


@pytest.mark.parametrize("name", LOSSES)
def test_all_masked_batch_has_zero_loss_and_gradient(name):
    logprobs, behaviour, advantages, mask = case(np.nan, np.nan, np.nan)
    per_token, gradient, metrics = value_and_gradient(
        name,
        logprobs,
        behaviour,
        advantages,
        jnp.zeros_like(mask),
        CONFIG,
        segment_ids=jnp.ones((1, 6), jnp.int32),
    )
    assert (per_token == 0).all() and (gradient == 0).all()
    assert metrics == {}  # nothing was seen, so nothing is reported


def test_the_clamp_cuts_the_gradient_beyond_twenty():
    gradient = jax.grad(lambda x: log_ratio(x, jnp.zeros((1, 3)), jnp.ones((1, 3), bool)).sum())
    np.testing.assert_array_equal(gradient(jnp.array([[-25.0, 5.0, 25.0]])), [[0.0, 1.0, 0.0]])


def test_metrics_of_the_hand_worked_case():
    _, _, metrics = value_and_gradient("aipo_clip", *case(), CONFIG)
    k3 = R - np.log(R) - 1
    assert metrics["policy/ratio_mean"] == pytest.approx(R.mean(), rel=1e-6)
    assert metrics["policy/ratio_max"] == pytest.approx(1.5, rel=1e-6)
    assert metrics["policy/mismatch_k3"] == pytest.approx(k3.mean(), rel=1e-5)
    assert metrics["policy/mismatch_k3_max"] == pytest.approx(k3.max(), rel=1e-5)
    assert metrics["policy/log_ratio_abs"] == pytest.approx(np.abs(np.log(R)).mean(), rel=1e-5)
    assert metrics["policy/sample_size"] == pytest.approx(
        R.sum() ** 2 / (5 * (R**2).sum()), rel=1e-6
    )


def test_separate_low_and_high_bounds():
    config = LossConfig(clip_low=0.6, clip_high=0.4)
    per_token, gradient, _ = value_and_gradient("ppo", *case(), config)
    # 1.5 is cut at 1.4; 0.5 is inside [0.4, 1.4] now.
    np.testing.assert_allclose(per_token[0, :5], [-2.8, 3.0, -1.0, 1.0, -3.3], rtol=2e-6)
    np.testing.assert_allclose(gradient[0, :5], [0.0, 3.0, -1.0, 1.0, -3.3], rtol=2e-6)


def test_dual_clip_bounds_the_loss_of_a_negative_advantage():
    config = LossConfig(dual_clip=1.25)
    per_token, gradient, metrics = value_and_gradient("ppo", *case(), config)
    # Token 1: r |A| = 3 is above c |A| = 2.5. The other tokens are as without it.
    np.testing.assert_allclose(per_token[0, :5], [-2.4, 2.5, -1.0, 1.6, -3.3], rtol=2e-6)
    np.testing.assert_allclose(gradient[0, :5], [0.0, 0.0, -1.0, 0.0, -3.3], rtol=2e-6)
    assert metrics["policy/clipped_negative"] == 1.0


def test_decoupled_ppo_clips_against_the_proximal_policy():
    logprobs, behaviour, advantages, mask = case()
    # pi/prox = 0.9, 1.5, 0.9, 0.5, 1.1, so prox/mu = r over that; capped at 1.4.
    step = np.array([0.9, 1.5, 0.9, 0.5, 1.1])
    proximal = jnp.array([[*(LP - np.log(step)), np.nan]], jnp.float32)
    per_token, gradient, _ = value_and_gradient(
        "ppo", logprobs, behaviour, advantages, mask, CONFIG, proximal_logprobs=proximal
    )
    weight = np.minimum(R / step, 1.4)
    surrogate = np.array([-0.9 * 2, 1.5 * 2, -0.9 * 2, 0.8 * 2, -1.1 * 3])
    slope = np.array([-0.9 * 2, 1.5 * 2, -0.9 * 2, 0.0, -1.1 * 3])
    np.testing.assert_allclose(per_token[0, :5], weight * surrogate, rtol=5e-6)
    np.testing.assert_allclose(gradient[0, :5], weight * slope, rtol=5e-6, atol=1e-7)


def test_gspo_shares_one_ratio_per_sequence():
    # Sequence 1 (tokens 0, 1, 2): geometric mean (1.5 * 1.5 * 0.5)^(1/3); sequence 2: 0.5, 1.1.
    logprobs, behaviour, _, mask = case()
    advantages = jnp.array([[2.0, 2.0, 2.0, -2.0, -2.0, 9.0]])
    ids = jnp.array([[1, 1, 1, 2, 2, 2]], jnp.int32)
    first, second = (1.5 * 1.5 * 0.5) ** (1 / 3), (0.5 * 1.1) ** 0.5
    config = LossConfig(clip_low=0.3, clip_high=0.02)
    assert first > 1.02 and second > 0.7
    per_token, gradient, _ = value_and_gradient(
        "gspo", logprobs, behaviour, advantages, mask, config, segment_ids=ids
    )
    np.testing.assert_allclose(per_token[0, :5], [-2.04] * 3 + [2 * second] * 2, rtol=2e-6)
    np.testing.assert_allclose(gradient[0, :5], [0.0] * 3 + [2 * second] * 2, rtol=2e-6)
    # Per sequence the mean of the token gradients is that of the sequence ratio.
    with pytest.raises(ValueError, match="gspo needs the segment ids"):
        value_and_gradient("gspo", logprobs, behaviour, advantages, mask, config)


def test_aipo_and_aipo_clip_part_above_the_cap():
    """The detached weight keeps pushing a token that the clipped surrogate has let go."""
    arrays = (jnp.array([[-0.1]]), jnp.array([[-3.1]]), jnp.ones((1, 1)), jnp.ones((1, 1), bool))
    config = LossConfig(weight_cap=2.0)
    assert value_and_gradient("aipo", *arrays, config)[1].item() == pytest.approx(-2.0)
    assert value_and_gradient("aipo_clip", *arrays, config)[1].item() == 0.0


def test_changing_a_bound_compiles_nothing_anew():
    traces = []

    @jax.jit
    def total(config, logprobs, behaviour, advantages, mask):
        traces.append(1)
        return LOSSES["aipo_clip"](logprobs, behaviour, advantages, mask, config)[0].sum()

    values = {float(total(LossConfig(clip_high=high), *case())) for high in (0.1, 0.2, 0.3)}
    assert len(values) == 3 and len(traces) == 1


@pytest.mark.parametrize(
    "bad", [{"clip_low": -0.1}, {"dual_clip": 0.5}, {"weight_cap": float("nan")}]
)
def test_a_bound_that_makes_no_sense_is_refused(bad):
    with pytest.raises(ValueError, match=f"loss {next(iter(bad))} must be at least"):
        LossConfig(**bad)
