"""`utilisation.png`: what learner and engines did with their time, step by step, stacked.

Reads the `time/` numbers of metrics.jsonl.  Leaves out everything that isn't time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from fastask_jax.report.plots import save

# Colour, metric and label of each share, from the bottom up.
LEARNER = (
    ("#2b5fa8", "time/learn", "learns"),
    ("#8a56a8", "time/eval", "evaluates"),
    ("#d9d9d9", "time/rollout", "waits for rollouts"),
)
ENGINE = (
    ("#2b5fa8", "time/decode", "decodes"),
    ("#3a8f5c", "time/append", "reads prompts and results"),
    ("#d1601f", "time/pool", "waits for tools"),
    ("#d9d9d9", "time/idle", "has nothing to do"),
)


def shares(
    metrics: Sequence[Mapping[str, Any]], parts: Sequence[tuple[str, str, str]]
) -> tuple[list[int], list[list[float]]]:
    """Steps, and for each part its share of their sum at each step (0 where nothing is known)."""
    lines = [m for m in metrics if m.get("time/rollout") is not None]
    rows = [[float(line.get(name) or 0.0) for _, name, _ in parts] for line in lines]
    scaled = [[value / max(sum(row), 1e-9) for value in row] for row in rows]
    return [line["step"] for line in lines], [list(part) for part in zip(*scaled, strict=True)]


def plot_utilisation(
    metrics: Sequence[Mapping[str, Any]], path: str | Path, *, title: str = ""
) -> Path:
    """Draws the shares of learner and engines over steps to a PNG at `path`.

    metrics: objects of metrics.jsonl.  Raises ValueError when there is no step to draw.
    """
    if not any(m.get("time/rollout") is not None for m in metrics):
        raise ValueError("no training steps to draw")
    figure = Figure(figsize=(9, 6), layout="constrained")
    if title:
        figure.suptitle(title, fontsize=13)
    for axes, (name, parts) in zip(
        figure.subplots(2, 1, sharex=True),
        (("learner", LEARNER), ("engine", ENGINE)),
        strict=True,
    ):
        steps, values = shares(metrics, parts)
        colours = [colour for colour, _, _ in parts]
        labels = [label for _, _, label in parts]
        # A step's area goes half a step to either side of it.
        edges = [step - 0.5 for step in steps] + [steps[-1] + 0.5]
        areas = [[*part, part[-1]] for part in values]
        axes.stackplot(edges, areas, colors=colours, labels=labels, step="post")
        axes.set_title(f"share of the {name}'s time", fontsize=11, loc="left")
        axes.set_ylim(0, 1)
        axes.set_xlim(edges[0], edges[-1])
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.spines[["top", "right"]].set_visible(False)
        handles, names = axes.get_legend_handles_labels()
        axes.legend(
            handles[::-1], names[::-1], frameon=False, loc="center left", bbox_to_anchor=(1, 0.5)
        )
    axes.set_xlabel("step")
    return save(figure, path)
