"""Workbook files of every kind behind one interface: which reader a file is for.

Runs in the worker process, never in the one that asks.  Readers of rarer kinds are imported when
a file is of theirs.
"""

from __future__ import annotations

import os
from typing import BinaryIO

from envs.workbook.container import Limits, kind_of_file
from envs.workbook.grid import Source
from envs.workbook.xlsx import XlsxSource


def open_source(file: BinaryIO, name: str, limits: Limits) -> Source:
    """The source for a file, by its content.  name: the file's, without folders.

    Raises WorkbookError, Damaged, and whatever the readers below raise for broken files.
    """
    kind = kind_of_file(file, "the file")
    file.seek(0)
    if kind == "xlsx":
        source: Source = XlsxSource(file, limits)
    elif kind == "xls":
        from envs.workbook.legacy import read_xls

        source = read_xls(file, limits)
    elif kind == "xlsb":
        from envs.workbook.legacy import read_xlsb

        source = read_xlsb(file, limits)
    elif kind == "ods":
        from envs.workbook.ods import read_ods

        source = read_ods(file, limits)
    else:
        from envs.workbook.delimited import read_csv

        source = read_csv(file, os.path.splitext(name)[0] or name, limits)
    extension = os.path.splitext(name)[1].lower().lstrip(".")
    alike = {"xlsx": ("xlsx", "xlsm", "xltx", "xltm", "xlam"), "csv": ("csv", "tsv", "tab", "txt")}
    if extension and extension not in alike.get(kind, (kind, "xlt", "ots")):
        source.outline["notes"].append(f"the file is {kind} by its content, not {extension}")
    source.outline["kind"] = kind
    return source
