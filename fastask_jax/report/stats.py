"""The few statistics that reports need: an interval for a share, and means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import NormalDist


def wilson(successes: float, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval for a share (E. B. Wilson, JASA 1927).

    Both bounds in [0, 1]; no trials give (0, 1).  Raises ValueError on impossible counts.
    """
    if trials < 0 or not 0 <= successes <= trials:
        raise ValueError(f"can't have {successes} successes in {trials} trials")
    if trials == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = successes / trials
    scale = 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    # At the ends the bound is exact; rounding would put it a hair off 0 or 1.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == trials else min(1.0, centre + half)
    return low, high


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean, summed exactly; NaN of nothing."""
    found = list(values)
    return math.fsum(found) / len(found) if found else math.nan


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Centred moving mean over `window` values (made odd), fewer at both ends."""
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    half = window // 2
    return [mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
