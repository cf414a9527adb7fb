"""Tables for the terminal and for Markdown: the closing table, and exact match by group.

Plain text stays within 100 columns.  Leaves out colour and borders, so that a table can be
pasted anywhere.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastask_jax.report.stats import mean
from fastask_jax.report.summary import Record, by_task, exact_match, groups, summarize

BLIND = "blind"
# The policy whose lead over blind the group table shows, where it is there.
LEADER = "trained"


@dataclass(frozen=True)
class Table:
    """Rows of text under a header of one or two lines a column.  A row of one cell is a rule
    with that text: the start of a section."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        heads = [h.split("\n") for h in self.header]
        depth = max(len(h) for h in heads)
        heads = [[""] * (depth - len(h)) + h for h in heads]
        whole = [row for row in self.rows if len(row) > 1]
        widths = [
            max(len(cell) for cell in [*heads[i], *(row[i] for row in whole)])
            for i in range(len(heads))
        ]
        gap = "  "

        def line(cells: Sequence[str]) -> str:
            first = f"{cells[0]:<{widths[0]}}"
            rest = [f"{c:>{w}}" for c, w in zip(cells[1:], widths[1:], strict=True)]
            return gap.join([first, *rest]).rstrip()

        total = sum(widths) + len(gap) * (len(widths) - 1)
        out = [self.title, "-" * total]
        out += [line([h[level] for h in heads]) for level in range(depth)]
        out.append("-" * total)
        for i, row in enumerate(self.rows):
            if len(row) == 1:
                out += ([""] if i else []) + [row[0]]
            else:
                out.append(line(row))
        out.append("-" * total)
        for note in self.notes:
            out += textwrap.wrap(note, max(total, 72))
        return "\n".join(out)

    def markdown(self) -> str:
        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(c.strip().replace("|", r"\|") for c in cells) + " |"

        out = [f"**{self.title}**", "", line([" ".join(h.split()) for h in self.header])]
        out.append("|" + "|".join([" :-- "] + [" --: "] * (len(self.header) - 1)) + "|")
        for row in self.rows:
            if len(row) == 1:
                out.append(line([f"**{row[0]}**"] + [""] * (len(self.header) - 1)))
            else:
                out.append(line(row))
        return "\n".join([*out, *(["", *self.notes] if self.notes else [])])


def closing_table(policies: Mapping[str, Sequence[Record]]) -> Table:
    """One row a policy, in the order given (blind, base, trained, oracle): exact match with its
    95 % interval, reward and its parts, turns, cells read."""
    summaries = {name: summarize(records) for name, records in policies.items()}
    # `correct` is the exact match, which has columns of its own.
    parts = sorted({p for s in summaries.values() for p in s["parts"]} - {"correct"})
    header = (
        "policy",
        "exact\nmatch",
        "95 %\ninterval",
        "mean\nreward",
        *(_breakable(p) for p in parts),
        "\nturns",
        "turns if\ncorrect",
        "cells\nread",
    )
    rows = tuple(
        (
            name,
            f"{100 * s['exact_match']:.1f} %",
            f"{100 * s['low']:.1f} - {100 * s['high']:.1f}",
            f"{s['mean_reward']:.3f}",
            *(_number(s["parts"].get(p), 3) for p in parts),
            _number(s["turns"], 1),
            _number(s["turns_correct"], 1),
            f"{s['cells']:,.0f}",
        )
        for name, s in summaries.items()
    )
    counts = sorted({s["tasks"] for s in summaries.values()})
    tasks = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return Table(f"{tasks} held-out tasks", header, rows)


def group_table(policies: Mapping[str, Sequence[Record]]) -> Table:
    """Exact match in per cent, with its 95 % interval, by family, type and difficulty; where
    blind and trained policies are there, the lead of the trained one in points.  A note names
    the types in which it isn't above blind."""
    names = list(policies)
    compare = BLIND in policies and LEADER in policies
    header = (
        "",
        "tasks",
        *names,
        *([f"{LEADER}\n- {BLIND}"] if compare else []),
    )
    rows: list[tuple[str, ...]] = []
    behind: list[str] = []

    def add(label: str, chosen: Mapping[str, Sequence[Record]]) -> None:
        cells = [_share(chosen[n]) for n in names]
        if compare:
            blind, leader = (_rate(chosen[n]) for n in (BLIND, LEADER))
            cells.append(_points(leader - blind))
        rows.append((label, str(max(len(by_task(r)) for r in chosen.values())), *cells))

    def pick(key: str, value: str) -> dict[str, list[Record]]:
        return {n: groups(key, records).get(value, []) for n, records in policies.items()}

    every = [r for records in policies.values() for r in records]
    for family, found in sorted(groups("family", every).items()):
        rows.append((family,))
        for kind in sorted(groups("type", found)):
            chosen = pick("type", kind)
            add(f"  {kind}", chosen)
            if compare and not _rate(chosen[LEADER]) > _rate(chosen[BLIND]):
                behind.append(kind)
        add("  all", pick("family", family))
    rows.append(("difficulty",))
    order = {"easy": 0, "medium": 1, "hard": 2}
    for level in sorted(groups("difficulty", every), key=lambda d: (order.get(d, 9), d)):
        add(f"  {level}", pick("difficulty", level))
    rows.append(("every task",))
    add("  all", policies)
    notes: tuple[str, ...] = ()
    if compare:
        notes = (
            f"{LEADER} is not above {BLIND} in: {', '.join(behind)}"
            if behind
            else f"{LEADER} is above {BLIND} in every type",
        )
    return Table("Exact match, % (95 % interval)", header, tuple(rows), notes)


def _rate(records: Sequence[Record]) -> float:
    return mean(float(bool(r["correct"])) for r in records)


def _share(records: Sequence[Record]) -> str:
    if not records:
        return "-"
    exact, low, high = exact_match(records)
    interval = f"({100 * low:.0f}-{100 * high:.0f})"
    return f"{100 * exact:.0f} {interval:<8}"  # padded, so that the rates line up


def _points(difference: float) -> str:
    return "-" if math.isnan(difference) else f"{100 * difference:+.0f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _breakable(name: str) -> str:
    """`answer_format` on two header lines; a single word on the second."""
    first, _, rest = name.replace("_", " ").rpartition(" ")
    return f"{first}\n{rest}"
