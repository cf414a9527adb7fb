"""A workbook in memory: sheets of typed values, by row.

Rows are tuples that begin at column A and end at the row's last filled cell, kept in a
dict by row number, so a sheet with one value in XFD1048576 stays small.  Formatting other
than the tab colour, formulas and names are left out: the tools answer from values.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass, field

from envs.workbook.a1 import Area


class CellError(str):
    """An error cell such as #N/A: prints as its code, never equal to the same text."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CellError) and str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(("CellError", str(self)))


Value = None | bool | int | float | str | dt.date | dt.datetime | dt.time | dt.timedelta


@dataclass
class Sheet:
    """One sheet.  `rows[r][c - 1]` is the value of row r, column c (both 1-based).

    tab_color: "RRGGBB" or None.
    formats: number format of a whole column, by 1-based column, for the writer.
    uncalculated: formulas whose result the file doesn't hold; their cells are empty here.
    """

    name: str
    rows: dict[int, tuple] = field(default_factory=dict)
    tab_color: str | None = None
    formats: dict[int, str] = field(default_factory=dict)
    uncalculated: int = 0

    def used(self) -> Area | None:
        """The smallest area that holds every filled cell; None for an empty sheet."""
        low, high, left, right = None, 0, 1 << 20, 0
        for r, row in self.rows.items():
            width = len(row)
            while width and row[width - 1] is None:
                width -= 1
            if not width:
                continue
            low = r if low is None or r < low else low
            high = max(high, r)
            right = max(right, width)
            if left > 1:
                left = min(left, next(i for i, v in enumerate(row, 1) if v is not None))
        return None if low is None else Area(low, left, high, right)

    def block(self, area: Area) -> Iterator[tuple[int, list]]:
        """(row number, values from area.left to area.right) for the rows of the area."""
        left, right, empty = area.left - 1, area.right, [None] * area.width
        for r in range(area.top, area.bottom + 1):
            values = list(self.rows.get(r, ())[left:right])
            yield r, values + empty[len(values) :]


@dataclass
class Workbook:
    """Sheets in tab order.  Names are unique without regard to case, as in Excel.

    Raises ValueError where two are alike.
    """

    sheets: list[Sheet]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for name in self.names():
            if name.lower() in seen:
                raise ValueError(f"two sheets are named {name[:40]!r}")
            seen.add(name.lower())

    def names(self) -> list[str]:
        return [s.name for s in self.sheets]

    def uncalculated(self) -> dict[str, int]:
        """`Sheet.uncalculated` by sheet, where it isn't 0."""
        return {s.name: s.uncalculated for s in self.sheets if s.uncalculated}

    def find(self, name: str) -> Sheet | None:
        """The sheet of that name, or else the first that differs in case alone, or None."""
        wanted = name.casefold()
        alike = [s for s in self.sheets if s.name.casefold() == wanted]
        return next((s for s in alike if s.name == name), alike[0] if alike else None)

    def __getitem__(self, name: str) -> Sheet:
        sheet = self.find(name)
        if sheet is None:
            raise KeyError(f"no sheet named {name!r}; sheets: {', '.join(self.names())}")
        return sheet
