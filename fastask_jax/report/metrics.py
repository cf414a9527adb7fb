"""`metrics.jsonl`: one object a step, names with `/`.

    with MetricsWriter(run_dir, after_step=restored) as metrics:
        metrics.write(step, {REWARD: 0.4, "eval/exact_match": 0.3, ...})

Training numbers are under `train/`, evaluations under `eval/`; the names below are those that
the plots and the progress bar look for.  Leaves out reductions: see fastask_jax/learn/metrics.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from fastask_jax.report.jsonl import JsonLines, read_jsonl

FILE = "metrics.jsonl"

REWARD = "train/reward"
ACCURACY = "train/accuracy"
TURNS = "train/turns"
TOKENS_PER_SECOND = "train/tokens_per_second"
WALL_SECONDS = "time/wall"  # since the run began, all its sessions together

EVAL_REWARD = "eval/mean_reward"
EVAL_ACCURACY = "eval/exact_match"
EVAL_LOW = "eval/low"
EVAL_HIGH = "eval/high"
EVAL_TURNS = "eval/turns"


class MetricsWriter:
    """Writer of a run's `metrics.jsonl`; see `JsonLines` for `after_step` and its errors."""

    def __init__(self, run_dir: str | Path, after_step: int | None = None) -> None:
        self._lines = JsonLines(Path(run_dir) / FILE, after_step)

    def cut(self, after_step: int) -> None:
        """Drops the lines behind `after_step`: a resumed run writes them again."""
        self._lines.cut(after_step)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends the numbers of one step.  Steps must rise: ValueError otherwise."""
        last = self._lines.last_step
        if last is not None and step <= last:
            raise ValueError(f"metrics of step {step} come after those of step {last}")
        self._lines.write({"step": int(step), **values})

    def close(self) -> None:
        self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The objects of a run's `metrics.jsonl`, in order of step."""
    return read_jsonl(Path(run_dir) / FILE)


def eval_values(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a policy summary (see summary.py) under their names in metrics.jsonl."""
    return {f"eval/{k}": v for k, v in summary.items() if isinstance(v, (int, float))}
