"""Workbooks as plain data: cells, A1 ranges, files of six kinds in and .xlsx files out.

All readers sit behind `read_workbook`, in a process of their own.
"""

from envs.workbook.a1 import Area, RangeError, column_index, column_letter, parse_area
from envs.workbook.container import Limits, WorkbookError
from envs.workbook.model import Cell, CellError, DefinedName, Marks, Sheet, Table, Value, Workbook
from envs.workbook.reader import read_workbook
from envs.workbook.store import BlockStore
from envs.workbook.writer import write_xlsx

__all__ = [
    "Area",
    "BlockStore",
    "Cell",
    "CellError",
    "DefinedName",
    "Limits",
    "Marks",
    "RangeError",
    "Sheet",
    "Table",
    "Value",
    "Workbook",
    "WorkbookError",
    "column_index",
    "column_letter",
    "parse_area",
    "read_workbook",
    "write_xlsx",
]
