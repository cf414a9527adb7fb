"""Advantages of rollouts relative to the other rollouts of their group.

Plain numpy on the host: a step has hundreds of rollouts, and their groups are uneven, arrive in
any order and lose members to faults.  Groups are therefore named by an explicit id per rollout,
never by position.  The sums run in float64 and the variance takes two passes (the mean first,
then the squared deviations), since E[x^2] - E[x]^2 cancels where rewards are nearly equal.

Left out: value functions, per-turn credit, and any normalisation across groups.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

KINDS = ("mean", "mean_std", "rloo")

# Added to the standard deviation: it bounds the advantages of a group whose rewards differ only
# by rounding, and is far below the smallest real difference of two rewards.
STD_FLOOR = 1e-6


def advantages(
    rewards: ArrayLike,
    group_ids: Sequence[Hashable] | NDArray,
    valid: ArrayLike | None = None,
    kind: str = "mean",
) -> NDArray[np.float64]:
    """Advantage of each rollout, float64 [rollouts].

    kind, for a group of n valid rewards R with mean m:
      mean      R - m                       (the seed; Dr.GRPO, arXiv 2503.20783)
      mean_std  (R - m) / (std + 1e-6)      (GRPO, arXiv 2402.03300; population std)
      rloo      R - mean of the others      (arXiv 2402.14740; equals (R - m) n / (n - 1))

    rewards: float [rollouts].  group_ids: one id per rollout, equal exactly within a group; any
    integers or strings.  valid: bool [rollouts]; a rollout that failed for reasons of its own
    (a dead worker, not a wrong answer) is false, leaves the group before its statistics and gets
    0.  A group with one valid rollout gets 0, and so, exactly, does one whose rewards are equal.

    Raises ValueError for an unknown kind, lengths that differ, or a valid reward that isn't
    finite.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown advantage kind {kind!r}: choose one of {', '.join(KINDS)}")
    reward = np.asarray(rewards, dtype=np.float64)
    keep = np.ones(reward.shape, bool) if valid is None else np.asarray(valid, dtype=bool)
    groups = np.asarray(group_ids)
    if reward.ndim != 1 or groups.shape != reward.shape or keep.shape != reward.shape:
        raise ValueError(
            "rewards, group_ids and valid must be one-dimensional and equally long, "
            f"not {reward.shape}, {groups.shape} and {keep.shape}"
        )
    result = np.zeros_like(reward)
    if not keep.any():
        return result
    if not np.isfinite(reward[keep]).all():
        bad = int(np.flatnonzero(keep & ~np.isfinite(reward))[0])
        raise ValueError(
            f"reward of rollout {bad} is {reward[bad]}: mark a failed rollout as not valid"
        )
    result[keep] = _centred(reward[keep], groups[keep], kind)
    return result


def _centred(reward: NDArray, groups: NDArray, kind: str) -> NDArray:
    _, index = np.unique(groups, return_inverse=True)
    count = np.bincount(index)
    mean = np.bincount(index, weights=reward) / count
    centred = reward - mean[index]

    # The mean of equal numbers can miss them by a rounding error; an exact 0 lets callers see
    # which groups carry no signal.
    low = np.full(count.shape, np.inf)
    high = np.full(count.shape, -np.inf)
    np.minimum.at(low, index, reward)
    np.maximum.at(high, index, reward)
    centred[(low == high)[index]] = 0.0

    if kind == "mean_std":
        variance = np.bincount(index, weights=centred**2) / count
        return centred / (np.sqrt(variance) + STD_FLOOR)[index]
    if kind == "rloo":
        return centred * (count / np.maximum(count - 1, 1))[index]
    return centred


def has_signal(values: ArrayLike, group_ids: Sequence[Hashable] | NDArray) -> NDArray[np.bool_]:
    """Whether each rollout's group has any advantage that isn't 0, bool [rollouts].

    For loops that skip or refill groups from which nothing can be learned.
    """
    _, index = np.unique(np.asarray(group_ids), return_inverse=True)
    moves = np.bincount(index, weights=np.asarray(values, dtype=np.float64) != 0) > 0
    return moves[index]
