"""How fast Fast Ask tasks are made, and whether the oracle solves them all.

    python -m experiments.bench.tasks                 tasks (with their workbooks) per second
    python -m experiments.bench.tasks --oracle        100 tasks of each type and difficulty,
                                                      solved through the tools and the sandbox

One process, one core; rates are per second of CPU time, so that a busy machine does not
change them much (the wall clock stands beside).  Every type and difficulty counts the same.
With `--oracle` a task that the oracle gets wrong, or needs more than the turn budget for, is
named and makes the command fail.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from envs.core import Score
from envs.fast_ask import DIFFICULTIES, KINDS, Task, build_workbook, make_task
from envs.fast_ask.env import FastAskConfig, FastAskEnv
from envs.sandbox import Sandbox
from experiments.bench.report import report
from experiments.config import option, parse, run_main
from fastask_jax.policies.base import run_episode
from fastask_jax.policies.oracle import OraclePolicy

SCALES: dict[str, tuple[str, ...]] = {
    "tiny": ("tiny",),
    "standard": ("standard",),
    "both": ("tiny", "standard"),
}


@dataclass(frozen=True)
class Config:
    """What to measure."""

    scale: Literal["tiny", "standard", "both"] = option("both", "sizes of the workbooks")
    oracle: bool = option(False, "let the oracle solve the tasks")
    helpers: bool = option(False, "the oracle takes the helper sheet of easy workbooks")
    per_cell: int = option(0, "tasks per type and difficulty; 0: 20, or 100 with --oracle")
    runs: int = option(3, "repetitions of the speed measurement; the median counts")
    first_seed: int = option(0, "seed of the first task; the others follow it")

    def __post_init__(self) -> None:
        if self.per_cell < 0 or self.runs < 1 or self.first_seed < 0:
            raise ValueError("per_cell and first_seed are 0 or more, runs at least 1")

    @property
    def count(self) -> int:
        return self.per_cell or (100 if self.oracle else 20)


def specs(config: Config, scale: str, run: int = 0) -> Iterator[tuple[int, str, str, str]]:
    """(seed, type, difficulty, scale) of every task of one run."""
    first = config.first_seed + run * config.count
    for seed in range(first, first + config.count):
        for kind in KINDS:
            for difficulty in DIFFICULTIES:
                yield seed, kind, difficulty, scale


def measure_speed(config: Config, scale: str) -> dict[str, Any]:
    """Rates of making tasks with their workbooks, and cells of the largest and smallest."""
    build_workbook(make_task(1, "top_vendor", "hard", scale))  # long filler tables, drawn once
    rates, walls, cells = [], [], []
    for run in range(config.runs):
        wall, cpu = time.perf_counter(), time.process_time()
        books = 0
        for spec in specs(config, scale, run):
            book = build_workbook(make_task(*spec))
            books += 1
            if run == 0 and spec[0] == config.first_seed:
                areas = [area for area in (s.used() for s in book.sheets) if area]
                cells.append(sum(area.cells for area in areas))
        rates.append(books / (time.process_time() - cpu))
        walls.append(books / (time.perf_counter() - wall))
    rates.sort()
    walls.sort()
    return {
        "rate": round(rates[len(rates) // 2], 1),
        "wall_rate": round(walls[len(walls) // 2], 1),
        "rates": [round(rate, 1) for rate in rates],
        "cells": [min(cells), max(cells)],
    }


def play_oracle(config: Config, scale: str, sandbox: Sandbox) -> dict[str, Any]:
    """Episodes of the oracle on every task; names each one that it gets wrong."""
    env = FastAskEnv(FastAskConfig(), sandbox)
    budget = env.config.max_turns
    right = tasks = 0
    turns: dict[int, int] = {}
    cells = 0
    wrong: list[str] = []
    started = time.perf_counter()
    for spec in specs(config, scale):
        task = make_task(*spec)
        score = run_episode(OraclePolicy(use_helper=config.helpers), env, task)
        tasks += 1
        right += _is_right(score)
        used = score.info["turns"]
        turns[used] = turns.get(used, 0) + 1
        cells = max(cells, score.info["cells"])
        if not _is_right(score) or used > budget:
            wrong.append(_complaint(task, score))
            print(wrong[-1])
    return {
        "exact_match": 100 * right / tasks,
        "tasks": tasks,
        "max_turns": max(turns),
        "turns": {str(n): turns[n] for n in sorted(turns)},
        "max_cells": cells,
        "seconds": round(time.perf_counter() - started, 1),
        "wrong": len(wrong),
    }


def _is_right(score: Score) -> bool:
    return score.parts["correct"] == 1.0


def _complaint(task: Task, score: Score) -> str:
    info = score.info
    return (
        f"{task.id}: answered {info['answer']!r}, truth {task.truth!r}, {info['turns']} turns, "
        f"ended by {info['stop_reason']}"
    )


def main(config: Config) -> int:
    results: dict[str, Any] = {}
    if config.oracle:
        with Sandbox() as sandbox:
            for scale in SCALES[config.scale]:
                r = results[scale] = play_oracle(config, scale, sandbox)
                print(
                    f"{scale}: {r['exact_match']:.1f} % of {r['tasks']} tasks, at most "
                    f"{r['max_turns']} turns and {r['max_cells']} cells, {r['seconds']} s"
                )
        runs, unit = [min(r["exact_match"] for r in results.values())], "% exact match"
    else:
        for scale in SCALES[config.scale]:
            r = results[scale] = measure_speed(config, scale)
            print(
                f"{scale}: {r['rate']:,.0f} tasks/s on one core ({r['wall_rate']:,.0f} by the "
                f"wall clock), workbooks of {r['cells'][0]:,} to {r['cells'][1]:,} cells"
            )
        slowest = min(results.values(), key=lambda r: r["rate"])
        runs, unit = slowest["rates"], "tasks/s"
    report("tasks", unit, runs, oracle=config.oracle, per_cell=config.count, **results)
    return int(any(r.get("wrong") for r in results.values()))


if __name__ == "__main__":
    run_main(lambda argv: main(parse(Config, argv, description=__doc__)))
