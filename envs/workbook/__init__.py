"""Workbooks as plain data: cells, A1 ranges, and .xlsx files in and out.

The readers sit behind `read_workbook`: today openpyxl, later a faster one, same values.
"""

from envs.workbook.a1 import Area, RangeError, column_index, column_letter, parse_area
from envs.workbook.container import Limits, WorkbookError
from envs.workbook.model import CellError, Sheet, Value, Workbook
from envs.workbook.xlsx import read_workbook, write_xlsx

__all__ = [
    "Area",
    "CellError",
    "Limits",
    "RangeError",
    "Sheet",
    "Value",
    "Workbook",
    "WorkbookError",
    "column_index",
    "column_letter",
    "parse_area",
    "read_workbook",
    "write_xlsx",
]
