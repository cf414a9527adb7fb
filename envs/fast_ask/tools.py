"""The three tools of Fast Ask, over one workbook.

Every fault of a call is text for the model, never an exception: unknown sheets, bad ranges,
reads above the cap, Python errors.  Cells that were read are also bound inside the Python
session (see `envs.sandbox.prelude`), so a model can leave them out of its context with
`show` and compute on them by name.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable

from envs.core import ToolCall, ToolSpec
from envs.workbook import (
    Area,
    Marks,
    RangeError,
    Sheet,
    Workbook,
    WorkbookError,
    column_letter,
    parse_area,
)

MAX_CELLS = 1000
MAX_NAMES = 20
MAX_RANGES = 50
MAX_CELL_TEXT = 400

TOOLS = (
    ToolSpec(
        "get_workbook_metadata",
        "Lists the sheets: name, used range and tab colour.",
        {"type": "object", "properties": {}, "required": []},
    ),
    ToolSpec(
        "read_ranges",
        f"Reads cells, at most {MAX_CELLS} in one call. The cells that were read are also "
        "available in run_python as records named after their sheet.",
        {
            "type": "object",
            "properties": {
                "ranges": {
                    "type": "array",
                    "items": {"type": "string"},
                    "description": "A1 ranges such as Orders!A1:D20, Orders!A:D or 'My Sheet'!B2.",
                },
                "show": {
                    "type": "integer",
                    "description": "Print only the first rows of each range; all are read.",
                },
            },
            "required": ["ranges"],
        },
    ),
    ToolSpec(
        "run_python",
        "Runs Python (standard library only) and returns what it prints. State is kept. For "
        "each sheet read so far there is a list of records under the sheet's name, with one "
        "attribute per column header and _row, the row number in the sheet.",
        {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    ),
)


def show_value(value: object) -> str:
    """One cell as text: dates in ISO form, text quoted only where a comma would confuse or where
    it looks like another kind of value, and cut where it would flood the context (the Python
    session has all of it)."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, float):
        return f"{value:.15g}"
    if isinstance(value, dt.datetime):
        return value.isoformat(" ")
    text = str(value)
    if len(text) > MAX_CELL_TEXT:
        text = f"{text[:MAX_CELL_TEXT]}… ({len(text):,} characters)"
    if any(c in text for c in ',"\n\r') or (
        text[:1] in _STARTS and type(value) is str and _LOOKS_OTHER.fullmatch(text)
    ):
        return '"' + text.replace('"', '""') + '"'
    return text


_STARTS = frozenset("0123456789+-TF#")
# A text that would be read as a number, a boolean or an error.
_LOOKS_OTHER = re.compile(
    r"[-+]?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|TRUE|FALSE|#[A-Z/0_]+[!?]?"
)


def _remarks(sheet: Sheet) -> str:
    """What a reader of the values alone would miss, in brackets; nothing for a plain sheet."""
    marks, said = sheet.marks, []
    if marks is not _PLAIN:
        if marks.kind != "worksheet":
            said.append(f"{marks.kind} sheet")
        if marks.state != "visible":
            said.append("hidden" if marks.state == "hidden" else "very hidden")
        if marks.hidden_rows:
            said.append(f"hidden rows {_spans(marks.hidden_rows, str)}")
        if marks.hidden_columns:
            said.append(f"hidden columns {_spans(marks.hidden_columns, column_letter)}")
        if marks.merged:
            said.append(f"merged {', '.join(marks.merged[:10])}{' …' * (len(marks.merged) > 10)}")
        if marks.declared:
            said.append(f"the file claims {marks.declared}")
        if marks.damage:
            said.append(f"can't be read: {marks.damage}")
    if sheet.uncalculated:
        plural = "s" * (sheet.uncalculated > 1)
        said.append(f"{sheet.uncalculated} formula{plural} without results read as empty")
    return f" ({'; '.join(said)})" if said else ""


_PLAIN = Marks()


def _spans(spans: tuple[tuple[int, int], ...], name: Callable[[int], str]) -> str:
    few = [name(a) if a == b else f"{name(a)}:{name(b)}" for a, b in spans[:10]]
    return ", ".join(few) + " …" * (len(spans) > 10)


def _quoted(name: str) -> str:
    return name if name.replace("_", "").isalnum() else "'" + name.replace("'", "''") + "'"


class Toolbox:
    """Runs calls against one workbook.  `python(code) -> text` runs code; `bind(sheet,
    top, left, rows)` hands it the cells that were read."""

    def __init__(
        self,
        book: Workbook,
        python: Callable[[str], str],
        bind: Callable[[str, int, int, list[list]], None],
    ) -> None:
        self.book = book
        self.cells_read = 0
        self.ranges_read: list[str] = []
        self.malformed = 0
        self._python = python
        self._bind = bind
        self._areas: dict[str, Area | None] = {}

    def call(self, call: ToolCall) -> str:
        """The tool's answer, or an `error: ...` text."""
        if call.error is not None:
            self.malformed += 1
            return f"error: {call.error}"
        try:
            return self._call(call)
        except WorkbookError as error:  # a damaged row of a large file shows when it is read
            return f"error: {error}"

    def _call(self, call: ToolCall) -> str:
        arguments = call.arguments
        if call.name == "get_workbook_metadata":
            return self.metadata()
        if call.name == "read_ranges":
            ranges, show = arguments.get("ranges"), arguments.get("show")
            if isinstance(ranges, str):
                ranges = [ranges]
            if not isinstance(ranges, list) or not all(isinstance(r, str) for r in ranges):
                return self._bad('read_ranges takes "ranges": a list of A1 ranges')
            if show is not None and (isinstance(show, bool) or not isinstance(show, int)):
                return self._bad('"show" is a whole number of rows')
            return self.read(ranges, show)
        if call.name == "run_python":
            code = arguments.get("code")
            if not isinstance(code, str):
                return self._bad('run_python takes "code": a text')
            return self._python(code)
        names = ", ".join(t.name for t in TOOLS)
        return self._bad(f"no tool named {call.name!r}; tools: {names}")

    def _bad(self, text: str) -> str:
        self.malformed += 1
        return f"error: {text}"

    def _used(self, sheet: Sheet) -> Area | None:
        """The sheet's used range; books do not change during an episode."""
        if sheet.name not in self._areas:
            self._areas[sheet.name] = sheet.used()
        return self._areas[sheet.name]

    def metadata(self) -> str:
        lines = []
        for sheet in self.book.sheets:
            used = self._used(sheet)
            color = f" #{sheet.tab_color}" if sheet.tab_color else ""
            place = f"!{used}{color}" if used else " empty"
            lines.append(_quoted(sheet.name) + place + _remarks(sheet))
            for table in sheet.marks.tables:
                lines.append(f"table {table.name} at {_quoted(sheet.name)}!{table.ref}")
        names = [n for n in self.book.defined_names if not n.hidden and n.name[:6] != "_xlnm."]
        for name in names[:MAX_NAMES]:
            target = "broken" if name.broken else name.refers_to[:MAX_CELL_TEXT]
            lines.append(f"name {name.name} = {target}")
        if len(names) > MAX_NAMES:
            lines.append(f"… and {len(names) - MAX_NAMES} more names")
        return "\n".join(lines)

    def read(self, ranges: list[str], show: int | None = None) -> str:
        """Reads all ranges or none: the cap counts the cells of the whole call."""
        if not ranges:
            return self._bad('"ranges" is empty; name at least one, such as Orders!A1:D20')
        if len(ranges) > MAX_RANGES:
            return self._bad(f"{len(ranges)} ranges in one call; at most {MAX_RANGES}")
        wanted: list[tuple[Sheet, Area | None]] = []
        for text in ranges:
            try:
                wanted.append(self._resolve(text))
            except RangeError as error:
                return self._bad(str(error))
        total = sum(area.cells for _, area in wanted if area)
        if total > MAX_CELLS:
            return (
                f"error: {total:,} cells requested, at most {MAX_CELLS:,} in one call; "
                "nothing was read. Ask for fewer rows or columns."
            )
        answer = "\n".join(self._read_one(sheet, area, show) for sheet, area in wanted)
        self.cells_read += total
        return answer

    def _resolve(self, text: str) -> tuple[Sheet, Area | None]:
        name, area, is_open = parse_area(text)
        if name is None:
            if len(self.book.sheets) != 1:
                raise RangeError(f"{text!r} names no sheet; write Sheet!{text}")
            sheet: Sheet | None = self.book.sheets[0]
        else:
            sheet = self.book.find(name)
        if sheet is None:
            known = ", ".join(self.book.names())
            raise RangeError(f"no sheet named {name!r}; sheets: {known[:300]}")
        if area is None or is_open:
            used = self._used(sheet)
            if used is None:
                return sheet, None
            area = used if area is None else area.clip(used)
        return sheet, area

    def _read_one(self, sheet: Sheet, area: Area | None, show: int | None) -> str:
        if area is None:
            return f"{_quoted(sheet.name)}: nothing there"
        label = f"{_quoted(sheet.name)}!{area}"
        self.ranges_read.append(label)
        rows = list(sheet.block(area))
        self._bind(sheet.name, area.top, area.left, [values for _, values in rows])
        shown = rows if show is None else rows[: max(show, 0)]
        lines = [f"{label} {area.height} rows"]
        remarks = sheet.remarks(area)
        if not remarks and not sheet.marks.hidden_rows:
            lines += [f"{r}: {','.join(map(show_value, values))}" for r, values in shown]
            return "\n".join(lines)
        for r, values in shown:
            texts = []
            for column, value in enumerate(values, area.left):
                text, remark = show_value(value), remarks.get((r, column))
                texts.append(f"{text} ({remark})".lstrip() if remark else text)
            hidden = " (hidden)" * sheet.is_hidden(r)
            lines.append(f"{r}{hidden}: {','.join(texts)}")
        return "\n".join(lines)
