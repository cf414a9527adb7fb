"""The last line of a benchmark: one JSON object that programs read.

Leaves out the measuring: each benchmark keeps its own workload and its own runs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any

_FIXED = ("bench", "value", "unit", "peer", "peer_value", "ratio", "runs")


def report(
    bench: str,
    unit: str,
    runs: Sequence[float],
    *,
    peer: str | None = None,
    peer_runs: Sequence[float] = (),
    higher_is_better: bool = True,
    **workload: Any,
) -> dict[str, Any]:
    """Prints and returns the result line.

    runs, peer_runs: one figure a run, ours and the peer's, interleaved when they were taken;
    the medians become `value` and `peer_value`.  ratio: above 1, ours is better.
    workload: further numbers, what was run and what came out beside.
    Raises ValueError for no runs, a peer without runs, or a workload name that is taken.
    """
    if not runs or (peer is None) != (not peer_runs):
        raise ValueError("a benchmark reports at least one run, and runs of a peer with its name")
    taken = sorted(set(_FIXED) & set(workload))
    if taken:
        raise ValueError(f"workload names that the line itself uses: {', '.join(taken)}")
    value = statistics.median(runs)
    line: dict[str, Any] = {"bench": bench, "value": _short(value), "unit": unit}
    if peer is not None:
        other = statistics.median(peer_runs)
        ratio = value / other if higher_is_better else other / value
        line |= {"peer": peer, "peer_value": _short(other), "ratio": _short(ratio)}
    line |= {"runs": len(runs), **{name: _short(entry) for name, entry in workload.items()}}
    print(json.dumps(line), flush=True)
    return line


def _short(value: Any) -> Any:
    """Four significant digits are all that a benchmark knows."""
    return float(f"{value:.4g}") if isinstance(value, float) else value
