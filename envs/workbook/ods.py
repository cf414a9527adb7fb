"""OpenDocument spreadsheets, by expat: values, kinds, formulas, formats, hidden, merged, names.

Everything stands in content.xml, cells and rows with a repeat count, formats as elements that
are turned into Excel's codes here.  Left out: colours of conditional formats, annotations,
tracked changes, sub-tables.
"""

from __future__ import annotations

import re
from typing import Any, BinaryIO

from envs.workbook.a1 import MAX_COLUMN, MAX_ROW, Area
from envs.workbook.cells import Row, segments_of
from envs.workbook.container import Archive, Damaged, Limits, WorkbookError
from envs.workbook.formats import kind_of, to_serial
from envs.workbook.grid import Grid, book_outline, check_cells, sheet_outline, spans
from envs.workbook.ods_formulas import display, quoted_sheet, target
from envs.workbook.xml import as_utf8, walk

_ERRORS = re.compile(r"#[A-Z/0-9_]+[!?]?|Err:\d+")
_DURATION = re.compile(r"(-?)P(?:(\d+)D)?T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?")
_DATA_STYLES = (
    "number-style", "currency-style", "percentage-style", "date-style", "time-style",
    "boolean-style", "text-style",
)  # fmt: skip


def read_ods(file: BinaryIO, limits: Limits) -> Grid:
    """Raises Damaged for broken files and WorkbookError for protected or too large ones."""
    archive = Archive(file, limits)
    if "meta-inf/manifest.xml" in archive:
        if b"encryption-data" in archive.read("meta-inf/manifest.xml"):
            raise WorkbookError(
                "is password-protected; open it in a spreadsheet program and save it without the "
                "password"
            )
    styles = Styles()
    if "styles.xml" in archive:
        reader = Reader(styles, limits)
        walk(as_utf8(archive.read("styles.xml")), reader.start, reader.end, reader.text)
    reader = Reader(styles, limits)
    walk(as_utf8(archive.read("content.xml")), reader.start, reader.end, reader.text)
    if not reader.sheets:
        raise Damaged("it holds no sheets")
    outline = book_outline(
        epoch1904=reader.epoch1904, formats=styles.formats, names=reader.names, notes=[]
    )
    outline["sheets"] = [said for said, _ in reader.sheets]
    for name, area, header in reader.ranges:
        for said in outline["sheets"]:
            if said["name"] == area[0]:
                said["tables"].append(
                    {"name": name, "ref": area[1], "columns": [], "header": header,
                     "totals": False}
                )  # fmt: skip
    return Grid(outline, [rows for _, rows in reader.sheets], limits)


class Styles:
    """Formats by the names of cell styles, and what tables look like by theirs."""

    def __init__(self) -> None:
        self.formats = ["General"]
        self.codes: dict[str, str] = {}  # data style -> code
        self.of_cells: dict[str, tuple[str, str]] = {}  # cell style -> data style, parent
        self.tables: dict[str, dict[str, Any]] = {}
        self._numbers: dict[str, int] = {"General": 0}
        self._known: dict[str, int] = {}

    def number(self, name: str) -> int:
        """The place of a cell style's format."""
        if name not in self._known:
            data, parent, seen = "", name, 0
            while not data and parent and seen < 20:
                data, parent = self.of_cells.get(parent, ("", ""))
                seen += 1
            code = self.codes.get(data, "General")
            if code not in self._numbers:
                self._numbers[code] = len(self.formats)
                self.formats.append(code)
            self._known[name] = self._numbers[code]
        return self._known[name]


class Reader:
    """The handlers of one document."""

    def __init__(self, styles: Styles, limits: Limits) -> None:
        self.styles, self.limits = styles, limits
        self.sheets: list[tuple[dict[str, Any], list[Row]]] = []
        self.names: list[dict[str, Any]] = []
        self.ranges: list[tuple[str, tuple[str, str], bool]] = []
        self.epoch1904 = False
        self._path: list[str] = []
        self._skip = 0  # depth inside what isn't read
        self._cells = 0
        self._data: tuple[str, str, list[str]] | None = None  # kind, name, pieces of the code
        self._style = ""
        self._cell: dict[str, str] | None = None
        self._paragraphs: list[list[str]] = []
        self._literal = False

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        path = self._path
        path.append(tag)
        if self._skip:
            return
        said = {key.rpartition(":")[2]: value for key, value in attributes.items()}
        if tag in ("tracked-changes", "annotation", "shapes", "dde-links") or (
            tag == "table" and "table" in path[:-1]
        ):
            self._skip = len(path)
        elif tag in _DATA_STYLES:
            elapsed = said.get("truncate-on-overflow") == "false"
            self._data = tag + ("!" if elapsed else ""), said.get("name", ""), []
        elif self._data is not None:
            self._piece(tag, said)
        elif tag == "style" and said.get("family") in ("table-cell", "table"):
            self._style = said.get("name", "")
            if said["family"] == "table-cell":
                parent = said.get("parent-style-name", "")
                self.styles.of_cells[self._style] = said.get("data-style-name", ""), parent
        elif tag == "default-style" and said.get("family") == "table-cell":
            self._style = ""
        elif tag == "table-properties" and "style" in path:
            self.styles.tables[self._style] = {
                "hidden": said.get("display") == "false",
                "color": said.get("tab-color", "").lstrip("#").upper(),
            }
        elif tag == "null-date":
            self.epoch1904 = said.get("date-value", "").startswith("1904")
        elif tag == "table":
            self._start_sheet(said)
        elif tag == "table-column" and self.sheets:
            self._column(said)
        elif tag == "table-row" and self.sheets:
            self._number_row(said)
        elif tag in ("table-cell", "covered-table-cell") and self.sheets:
            if attributes.get("calcext:value-type") == "error":
                said["value-type"] = "error"  # office:value-type says string
            self._cell, self._paragraphs = said, []
        elif self._cell is not None:
            self._inside_cell(tag, said)
        elif tag in ("named-range", "named-expression"):
            self._name(said)
        elif tag == "database-range":
            area = target(said.get("target-range-address", ""))
            if area and not said.get("name", "").startswith("__Anonymous"):
                header = said.get("contains-header", "true") != "false"
                self.ranges.append((said.get("name", ""), area, header))

    def end(self, tag: str) -> None:
        self._path.pop()
        if self._skip:
            if len(self._path) < self._skip:
                self._skip = 0
            return
        if tag in _DATA_STYLES and self._data is not None:
            kind, name, pieces = self._data
            self.styles.codes[name] = "".join(pieces) or "General"
            self._data = None
        elif tag in ("table-cell", "covered-table-cell") and self._cell is not None:
            self._finish_cell(self._cell)
            self._cell = None
        elif tag == "table-row" and self.sheets:
            self._finish_row()
        elif tag == "table" and self.sheets:
            said = self.sheets[-1][0]
            said["hidden_rows"] = spans(self._hidden)
        self._literal = False

    def text(self, data: str) -> None:
        if self._skip:
            return
        if self._data is not None:
            if self._literal:
                self._data[2].append(_quoted(data))
        elif self._cell is not None and self._paragraphs and "p" in self._path:
            self._paragraphs[-1].append(re.sub(r"[ \t\r\n]+", " ", data))

    # Formats.

    def _piece(self, tag: str, said: dict[str, str]) -> None:
        assert self._data is not None
        kind, _, out = self._data
        long = said.get("style") == "long"
        if tag == "text":
            self._literal = True
        elif tag in ("number", "scientific-number"):
            code = "0" * max(1, min(20, int(said.get("min-integer-digits", "1") or 1)))
            if said.get("min-integer-digits") == "0":
                code = "#"
            if said.get("grouping") == "true":
                code = "#,##" + code
            places = said.get("decimal-places", "0")
            code += "." + "0" * min(20, int(places)) if places.isdigit() and places != "0" else ""
            if kind == "number-style" and "decimal-places" not in said and tag == "number":
                code = "General" if code == "0" else code
            if tag == "scientific-number":
                code += "E+" + "0" * max(1, int(said.get("min-exponent-digits", "2") or 2))
            out.append(code)
        elif tag == "fraction":
            digits = int(said.get("min-denominator-digits", "1") or 1)
            out.append("# " + "?" * digits + "/" + "?" * digits)
        elif tag == "currency-symbol":
            self._literal = True
        elif tag == "year":
            out.append("yyyy" if long else "yy")
        elif tag == "month":
            textual = said.get("textual") == "true"
            out.append(("mmmm" if long else "mmm") if textual else ("mm" if long else "m"))
        elif tag == "day":
            out.append("dd" if long else "d")
        elif tag == "day-of-week":
            out.append("dddd" if long else "ddd")
        elif tag == "hours":
            code = "hh" if long else "h"
            out.append(f"[{code}]" if kind.endswith("!") else code)
        elif tag == "minutes":
            out.append("mm" if long else "m")
        elif tag == "seconds":
            places = said.get("decimal-places", "0")
            tail = "." + "0" * min(3, int(places)) if places.isdigit() and places != "0" else ""
            out.append(("ss" if long else "s") + tail)
        elif tag == "am-pm":
            out.append("AM/PM")
        elif tag == "text-content":
            out.append("@")

    # Sheets.

    def _start_sheet(self, said: dict[str, str]) -> None:
        look = self.styles.tables.get(said.get("style-name", ""), {})
        color = look.get("color", "")
        self.sheets.append(
            (
                sheet_outline(
                    said.get("name", ""),
                    None,
                    state="hidden" if look.get("hidden") else "visible",
                    tab_color=color if re.fullmatch("[0-9A-F]{6}", color) else None,
                    protected=said.get("protected") == "true",
                ),
                [],
            )
        )
        self._row = self._columns = 0
        self._hidden: list[int] = []
        self._column_styles: list[tuple[int, str]] = []  # last column of each, style
        self._start_row()

    def _start_row(self) -> None:
        self._at = 0
        self._found: tuple[list[int], list[Any], list[int]] = [], [], []
        self._formulas: list[list[Any]] = []
        self._repeat, self._row_style = 1, ""

    def _column(self, said: dict[str, str]) -> None:
        first = self._columns + 1
        self._columns += _repeated(said, "number-columns-repeated")
        self._column_styles.append((self._columns, said.get("default-cell-style-name", "")))
        if said.get("visibility") in ("collapse", "filter") and first <= MAX_COLUMN:
            hidden = self.sheets[-1][0]["hidden_columns"]
            hidden.append([first, min(self._columns, MAX_COLUMN)])

    def _number_row(self, said: dict[str, str]) -> None:
        self._start_row()
        self._repeat = _repeated(said, "number-rows-repeated")
        self._row_style = said.get("default-cell-style-name", "")
        if said.get("visibility") in ("collapse", "filter"):
            last = min(self._row + self._repeat, MAX_ROW)
            self._hidden += range(self._row + 1, last + 1)

    def _finish_row(self) -> None:
        columns, values, styles = self._found
        last = min(self._row + self._repeat, MAX_ROW)
        if columns and last > self._row:
            self._cells += len(columns) * (last - self._row)
            check_cells(self._cells, self.limits)
            segments = segments_of(self._row + 1, columns, values, styles)
            rows = self.sheets[-1][1]
            for number in range(self._row + 1, last + 1):
                rows.append([number, segments, self._formulas])
        self._row += self._repeat

    # Cells.

    def _inside_cell(self, tag: str, said: dict[str, str]) -> None:
        if tag == "p":
            self._paragraphs.append([])
        elif self._paragraphs:
            if tag == "s":
                self._paragraphs[-1].append(" " * min(_repeated(said, "c"), 32767))
            elif tag == "tab":
                self._paragraphs[-1].append("\t")
            elif tag == "line-break":
                self._paragraphs[-1].append("\n")

    def _finish_cell(self, said: dict[str, str]) -> None:
        repeat = _repeated(said, "number-columns-repeated")
        first = self._at + 1
        self._at += repeat
        if first > MAX_COLUMN:
            return
        style_name = said.get("style-name") or self._row_style or self._column_style(first)
        style = self.styles.number(style_name) if style_name else 0
        value = self._value(said, style)
        formula = said.get("formula")
        rows = _repeated(said, "number-rows-spanned")
        columns = _repeated(said, "number-columns-spanned")
        if (rows > 1 or columns > 1) and self._row < MAX_ROW:
            area = Area(
                self._row + 1, first, min(self._row + rows, MAX_ROW),
                min(first + columns - 1, MAX_COLUMN),
            )  # fmt: skip
            self.sheets[-1][0]["merged"].append(str(area))
        if value is None and formula is None:
            return
        last = min(self._at, MAX_COLUMN)
        check_cells(self._cells + last - first, self.limits)
        for column in range(first, last + 1):
            for entries, entry in zip(self._found, (column, value, style), strict=True):
                entries.append(entry)
            if formula is not None:
                self._formulas.append([column, display(formula), None, value is not None])
                self.sheets[-1][0]["uncalculated"] += value is None

    def _column_style(self, column: int) -> str:
        return next((name for last, name in self._column_styles if column <= last), "")

    def _value(self, said: dict[str, str], style: int) -> Any:
        kind = said.get("value-type", "")
        words = "\n".join("".join(p) for p in self._paragraphs)
        if kind in ("float", "percentage", "currency"):
            return _number(said.get("value", ""))
        if kind == "boolean":
            return said.get("boolean-value") == "true"
        if kind == "date":
            found = to_serial(said.get("date-value", ""), self.epoch1904)
            if found is None or found[0] < 1:
                return said.get("date-value") or words
            return [found[1], found[0]]
        if kind == "time":
            return self._time(said.get("time-value", ""), style)
        if kind == "error" or (kind == "string" and said.get("formula") and _is_error(words)):
            return ["e", words.strip() or "#VALUE!"]
        if kind == "string" or self._paragraphs:
            text = said.get("string-value", words)
            return text if text or said.get("formula") else None
        return None

    def _time(self, text: str, style: int) -> Any:
        match = _DURATION.fullmatch(text)
        if not match:
            return text or None
        sign, days, hours, minutes, seconds = match.groups()
        total = int(days or 0) * 86400 + int(hours or 0) * 3600 + int(minutes or 0) * 60
        serial = (total + float(seconds or 0)) / 86400 * (-1 if sign else 1)
        plain = 0 <= serial < 1 and kind_of(self.styles.formats[style]) != "duration"
        return ["time" if plain else "duration", serial]

    def _name(self, said: dict[str, str]) -> None:
        text = said.get("cell-range-address") or said.get("expression", "")
        area = target(text)
        shown = f"{quoted_sheet(area[0])}!{area[1]}" if area else display(text).lstrip("=")
        scope = self.sheets[-1][0]["name"] if "table" in self._path and self.sheets else None
        self.names.append(
            {"name": said.get("name", ""), "refers_to": shown, "scope": scope,
             "broken": not shown or "#REF!" in shown, "hidden": False}
        )  # fmt: skip


def _repeated(said: dict[str, str], name: str) -> int:
    text = said.get(name, "1")
    return max(1, int(text)) if text.isdigit() else 1


def _number(text: str) -> int | float | None:
    try:
        return int(text)
    except ValueError:
        try:
            value = float(text)
        except ValueError:
            raise Damaged(f"{text[:20]!r} is no number") from None
        if value - value:
            raise Damaged(f"{text[:20]!r} is no number") from None
        return value


def _is_error(text: str) -> bool:
    return bool(_ERRORS.fullmatch(text.strip()))


def _quoted(text: str) -> str:
    if re.fullmatch(r"[-/.:, %()€$£]+", text):
        return text
    return '"' + text.replace('"', "") + '"'
