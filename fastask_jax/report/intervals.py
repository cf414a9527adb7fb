"""Intervals for policies that were asked the same tasks, several rollouts each.

Tasks are the sample: rollouts of one task resemble each other, so four rollouts of 128 tasks say
less than 512 tasks would.  All intervals are for tasks drawn alike, not for this set alone.

- `share_interval`: an accuracy.  Wilson's score interval with the effective number of rollouts
  (E. L. Korn and B. I. Graubard, Survey Methodology 24, 1998) and Student's quantile.
- `paired_interval`: a difference of two policies, by a bootstrap over tasks.
- `unpaired_interval`: what that difference would be known to if the two had been asked different
  tasks (R. G. Newcombe, Statistics in Medicine 17, 1998, method 10).

How often they hold the truth: tests/fastask_jax/report/test_intervals.py.  Everything here is
vectorised over leading axes; leaves out records and tables (`comparison`).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr, ndtri, stdtrit

Floats = NDArray[np.float64]

RESAMPLES = 10_000


def share_interval(
    right: ArrayLike, rollouts: ArrayLike, confidence: float = 0.95
) -> tuple[Floats, Floats]:
    """Bounds of a share of right rollouts, each in [0, 1].

    right, rollouts: per task, [..., tasks]; tasks without a rollout count for nothing.  With one
    rollout a task this is Wilson's interval.  No rollouts give (0, 1).  Raises ValueError on
    impossible counts.
    """
    right, rollouts = np.asarray(right, float), np.asarray(rollouts, float)
    right, rollouts = np.broadcast_arrays(right, rollouts)
    if (rollouts < 0).any() or (right < 0).any() or (right > rollouts).any():
        raise ValueError("a task can't have fewer than 0 right rollouts, or more than it has")
    total = rollouts.sum(-1)
    tasks = (rollouts > 0).sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.where(total > 0, right.sum(-1) / total, 0.0)
        residual = right - share[..., None] * rollouts
        variance = (residual**2).sum(-1) / total**2 * tasks / (tasks - 1)
        effective = share * (1 - share) / variance
    # Between what tasks whose rollouts all agree are worth, and independent ones; the variance
    # of a share of 0 or 1 says nothing.
    several = total > tasks
    says = (share > 0) & (share < 1) & (tasks > 1)
    effective = np.where(says, np.clip(effective, tasks, total), tasks)
    effective = np.where(several, effective, total)
    normal = ndtri(0.5 + confidence / 2)
    student = stdtrit(np.maximum(tasks - 1, 1), 0.5 + confidence / 2)
    z = np.where(several & (tasks > 1), student, normal)
    with np.errstate(invalid="ignore", divide="ignore"):
        scale = 1 + z * z / effective
        centre = (share + z * z / (2 * effective)) / scale
        spread = share * (1 - share) / effective + z * z / (4 * effective**2)
        half = z / scale * np.sqrt(spread)
    # At the ends the bound is exact; rounding would put it a hair off 0 or 1.
    low = np.where((share == 0) | (total == 0), 0.0, np.maximum(centre - half, 0.0))
    high = np.where((share == 1) | (total == 0), 1.0, np.minimum(centre + half, 1.0))
    return low, high


def paired_interval(
    differences: ArrayLike,
    step: float = 1.0,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[Floats, Floats]:
    """Bounds of the mean of `differences`, [..., tasks]: per task, one policy's mean over its
    rollouts less the other's.

    step: the smallest difference that one rollout makes, 1 / rollouts per task.

    Resamples tasks, from those that there are and half a task of difference `step` and of -`step`,
    as in Agresti and Min's interval for pairs (Statistics in Medicine 24, 2005): where no task
    tells two policies apart, their difference isn't known to be 0.  Plain percentiles are too
    narrow for few tasks: they are taken further out, by Student's quantile over the normal one
    (T. C. Hesterberg, The American Statistician 69, 2015).
    Raises ValueError without a task.
    """
    found = np.asarray(differences, float)
    tasks = found.shape[-1]
    if tasks < 1:
        raise ValueError("a difference needs a task that both policies were asked")
    ends = np.ones((*found.shape[:-1], 1)) * step
    pool = np.concatenate([found, ends, -ends], -1).reshape(-1, tasks + 2)
    means = np.asarray(pool.astype(np.float32) @ _weights(tasks, resamples, seed))
    # One task has no spread of its own; two give the widest quantile that there is.
    freedom = max(tasks - 1, 1)
    out = np.sqrt(tasks / freedom) * stdtrit(freedom, 0.5 + confidence / 2)
    tail = float(ndtr(-out))
    first = int(np.floor(tail * (resamples - 1)))
    last = resamples - 1 - first
    means.partition((first, last), axis=-1)
    # Sums in float32 are a hair off, also beyond what any task has.
    least, most = pool.min(-1), pool.max(-1)
    low, high = (np.clip(means[:, at].astype(float), least, most) for at in (first, last))
    return low.reshape(found.shape[:-1]), high.reshape(found.shape[:-1])


@lru_cache(maxsize=32)
def _weights(tasks: int, resamples: int, seed: int) -> NDArray[np.float32]:
    """[tasks + 2, resamples]: how often a resample holds each, over the number of tasks."""
    rng = np.random.default_rng((seed, tasks))
    # Of 2 tasks + 2 equal shares a task has two and each of the half tasks one.
    drawn = rng.integers(0, 2 * tasks + 2, (resamples, tasks), np.int32)
    drawn = np.where(drawn < 2 * tasks, drawn >> 1, drawn - tasks)
    drawn += np.arange(resamples, dtype=np.int32)[:, None] * np.int32(tasks + 2)
    counts = np.bincount(drawn.ravel(), minlength=resamples * (tasks + 2))
    counts = counts.reshape(resamples, tasks + 2)
    return np.ascontiguousarray(counts.T, np.float32) / np.float32(tasks)


def unpaired_interval(
    one: ArrayLike,
    one_bounds: tuple[ArrayLike, ArrayLike],
    other: ArrayLike,
    other_bounds: tuple[ArrayLike, ArrayLike],
) -> tuple[Floats, Floats]:
    """Bounds of `one - other`, two shares with intervals of their own from different tasks."""
    a, b = np.asarray(one, float), np.asarray(other, float)
    (a_low, a_high), (b_low, b_high) = (
        tuple(np.asarray(bound, float) for bound in bounds) for bounds in (one_bounds, other_bounds)
    )
    low = a - b - np.hypot(a - a_low, b_high - b)
    high = a - b + np.hypot(a_high - a, b - b_low)
    return low, high
