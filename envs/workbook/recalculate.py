"""Results of formulas, by formualizer, from the cells that a source gives.

Runs in the worker.  The engine is fed values and formulas, never the file, on one thread with
its clock and seed pinned.  A formula that it can't be trusted with (other files, functions and
names it doesn't know, arrays over several cells) gets no result, nor does any that depends on
one; where such a formula has a stored result, that stands in for it.
"""

from __future__ import annotations

import datetime as dt
import re
from typing import Any

from envs.workbook.a1 import MAX_COLUMN, MAX_ROW, column_index
from envs.workbook.container import WorkbookError
from envs.workbook.formats import to_serial
from envs.workbook.grid import Source

MOST_CELLS = 2_000_000
SECONDS = 10  # of one formula with all it needs
_KINDS = {
    "#N/A": "Na", "#DIV/0!": "Div", "#REF!": "Ref", "#VALUE!": "Value", "#NAME?": "Name",
    "#NUM!": "Num", "#NULL!": "Null", "#SPILL!": "Spill", "#CALC!": "Calc",
}  # fmt: skip
_CODES = {kind: code for code, kind in _KINDS.items() if kind not in ("Name", "Spill", "Calc")}
_WORD = re.compile(
    r'"(?:[^"]|"")*"|(?:\'(?:[^\']|\'\')+\'|[\w.]+)!|\$?[A-Za-z]{1,3}\$?[0-9]+(?![\w.(])|'
    r"\$?[A-Za-z]{1,3}:\$?[A-Za-z]{1,3}(?![\w.(])|#[A-Z/0]+[!?]?|[A-Za-z_\\][\w.\\]*\(?"
)
_TRAPS = re.compile(r"\b(IF(ERROR|NA)|IS(ERR|ERROR|NA)|ERROR\.TYPE|AGGREGATE|COUNT\w*)\(")
_CLOCK = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)


def calculate(source: Source, everything: bool) -> list[list[Any]] | None:
    """[sheet, row, column, raw value] of formulas: all, or those without a stored result.

    None where no engine is installed.  Raises WorkbookError for a book that is too large.
    """
    try:
        import formualizer
    except ImportError:
        return None
    engine = Engine(formualizer, source, everything)
    return engine.results()


class Engine:
    """The engine with one book in it."""

    def __init__(self, formualizer: Any, source: Source, everything: bool) -> None:
        self._module = formualizer
        self._outline = source.outline
        self._epoch1904: bool = source.outline["epoch1904"]
        config = formualizer.EvaluationConfig()
        config.enable_parallel = False  # a forked process must start no threads that it lost
        config.max_eval_time_ms = SECONDS * 1000
        config.workbook_seed = 1
        if self._epoch1904:
            config.date_system = "1904"
        self._book = formualizer.Workbook(
            config=formualizer.WorkbookConfig(eval_config=config, enable_changelog=False)
        )
        self._book.set_deterministic_clock(_CLOCK)
        self._wanted: list[tuple[int, int, int, str]] = []
        self._unknown = False
        self._names = self._simple_names()
        cells = 0
        for place, sheet in enumerate(self._outline["sheets"]):
            self._book.add_sheet(sheet["name"])
            for row in source.rows(place, 1, MAX_ROW):
                cells += sum(len(segment[1]) for segment in row[1])
                if cells > MOST_CELLS:
                    raise WorkbookError(
                        f"holds more than {MOST_CELLS:,} cells, too many to calculate here"
                    )
                self._feed(place, sheet["name"], row, everything)

    def _simple_names(self) -> dict[tuple[str | None, str], str]:
        """Defined names that are ranges or constants, by (sheet or None, name)."""
        found = {}
        for name in self._outline["names"]:
            text = name["refers_to"]
            simple = re.fullmatch(
                r"(?:'(?:[^']|'')+'|[\w.]+)!\$?[A-Z]+\$?\d+(?::\$?[A-Z]+\$?\d+)?|-?[\d.]+|\"[^\"]*\"",
                text,
            )
            if simple and not name["broken"]:
                found[name["scope"], name["name"].upper()] = text
        return found

    def _feed(self, place: int, sheet: str, row: list[Any], everything: bool) -> None:
        number, segments, formulas = row
        held = {column: (text, array, stored) for column, text, array, stored in formulas}
        target = self._book.sheet(sheet)
        for first, values, _ in segments:
            for column, raw in enumerate(values, first):
                formula = held.get(column)
                if formula is None or (formula[2] and not everything):
                    if raw is not None:
                        target.set_value(number, column, self._literal(raw))
                    continue
                text = self._usable(formula[0], sheet) if _single(formula[1]) else None
                if text is None:
                    self._set_unknown(target, number, column, raw)
                    continue
                try:
                    target.set_formula(number, column, text)
                except Exception:  # what its parser refuses
                    self._set_unknown(target, number, column, raw)
                else:
                    self._wanted.append((place, number, column, text))

    def _set_unknown(self, target: Any, row: int, column: int, raw: Any) -> None:
        if raw is None:
            self._unknown = True
            raw = ["e", "#NAME?"]  # an error that goes on to all that depends on it
        target.set_value(row, column, self._literal(raw))

    def _usable(self, text: str, sheet: str) -> str | None:
        """The formula with its names resolved; None where the engine lacks something."""
        bare = re.sub(r'"[^"]*"', "", text).upper()
        if "[" in bare or "#" in bare or "AGGREGATE(" in bare:  # the engine has the last one wrong
            return None
        local = bool(re.search(r"\b(LET|LAMBDA)\(", text))
        lacking = False

        def word(match: re.Match[str]) -> str:
            nonlocal lacking
            found = match[0]
            if found[0] == '"' or found[-1] in "!(":
                return found
            if found.upper() in ("TRUE", "FALSE") or _is_reference(found):
                return found
            name = self._names.get((sheet, found.upper())) or self._names.get((None, found.upper()))
            if name is not None:
                return name
            lacking |= not local
            return found

        text = _WORD.sub(word, text)
        return None if lacking else text

    def _literal(self, raw: Any) -> Any:
        literal = self._module.LiteralValue
        if isinstance(raw, bool):
            return literal.boolean(raw)
        if isinstance(raw, (int, float)):
            return literal.number(float(raw))
        if isinstance(raw, list):
            if raw[0] != "e":
                return literal.number(float(raw[1]))
            return literal.error(_KINDS.get(raw[1], "Value"), "")
        return literal.text(raw)

    def results(self) -> list[list[Any]]:
        out = []
        for place, row, column, text in self._wanted:
            sheet = self._outline["sheets"][place]["name"]
            try:
                value = self._book.evaluate_cell(sheet, row, column)
            except Exception:  # the engine has one for each of its faults
                continue
            raw = self._raw(value)
            if raw is None:
                self._unknown = True  # a function it lacks; what traps errors may hide that
            else:
                out.append([place, row, column, raw, text])
        return [r[:4] for r in out if not (self._unknown and _TRAPS.search(r[4].upper()))]

    def _raw(self, value: Any) -> Any:
        if isinstance(value, dict):
            code = _CODES.get(str(value.get("kind")))
            return None if code is None else ["e", code]
        if isinstance(value, (bool, str)):
            return value
        if isinstance(value, (int, float)):
            whole = float(value).is_integer() and abs(value) < 1e15
            return int(value) if whole else float(value)
        if isinstance(value, (dt.date, dt.time)):
            found = to_serial(value.isoformat(), self._epoch1904)
            return None if found is None else [found[1], found[0]]
        if isinstance(value, dt.timedelta):
            return ["duration", value / dt.timedelta(days=1)]
        return None


def _single(array: str | None) -> bool:
    """An array formula over one cell is a plain one."""
    return array is None or ":" not in array


def _is_reference(word: str) -> bool:
    match = re.fullmatch(r"\$?([A-Za-z]{1,3})(?:\$?([0-9]+)|:\$?([A-Za-z]{1,3}))", word)
    if not match:
        return False
    try:
        fine = column_index(match[1]) <= MAX_COLUMN
    except ValueError:
        return False
    return fine and (match[2] is None or 1 <= int(match[2]) <= MAX_ROW)
