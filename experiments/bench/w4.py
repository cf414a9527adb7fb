"""Workload W4: two workbooks of a million cells, and the block that is read out of each.

Four sheets: Summary (10 x 5), Data (50,000 x 20), Lookup (500 x 6), Notes (100 x 3).  File 1 is
written by openpyxl (inline strings, no <dimension>), file 2 by XlsxWriter (shared strings and a
<dimension>, like a file that Excel saved).
"""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COLUMNS = 20
SIZES = {"Summary": (10, 5), "Lookup": (500, 6), "Notes": (100, 3)}
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
WORDS = [
    _CONSONANTS[n % 14] + _VOWELS[n % 5] + _CONSONANTS[n // 7 % 14] + _VOWELS[n // 5 % 5]
    for n in range(100)
]
CATEGORIES = [f"category {n}" for n in range(50)]


def data_rows(rows: int) -> Iterator[list[Any]]:
    """The header and rows of Data; `rows` counts the header."""
    yield [f"col_{c + 1}" for c in range(COLUMNS)]
    draw = random.Random(7)
    day = dt.date(2015, 1, 1)
    for index in range(1, rows):
        row: list[Any] = []
        for c in range(COLUMNS):
            kind = c % 5
            if kind == 0:
                row.append(f"{draw.choice(WORDS)} {draw.choice(WORDS)} #{index}")
            elif kind == 1:
                row.append(draw.randrange(10**6))
            elif kind == 2:
                row.append(round(draw.gauss(100, 25), 2))
            elif kind == 3:
                row.append(day + dt.timedelta(days=draw.randrange(3650)))
            else:
                row.append(draw.choice(CATEGORIES))
        yield row


def sheets(rows: int) -> Iterator[tuple[str, Iterator[list[Any]]]]:
    """Name and rows of the four sheets, in their order."""
    for name in ("Summary", "Data", "Lookup", "Notes"):
        if name == "Data":
            yield name, data_rows(rows)
        else:
            height, width = SIZES[name]
            yield name, ([f"{name} {r}.{c}" for c in range(width)] for r in range(height))


def used_ranges(rows: int) -> dict[str, str]:
    return {"Summary": "A1:E10", "Data": f"A1:T{rows}", "Lookup": "A1:F500", "Notes": "A1:C100"}


def block(rows: int) -> tuple[int, list[list[Any]]]:
    """First row and values of the block in the middle of Data: 50 rows x 20 columns."""
    top = rows // 2 + 1
    return top, [row for n, row in enumerate(data_rows(rows), 1) if top <= n < top + 50]


def write_openpyxl(path: Path, rows: int) -> None:
    import openpyxl

    book = openpyxl.Workbook(write_only=True)
    for name, content in sheets(rows):
        sheet = book.create_sheet(name)
        for row in content:
            sheet.append(row)
    book.save(path)


def write_xlsxwriter(path: Path, rows: int) -> None:
    """Raises ImportError where XlsxWriter isn't installed."""
    import xlsxwriter

    book = xlsxwriter.Workbook(str(path), {"default_date_format": "yyyy-mm-dd"})
    for name, content in sheets(rows):
        sheet = book.add_worksheet(name)
        for r, row in enumerate(content):
            sheet.write_row(r, 0, row)
    book.close()


def text(value: Any) -> str:
    """A value as it is compared: readers differ in types of dates and of whole numbers."""
    if hasattr(value, "year"):
        return value.isoformat()[:10]
    return f"{value:.15g}" if isinstance(value, (int, float)) else str(value)
