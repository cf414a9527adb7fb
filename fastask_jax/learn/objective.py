"""The training objective: advantage signal + per-token loss + reduction, as one config.

This module says which tokens count, with what weight and over what denominator, and adds the
optional terms (entropy, KL to a frozen reference).  The per-token losses are in `losses.py`; the
forward pass, gradients and the update are in `score.py` and `step.py`.

Denominators are global: they come from the whole batch, before it is cut into micro-batches, and
count every sampled token, the rejected ones too.  So rejecting a token never enlarges the others,
and loss and gradient are the same for any split, padding, packing or number of devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fastask_jax.learn.advantages import KINDS
from fastask_jax.learn.losses import (
    LOSSES,
    Context,
    LossConfig,
    TokenMask,
    Tokens,
    log_ratio,
)
from fastask_jax.learn.masked import masked_sum, segment_totals
from fastask_jax.learn.metrics import Max, Metrics, Sum, Total
from fastask_jax.learn.packing import Batch

REDUCTIONS = ("token_mean", "sequence_mean", "constant")
KL_KINDS = ("k2", "k3")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["max_staleness", "ratio_low", "ratio_high", "probability_gap"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Keep:
    """Which sampled tokens may push the policy; the others are rejected.  Defaults keep all.

    max_staleness: policy versions between the token's and the current one.
    ratio_low, ratio_high: band of r = pi/mu (IcePop, double-sided masking).
    probability_gap: largest |pi - mu|.
    """

    max_staleness: float = float("inf")
    ratio_low: float = 0.0
    ratio_high: float = float("inf")
    probability_gap: float = float("inf")

    def __post_init__(self) -> None:
        # Leaves are tracers inside a jitted function; only numbers can be checked.
        for name in ("max_staleness", "ratio_low", "ratio_high", "probability_gap"):
            value = getattr(self, name)
            if isinstance(value, (int, float)) and not value >= 0:
                raise ValueError(f"keep {name} must be at least 0, not {value}")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["bounds", "keep", "constant_length", "temperature", "entropy_coef", "kl_coef"],
    meta_fields=["advantage", "loss", "reduction", "kl_kind"],
)
@dataclass(frozen=True)
class Objective:
    """What a step minimises.  Numbers are array leaves, so changing one compiles nothing anew.

    advantage: mean, mean_std or rloo (advantages.py).
    loss: aipo_clip, aipo, ppo, cispo, reinforce, gspo or ipo (losses.py).
    bounds: the loss's clip bounds.  keep: selective token masks.
    reduction: token_mean, sequence_mean or constant, over the whole batch.
        token_mean      sum over tokens / sampled tokens                     (DAPO)
        sequence_mean   mean over trajectories of the mean over their tokens (GRPO)
        constant        sum over tokens / (trajectories x constant_length)   (Dr.GRPO)
    constant_length: tokens that stand for a trajectory's length in reduction constant.
    temperature: that of sampling; the learner scores the same distribution.
    entropy_coef: weight of the entropy bonus.
    kl_coef, kl_kind: weight and kind (k2 or k3) of a penalty on the distance to
        batch.reference_logprobs, k2 = (log r)^2 / 2 or k3 = 1/r - 1 + log r with r = pi/ref.
        (k1 = log r is an estimate and can't be minimized, as its gradient's mean is 0.)
    """

    advantage: str = "mean"
    loss: str = "aipo_clip"
    bounds: LossConfig = field(default_factory=LossConfig)
    reduction: str = "token_mean"
    constant_length: float = 1024.0
    keep: Keep = field(default_factory=Keep)
    temperature: float = 1.0
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_kind: str = "k3"

    def __post_init__(self) -> None:
        for name, choices in (
            ("advantage", KINDS),
            ("loss", tuple(LOSSES)),
            ("reduction", REDUCTIONS),
            ("kl_kind", KL_KINDS),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"unknown {name} {getattr(self, name)!r}: choose one of {', '.join(choices)}"
                )
        # Leaves are tracers inside a jitted function; only numbers can be checked.
        for name in ("constant_length", "temperature", "entropy_coef", "kl_coef"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)):
                continue
            if name in ("constant_length", "temperature") and not value > 0:
                raise ValueError(f"{name} must be above 0, not {value}")
            if name in ("entropy_coef", "kl_coef") and not value >= 0:
                raise ValueError(f"{name} must be at least 0, not {value}")
            if math.isinf(value):
                raise ValueError(f"{name} must be finite, not {value}")
            object.__setattr__(self, name, float(value))

    @property
    def terms(self) -> frozenset[str]:
        """The optional terms that are on; only these enter the compiled graph."""
        coefficients = {"entropy": self.entropy_coef, "kl": self.kl_coef}
        return frozenset(name for name, value in coefficients.items() if value)


def reduction_weights(
    objective: Objective,
    mask: Bool[Array, "*rows length"],
    segment_ids: Int[Array, "*rows length"],
) -> tuple[Float[Array, "*rows length"], Float[Array, "*rows length"]]:
    """Per-token weights of the numerator and of the denominator of the reduction.

    The reduced loss is sum(loss * numerator) / sum(denominator), both sums over the whole batch;
    as the denominator is a sum over tokens too, it can be split in any way.
    """
    counted = mask.astype(jnp.float32)
    if objective.reduction == "token_mean":
        return counted, counted
    per_sequence = segment_totals(counted, mask, segment_ids)
    share = counted / jnp.maximum(per_sequence, 1.0)
    if objective.reduction == "sequence_mean":
        return share, share
    return counted, share * objective.constant_length


def kept_tokens(
    keep: Keep,
    logprobs: Tokens,
    behaviour_logprobs: Tokens,
    mask: TokenMask,
    staleness: Int[Array, "rows length"],
) -> TokenMask:
    """The sampled tokens that pass every bound of `keep`; carries no gradient."""
    current = jax.lax.stop_gradient(jnp.where(mask, logprobs, 0.0))
    behaviour = jnp.where(mask, behaviour_logprobs, 0.0)
    ratio = jnp.exp(log_ratio(current, behaviour, mask))
    gap = jnp.abs(jnp.exp(current) - jnp.exp(behaviour))
    return (
        mask
        & (staleness <= keep.max_staleness)
        & (ratio >= keep.ratio_low)
        & (ratio <= keep.ratio_high)
        & (gap <= keep.probability_gap)
    )


def objective_sum(
    objective: Objective,
    logprobs: Tokens,
    entropy: Tokens,
    batch: Batch,
    version: Int[Array, ""],
    terms: frozenset[str],
) -> tuple[Float[Array, ""], Metrics]:
    """Undivided objective of (a part of) a batch, and its metrics.

    logprobs, entropy: the learner's, [rows, length].  version: of the current policy.  terms:
    `objective.terms`, static.  Divide by the whole batch's sum of denominator weights.
    Raises ValueError when the batch lacks what the objective needs.
    """
    mask = batch.mask
    staleness = version - batch.versions
    kept = kept_tokens(objective.keep, logprobs, batch.behaviour_logprobs, mask, staleness)
    per_token, metrics = LOSSES[objective.loss](
        logprobs,
        batch.behaviour_logprobs,
        batch.advantages,
        kept,
        objective.bounds,
        context=Context(batch.segment_ids, batch.proximal_logprobs),
    )
    numerator, denominator = reduction_weights(objective, mask, batch.segment_ids)
    weight = jnp.sum(denominator)

    policy = masked_sum(per_token * numerator, mask)
    total = policy
    if "entropy" in terms:
        total -= objective.entropy_coef * masked_sum(jnp.where(mask, entropy, 0) * numerator, mask)
    if "kl" in terms:
        if batch.reference_logprobs is None:
            raise ValueError("kl_coef is set but the batch has no reference_logprobs")
        delta = log_ratio(logprobs, batch.reference_logprobs, mask)
        distance = delta**2 / 2 if objective.kl_kind == "k2" else jnp.expm1(-delta) + delta
        total += objective.kl_coef * masked_sum(distance * numerator, mask)
        metrics["policy/reference_kl"] = Sum.of(distance, mask)

    stale = staleness.astype(jnp.float32)
    fresh = mask & (staleness == 0)
    metrics |= {
        "loss/policy": Sum(policy, weight),
        "loss/total": Sum(total, weight),
        "policy/entropy": Sum.of(entropy, mask),
        "policy/rejected": Sum.of((~kept).astype(jnp.float32), mask),
        "policy/staleness": Sum.of(stale, mask),
        "policy/staleness_max": Max.of(stale, mask),
        "policy/gap": Sum.of(jnp.abs(log_ratio(logprobs, batch.behaviour_logprobs, mask)), fresh),
        "batch/advantage_abs": Sum.of(jnp.abs(batch.advantages), mask),
        "batch/tokens": Total.of(batch.segment_ids > 0),
        "batch/sampled_tokens": Total.of(mask),
    }
    return total, jax.lax.stop_gradient(metrics)
