"""The rows of a worksheet's XML as plain values, by expat.

One row becomes `[number, segments, formulas]`: a segment is `[first column, values, styles]`
of cells side by side, so a row with values in A and XFD stays small; a formula is `[column,
text, array range or None, has a stored result]`.  A value is None, a bool, a number, a text,
`["e", code]` for an error or `[kind, serial]` for a date that the file spells out.  All of it
is JSON, for that is how it travels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any
from xml.parsers import expat

from envs.workbook.a1 import MAX_COLUMN, MAX_ROW, column_index, column_letter
from envs.workbook.container import Damaged, WorkbookError
from envs.workbook.formats import to_serial
from envs.workbook.formulas import display, moved
from envs.workbook.package import Strings, unescape
from envs.workbook.xml import doctype, is_true

GAP = 8  # empty cells that a segment bridges
Row = list[Any]
_PLACE = re.compile(r"([A-Za-z]{1,3})([0-9]{1,7})")


class SharedFormulaMissing(Damaged):
    """The cell that holds it may stand in a row that wasn't parsed yet."""


class Context:
    """What the cells of one sheet refer to.  masters: shared formulas, index -> (text, row,
    column of the cell that holds it)."""

    def __init__(self, strings: Callable[[], Strings | None], epoch1904: bool) -> None:
        """strings: gives the shared strings; called with the first cell that wants one."""
        self._strings = strings
        self.epoch1904 = epoch1904
        self.masters: dict[str, tuple[str, int, int]] = {}
        self.columns: dict[str, int] = {}
        self.plain_columns: dict[bytes, int] = {}

    @cached_property
    def strings(self) -> Strings | None:
        return self._strings()

    def column(self, letters: str) -> int:
        found = self.columns.get(letters)
        if found is None:
            found = self.columns[letters] = column_index(letters)
        return found


def parse_rows(pieces: Iterable[tuple[int, bytes]], context: Context) -> list[Row]:
    """Rows from their XML, each without its `</row>`; empty ones are left out.

    Raises Damaged, with the cell's name, for what can't be read, cells that are there twice and
    cells outside their row.
    """
    out: list[Row] = []
    for number, piece in pieces:
        row = plain_row(number, piece, context) or parse_row(number, piece, context)
        if row:
            out.append(row)
    return out


# A cell as programs write it, with nothing that would have to be translated; no formula.
_PLAIN = re.compile(
    rb'<c r="([A-Z]{1,3})([0-9]+)"(?: s="([0-9]+)")?(?: t="(?:(n)|(s)|(str)|inlineStr)")?>'
    rb"(?:<v>(?:(-?[0-9]{1,18})|(-?[0-9.]+(?:[eE][-+]?[0-9]+)?)|([^<&\r]+))</v>"
    rb'|<is><t(?: xml:space="preserve")?>([^<&\r]*)</t></is>)</c>'
)


def plain_row(number: int, piece: bytes, context: Context) -> Row | None:
    """What `parse_row` gives, for a row of plain cells side by side; None for any other."""
    place = piece.find(b">") + 1
    digits = b"%d" % number
    first = column = 0
    values: list[Any] = []
    styles: list[int] = []
    known = context.plain_columns
    try:
        for match in _PLAIN.finditer(piece, place):
            if match.start() != place:
                return None
            place = match.end()
            letters, row, style, plain, shared, string, whole, real, other, inline = match.groups()
            at = known.get(letters)
            if at is None:
                at = known[letters] = column_index(letters.decode())
            if row != digits or (column and at != column + 1):
                return None
            column = at
            first = first or at
            if inline is not None:
                if plain or shared or string:
                    return None
                values.append(unescape(inline.decode()))
            elif shared:
                assert context.strings is not None
                values.append(context.strings[int(whole)])
            elif string:
                values.append(unescape((whole or real or other).decode()))
            elif other is None and (plain or b' t="' not in match[0]):
                if whole:
                    values.append(int(whole))
                else:
                    value = float(real)
                    if value - value:
                        return None
                    values.append(value)
            else:
                return None
            styles.append(int(style) if style else 0)
    except (ValueError, TypeError, AssertionError, Damaged):
        return None  # the parser says what is wrong
    if place != len(piece) or not values:
        return None
    return [number, [[first, values, styles]], []]


def parse_row(number: int, piece: bytes, context: Context) -> Row | None:
    """One row by expat; None where it is empty."""
    columns: list[int] = []
    values: list[Any] = []
    styles: list[int] = []
    formulas: list[list[Any]] = []
    words: list[str] = []
    column = phonetic = 0
    attributes: dict[str, str] = {}
    text: str | None = None  # of <v>
    inline: list[str] | None = None
    formula: tuple[str, dict[str, str]] | None = None
    listening = False

    def start(tag: str, found: dict[str, str]) -> None:
        nonlocal attributes, column, text, inline, formula, listening, phonetic
        if tag == "v" or tag == "f":
            listening = True
            words.clear()
            if tag == "f":
                formula = "", found
        elif tag == "c":
            attributes, text, inline, formula = found, None, None, None
            place = found.get("r")
            if place is None:
                column += 1
            else:
                letters = place.rstrip("0123456789")
                digits = place[len(letters) :]
                if digits != str(number) and digits.lstrip("0") != str(number):
                    raise Damaged(f"row {number} holds a cell of row {digits[:10] or place[:20]}")
                try:
                    column = context.column(letters)
                except (ValueError, TypeError) as error:
                    if not letters.isascii() or not letters.isalpha() or len(letters) > 3:
                        raise Damaged(f"cell {place[:20]!r}: no such place") from error
                    raise Damaged(f"row {number} holds a cell past column XFD") from error
            if column > MAX_COLUMN:
                raise Damaged(f"row {number} holds a cell past column XFD")
        elif tag == "is":
            inline = []
        elif tag == "t":
            listening = inline is not None and not phonetic
            words.clear()
        elif tag == "rPh":
            phonetic += 1

    def end(tag: str) -> None:
        nonlocal text, formula, listening, phonetic
        if tag == "v":
            text = "".join(words)
            listening = False
        elif tag == "c":
            finish()
        elif tag == "t":
            if listening and inline is not None:
                inline.append("".join(words))
            listening = False
        elif tag == "f":
            if formula is not None:
                formula = "".join(words), formula[1]
            listening = False
        elif tag == "rPh":
            phonetic -= 1

    def characters(data: str) -> None:
        if listening:
            words.append(data)

    def finish() -> None:
        kind = attributes.get("t", "n")
        value: Any = None
        try:
            if inline is not None and (text is None or kind == "inlineStr"):
                value = unescape("".join(inline)) if inline else None
            elif text is None:
                pass
            elif kind == "n":
                value = _as_number(text)
            elif kind == "s":
                if text:
                    if context.strings is None:
                        raise Damaged(f"there is no shared string {text[:20]}")
                    value = context.strings[int(text)]
            elif kind == "str":
                value = unescape(text)
                if not value and formula is None:
                    value = None
            elif kind == "b":
                value = _as_bool(text)
            elif kind == "e":
                value = ["e", text.strip()] if text else None
            elif kind == "d":
                serial = to_serial(text, context.epoch1904)
                value = text if serial is None else [serial[1], serial[0]]
            else:
                value = text
        except WorkbookError:  # of the shared strings, whatever the cell
            raise
        except (ValueError, OverflowError, Damaged) as error:
            what = error if isinstance(error, Damaged) else f"{type(error).__name__}: {error}"
            place = f"{column_letter(column)}{number}"
            raise Damaged(f"cell {place!r}: {what}"[:200]) from error
        if formula is not None:
            stored = value is not None
            shown, area = _formula(*formula, number, column, context)
            if shown is not None:
                formulas.append([column, shown, area, stored])
            elif value is None:
                return
        elif value is None:
            return
        columns.append(column)
        values.append(value)
        style = attributes.get("s")
        styles.append(int(style) if style and style.isdigit() else 0)

    parser = expat.ParserCreate("utf-8")
    parser.buffer_text = True
    parser.StartDoctypeDeclHandler = doctype
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = characters
    try:
        parser.Parse(piece)
        parser.Parse(b"</row>", True)
    except expat.ExpatError as error:
        raise Damaged(f"row {number}: broken XML: {error}") from error
    if not columns:
        return None
    return [number, segments_of(number, columns, values, styles), formulas]


def _as_number(text: str) -> int | float | None:
    if "_" in text:
        raise ValueError(f"{text[:20]!r} is no number")
    try:
        whole = int(text)
        return whole if abs(whole) < 10**18 else float(whole)
    except ValueError:
        if not text.strip():
            return None
        value = float(text)
        if value - value != 0:
            raise ValueError(f"{text[:20]!r} is no number") from None
        return value


def _as_bool(text: str) -> bool:
    word = text.strip().lower()
    if word not in ("0", "1", "true", "false"):
        raise ValueError(f"{text[:20]!r} is no boolean")
    return is_true(word)


def _formula(
    text: str, found: dict[str, str], row: int, column: int, context: Context
) -> tuple[str | None, str | None]:
    """The formula as it is shown and the range of an array one."""
    kind = found.get("t", "normal")
    if kind == "shared":
        index = found.get("si", "")
        if text:
            context.masters[index] = text, row, column
        elif index in context.masters:
            master, top, left = context.masters[index]
            text = moved(master, row - top, column - left)
        else:
            place = f"{column_letter(column)}{row}"
            raise SharedFormulaMissing(f"cell {place} shares a formula that is missing")
    elif kind == "dataTable":
        inputs = [found[key] for key in ("r1", "r2") if key in found]
        return f"=TABLE({', '.join(inputs)})", found.get("ref")
    if not text.strip():
        return None, None
    return display(text), found.get("ref") if kind == "array" else None


def segments_of(
    row: int, columns: list[int], values: list[Any], styles: list[int]
) -> list[list[Any]]:
    first, last, count = columns[0], columns[-1], len(columns)
    if last - first == count - 1 and all(map(int.__lt__, columns, columns[1:])):
        return [[first, values, styles]]
    order = sorted(range(count), key=columns.__getitem__)
    out: list[list[Any]] = []
    end = -GAP
    for i in order:
        column = columns[i]
        if out and column <= end:
            raise Damaged(f"cell {column_letter(column)}{row} is there twice")
        if column - end > GAP or not out:
            out.append([column, [], []])
        else:
            gap = column - end - 1
            out[-1][1] += [None] * gap
            out[-1][2] += [0] * gap
        out[-1][1].append(values[i])
        out[-1][2].append(styles[i])
        end = column
    return out


def row_number(text: str | None) -> int:
    """The number in a row's `r`.  Raises Damaged outside 1..1048576."""
    try:
        number = int(text or "")
    except ValueError as error:
        raise Damaged(f"a row has the number {str(text)[:20]!r}") from error
    if not 1 <= number <= MAX_ROW:
        raise Damaged(f"a row has the number {number}")
    return number
