"""Workbooks out, as .xlsx files, through openpyxl.

Writes values, dates with a date format, column number formats and tab colours.  Left out:
formulas, styles, and whatever else a workbook that was read from a file knows.
"""

from __future__ import annotations

import datetime as dt
import os
from typing import Any

from envs.workbook.model import CellError, Workbook

DATE_FORMAT = "yyyy-mm-dd"


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
