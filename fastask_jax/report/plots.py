"""Plots of a run (`reward.png`) and of a sweep, drawn without a display.

Reads the objects of metrics.jsonl and rows of a sweep; leaves out anything interactive.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    MaxNLocator,
    NullLocator,
    PercentFormatter,
)

from fastask_jax.report import metrics as names
from fastask_jax.report.stats import smooth

_BLUE, _ORANGE, _GREY = "#2b5fa8", "#d1601f", "#777777"
_SERIES = ("#2b5fa8", "#d1601f", "#3a8f5c", "#8a56a8", "#b03a4b", "#6f6f6f")


def plot_run(
    metrics: Sequence[Mapping[str, Any]],
    path: str | Path,
    *,
    title: str = "",
    references: Mapping[str, float] | None = None,
) -> Path:
    """Draws reward, accuracy and turns over steps to a PNG at `path`.

    metrics: objects of metrics.jsonl; training curves are drawn thin with a centred moving mean
    on top, evaluations as points (exact match with its 95 % interval).
    references: exact match of other policies (blind, oracle), as horizontal lines.
    Raises ValueError when there is no training step to draw.
    """
    if not any(names.REWARD in m for m in metrics):
        raise ValueError("no training steps to draw")
    figure = Figure(figsize=(9, 7.2), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(1.25, 1))
    reward = figure.add_subplot(grid[0, :])
    accuracy, turns = figure.add_subplot(grid[1, 0]), figure.add_subplot(grid[1, 1])
    if title:
        figure.suptitle(title, fontsize=13)

    _curve(reward, metrics, names.REWARD)
    _points(reward, metrics, names.EVAL_REWARD)
    _frame(reward, "mean reward of a rollout")
    reward.legend(frameon=False, loc="best")

    _curve(accuracy, metrics, names.ACCURACY)
    _points(accuracy, metrics, names.EVAL_ACCURACY, names.EVAL_LOW, names.EVAL_HIGH)
    _frame(accuracy, "exact match (points: held out, 95 % interval)")
    accuracy.set_ylim(0, 1.05)
    accuracy.yaxis.set_major_formatter(PercentFormatter(1.0))
    for label, value in (references or {}).items():
        accuracy.axhline(value, color=_GREY, linewidth=1, linestyle=(0, (4, 3)))
        accuracy.annotate(
            label,
            (1, value),
            xycoords=("axes fraction", "data"),
            xytext=(-3, 3 if value < 0.9 else -3),
            textcoords="offset points",
            ha="right",
            va="bottom" if value < 0.9 else "top",
            fontsize=9,
            color=_GREY,
        )

    _curve(turns, metrics, names.TURNS)
    _points(turns, metrics, names.EVAL_TURNS)
    _frame(turns, "turns of a rollout")
    turns.set_ylim(0, 1.15 * max(turns.get_ylim()[1], 1.0))
    return save(figure, path)


def _column(metrics: Sequence[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    found = [(m["step"], m[name]) for m in metrics if m.get(name) is not None]
    return [float(s) for s, _ in found], [float(v) for _, v in found]


def _curve(axes: Axes, metrics: Sequence[Mapping[str, Any]], name: str) -> None:
    steps, values = _column(metrics, name)
    if not steps:
        return
    window = max(3, len(values) // 10) | 1
    if len(values) < 5:
        axes.plot(steps, values, color=_BLUE, linewidth=2, marker=".", label="training")
        return
    axes.plot(steps, values, color=_BLUE, linewidth=0.9, alpha=0.35)
    axes.plot(
        steps,
        smooth(values, window),
        color=_BLUE,
        linewidth=2,
        label=f"training (mean of {window} steps)",
    )


def _points(
    axes: Axes,
    metrics: Sequence[Mapping[str, Any]],
    name: str,
    low: str | None = None,
    high: str | None = None,
) -> None:
    steps, values = _column(metrics, name)
    if not steps:
        return
    style: dict[str, Any] = {
        "color": _ORANGE,
        "marker": "o",
        "markersize": 5,
        "linestyle": "",
        "label": "held-out tasks",
        "zorder": 3,
    }
    if low is None or high is None:
        axes.plot(steps, values, **style)
        return
    rows = [m for m in metrics if m.get(name) is not None]
    below = [v - float(m.get(low, v)) for v, m in zip(values, rows, strict=True)]
    above = [float(m.get(high, v)) - v for v, m in zip(values, rows, strict=True)]
    axes.errorbar(steps, values, yerr=[below, above], elinewidth=1.2, capsize=3, **style)


def _frame(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(axis="y", color="#e3e3e3", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def plot_sweep(
    rows: Sequence[Mapping[str, Any]],
    fields: Sequence[str],
    path: str | Path,
    *,
    title: str = "",
) -> Path:
    """Draws a sweep's exact match with its 95 % interval to a PNG at `path`.

    rows: dicts with the swept fields and `exact_match`, `low`, `high`; rows without a number
    (failed runs) are left out.  The field with the most numeric values is the x axis (on a log
    scale where they span a factor of 8), the other fields make the series; without a numeric
    field each combination is a labelled line.
    Raises ValueError when no row has a number.
    """
    done = [r for r in rows if r.get("exact_match") is not None]
    if not done:
        raise ValueError("no finished run to draw")
    numeric = [f for f in fields if _numeric(done, f)]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    if numeric:
        x = max(numeric, key=lambda f: len({float(r[f]) for r in done}))
        _sweep_lines(axes, done, x, [f for f in fields if f != x])
    else:
        _sweep_labels(axes, done, fields)
        figure.set_size_inches(8, 1.6 + 0.45 * len(done))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.set_title(
        title or "exact match on held-out tasks (95 % interval)", fontsize=11, loc="left"
    )
    return save(figure, path)


def _numeric(rows: Sequence[Mapping[str, Any]], field: str) -> bool:
    def number(value: Any) -> bool:
        try:
            return not isinstance(value, bool) and math.isfinite(float(value))
        except (TypeError, ValueError):
            return False

    return all(number(r[field]) for r in rows) and len({float(r[field]) for r in rows}) > 1


def _sweep_lines(
    axes: Axes, rows: Sequence[Mapping[str, Any]], x: str, others: Sequence[str]
) -> None:
    series: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        series.setdefault(tuple(str(row[f]) for f in others), []).append(row)
    ticks = sorted({float(r[x]) for r in rows})
    log = ticks[0] > 0 and ticks[-1] / ticks[0] >= 8
    for i, (key, found) in enumerate(series.items()):
        found = sorted(found, key=lambda r: float(r[x]))
        values = [float(r["exact_match"]) for r in found]
        # Series stand a little apart, so that their intervals don't cover each other.
        shift = (i - (len(series) - 1) / 2) * 0.012
        span = math.log(ticks[-1] / ticks[0]) if log else ticks[-1] - ticks[0]
        at = [
            float(r[x]) * math.exp(shift * span) if log else float(r[x]) + shift * span
            for r in found
        ]
        axes.errorbar(
            at,
            values,
            yerr=_intervals(found),
            color=_SERIES[i % len(_SERIES)],
            marker="o",
            markersize=5,
            capsize=3,
            linewidth=1.6,
            elinewidth=1.1,
            label=", ".join(f"{f} = {v}" for f, v in zip(others, key, strict=True)) or None,
        )
    if log:
        axes.set_xscale("log")
    if len(ticks) <= 10:
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel(x)
    axes.set_ylim(0, 1.05)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(axis="y", color="#e3e3e3", linewidth=0.8)
    if others:
        axes.figure.legend(frameon=False, loc="outside lower center", ncols=min(3, len(series)))


def _sweep_labels(axes: Axes, rows: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> None:
    labels = [", ".join(f"{f} = {r[f]}" for f in fields) for r in rows]
    places = list(range(len(rows)))[::-1]
    values = [float(r["exact_match"]) for r in rows]
    axes.errorbar(
        values,
        places,
        xerr=_intervals(rows),
        color=_BLUE,
        marker="o",
        markersize=6,
        capsize=3,
        linestyle="",
    )
    axes.set_yticks(places, labels)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlim(0, 1.02)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(axis="x", color="#e3e3e3", linewidth=0.8)


def _intervals(rows: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Distances down and up from exact match to its bounds; zero where a bound is missing."""
    below, above = [], []
    for row in rows:
        middle = float(row["exact_match"])
        below.append(middle - float(middle if row.get("low") is None else row["low"]))
        above.append(float(middle if row.get("high") is None else row["high"]) - middle)
    return [below, above]


def save(figure: Figure, path: str | Path) -> Path:
    """Writes a figure as a PNG, making its folder; returns the path."""
    FigureCanvasAgg(figure)  # no pyplot: no global state, no display
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=120)
    return target
