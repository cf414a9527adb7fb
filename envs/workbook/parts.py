"""openpyxl's parsers, kept from passing over what is damaged.

openpyxl leaves out sheets whose part is missing, takes a negative shared-string index for one
from the end, and doesn't tell an empty cell from a formula that was never calculated.  Parts that
hold no cells (chart sheets, themes, properties) aren't read at all.  A module of its own, for
openpyxl is imported only once there is a file to read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from openpyxl.cell.read_only import ReadOnlyCell
from openpyxl.reader.excel import ExcelReader
from openpyxl.styles.stylesheet import apply_stylesheet
from openpyxl.worksheet._reader import CELL_TAG, FORMULA_TAG, VALUE_TAG, WorkSheetParser

from envs.workbook.container import Damaged, reason


class Parts(ExcelReader):
    """An open workbook file: its strings and styles are read, its sheets wait."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, read_only=True, data_only=True, keep_links=False)
        self.read_manifest()
        self.read_strings()
        self.shared_strings: list = _Strings(self.shared_strings)
        self.read_workbook()
        apply_stylesheet(self.archive, self.wb)

    def worksheets(self) -> Iterator[tuple[str, str]]:
        """Name and part of every sheet that has cells, in tab order; Damaged where one is lost."""
        rels = self.parser.rels
        ids = {sheet.id for sheet in self.parser.sheets if sheet.id}
        lost = any(r.Type.endswith("/worksheet") for i, r in rels.items() if i not in ids)
        for sheet in self.parser.sheets:
            if not sheet.id and not (ids and lost):
                continue  # a module of an old macro book, or a sheet of a Strict one
            rel = rels.get(sheet.id)
            if rel is not None and "chartsheet" in rel.Type:
                continue
            if rel is None or rel.target not in self.valid_files:
                raise Damaged(f"the cells of sheet {sheet.name[:40]!r} are missing")
            yield sheet.name, rel.target

    def cells(self, source: BinaryIO) -> SheetParser:
        """The parser of one sheet's part."""
        book = self.wb
        return SheetParser(
            source,
            self.shared_strings,
            data_only=True,
            epoch=book.epoch,
            date_formats=book._date_formats,
            timedelta_formats=book._timedelta_formats,
        )

    def number_format(self, cell: dict[str, Any]) -> str | None:
        """The number format of a parsed cell."""
        return ReadOnlyCell(self, **cell).number_format

    @property
    def parent(self) -> Any:
        return self.wb  # where a ReadOnlyCell looks for the styles


class SheetParser(WorkSheetParser):
    """Parses one sheet.  `uncalculated` counts the formulas without a stored result so far."""

    uncalculated = 0

    def parse_row(self, row: Any) -> tuple[int, list[dict[str, Any]]]:
        """Number and cells of a row; one without a number has that of its first cell."""
        first = None if "r" in row.attrib else row.find(CELL_TAG)
        number = re.search(r"\d+$", "" if first is None else first.get("r", ""))
        if number:
            self.row_counter = int(number[0]) - 1
        return super().parse_row(row)

    def parse_cell(self, element: Any) -> dict[str, Any]:
        """A cell as openpyxl parses it; Damaged, with the cell's name, where that fails."""
        try:
            cell = super().parse_cell(element)
        except (MemoryError, OSError):
            raise  # no fault of the file
        except Exception as error:
            place = str(element.get("r") or f"of row {self.row_counter}")[:20]
            raise Damaged(f"cell {place!r}: {reason(error)}") from error
        if cell["row"] != self.row_counter:
            raise Damaged(f"row {self.row_counter} holds a cell of row {cell['row']}")
        if cell["value"] is None and element.find(FORMULA_TAG) is not None:
            # The result of a formula may be an empty text.
            text = element.get("t") == "str" and element.find(VALUE_TAG) is not None
            self.uncalculated += not text
        return cell


class _Strings(list):
    """The shared strings, by an index that must not be negative."""

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise Damaged(f"there is no shared string {index}")
        return super().__getitem__(index)
