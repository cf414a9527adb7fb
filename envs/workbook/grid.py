"""What every reader of workbook files gives: a `Source`, with an outline and rows of its sheets.

An outline is JSON: what `envs.workbook.opened` makes a workbook of.  Rows are those of
`cells`.  `Grid` is the source of the kinds of file that are read at once.
"""

from __future__ import annotations

from typing import Any, Protocol

from envs.workbook.cells import Row
from envs.workbook.container import Limits, WorkbookError
from envs.workbook.sheetxml import bounds


class Source(Protocol):
    """outline: see `sheet_outline`.  rows: the filled ones of a sheet.
    numbers: their numbers, ascending.  uncalculated: formulas without a stored result.
    heavy: worth keeping in a store once read."""

    outline: dict[str, Any]
    heavy: bool

    def rows(self, sheet: int, top: int, bottom: int) -> list[Row]: ...

    def numbers(self, sheet: int) -> list[int]: ...

    def uncalculated(self, sheet: int) -> int: ...


def sheet_outline(name: str, used: list[int] | None, **more: Any) -> dict[str, Any]:
    """What an outline says of one sheet.

    used: top, left, bottom, right of the filled cells.  declared: the used range that the file
    claims.  merged: A1 ranges.  hidden_rows, hidden_columns: [first, last] pairs.
    uncalculated: formulas without a stored result, or None where that isn't known yet.
    damage: why its cells can't be read.
    """
    return {
        "name": name,
        "used": used,
        "state": "visible",
        "kind": "worksheet",
        "tab_color": None,
        "declared": None,
        "merged": [],
        "hidden_rows": [],
        "hidden_columns": [],
        "tables": [],
        "uncalculated": 0,
        "protected": False,
        "damage": None,
    } | more


def book_outline(**more: Any) -> dict[str, Any]:
    """An outline without sheets.  notes: what a person should know about the file."""
    return {
        "kind": "",
        "epoch1904": False,
        "formats": ["General"],
        "names": [],
        "notes": [],
        "sheets": [],
    } | more


def spans(numbers: list[int]) -> list[list[int]]:
    """Numbers as [first, last] pairs of those that follow each other."""
    out: list[list[int]] = []
    for number in sorted(set(numbers)):
        if out and out[-1][1] == number - 1:
            out[-1][1] = number
        else:
            out.append([number, number])
    return out


class Grid:
    """Rows of all sheets in memory: the source of the kinds that are read at once."""

    heavy = True

    def __init__(self, outline: dict[str, Any], sheets: list[list[Row]], limits: Limits) -> None:
        self.outline = outline
        self._sheets = [{row[0]: row for row in rows} for rows in sheets]
        cells = sum(len(s[1]) for rows in sheets for row in rows for s in row[1])
        check_cells(cells, limits)
        self.heavy = cells > 20_000
        for sheet, rows in zip(outline["sheets"], sheets, strict=True):
            top, bottom, left, right = bounds(rows)
            sheet["used"] = [top, left, bottom, right] if top else None

    def numbers(self, sheet: int) -> list[int]:
        return sorted(self._sheets[sheet])

    def uncalculated(self, sheet: int) -> int:
        count: int = self.outline["sheets"][sheet]["uncalculated"]
        return count

    def rows(self, sheet: int, top: int, bottom: int) -> list[Row]:
        found = self._sheets[sheet]
        if bottom - top < len(found):
            return [found[n] for n in range(top, bottom + 1) if n in found]
        return [found[n] for n in sorted(found) if top <= n <= bottom]


def check_cells(cells: int, limits: Limits) -> None:
    if cells > limits.cells:
        raise WorkbookError(
            f"holds {cells:,} filled cells; the limit is {limits.cells:,}. Split it into smaller "
            "workbooks"
        )
