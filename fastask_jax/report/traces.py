"""`traces.jsonl`: one trajectory a line, with its full transcript.

A trace is what a person needs to see why a rollout got its reward: `step`, `split` (train or
eval), the task (`id`, `type`, `question`, `truth`), `messages` as role and content in order,
`answer`, `reward`, `parts`, `turns`, `stop_reason`.  Fields are the caller's; only `step` is
required, because a resumed run cuts the file back to the restored step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastask_jax.report.jsonl import JsonLines, read_jsonl

FILE = "traces.jsonl"


class TraceWriter(JsonLines):
    """Writer of a run's `traces.jsonl`; see `JsonLines` for `after_step`."""

    def __init__(self, run_dir: str | Path, after_step: int | None = None) -> None:
        super().__init__(Path(run_dir) / FILE, after_step)

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one trajectory.  Raises ValueError without an integer `step`."""
        if not isinstance(record.get("step"), int):
            raise ValueError("a trace needs an integer `step`")
        super().write(record)


def read_traces(run_dir: str | Path) -> list[dict[str, Any]]:
    """The trajectories of a run, in the order written."""
    return read_jsonl(Path(run_dir) / FILE)
