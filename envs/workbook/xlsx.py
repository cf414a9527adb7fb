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
from typing import TYPE_CHECKING, Any

from envs.workbook.a1 import MAX_COLUMN, MAX_ROW, column_letter
from envs.workbook.container import (
    Damaged,
    Limits,
    WorkbookError,
    damaged,
    open_container,
    reason,
)
from envs.workbook.model import CellError, Sheet, Workbook

if TYPE_CHECKING:
    from envs.workbook.parts import Parts

DATE_FORMAT = "yyyy-mm-dd"


def read_workbook(path: str | os.PathLike, limits: Limits | None = None) -> Workbook:
    """Reads an .xlsx or .xlsm file.  Raises FileNotFoundError or WorkbookError.

    Formulas without a stored result read as empty cells; `Sheet.uncalculated` counts them.
    """
    path, limits = Path(path), limits or Limits()
    if not path.exists():
        raise FileNotFoundError(f"no such workbook: {path}")
    if path.is_dir():
        raise WorkbookError(f"{path} is a folder; give the path of an .xlsx file")
    container = open_container(path, limits)
    from envs.workbook.parts import Parts

    with container.file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            parts = Parts(container.file)
            sheets, slots = [], limits.slots
            for name, part in parts.worksheets():
                sheet, slots = _read_sheet(parts, name, part, slots)
                sheet.tab_color = container.tab_colors.get(part.lstrip("/")) or None
                sheets.append(sheet)
            book = _checked(sheets)
        except WorkbookError as error:
            raise WorkbookError(f"{path}: {error}") from error
        except MemoryError as error:
            raise WorkbookError(
                f"{path} takes more memory than there is; split it into smaller workbooks"
            ) from error
        except OSError as error:  # so does openpyxl for other kinds of documents
            raise WorkbookError(
                f"can't read {path} as a workbook ({reason(error)}); save it as plain .xlsx"
            ) from error
        except Exception as error:  # openpyxl raises anything from KeyError to expat errors
            raise damaged(path, error) from error
    if not sheets:
        raise WorkbookError(
            f"{path} holds no worksheets in the usual form (is it all charts, or a Strict Open "
            "XML file?); save it as plain .xlsx"
        )
    return book


def _checked(sheets: list[Sheet]) -> Workbook:
    """The workbook, if each sheet can be reached by its name."""
    if not all(sheet.name for sheet in sheets):
        raise Damaged("a sheet has no name")
    try:
        return Workbook(sheets)
    except ValueError as error:
        raise Damaged(str(error)) from error


def _read_sheet(parts: Parts, name: str, part: str, slots: int) -> tuple[Sheet, int]:
    """The sheet, and what is left of the slots that the book's rows may take."""
    sheet = Sheet(name)
    try:
        with parts.archive.open(part) as source:
            parser = parts.cells(source)
            for number, cells in parser.parse():
                # Counted before empty ends are cut: a row's width is what it costs to make.
                slots -= max((cell["column"] for cell in cells), default=0)
                if slots < 0:
                    raise WorkbookError(
                        "its rows span more cells than this reader takes; split it into smaller "
                        "workbooks"
                    )
                if not 1 <= number <= MAX_ROW:
                    raise Damaged(f"a row has the number {number}")
                values = _values(parts, cells)
                if values and number in sheet.rows:
                    raise Damaged(f"row {number} is there twice")
                if values:
                    sheet.rows[number] = tuple(values)
            sheet.uncalculated = parser.uncalculated
    except (WorkbookError, MemoryError, OSError):
        raise
    except Exception as error:
        raise Damaged(f"sheet {name[:40]!r}: {reason(error)}") from error
    return sheet, slots


def _values(parts: Parts, cells: list[dict[str, Any]]) -> list[object]:
    """The values of one row from column A to its last filled cell."""
    values: list[object] = []
    for cell in cells:
        value, column = cell["value"], cell["column"]
        if value is None:
            continue
        if column > MAX_COLUMN:
            raise Damaged(f"row {cell['row']} holds a cell past column XFD")
        if cell["data_type"] == "e":
            value = CellError(value)
        elif isinstance(value, dt.datetime) and _is_date_only(value, parts.number_format(cell)):
            value = value.date()
        values += [None] * (column - len(values))
        if values[column - 1] is not None:
            raise Damaged(f"cell {column_letter(column)}{cell['row']} is there twice")
        values[column - 1] = value
    return values


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
