"""`summary.json`: how each policy did, in the numbers that tables, sweeps and CI read.

{"policies": {"base": {...}, "trained": {...}}, "steps": ..., "wall_seconds": ..., ...}
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastask_jax.report.intervals import share_interval
from fastask_jax.report.jsonl import plain
from fastask_jax.report.stats import mean, wilson

FILE = "summary.json"
Record = Mapping[str, Any]


def summarize(records: Sequence[Record]) -> dict[str, Any]:
    """The summary of one policy's episode records.

    exact_match with its 95 % interval (low, high; see `exact_match`), mean_reward, turns and
    turns_correct (means; the latter over correct episodes, None without one), cells read and
    seconds per episode (means), tasks and rollouts (counts), parts (mean of each reward part), and
    the exact match of each family, type and difficulty.  Raises ValueError on no records.
    """
    if not records:
        raise ValueError("no episodes to summarize")
    exact, low, high = exact_match(records)
    right = [r for r in records if r["correct"]]
    parts = sorted({name for r in records for name in r["parts"]})
    return {
        "exact_match": exact,
        "low": low,
        "high": high,
        "mean_reward": mean(r["reward"] for r in records),
        "turns": mean(r["turns"] for r in records),
        "turns_correct": mean(r["turns"] for r in right) if right else None,
        "cells": mean(r["cells"] for r in records),
        "seconds": mean(r["seconds"] for r in records),
        "tasks": len(by_task(records)),
        "rollouts": len(records),
        "parts": {p: mean(float(r["parts"].get(p, 0.0)) for r in records) for p in parts},
        "by_family": _by("family", records),
        "by_type": _by("type", records),
        "by_difficulty": _by("difficulty", records),
    }


def by_task(records: Iterable[Record]) -> list[list[Record]]:
    """The rollouts of each task, in order of first appearance; a record that names no task is a
    task of its own."""
    found: dict[Any, list[Record]] = {}
    for place, record in enumerate(records):
        found.setdefault(record.get("task", place), []).append(record)
    return list(found.values())


def exact_match(records: Sequence[Record]) -> tuple[float, float, float]:
    """Share of correct episodes and its 95 % interval (low, high): Wilson's with one rollout a
    task; with several, those of one task don't count as independent."""
    tasks = by_task(records)
    right = [sum(bool(r["correct"]) for r in rollouts) for rollouts in tasks]
    if len(tasks) == len(records):
        low, high = wilson(sum(right), len(records))
    else:
        low, high = map(float, share_interval(right, [len(rollouts) for rollouts in tasks]))
    return (sum(right) / len(records) if records else 0.0), low, high


def groups(key: str, records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by the value of `key`, in order of first appearance."""
    out: dict[str, list[Record]] = {}
    for record in records:
        out.setdefault(str(record[key]), []).append(record)
    return out


def _by(key: str, records: Sequence[Record]) -> dict[str, dict[str, float]]:
    out = {}
    for name, found in sorted(groups(key, records).items()):
        exact, low, high = exact_match(found)
        out[name] = {"exact_match": exact, "low": low, "high": high, "tasks": len(by_task(found))}
    return out


def write_summary(
    run_dir: str | Path,
    policies: Mapping[str, Sequence[Record]],
    *,
    steps: int,
    wall_seconds: float,
    **extra: Any,
) -> dict[str, Any]:
    """Summarizes each policy's records, writes `summary.json` atomically and returns it."""
    summary = {
        "policies": {name: summarize(records) for name, records in policies.items()},
        "steps": steps,
        "wall_seconds": wall_seconds,
        **extra,
    }
    path = Path(run_dir) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".json.part")
    scratch.write_text(json.dumps(plain(summary), indent=2) + "\n", "utf-8")
    os.replace(scratch, path)
    return summary


def read_summary(run_dir: str | Path) -> dict[str, Any]:
    """A run's `summary.json`.  Raises FileNotFoundError, or ValueError that names the file."""
    path = Path(run_dir) / FILE
    try:
        summary = json.loads(path.read_text("utf-8"))
    except ValueError:
        raise ValueError(f"{path} is not JSON") from None
    if not isinstance(summary, dict) or not isinstance(summary.get("policies"), dict):
        raise ValueError(f"{path} has no policies")
    return summary
