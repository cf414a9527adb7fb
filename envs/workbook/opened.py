"""A workbook that was read from a file: its outline at hand, its rows fetched when asked for.

Rows come from a `Feed`: the worker that reads the file, or the store that keeps it.  Values
become Python's here, by their formats and the file's epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from envs.workbook.a1 import Area
from envs.workbook.container import Damaged, Limits, WorkbookError
from envs.workbook.formats import from_serial, is_percent, kind_of
from envs.workbook.model import (
    Cell,
    CellError,
    DefinedName,
    Marks,
    Sheet,
    Table,
    Value,
    Workbook,
    make_cell,
)

Row = list[Any]
_STEP = 4096  # rows of one fetch


class Feed(Protocol):
    """Gives rows of a sheet as `cells` makes them; raises WorkbookError."""

    def rows(self, sheet: int, top: int, bottom: int) -> list[Row]: ...

    def uncalculated(self, sheet: int) -> int: ...

    def close(self) -> None: ...


class Values:
    """Stored values as Python's, for one file's formats and epoch."""

    def __init__(self, formats: list[str], epoch1904: bool) -> None:
        self.formats = formats
        self.epoch1904 = epoch1904
        kinds = [kind_of(code) for code in formats]
        self.dates = [kind if kind not in ("number", "text") else None for kind in kinds]
        # Whether a value may need a word beside it.
        self.remarkable = any(self.dates) or any(map(is_percent, formats))

    def code(self, style: int) -> str:
        return self.formats[style] if style < len(self.formats) else "General"

    def value(self, raw: Any, style: int) -> Value:
        kind = type(raw)
        if kind is float or kind is int:
            date = self.dates[style] if style < len(self.dates) else None
            if date is None:
                return raw
            found = from_serial(raw, date, self.epoch1904)
            return raw if found is None else found
        if kind is list:
            if raw[0] == "e":
                return CellError(raw[1])
            return self.cell(raw, style).value
        return raw

    def cell(self, raw: Any, style: int) -> Cell:
        code = self.code(style)
        kind = type(raw)
        if kind is str:
            return Cell(raw, "text", code, raw)
        if (kind is int or kind is float) and style < len(self.dates) and not self.dates[style]:
            return Cell(raw, "number", code, raw)
        if kind is list:
            if raw[0] == "e":
                return make_cell(CellError(raw[1]), code)
            if kind_of(code) in ("number", "text"):  # the file spells out a date, without a format
                code = {"date": "yyyy-mm-dd", "time": "hh:mm:ss", "duration": "[h]:mm:ss"}.get(
                    raw[0], "yyyy-mm-dd hh:mm:ss"
                )
            raw = raw[1]
        return make_cell(raw, code, self.epoch1904)


class OpenedSheet(Sheet):
    """One sheet of a file.  `rows` reads all of it; `block` and `cells` what they need."""

    def __init__(
        self, said: dict[str, Any], place: int, book: OpenedWorkbook, values: Values, limits: Limits
    ) -> None:
        self.name = said["name"]
        self.tab_color = said["tab_color"]
        self.formats = {}
        self._uncalculated: int | None = said["uncalculated"]
        used = said["used"]
        self._used = Area(*used) if used else None
        self.marks = Marks(
            state=said["state"],
            kind=said["kind"],
            declared=None if said["declared"] in (None, str(self._used)) else said["declared"],
            hidden_rows=tuple(map(tuple, said["hidden_rows"])),
            hidden_columns=tuple(map(tuple, said["hidden_columns"])),
            merged=tuple(said["merged"]),
            tables=tuple(
                Table(t["name"], t["ref"], tuple(t["columns"]), t["header"], t["totals"])
                for t in said["tables"]
            ),
            protected=said["protected"],
            damage=said["damage"],
        )
        self._place, self._book, self._feed = place, book, book.feed
        self._values, self._limits = values, limits
        self._rows: dict[int, tuple] | None = None
        # Results of formulas that the file holds none of: (row, column) -> raw value.
        self.calculated: dict[tuple[int, int], Any] = {}

    @property
    def uncalculated(self) -> int:  # type: ignore[override]
        """Formulas whose result nobody knows.  Counts and calculates when first asked."""
        if self._uncalculated is None:
            self._uncalculated = self._feed.uncalculated(self._place)
        if self._uncalculated:
            self._book.calculate()
        return self._uncalculated - len(self.calculated)

    def _knows(self, row: Row) -> bool:
        """Whether a row has formulas that were, or are now, calculated."""
        if not row[2] or all(stored for _, _, _, stored in row[2]):
            return False
        self._book.calculate()
        return bool(self.calculated)

    @property
    def rows(self) -> dict[int, tuple]:  # type: ignore[override]
        """All rows, as `Sheet.rows`.  Raises WorkbookError where they would span too many cells."""
        if self._rows is None:
            rows: dict[int, tuple] = {}
            slots = self._limits.slots
            for number, cells in self.stored():
                slots -= max(cells, default=0)
                if slots < 0:
                    raise WorkbookError(
                        f"the rows of sheet {self.name[:40]!r} span more cells than fit in memory; "
                        "read ranges of it"
                    )
                row: list[Value] = [None] * max(cells, default=0)
                for column, (raw, style) in cells.items():
                    row[column - 1] = self._values.value(raw, style)
                if any(value is not None for value in row):
                    rows[number] = tuple(row)
            self._rows = rows
        return self._rows

    def stored(self) -> Iterator[tuple[int, dict[int, tuple[Any, int]]]]:
        """(row, column -> (raw value, style)) of every row that isn't empty."""
        if self._used is None:
            return
        top = self._used.top
        while top <= self._used.bottom:
            bottom = min(top + _STEP - 1, self._used.bottom)
            if self._used.height > 64 * _STEP:  # likely sparse
                bottom = self._used.bottom
            for row in self._feed.rows(self._place, top, bottom):
                yield row[0], self._by_column(row)
            top = bottom + 1

    def _by_column(self, row: Row) -> dict[int, tuple[Any, int]]:
        cells = {
            column: (raw, style)
            for first, values, styles in row[1]
            for column, (raw, style) in enumerate(zip(values, styles, strict=True), first)
            if raw is not None
        }
        for column, _, _, stored in row[2] if self._knows(row) else ():
            if not stored and (row[0], column) in self.calculated:
                style = next(
                    s[2][column - s[0]] for s in row[1] if 0 <= column - s[0] < len(s[1])
                )
                cells[column] = self.calculated[row[0], column], style
        return cells

    def used(self) -> Area | None:
        return self._used

    def _fetch(self, area: Area) -> dict[int, Row]:
        inside = area.clip(self._used) if self._used else None
        if inside is None:
            return {}
        return {r[0]: r for r in self._feed.rows(self._place, inside.top, inside.bottom)}

    def block(self, area: Area) -> Iterator[tuple[int, list]]:
        rows, value = self._fetch(area), self._values.value
        for number in range(area.top, area.bottom + 1):
            out: list[Value] = [None] * area.width
            row = rows.get(number)
            if row is not None:
                left = area.left
                for first, values, styles in row[1]:
                    begin, end = max(first, left), min(first + len(values), area.right + 1)
                    if begin < end:
                        out[begin - left : end - left] = map(
                            value,
                            values[begin - first : end - first],
                            styles[begin - first : end - first],
                        )
                if self._knows(row):
                    for column, (raw, style) in self._by_column(row).items():
                        if area.left <= column <= area.right:
                            out[column - left] = value(raw, style)
            yield number, out

    def cells(self, area: Area) -> Iterator[tuple[int, list[Cell]]]:
        """(row number, cells) for the rows of the area."""
        rows, make = self._fetch(area), self._values.cell
        for number in range(area.top, area.bottom + 1):
            out = [Cell(None, "empty")] * area.width
            row = rows.get(number)
            if row is not None:
                for first, values, styles in row[1]:
                    for column, (raw, style) in enumerate(zip(values, styles, strict=True), first):
                        if area.left <= column <= area.right:
                            out[column - area.left] = make(raw, style)
                self._knows(row)
                for column, formula, array, stored in row[2]:
                    if area.left <= column <= area.right:
                        out[column - area.left] = self._with_formula(
                            out[column - area.left], (number, column), formula, array, stored
                        )
            yield number, out

    def _with_formula(
        self, cell: Cell, place: tuple[int, int], formula: str, array: str | None, stored: bool
    ) -> Cell:
        known = not stored and place in self.calculated
        if known:
            raw = self.calculated[place]
            if type(raw) is list:
                raw = CellError(raw[1])
            cell = make_cell(raw, cell.number_format, self._values.epoch1904)
        return Cell(
            cell.value, cell.kind, cell.number_format, cell.raw, formula, array, stored, known,
            self._values.epoch1904,
        )  # fmt: skip

    def remarks(self, area: Area) -> dict[tuple[int, int], str]:
        return {
            (number, column): text
            for number, cells in self.cells(area)
            for column, cell in enumerate(cells, area.left)
            if (text := _remark(cell))
        }

    def filled(self) -> int:
        """How many cells hold a value."""
        return sum(len(cells) for _, cells in self.stored())


def _remark(cell: Cell) -> str | None:
    if cell.formula is not None and not cell.stored and not cell.calculated:
        return f"{cell.formula} not calculated"
    if cell.kind == "serial" or (cell.kind == "number" and is_percent(cell.number_format)):
        return cell.shown
    return None


class OpenedWorkbook(Workbook):
    """A workbook of a file.  Closing it ends the worker that reads it, if one still does."""

    def __init__(self, outline: dict[str, Any], feed: Feed, limits: Limits) -> None:
        self.feed = feed
        # Gives results of formulas that the file holds none of; None once they were asked for.
        self.calculator: Callable[[], list[list[Any]] | None] | None = None
        values = Values(outline["formats"], outline["epoch1904"])
        sheets: list[Sheet] = [
            OpenedSheet(said, place, self, values, limits)
            for place, said in enumerate(outline["sheets"])
        ]
        if not all(sheet.name for sheet in sheets):
            raise Damaged("a sheet has no name")
        names = tuple(
            DefinedName(n["name"], n["refers_to"], n["scope"], n["broken"], n["hidden"])
            for n in outline["names"]
        )
        notes = list(outline["notes"])
        for sheet in sheets:
            if sheet.marks.damage:
                notes.append(f"sheet {sheet.name[:40]!r} can't be read: {sheet.marks.damage}")
        try:
            super().__init__(sheets, names, tuple(notes), outline["epoch1904"])
        except ValueError as error:
            raise Damaged(str(error)) from error
        self.kind: str = outline["kind"]

    def calculate(self) -> None:
        """Fills in results that the file doesn't hold, once; without an engine nothing changes."""
        calculator, self.calculator = self.calculator, None
        if calculator is None:
            return
        try:
            results = calculator() or []
        except WorkbookError as error:
            self.notes += (f"its formulas can't be calculated: {error}",)
            return
        for place, row, column, raw in results:
            sheet = self.sheets[place]
            assert isinstance(sheet, OpenedSheet)
            sheet.calculated[row, column] = raw

    def close(self) -> None:
        self.feed.close()
