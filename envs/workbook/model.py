"""A workbook in memory: sheets of typed values, by row, and what a file says beside them.

Rows are tuples that begin at column A and end at the row's last filled cell, kept in a
dict by row number, so a sheet with one value in XFD1048576 stays small.  A workbook that was
read from a file has sheets that fetch their rows when asked (`opened`); made ones leave
everything but values, tab colours and column formats at its default.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from envs.workbook.a1 import Area
from envs.workbook.formats import from_serial, kind_of


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


class Cell(NamedTuple):
    """One cell with all that is known of it.

    kind: number, text, boolean, error, date, time, duration, empty, or serial: a number in a
        date format that is no date, such as -1 or Excel's 29 February 1900.
    raw: the value as it is stored, where dates are numbers of days.
    formula: with its "=", as a person writes it, or None.  array: the range it fills.
    stored: whether the file holds a result of the formula.
    calculated: whether the value was calculated here, for want of a stored one.
    """

    value: Value
    kind: str
    number_format: str = "General"
    raw: bool | int | float | str | None = None
    formula: str | None = None
    array: str | None = None
    stored: bool = True
    calculated: bool = False
    epoch1904: bool = False

    @property
    def shown(self) -> str:
        """The text that a spreadsheet program shows."""
        from envs.workbook.shown import show

        return show(self.raw, self.number_format, self.epoch1904)


def make_cell(raw: object, number_format: str = "General", epoch1904: bool = False) -> Cell:
    """The cell of a stored value: None, bool, number, text or CellError."""
    if raw is None:
        return Cell(None, "empty", number_format)
    if isinstance(raw, CellError):
        return Cell(raw, "error", number_format, str(raw))
    if isinstance(raw, bool):
        return Cell(raw, "boolean", number_format, raw)
    if not isinstance(raw, (int, float)):
        return Cell(str(raw), "text", number_format, str(raw))
    kind = kind_of(number_format)
    if kind in ("number", "text"):
        return Cell(raw, "number", number_format, raw)
    value = from_serial(raw, kind, epoch1904)
    if value is None:
        return Cell(raw, "serial", number_format, raw, epoch1904=epoch1904)
    return Cell(value, value_kind(value), number_format, raw, epoch1904=epoch1904)


def value_kind(value: Value) -> str:
    """The kind of a value that stands alone."""
    for kind, types in _KINDS.items():
        if isinstance(value, types):
            return kind
    return "empty"


_KINDS: dict[str, type | tuple[type, ...]] = {
    "error": CellError,
    "text": str,
    "boolean": bool,
    "number": (int, float),
    "date": dt.date,
    "time": dt.time,
    "duration": dt.timedelta,
}


@dataclass(frozen=True)
class Table:
    """A named table.  ref: its range with header and totals; columns: their names."""

    name: str
    ref: str
    columns: tuple[str, ...]
    header: bool
    totals: bool


@dataclass(frozen=True)
class DefinedName:
    """A name for a range, constant or formula.  scope: the one sheet that knows it, or None.
    broken: what it refers to is gone, in another file, or nothing."""

    name: str
    refers_to: str
    scope: str | None
    broken: bool
    hidden: bool


@dataclass(frozen=True)
class Marks:
    """What a file says of a sheet beside its cells.

    state: visible, hidden or veryHidden.  kind: worksheet, chart, dialog or macro.
    declared: the used range that the file claims, where it isn't the one of the filled cells.
    hidden_rows, hidden_columns: (first, last) pairs.  merged: A1 ranges.
    damage: why its cells can't be read; it is empty then.
    """

    state: str = "visible"
    kind: str = "worksheet"
    declared: str | None = None
    hidden_rows: tuple[tuple[int, int], ...] = ()
    hidden_columns: tuple[tuple[int, int], ...] = ()
    merged: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    protected: bool = False
    damage: str | None = None


NO_MARKS = Marks()


@dataclass
class Sheet:
    """One sheet.  `rows[r][c - 1]` is the value of row r, column c (both 1-based).

    tab_color: "RRGGBB" or None.
    formats: number format of a whole column, by 1-based column.
    uncalculated: formulas whose result nobody knows; their cells are empty here.
    """

    name: str
    rows: dict[int, tuple] = field(default_factory=dict)
    tab_color: str | None = None
    formats: dict[int, str] = field(default_factory=dict)
    uncalculated: int = 0
    marks: Marks = NO_MARKS

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

    def cells(self, area: Area) -> Iterator[tuple[int, list[Cell]]]:
        """(row number, cells) for the rows of the area.  Dates have no serial number here."""
        for r, values in self.block(area):
            formats = (self.formats.get(c, "General") for c in range(area.left, area.right + 1))
            yield r, [
                Cell(v, value_kind(v), f, v if isinstance(v, (bool, int, float, str)) else None)
                for v, f in zip(values, formats, strict=True)
            ]

    def remarks(self, area: Area) -> dict[tuple[int, int], str]:
        """(row, column) -> what the values of the area don't say: formulas whose result nobody
        knows, percents, and dates that are none."""
        return {}

    def is_hidden(self, row: int) -> bool:
        return any(first <= row <= last for first, last in self.marks.hidden_rows)


@dataclass
class Workbook:
    """Sheets in tab order.  Names are unique without regard to case, as in Excel.

    notes: what a person should know about the file that it was read from.
    Raises ValueError where two names are alike.
    """

    sheets: list[Sheet]
    defined_names: tuple[DefinedName, ...] = ()
    notes: tuple[str, ...] = ()
    epoch1904: bool = False

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

    def close(self) -> None:
        """Lets go of the file that it was read from, if any."""

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
