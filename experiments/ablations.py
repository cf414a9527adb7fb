"""The ablation figures: one command each, several seeds, with intervals.

    python -m experiments.ablations staleness
    python -m experiments.ablations group_size --seeds 0,1,2,3,4 --loop.steps 60

Each figure is a grid over a few settings of `experiments.fast_ask`, every point of it run with
several seeds (of tasks and of sampling) as `experiments.sweep` runs them: one after the other,
finished ones skipped when the same command is given again.  A point's number is the mean of its
runs' exact match on held-out tasks; its interval is Student's 95 % interval of that mean over the
seeds, so it tells how far another set of seeds would be.  Leaves out single runs' own
intervals, which stand in sweep.csv.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from experiments import sweep
from experiments.config import UsageError, run_main
from fastask_jax.report.plots import plot_sweep
from fastask_jax.report.tables import Table


@dataclass(frozen=True)
class Figure:
    """grid: values of each setting.  fixed: options of every run.  title: of the plot."""

    grid: dict[str, tuple[str, ...]]
    title: str
    fixed: tuple[str, ...] = ()


FIGURES = {
    "staleness": Figure(
        {
            "fleet.max_staleness": ("0", "2", "4", "8"),
            "objective.loss": ("aipo_clip", "aipo", "ipo", "gspo", "reinforce"),
        },
        "held-out exact match by bound of staleness and loss",
        ("--mode=async",),
    ),
    "group_size": Figure(
        {"loop.group_size": ("2", "4", "8", "16")}, "held-out exact match by size of a group"
    ),
    "shaping": Figure(
        {"env.shaping_requires_correct": ("false", "true")},
        "held-out exact match, shaping paid always or for right answers alone",
    ),
    "decoys": Figure(
        {"tasks.difficulties": ("easy", "medium")},
        "held-out exact match without and with decoy sheets",
    ),
}

# Student's t, two-sided 95 %, by degrees of freedom.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

USAGE = f"""\
usage: python -m experiments.ablations FIGURE [--seeds 0,1,2] [--run-dir DIR] [--field value ...]

  FIGURE       one of {", ".join(FIGURES)}
  --seeds      seeds of every point, at least three (default 0,1,2)
  --run-dir    where the runs are kept (default runs/ablation-FIGURE)
  --grid       FIELD=V1,V2: other values of one of the figure's settings
  --field      any other option goes to every run of experiments.fast_ask (--preset tiny)

Writes FIGURE.png, FIGURE.txt and sweep.csv; each run has its directory and its log there."""


def main(argv: list[str]) -> int:
    """Makes one figure; 1 when a run failed."""
    if not argv or "-h" in argv or "--help" in argv:
        print(USAGE)
        return 0 if argv else 2
    name, words = argv[0], argv[1:]
    if name not in FIGURES:
        raise UsageError(f"no figure {name!r}: choose one of {', '.join(FIGURES)}")
    figure = FIGURES[name]
    seeds, words = _seeds(words)
    grid = [f"--grid={field}={';'.join(values)}" for field, values in figure.grid.items()]
    # What the words say comes last, and so replaces these.
    own = [f"--run-dir=runs/ablation-{name}", "--preset=tiny", *figure.fixed]
    plan = sweep.parse_sweep(["fast_ask", *grid, *own, *words])
    unknown = sorted(set(plan.fields) - set(figure.grid))
    if unknown:
        raise UsageError(f"--grid {unknown[0]}: figure {name} has {', '.join(figure.grid)}")
    rows = [
        {**values, "seed": seed, **_run(plan, values, seed)}
        for values, seed in product(plan.combinations(), seeds)
    ]
    sweep.report(plan, rows)
    points = [_pooled(values, rows) for values in plan.combinations()]
    table = _table(name, plan.fields, points)
    (plan.run_dir / f"{name}.txt").write_text(table.text() + "\n", "utf-8")
    print("\n" + table.text())
    if any(point["exact_match"] is not None for point in points):
        path = plot_sweep(points, plan.fields, plan.run_dir / f"{name}.png", title=figure.title)
        print(f"plot: {path}", flush=True)
    failed = sum(row["status"] == "failed" for row in rows)
    if failed:
        print(f"{failed} of {len(rows)} runs failed", file=sys.stderr)
    return 1 if failed else 0


def _seeds(words: Sequence[str]) -> tuple[list[int], list[str]]:
    """The seeds that the words ask for, and the other words."""
    rest, text = list(words), "0,1,2"
    for place, word in enumerate(rest):
        flag, equals, value = word.partition("=")
        if flag == "--seeds":
            if not equals and place + 1 == len(rest):
                raise UsageError("--seeds needs a value")
            text = value if equals else rest[place + 1]
            del rest[place : place + (1 if equals else 2)]
            break
    try:
        seeds = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise UsageError(f"--seeds {text}: expected whole numbers, as in 0,1,2") from None
    if len(seeds) < 3:
        raise UsageError("--seeds: an interval over seeds needs at least three")
    return seeds, rest


def _run(plan: sweep.Sweep, values: dict[str, str], seed: int) -> dict[str, Any]:
    """One run of one point."""
    full = {**values, "loop.seed": str(seed), "tasks.seed": str(seed)}
    label = ", ".join(f"{field}={value}" for field, value in values.items())
    print(f"{label}, seed {seed}", flush=True)
    row = sweep.run_one(plan, full, sweep.resolve(plan, full))
    print(f"    {sweep.outcome(row)}", flush=True)
    return row


def _pooled(values: dict[str, str], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A point of the figure: mean over its seeds, and the interval of that mean."""
    own = [row for row in rows if all(row[field] == value for field, value in values.items())]
    found = [float(row["exact_match"]) for row in own if row.get("exact_match") is not None]
    point: dict[str, Any] = {**values, "runs": len(found), "exact_match": None}
    if found:
        mean = statistics.fmean(found)
        point |= {"exact_match": mean, "low": None, "high": None}
        if len(found) > 1:
            t = _T95[min(len(found) - 1, len(_T95)) - 1]
            half = t * statistics.stdev(found) / math.sqrt(len(found))
            point |= {"low": max(0.0, mean - half), "high": min(1.0, mean + half)}
    return point


def _table(name: str, fields: Sequence[str], points: Sequence[dict[str, Any]]) -> Table:
    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f}"

    body = tuple(
        (
            *(point[field] for field in fields),
            str(point["runs"]),
            percent(point["exact_match"]),
            f"{percent(point.get('low'))} - {percent(point.get('high'))}",
        )
        for point in points
    )
    return Table(f"ablation {name}", (*fields, "seeds", "exact match\n%", "95 %\nover seeds"), body)


if __name__ == "__main__":
    run_main(main)
