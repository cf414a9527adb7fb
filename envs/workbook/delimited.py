"""CSV and its kin: encoding, delimiter and decimal sign found out, values as a person means them.

A field becomes a number only where that loses nothing: no leading zeros, no plus sign, no more
than 15 digits, no exponent.  Its decimals are kept as a format.  ISO dates, TRUE and FALSE and
percents are read; all else is text as it stands.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from typing import Any, BinaryIO

from envs.workbook.a1 import MAX_COLUMN, MAX_ROW
from envs.workbook.cells import Row
from envs.workbook.container import Limits, WorkbookError
from envs.workbook.formats import to_serial
from envs.workbook.grid import Grid, book_outline, check_cells, sheet_outline

_DELIMITERS = ",;\t|"
_SAMPLE = 1 << 16
_PLAIN = re.compile(r"-?(?:0|[1-9][0-9]*)")
_POINT = re.compile(r"-?(?:0|[1-9][0-9]*|[1-9][0-9]{0,2}(?:,[0-9]{3})+)(?:\.([0-9]+))?(%?)")
_COMMA = re.compile(r"-?(?:0|[1-9][0-9]*|[1-9][0-9]{0,2}(?:\.[0-9]{3})+)(?:,([0-9]+))?(%?)")
_ISO = re.compile(r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?)?")


def read_csv(file: BinaryIO, name: str, limits: Limits) -> Grid:
    """name: of the sheet.  Raises WorkbookError for a file that is too large."""
    data = file.read(limits.unpacked // 4 + 1)
    if len(data) > limits.unpacked // 4:
        raise WorkbookError(
            f"holds more than {limits.unpacked >> 22:,} MiB of text; split it into smaller files"
        )
    text, encoding = decode(data)
    separator = None
    first, _, rest = text.partition("\n")
    if re.fullmatch(r"sep=.\r?", first, re.IGNORECASE):
        separator, text = first[4], rest
    delimiter = separator or find_delimiter(text[:_SAMPLE])
    sample = list(_records(text[:_SAMPLE], delimiter))[:500]
    comma = _decimal_comma(sample, delimiter)
    reader = Values(comma)
    rows: list[Row] = []
    cells = 0
    for number, record in enumerate(_records(text, delimiter), 1):
        if number > MAX_ROW or len(record) > MAX_COLUMN:
            raise WorkbookError("holds more rows or columns than a sheet; split it")
        values, styles = reader.record(record)
        if values:
            rows.append([number, [[1, values, styles]], []])
            cells += len(values)
            check_cells(cells, limits)
    notes = [] if encoding.startswith("utf") else [f"its text was read as {encoding}"]
    outline = book_outline(formats=reader.formats, notes=notes)
    outline["sheets"].append(sheet_outline(name[:31] or "Sheet1", None))
    return Grid(outline, [rows], limits)


def decode(data: bytes) -> tuple[str, str]:
    """The text, and the encoding it was in: that of its mark, or UTF-8, or Windows-1252."""
    if data[:4] == b"\xff\xfe\0\0":  # begins as the mark of UTF-16 does
        return data.decode("utf-32", "replace"), "utf-32"
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16", "replace"), "utf-16"
    try:
        return data.decode("utf-8-sig"), "utf-8"
    except UnicodeDecodeError:
        return data.decode("cp1252", "replace"), "Windows-1252"


def _records(text: str, delimiter: str) -> Any:
    csv.field_size_limit(1 << 24)
    try:
        yield from csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    except csv.Error as error:
        raise WorkbookError(f"can't be read as CSV: {error}") from error


def find_delimiter(sample: str) -> str:
    """The delimiter that cuts the most of the first records into one number of fields."""
    best, best_score = ",", (0.0, 0)
    for delimiter in _DELIMITERS:
        try:
            widths = [len(record) for record in _records(sample, delimiter) if record][:50]
        except WorkbookError:
            continue
        if len(widths) > 1 and len(sample) == _SAMPLE:
            widths.pop()  # cut off
        if not widths:
            continue
        width, times = Counter(widths).most_common(1)[0]
        several = sum(w > 1 for w in widths) / len(widths)
        score = (several * times / len(widths) if width > 1 else several / 2, width)
        if score[0] > best_score[0] + 1e-9 or score[0] == best_score[0] and score > best_score:
            best, best_score = delimiter, score
    return best


def _decimal_comma(records: list[list[str]], delimiter: str) -> bool:
    """Whether the file writes 1.234,50: numbers that only that reading explains outweigh."""
    if delimiter == ",":
        fields = [f for record in records for f in record if "," in f]
        sure = sum(bool(re.fullmatch(r"-?[0-9.]+,[0-9]{1,2}%?", f.strip())) for f in fields)
        return sure > 0 and sure == len(fields)
    comma = point = 0
    for record in records:
        for entry in record:
            entry = entry.strip()
            thousand = re.fullmatch(r"-?[1-9][0-9]{0,2}([.,])[0-9]{3}", entry)
            if thousand:
                continue  # either
            comma += bool(_COMMA.fullmatch(entry)) and "," in entry
            point += bool(_POINT.fullmatch(entry)) and "." in entry
    return comma > point or (comma == point and delimiter == ";")


class Values:
    """Fields to stored values and styles; `formats` grows with the styles."""

    def __init__(self, comma: bool) -> None:
        self._number = _COMMA if comma else _POINT
        self._comma = comma
        self.formats = ["General"]
        self._styles: dict[str, int] = {"General": 0}

    def _style(self, code: str) -> int:
        if code not in self._styles:
            self._styles[code] = len(self.formats)
            self.formats.append(code)
        return self._styles[code]

    def record(self, record: list[str]) -> tuple[list[Any], list[int]]:
        while record and record[-1] == "":
            record.pop()
        values: list[Any] = []
        styles: list[int] = []
        for entry in record:
            value, style = self._value(entry)
            values.append(value)
            styles.append(style)
        return values, styles

    def _value(self, entry: str) -> tuple[Any, int]:
        if not entry:
            return None, 0
        first = entry[0]
        if first in "0123456789-":
            if len(entry) < 16 and _PLAIN.fullmatch(entry):
                return int(entry), 0
            match = self._number.fullmatch(entry)
            if match and sum(c.isdigit() for c in entry) <= 15:
                return self._decimal(entry, match[1] or "", match[2])
            if _ISO.fullmatch(entry):
                serial = to_serial(entry.replace(" ", "T"), False)
                if serial is not None:
                    code = "yyyy-mm-dd" if serial[1] == "date" else "yyyy-mm-dd hh:mm:ss"
                    return [serial[1], serial[0]], self._style(code)
        elif first in "tTfF" and entry.upper() in ("TRUE", "FALSE"):
            return entry.upper() == "TRUE", 0
        return entry, 0

    def _decimal(self, entry: str, decimals: str, percent: str) -> tuple[Any, int]:
        grouped = ("." if self._comma else ",") in entry
        plain = entry.replace(".", "").replace(",", ".") if self._comma else entry.replace(",", "")
        code = "#,##0" if grouped else "0"
        code += "." + "0" * len(decimals) if decimals else ""
        if percent:
            digits = len(decimals) + 2
            return round(float(plain[:-1]) / 100, digits), self._style(code + "%")
        if not decimals:
            return int(plain), self._style(code)
        return float(plain), self._style(code)
