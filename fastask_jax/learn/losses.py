"""Per-token policy losses of reinforcement learning, one signature for all.

    loss(logprobs, behaviour_logprobs, advantages, mask, config) -> (per_token_loss, metrics)

All arrays are [rows, length].  `logprobs` are the learner's, differentiable; `behaviour_logprobs`
were recorded by the policy that sampled the tokens; r = exp(logprobs - behaviour_logprobs).  The
loss of a token whose mask is false is 0.  Two losses need more than that and take it through the
keyword `context`: `gspo` the segment ids, `ppo` (optionally) the proximal policy's logprobs.

The log-ratio is masked and clamped to +-20 *before* exp: a masked token may hold any number,
NaN included, without spoiling the gradient of the others.

Left out, on purpose: reductions and denominators, entropy and KL terms, and masks that reject
tokens (`objective.py`); the forward pass (`score.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fastask_jax.learn.masked import segment_totals
from fastask_jax.learn.metrics import Max, Metrics, SampleSize, Sum

Tokens = Float[Array, "rows length"]
TokenMask = Bool[Array, "rows length"]

MAX_LOG_RATIO = 20.0


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["clip_low", "clip_high", "weight_cap", "dual_clip", "ipo_threshold", "ipo_tau"],
    meta_fields=[],
)
@dataclass(frozen=True)
class LossConfig:
    """Bounds of the losses.  Every field is an array leaf: changing one compiles nothing anew.

    clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high] (aipo_clip, ppo,
        cispo, gspo).  The Fast Ask post's single epsilon is both.  cispo is usually run with
        clip_low 1 (no lower bound) and clip_high 4; gspo with about 3e-4 and 4e-4.
    weight_cap: rho, the cap of a detached importance weight (aipo; proximal weight of ppo).
    dual_clip: c > 1 bounds ppo's loss for a negative advantage by c |A|; infinity switches it off.
    ipo_threshold, ipo_tau: ipo drops a token once |pi - mu| exceeds the threshold, and pulls
        every token back with tau (log r)^2.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    weight_cap: float = 5.0
    dual_clip: float = float("inf")
    ipo_threshold: float = 0.1
    ipo_tau: float = 1e-3

    def __post_init__(self) -> None:
        # Leaves are tracers inside a jitted function; only numbers can be checked.
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, (int, float)):
                continue
            low = 1.0 if field.name == "dual_clip" else 0.0
            if not value >= low:
                raise ValueError(f"loss {field.name} must be at least {low:g}, not {value}")
            if field.name == "ipo_tau" and math.isinf(value):
                raise ValueError("loss ipo_tau must be finite, not inf")
            object.__setattr__(self, field.name, float(value))


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["segment_ids", "proximal_logprobs"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Context:
    """What only some losses need.

    segment_ids: int [rows, length], 0 for padding.  proximal_logprobs: [rows, length], of the
    policy at the start of the step, recomputed by the learner (decoupled PPO).
    """

    segment_ids: Int[Array, "rows length"] | None = None
    proximal_logprobs: Tokens | None = None


class Loss(Protocol):
    def __call__(
        self,
        logprobs: Tokens,
        behaviour_logprobs: Tokens,
        advantages: Tokens,
        mask: TokenMask,
        config: LossConfig,
        *,
        context: Context = ...,
    ) -> tuple[Tokens, Metrics]: ...


# What a loss decides for one token: its value, and whether a bound cut its gradient.
_Core = Callable[[Tokens, Tokens, Tokens, TokenMask, LossConfig, Context], tuple[Tokens, TokenMask]]


def log_ratio(logprobs: Tokens, base_logprobs: Tokens, mask: TokenMask) -> Tokens:
    """log(pi / base) clamped to +-20, and 0 where the mask is false; safe to differentiate."""
    return jnp.clip(jnp.where(mask, logprobs - base_logprobs, 0.0), -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _loss(core: _Core) -> Loss:
    """Adds to a loss what all share: masking of its inputs and result, and the metrics."""

    def loss(logprobs, behaviour_logprobs, advantages, mask, config, *, context=Context()):  # noqa: B008
        mask = mask.astype(bool)
        advantages = jax.lax.stop_gradient(jnp.where(mask, advantages, 0.0))
        behaviour = jax.lax.stop_gradient(jnp.where(mask, behaviour_logprobs, 0.0))
        current = jnp.where(mask, logprobs, 0.0)
        value, clipped = core(current, behaviour, advantages, mask, config, context)
        metrics = _metrics(jax.lax.stop_gradient(current), behaviour, advantages, mask, clipped)
        return jnp.where(mask, value, 0.0), metrics

    loss.__doc__ = core.__doc__
    loss.__name__ = core.__name__
    return loss


def _metrics(
    logprobs: Tokens, behaviour: Tokens, advantages: Tokens, mask: TokenMask, clipped: TokenMask
) -> Metrics:
    delta = log_ratio(logprobs, behaviour, mask)
    ratio = jnp.exp(delta)
    mismatch = jnp.expm1(delta) - delta
    cut = clipped.astype(jnp.float32)
    return {
        "policy/ratio_mean": Sum.of(ratio, mask),
        "policy/ratio_max": Max.of(ratio, mask),
        "policy/clipped_positive": Sum.of(cut, mask & (advantages > 0)),
        "policy/clipped_negative": Sum.of(cut, mask & (advantages < 0)),
        "policy/mismatch_k3": Sum.of(mismatch, mask),
        "policy/mismatch_k3_max": Max.of(mismatch, mask),
        "policy/log_ratio_abs": Sum.of(jnp.abs(delta), mask),
        "policy/sample_size": SampleSize.of(ratio, mask),
    }


def _clip_surrogate(
    ratio: Tokens, advantages: Tokens, config: LossConfig
) -> tuple[Tokens, TokenMask]:
    bounded = jnp.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    value = -jnp.minimum(ratio * advantages, bounded * advantages)
    cut = jnp.where(
        advantages > 0,
        ratio > 1.0 + config.clip_high,
        (advantages < 0) & (ratio < 1.0 - config.clip_low),
    )
    return value, cut


@_loss
def aipo_clip(logprobs, behaviour, advantages, mask, config, context):
    """-min(r A, clip(r, 1-e, 1+e) A): the Fast Ask post's objective, with r
    against the sampler."""
    return _clip_surrogate(jnp.exp(log_ratio(logprobs, behaviour, mask)), advantages, config)


@_loss
def aipo(logprobs, behaviour, advantages, mask, config, context):
    """-stop_gradient(min(r, rho)) A log pi (LlamaRL, arXiv 2505.24034): a token above the cap
    keeps a gradient of weight rho."""
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio(logprobs, behaviour, mask)))
    weight = jnp.minimum(ratio, config.weight_cap)
    return -weight * advantages * logprobs, ratio > config.weight_cap


@_loss
def ppo(logprobs, behaviour, advantages, mask, config, context):
    """Clipped surrogate (arXiv 1707.06347), optionally dual-clipped (arXiv 1912.09729).

    Without proximal logprobs the ratio is pi/mu (two policies).  With them it is
    min(prox/mu, rho) times the surrogate of pi/prox (decoupled, arXiv 2110.00641)."""
    proximal = context.proximal_logprobs
    if proximal is None:
        base, weight = behaviour, jnp.ones_like(logprobs)
    else:
        base = jax.lax.stop_gradient(jnp.where(mask, proximal, 0.0))
        weight = jnp.minimum(jnp.exp(log_ratio(base, behaviour, mask)), config.weight_cap)
    ratio = jnp.exp(log_ratio(logprobs, base, mask))
    value, cut = _clip_surrogate(ratio, advantages, config)
    negative = advantages < 0
    # The masked-in bound keeps infinity * 0 (dual clip off, advantage 0) out of the graph.
    bound = config.dual_clip * jnp.where(negative, -advantages, 1.0)
    return (
        weight * jnp.where(negative, jnp.minimum(value, bound), value),
        cut | (negative & (ratio > config.dual_clip)),
    )


@_loss
def cispo(logprobs, behaviour, advantages, mask, config, context):
    """-stop_gradient(clip(r, 1-low, 1+high)) A log pi (MiniMax-M1, arXiv 2506.13585): the weight
    is clipped, the gradient never vanishes."""
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio(logprobs, behaviour, mask)))
    weight = jnp.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    return -weight * advantages * logprobs, weight != ratio


@_loss
def reinforce(logprobs, behaviour, advantages, mask, config, context):
    """-A log pi (Williams 1992): no correction for who sampled the token."""
    return -advantages * logprobs, jnp.zeros_like(mask)


@_loss
def gspo(logprobs, behaviour, advantages, mask, config, context):
    """Clipped surrogate of the sequence's geometric-mean ratio, with the gradient spread over its
    tokens (GSPO-token, arXiv 2507.18071).  Needs context.segment_ids; meant for the reduction
    sequence_mean."""
    if context.segment_ids is None:
        raise ValueError("the loss gspo needs the segment ids: pass context=Context(segment_ids)")
    ids = context.segment_ids
    count = segment_totals(jnp.ones_like(logprobs), mask, ids)
    total = segment_totals(log_ratio(logprobs, behaviour, mask), mask, ids)
    sequence = jax.lax.stop_gradient(total / jnp.maximum(count, 1.0))
    ratio = jnp.exp(sequence + logprobs - jax.lax.stop_gradient(logprobs))
    return _clip_surrogate(ratio, advantages, config)


@_loss
def ipo(logprobs, behaviour, advantages, mask, config, context):
    """-r A on tokens with |pi - mu| within the threshold, plus tau (log r)^2 on all: a trust
    region in probability rather than in ratio, which spares rare tokens (prime-rl)."""
    delta = log_ratio(logprobs, behaviour, mask)
    moved = jax.lax.stop_gradient(jnp.abs(jnp.exp(logprobs) - jnp.exp(behaviour)))
    dropped = mask & (moved > config.ipo_threshold)
    policy = jnp.where(dropped, 0.0, -jnp.exp(delta) * advantages)
    return policy + config.ipo_tau * jnp.square(delta), dropped


LOSSES: dict[str, Loss] = {
    "aipo_clip": aipo_clip,
    "aipo": aipo,
    "ppo": ppo,
    "cispo": cispo,
    "reinforce": reinforce,
    "gspo": gspo,
    "ipo": ipo,
}
