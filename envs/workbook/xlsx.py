"""Workbook files, through openpyxl.

Reads values (a formula's stored result), tab colours as stored; writes values, dates with
a date format, column number formats and tab colours.  A file that can't be read is one
clear WorkbookError, whatever openpyxl raised inside.
"""

from __future__ import annotations

import datetime as dt
import os
import warnings
import zipfile
from pathlib import Path

from envs.workbook.model import CellError, Sheet, Workbook

DATE_FORMAT = "yyyy-mm-dd"
MAX_UNPACKED = 1 << 30


class WorkbookError(ValueError):
    """The file isn't a workbook that can be read; the text says why and what to do."""


def read_workbook(path: str | os.PathLike) -> Workbook:
    """Reads an .xlsx or .xlsm file.  Raises FileNotFoundError or WorkbookError."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no such workbook: {path}")
    if path.is_dir():
        raise WorkbookError(f"{path} is a folder; give the path of an .xlsx file")
    _check_container(path)
    import openpyxl

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            book = openpyxl.load_workbook(path, data_only=True)
            return Workbook([_sheet(s) for s in book.worksheets])
    except Exception as error:  # openpyxl raises anything from KeyError to expat errors
        reason = f"{type(error).__name__}: {error}".split("\n")[0][:200]
        raise WorkbookError(f"can't read {path} as a workbook ({reason})") from error


def _check_container(path: Path) -> None:
    with open(path, "rb") as file:
        head = file.read(8)
    if head == b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1":
        raise WorkbookError(
            f"{path} is an old .xls or a password-protected workbook; save it as plain .xlsx"
        )
    if not head:
        raise WorkbookError(f"{path} is empty")
    if head[:2] != b"PK":
        raise WorkbookError(f"{path} isn't an .xlsx workbook; save it as .xlsx and try again")
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(info.file_size for info in archive.infolist())
    except zipfile.BadZipFile as error:
        raise WorkbookError(f"{path} is damaged: {error}") from error
    if size > MAX_UNPACKED:
        raise WorkbookError(f"{path} unpacks to {size >> 20} MiB; the limit is 1024 MiB")


def _sheet(source) -> Sheet:
    # ws._cells is openpyxl's sparse store; walking iter_rows would visit (and create)
    # every cell up to the last styled one.
    by_row: dict[int, dict[int, object]] = {}
    for (row, column), cell in source._cells.items():
        value = cell.value
        if value is None:
            continue
        if cell.data_type == "e":
            value = CellError(value)
        elif isinstance(value, dt.datetime) and value.time() == dt.time() and "h" not in (
            cell.number_format or ""
        ).lower():
            value = value.date()
        by_row.setdefault(row, {})[column] = value
    rows = {}
    for row in sorted(by_row):
        cells = by_row[row]
        rows[row] = tuple(cells.get(c) for c in range(1, max(cells) + 1))
    color = source.sheet_properties.tabColor
    rgb = getattr(color, "rgb", None) if color is not None else None
    return Sheet(source.title, rows, rgb[-6:] if isinstance(rgb, str) else None)


def write_xlsx(book: Workbook, path: str | os.PathLike) -> None:
    """Writes the workbook; dates become real dates, formats are set by column."""
    import openpyxl
    from openpyxl.cell import WriteOnlyCell

    out = openpyxl.Workbook(write_only=True)
    for sheet in book.sheets:
        target = out.create_sheet(sheet.name)
        if sheet.tab_color:
            target.sheet_properties.tabColor = sheet.tab_color
        last = max(sheet.rows, default=0)
        for r in range(1, last + 1):
            cells = []
            for c, value in enumerate(sheet.rows.get(r, ()), 1):
                is_date = isinstance(value, dt.date) and not isinstance(value, dt.datetime)
                number = sheet.formats.get(c) if isinstance(value, int | float) else None
                if is_date or number:
                    cell = WriteOnlyCell(target, value)
                    cell.number_format = DATE_FORMAT if is_date else number
                    cells.append(cell)
                else:
                    cells.append(value)
            target.append(cells)
    out.save(path)
