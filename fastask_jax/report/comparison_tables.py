"""The tables and sentences of an evaluation, out of the object that `comparison.compare` makes.

For the terminal (`text`) and as one Markdown page (`page`).  Left out: the plot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastask_jax.report.comparison import in_words
from fastask_jax.report.tables import Table

_DIFFICULTIES = {"easy": 0, "medium": 1, "hard": 2}


def text(evaluation: Mapping[str, Any]) -> str:
    """Policies, then what tells them apart."""
    parts = [policy_table(evaluation).text()]
    if evaluation["differences"]:
        parts.append(difference_table(evaluation).text())
    return "\n\n".join([*parts, *partial_lines(evaluation)])


def page(evaluation: Mapping[str, Any], title: str, plot: str) -> str:
    """A Markdown page; plot: the file name of the picture."""
    parts = [f"# {title}", about(evaluation), policy_table(evaluation).markdown()]
    parts += [f"**{line}**" for line in partial_lines(evaluation)]
    parts.append(f"![exact match, differences, and exact match by type]({plot})")
    differences = evaluation["differences"]
    if differences:
        parts.append(difference_table(evaluation).markdown())
        parts.append("\n".join(f"- {in_words(pair)}" for pair in differences))
    parts.append(group_table(evaluation).markdown())
    if any(evaluation["differences_by"].values()):
        parts.append(group_difference_table(evaluation).markdown())
    return "\n\n".join(parts) + "\n"


def about(evaluation: Mapping[str, Any]) -> str:
    tasks = evaluation["tasks"]
    return (
        f"Task set `{tasks['digest']}`: {tasks['count']} {tasks['split']} tasks, scale "
        f"{tasks['scale']}, seed {tasks['seed']}. {_rollouts(evaluation).capitalize()}."
    )


def policy_table(evaluation: Mapping[str, Any]) -> Table:
    """One row a policy."""
    reference = evaluation["reference"]
    header = (
        "policy",
        "exact\nmatch",
        "95 %\ninterval",
        "mean\nreward",
        "\nturns",
        "cells\nread",
        "tokens\nsampled",
        "tokens\nread",
        "US\ncents",
        "\nseconds",
        f"x\n{reference}",
    )
    rows = tuple(
        (
            name,
            f"{100 * s['exact_match']:.1f} %",
            f"{100 * s['low']:.1f} - {100 * s['high']:.1f}",
            f"{s['mean_reward']:.3f}",
            f"{s['turns']:.1f}",
            f"{s['cells']:,.0f}",
            _number(s["tokens"], ",.0f"),
            _number(s["prompt_tokens"], ",.0f"),
            _number(None if s["price"] is None else 100 * s["price"], ".2f"),
            _number(s["seconds"], ".2f"),
            _number(s["seconds_ratio"], ".2f"),
        )
        for name, s in evaluation["policies"].items()
    )
    tasks = evaluation["tasks"]
    title = f"{tasks['count']} held-out tasks (set {tasks['digest']}); {_rollouts(evaluation)}"
    notes = (f"Means of a rollout. x {reference}: seconds, over those of {reference}.",)
    return Table(title, header, rows, notes)


def difference_table(evaluation: Mapping[str, Any]) -> Table:
    """One row a pair."""
    header = ("difference in exact match", "\npoints", "95 %,\npaired", "95 % if\nunpaired", "\nso")
    rows = []
    for pair in evaluation["differences"]:
        low, high = pair["unpaired"]
        rows.append(
            (
                f"{pair['policy']} - {pair['than']}",
                f"{100 * pair['difference']:+.1f}",
                f"{100 * pair['low']:+.1f} to {100 * pair['high']:+.1f}",
                f"{100 * low:+.1f} to {100 * high:+.1f}",
                verdict(pair),
            )
        )
    note = (
        "Inside the noise: the interval holds 0, so these tasks don't tell the two apart. Paired: "
        "both policies were asked the same tasks, so what makes a task hard falls out. Unpaired: "
        "what two sets of tasks would have told."
    )
    return Table("What tells them apart", header, tuple(rows), (note,))


def verdict(pair: Mapping[str, Any]) -> str:
    if pair["noise"]:
        return "inside the noise"
    return "better" if pair["difference"] > 0 else "worse"


def group_table(evaluation: Mapping[str, Any]) -> Table:
    """Exact match with its interval by type, family and difficulty, a column a policy."""
    policies = evaluation["policies"]

    def cell(summary: Mapping[str, Any], key: str, value: str) -> str:
        found = summary[f"by_{key}"].get(value)
        if found is None:
            return "-"
        bounds = f"({100 * found['low']:.0f}-{100 * found['high']:.0f})"
        return f"{100 * found['exact_match']:.0f} {bounds:<8}"

    rows: list[tuple[str, ...]] = []
    for key, value in rows_of(evaluation):
        cells = [cell(s, key, value) for s in policies.values()]
        counts = [s[f"by_{key}"].get(value, {"tasks": 0})["tasks"] for s in policies.values()]
        rows.append((label_of(key, value), str(max(counts)), *cells))
    return Table("Exact match, % (95 % interval)", ("", "tasks", *policies), tuple(rows))


def group_difference_table(evaluation: Mapping[str, Any]) -> Table:
    """Paired differences to the reference by type, family and difficulty."""
    reference, by = evaluation["reference"], evaluation["differences_by"]
    names = [name for name in evaluation["policies"] if name != reference]
    rows: list[tuple[str, ...]] = []
    count = 0
    for key, value in rows_of(evaluation):
        pairs = {pair["policy"]: pair for pair in by.get(key, {}).get(value, [])}
        count += len(pairs)
        rows.append((label_of(key, value), *(_against(pairs.get(name)) for name in names)))
    note = (
        f"In brackets: inside the noise. Of {count} differences between equal policies about "
        f"{max(1, round(count / 20))} would fall outside by chance, so one alone proves little."
    )
    title = f"Exact match less that of {reference}, points (95 % interval, paired)"
    return Table(title, ("", *names), tuple(rows), (note,))


def _against(pair: Mapping[str, Any] | None) -> str:
    if pair is None:
        return "-"
    told = f"{100 * pair['difference']:+.0f}, {100 * pair['low']:+.0f} to {100 * pair['high']:+.0f}"
    return f"[{told}]" if pair["noise"] else told


def partial_lines(evaluation: Mapping[str, Any]) -> list[str]:
    """A line for each policy with episodes that have no record."""
    return [
        f"{name} is partial: {found['left']} of {found['wanted']} rollouts have no record; "
        f"{found['why']}"
        for name, found in evaluation.get("partial", {}).items()
    ]


def rows_of(evaluation: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(key, value) of each group: a family after its types, the difficulties last."""
    found: list[tuple[str, str]] = []
    for family, types in sorted(evaluation["families"].items()):
        found += [("type", kind) for kind in sorted(types)]
        found.append(("family", family))
    levels = {level for s in evaluation["policies"].values() for level in s["by_difficulty"]}
    order = sorted(levels, key=lambda level: (_DIFFICULTIES.get(level, 9), level))
    return found + [("difficulty", level) for level in order]


def label_of(key: str, value: str) -> str:
    return {"type": f"  {value}", "family": f"all of {value}"}.get(key, value)


def _rollouts(evaluation: Mapping[str, Any]) -> str:
    count = evaluation["rollouts"]
    return "one rollout each" if count == 1 else f"{count} rollouts each"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
