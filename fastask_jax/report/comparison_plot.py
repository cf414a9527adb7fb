"""`evaluation.png`: an evaluation at a glance.

Above, each policy's exact match beside its paired difference to the reference, filled where that
is outside of the noise; below, exact match by type and difficulty.  Bars are 95 % intervals.
Drawn from the object of `comparison.compare`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from fastask_jax.report.comparison_tables import label_of, rows_of
from fastask_jax.report.plots import save

# Told apart without colour too, by the order in each row.
_INKS = (
    "#8c8c8c", "#d1601f", "#2b5fa8", "#3a8f5c", "#8a56a8", "#b03a4b", "#b08900", "#2a9d9d"
)  # fmt: skip
_GRID = "#e6e6e6"
_ROW = 0.42  # inches


def plot_evaluation(evaluation: Mapping[str, Any], path: str | Path, *, title: str = "") -> Path:
    """Draws to a PNG at `path`.  Raises ValueError where no policy has a record."""
    names = list(evaluation["policies"])
    if not names:
        raise ValueError("no policy to draw")
    inks = {name: _INKS[place % len(_INKS)] for place, name in enumerate(names)}
    groups = rows_of(evaluation)
    row = max(_ROW * 0.62, 0.07 * len(names) + 0.1)
    top, below = 1.0 + _ROW * len(names), 0.9 + row * len(groups)
    figure = Figure(figsize=(10, top + below + 0.7), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(top, below), width_ratios=(1.15, 1))
    if title:
        figure.suptitle(title, fontsize=13)
    _shares(figure.add_subplot(grid[0, 0]), evaluation, inks)
    _differences(figure.add_subplot(grid[0, 1]), evaluation, inks)
    _groups(figure.add_subplot(grid[1, :]), evaluation, inks, groups)
    handles = [
        figure.axes[0].plot([], [], "o", color=ink, markersize=6, label=name)[0]
        for name, ink in inks.items()
    ]
    figure.legend(
        handles=handles, frameon=False, loc="outside lower center", ncols=min(6, len(names))
    )
    return save(figure, path)


def _shares(axes: Axes, evaluation: Mapping[str, Any], inks: Mapping[str, str]) -> None:
    places = range(len(inks))[::-1]
    for place, (name, ink) in zip(places, inks.items(), strict=True):
        found = evaluation["policies"][name]
        middle = found["exact_match"]
        _bar(axes, middle, found["low"], found["high"], place, ink, size=7)
        axes.annotate(
            f"{100 * middle:.1f} %", (middle, place), (0, 8), textcoords="offset points",
            ha="left" if middle < 0.05 else "right" if middle > 0.95 else "center", fontsize=9,
        )  # fmt: skip
    _rows(axes, places, list(inks), "exact match (95 % interval)")
    _percent(axes)


def _differences(axes: Axes, evaluation: Mapping[str, Any], inks: Mapping[str, str]) -> None:
    reference = evaluation["reference"]
    places = dict(zip(inks, range(len(inks))[::-1], strict=True))
    for pair in evaluation["differences"]:
        if reference not in (pair["policy"], pair["than"]):
            continue
        # A pair has the later policy first.
        name, sign = (pair["policy"], 1) if pair["than"] == reference else (pair["than"], -1)
        low, high = sorted((sign * pair["low"], sign * pair["high"]))
        place, middle = places[name], sign * pair["difference"]
        _bar(axes, middle, low, high, place, inks[name], size=7, hollow=pair["noise"])
        told = f"{100 * middle:+.1f}" + (", inside the noise" if pair["noise"] else "")
        axes.annotate(
            told, (middle, place), (0, 8), textcoords="offset points", ha="center", fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )  # fmt: skip
    axes.axvline(0, color="#555555", linewidth=1)
    if reference in places:
        axes.annotate(
            "reference", (0, places[reference]), (5, 0), textcoords="offset points",
            va="center", fontsize=9, color="#555555",
        )  # fmt: skip
    _rows(axes, list(places.values()), ["" for _ in places], f"points above {reference}, paired")
    axes.margins(x=0.18)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:+.0f}" if x else "0"))


def _groups(
    axes: Axes,
    evaluation: Mapping[str, Any],
    inks: Mapping[str, str],
    groups: Sequence[tuple[str, str]],
) -> None:
    places = range(len(groups))[::-1]
    step = min(0.2, 0.74 / len(inks))
    for place, (key, value) in zip(places, groups, strict=True):
        if key == "family":
            axes.axhspan(place - 0.5, place + 0.5, color="#f5f5f5", linewidth=0)
        for order, (name, ink) in enumerate(inks.items()):
            found = evaluation["policies"][name][f"by_{key}"].get(value)
            if found is not None:
                height = place + step * ((len(inks) - 1) / 2 - order)
                _bar(axes, found["exact_match"], found["low"], found["high"], height, ink, size=4)
    levels = sum(key == "difficulty" for key, _ in groups)
    axes.axhline(levels - 0.5, color="#bbbbbb", linewidth=0.8)
    _rows(axes, places, [label_of(*g) for g in groups], "exact match by type and difficulty")
    axes.set_ylim(-0.5, len(groups) - 0.5)
    _percent(axes)


def _bar(
    axes: Axes,
    middle: float,
    low: float,
    high: float,
    place: float,
    ink: str,
    size: float,
    hollow: bool = False,
) -> None:
    axes.errorbar(
        [middle], [place], xerr=[[max(0.0, middle - low)], [max(0.0, high - middle)]],
        color=ink, marker="o", markersize=size, elinewidth=0.22 * size, capsize=0,
        markerfacecolor="white" if hollow else ink, linestyle="", zorder=3,
    )  # fmt: skip


def _rows(axes: Axes, places: Sequence[int], labels: Sequence[str], title: str) -> None:
    axes.set_yticks(list(places), labels)
    axes.set_ylim(-0.6, len(places) - 0.25)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(title, fontsize=11, loc="left")


def _percent(axes: Axes) -> None:
    axes.set_xlim(-0.02, 1.02)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
