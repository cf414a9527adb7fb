"""Workbook files, through openpyxl.

Reads values (a formula's stored result) and tab colours; writes values, dates with a date
format, column number formats and tab colours.  Reading streams, so cells formatted to the
sheet's last corner, merges of whole columns and the like cost nothing, and what a hostile file
can cost is bounded (`container`).  A file that can't be read is one clear WorkbookError,
whatever openpyxl raised inside.  Left out: theme colours of tabs, formulas, styles.
"""

from __future__ import annotations

import datetime as dt
import os
import warnings
from pathlib import Path
from typing import Any

from envs.workbook.a1 import MAX_COLUMN, MAX_ROW
from envs.workbook.container import Limits, WorkbookError, open_container
from envs.workbook.model import CellError, Sheet, Workbook

DATE_FORMAT = "yyyy-mm-dd"


def read_workbook(path: str | os.PathLike, limits: Limits | None = None) -> Workbook:
    """Reads an .xlsx or .xlsm file.  Raises FileNotFoundError or WorkbookError."""
    path, limits = Path(path), limits or Limits()
    if not path.exists():
        raise FileNotFoundError(f"no such workbook: {path}")
    if path.is_dir():
        raise WorkbookError(f"{path} is a folder; give the path of an .xlsx file")
    container = open_container(path, limits)
    import openpyxl

    with container.file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            book = openpyxl.load_workbook(
                container.file, read_only=True, data_only=True, keep_links=False
            )
            sheets, slots = [], limits.slots
            for source in book.worksheets:
                color = container.tab_colors.get(source._worksheet_path.lstrip("/"))
                sheet, slots = _read_sheet(source, slots)
                sheet.tab_color = color or None
                sheets.append(sheet)
        except WorkbookError as error:
            raise WorkbookError(f"{path}: {error}") from error
        except Exception as error:  # openpyxl raises anything from KeyError to expat errors
            reason = f"{type(error).__name__}: {error}".split("\n")[0][:200]
            raise WorkbookError(f"can't read {path} as a workbook ({reason})") from error
    if not sheets:
        raise WorkbookError(
            f"{path} holds no worksheets in the usual form (is it a Strict Open XML file?); "
            "save it as plain .xlsx"
        )
    return Workbook(sheets)


def _read_sheet(source: Any, slots: int) -> tuple[Sheet, int]:
    """The sheet, and what is left of the slots that the book's rows may take."""
    if not hasattr(source, "reset_dimensions"):
        raise WorkbookError(f"sheet {source.title!r} is no worksheet")
    source.reset_dimensions()  # the declared ones are often wrong
    rows: dict[int, tuple] = {}
    for cells in source.iter_rows(max_row=MAX_ROW):
        # Counted before empty ends are cut: a row's width is what it costs to make.
        slots -= len(cells)
        if slots < 0:
            raise WorkbookError(
                "its rows span more cells than this reader takes; split it into smaller workbooks"
            )
        values: list[object] = []
        number = 0
        for cell in cells:
            value = cell.value
            if value is None:
                continue
            number, column = cell.row, cell.column
            if not (1 <= number <= MAX_ROW and 1 <= column <= MAX_COLUMN):
                raise WorkbookError(f"a cell stands outside the sheet (row {number})")
            if cell.data_type == "e":
                value = CellError(value)
            elif isinstance(value, dt.datetime) and _is_date_only(value, cell.number_format):
                value = value.date()
            values += [None] * (column - len(values))
            values[column - 1] = value
        if number:
            rows[number] = tuple(values)
    return Sheet(source.title, rows), slots


def _is_date_only(value: dt.datetime, number_format: str | None) -> bool:
    """A date is a datetime at midnight whose format shows no hours."""
    return value.time() == dt.time() and "h" not in (number_format or "").lower()


def write_xlsx(book: Workbook, path: str | os.PathLike) -> None:
    """Writes the workbook; dates become real dates, formats are set by column."""
    import openpyxl

    out = openpyxl.Workbook(write_only=True)
    for sheet in book.sheets:
        target = out.create_sheet(sheet.name)
        if sheet.tab_color:
            target.sheet_properties.tabColor = sheet.tab_color
        last = max(sheet.rows, default=0)
        for r in range(1, last + 1):
            row = sheet.rows.get(r, ())
            target.append([_cell(target, v, sheet.formats.get(c)) for c, v in enumerate(row, 1)])
    out.save(path)


def _cell(target: Any, value: Any, number_format: str | None) -> Any:
    """What openpyxl shall write: the value itself wherever it would guess right."""
    from openpyxl.cell import WriteOnlyCell

    kind = type(value)
    if kind is dt.date:
        cell = WriteOnlyCell(target, value)
        cell.number_format = DATE_FORMAT
    elif number_format and kind in (int, float):
        cell = WriteOnlyCell(target, value)
        cell.number_format = number_format
    elif isinstance(value, str) and value[:1] in ("=", "#"):
        # A text may look like a formula or an error; only a CellError is one.
        cell = WriteOnlyCell(target, value)
        cell.data_type = "e" if isinstance(value, CellError) else "s"
    else:
        return value
    return cell
