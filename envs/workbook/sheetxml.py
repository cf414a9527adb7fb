"""One worksheet of an .xlsx file: its rows found in one pass, their cells parsed when asked for.

Finding rows takes no XML parser: `<` can't stand in a text or an attribute, so a row ends at
`</row>` and starts at `<row`, wherever there are no comments, CDATA sections or foreign
prefixes.  Documents that have those are first written anew by expat, row by row.  The used
range comes from the first and last filled cell of every row, never from what the file declares;
a row that doesn't look plain is parsed to find them.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from itertools import chain
from typing import Any
from xml.parsers import expat

from envs.workbook.a1 import MAX_ROW, Area, RangeError, column_letter, parse_area
from envs.workbook.cells import Context, Row, SharedFormulaMissing, parse_rows, row_number
from envs.workbook.container import Damaged
from envs.workbook.rewrite import written_anew
from envs.workbook.xml import is_true, parser, relation

_HEAD = re.compile(rb"<sheetData\s*/?>")
_DECLARED = re.compile(rb"""encoding\s*=\s*["']([A-Za-z0-9._-]+)["']""")
_FIRST_CELL = re.compile(rb"""<c(?=[\s>])[^>]*?\sr\s*=\s*["'][A-Za-z]+(\d+)["']""")
_WIDEST = 1 << 26  # bytes of a row
_FILLED = (b"</v></c>", b"</t></is></c>", b"</r></is></c>")
_LOOKS = 64  # styled blanks at a row's end that are skipped before it is parsed


class NotPlain(Exception):
    """The document has to be written anew before its rows can be told apart."""


class SheetXml:
    """A worksheet's rows and what else it says.  `rows` parses; the rest is known.

    Raises Damaged for broken XML and impossible rows, at once or when the row is parsed.
    """

    def __init__(
        self, document: Callable[[], Generator[bytes]], context: Context, whole: bool
    ) -> None:
        """document: gives the part's bytes in pieces; called a second time where they turn out
        not to be plain.  whole: parse all rows at once."""
        self.context = context
        self.numbers: list[int] = []
        self.used: Area | None = None
        self.declared: str | None = None
        self.tab_color: dict[str, str] | None = None
        self.merged: list[str] = []
        self.hidden_rows: list[int] = []
        self.hidden_columns: list[tuple[int, int]] = []
        self.table_ids: list[str] = []
        self.protected = False
        self.uncalculated: int | None = None  # known once counted
        self.size = 0
        # Row i is _buffers[_which[i]][_starts[i]:_ends[i]].
        self._buffers: list[bytes] = []
        self._which: list[int] = []
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._last = 0
        # How the row before begins, up to its first cell's column, how its last cell begins, and
        # bytes of a row that its end won't lie in.
        self._model: tuple[bytes, bytes, int] | None = None
        self._bounds = [0, 0, 1 << 20, 0]  # top, bottom, left, right
        self._parsed: dict[int, Row] | None = None
        frame = None
        with closing(document()) as chunks:
            try:
                frame = self._scan(chunks)
            except NotPlain:
                self._reset()
        if frame is None:
            with closing(document()) as chunks:
                frame = written_anew(chunks, self._take_one)
        self._read_frame(frame)
        self._in_order()
        if whole:
            self._parse_all()
        top, bottom, left, right = self._bounds
        self.used = Area(top, left, bottom, right) if top else None

    def _reset(self) -> None:
        self.numbers, self._buffers, self._last = [], [], 0
        self._which, self._starts, self._ends = [], [], []
        self.hidden_rows, self.size = [], 0
        self._bounds, self._model = [0, 0, 1 << 20, 0], None

    # Finding the rows.

    def _scan(self, chunks: Iterator[bytes]) -> bytes:
        """Takes in every row; returns the document without them."""
        buffer, head = b"", b""
        found = None
        for chunk in chunks:
            buffer += chunk
            found = _HEAD.search(buffer)
            if found or len(buffer) > 1 << 24:
                break
        if not found:
            raise NotPlain
        head, buffer = buffer[: found.end()], buffer[found.end() :]
        declared = _DECLARED.search(head[: head.find(b"?>")]) if head[:5] == b"<?xml" else None
        if (
            b"<!" in head
            or not re.match(rb"\s*(?:<\?xml[^>]*\?>)?\s*<worksheet[\s>]", head)
            or (declared and declared[1].lower() not in (b"utf-8", b"utf8", b"us-ascii"))
        ):
            raise NotPlain
        if found[0].rstrip(b"> \t\r\n").endswith(b"/"):
            self.size = len(head)
            return head + buffer + b"".join(chunks)
        rest = b""
        for chunk in chain([buffer], chunks):
            self.size += len(chunk)
            if b"!" in chunk and b"<!" in rest[-1:] + chunk:
                raise NotPlain
            place = 0
            if rest:
                end = chunk.find(b"</row>")
                if end < 0 or b"</row>" in rest[-5:] + chunk[:5]:
                    chunk = rest + chunk
                    if len(chunk) > _WIDEST:
                        raise Damaged("a row is longer than any that a program would write")
                else:
                    self._take_one(rest + chunk[:end])
                    place = end + 6
            rest = self._take(chunk, place)
            if b"</sheetData" in rest:
                break
        tail = rest + b"".join(chunks)
        tail_at = tail.find(b"</sheetData")
        if tail_at < 0:
            raise Damaged("the sheet is cut off")
        if b"<!" in tail:
            raise NotPlain
        if tail[:tail_at].strip():
            self._without_cells(tail[:tail_at])
        return head + tail[tail_at:]

    def _take(self, buffer: bytes, place: int) -> bytes:
        """The rows of a buffer from `place` on; returns what stands after the last whole one.

        Most rows of a large sheet look like the one before, one number on, and end in the same
        column: those are told by comparing a few bytes.
        """
        self._buffers.append(buffer)
        which = len(self._buffers) - 1
        while True:
            if self._model is not None:
                place = self._alike(buffer, place, which)
            end = buffer.find(b"</row>", place)
            if end < 0:
                return buffer[place:]
            self._take_one(buffer[place:end])
            place = end + 6

    def _alike(self, buffer: bytes, place: int, which: int) -> int:
        """Takes rows like the last one, numbered on; returns the place of the first other."""
        assert self._model is not None
        begin, end, skip = self._model
        find, rfind, startswith = buffer.find, buffer.rfind, buffer.startswith
        number = first = self._last + 1
        starts, ends = self._starts, self._ends
        while number <= MAX_ROW:
            # Looking for the row's end a good way in: where it is nearer, the next row's is found,
            # whose last cell has another number.
            stop = find(b"</row>", place + skip)
            if not (
                stop >= 0
                and startswith(begin % number, place)
                and startswith(end % number, rfind(b"<c ", place, stop))
                and buffer.endswith(_FILLED, place, stop)
                and buffer[stop - 9] != 0x3E  # as in <v></v></c>
            ):
                break
            starts.append(place)
            ends.append(stop)
            number += 1
            place = stop + 6
        if number > first:
            self.numbers.extend(range(first, number))
            self._which.extend([which] * (number - first))
            self._last = number - 1
            self._bounds[1] = max(self._bounds[1], self._last)
        return place

    def _take_one(self, piece: bytes) -> None:
        columns = self.context.columns
        self._model = None
        plain = piece[:8] == b'<row r="' and piece.find(b"<row", 8) < 0
        if plain:
            end = piece.index(b'"', 8)
            number = self._last = row_number(piece[8:end].decode("utf-8", "replace"))
        else:
            piece = self._odd(piece)
            number = self._last
        tag = piece[: piece.find(b">") + 1]
        if b"hidden" in tag and is_true(_attributes(tag).get("hidden")):
            self.hidden_rows.append(number)
        bounds = self._bounds
        last = self._last_column(piece, columns)
        if last < 0:  # not plain enough to tell
            parsed = parse_rows([(number, piece)], self.context)
            if not parsed:
                return
            first, last = _extent(parsed[0])
            bounds[2] = min(bounds[2], first)
        elif not last:
            return
        else:
            if bounds[2] > 1:
                bounds[2] = min(bounds[2], self._first_column(piece, number, bounds[2]))
            first_cell = piece[len(tag) : len(tag) + 10]
            if plain and b"hidden" not in tag and first_cell[:6] == b'<c r="':
                begin = first_cell[6:].rstrip(b"0123456789\"")
                template = b'<row r="%d' + (tag[end:] + first_cell[:6] + begin).replace(b"%", b"%%")
                if begin.isalpha() and self.context.column(begin.decode()) >= bounds[2]:
                    ending = b'<c r="' + column_letter(last).encode() + b'%d"'
                    self._model = template, ending, len(piece) * 3 // 4
        self.numbers.append(number)
        self._which.append(len(self._buffers))
        self._starts.append(0)
        self._ends.append(len(piece))
        self._buffers.append(piece)
        bounds[0] = min(bounds[0] or number, number)
        bounds[1] = max(bounds[1], number)
        bounds[3] = max(bounds[3], last)

    def _last_column(self, piece: bytes, columns: dict[str, int]) -> int:
        """The row's last filled column; 0 for none, -1 where only a parser can tell."""
        stop = len(piece)
        for _ in range(_LOOKS):
            place = piece.rfind(b"<c ", 0, stop)
            if place < 0:
                return -1 if b"<c" in piece[:stop].replace(b"<c ", b"") else 0
            if piece.find(b"<v>", place, stop) < 0 and piece.find(b"<is", place, stop) < 0:
                if piece.find(b"<", place + 1, stop) >= 0:  # <v/>, <f> or something stranger
                    return -1
                stop = place
                continue
            if piece[place : place + 6] != b'<c r="' or piece.find(b"<v></v>", place, stop) >= 0:
                return -1
            letters = piece[place + 6 : piece.index(b'"', place + 6)].rstrip(b"0123456789")
            found = columns.get(letters.decode("latin-1"))
            if found is None:
                try:
                    found = self.context.column(letters.decode("latin-1"))
                except ValueError:
                    return -1
            return found
        return -1

    def _first_column(self, piece: bytes, number: int, left: int) -> int:
        """The row's first filled column, or any number from `left` where it isn't before that."""
        if piece.count(b"<c") == piece.count(b'<c r="'):
            place = piece.find(b"<c ")
            for _ in range(_LOOKS):
                after = piece.find(b"<c ", place + 3)
                cell = piece[place : after if after >= 0 else len(piece)]
                letters = cell[6 : cell.find(b'"', 6)].rstrip(b"0123456789").decode("latin-1")
                try:
                    column = self.context.column(letters)
                except ValueError:
                    break
                if column >= left:
                    return left
                if cell.find(b"<", 3) >= 0:  # it may still be empty
                    break
                place = after
                if place < 0:
                    return left
        parsed = parse_rows([(number, piece)], self.context)
        return _extent(parsed[0])[0] if parsed else left

    def _odd(self, piece: bytes) -> bytes:
        """A row with other rows, of no cells, before it, or without a plain number."""
        starts = [m.start() for m in re.finditer(rb"<row(?=[\s>/])", piece)]
        if not starts or piece[: starts[0]].strip():
            raise NotPlain
        for first, last in zip(starts, starts[1:], strict=False):
            self._without_cells(piece[first:last])
        piece = piece[starts[-1] :]
        tag = piece[: piece.find(b">") + 1]
        if not tag or tag.endswith(b"/>"):
            raise NotPlain
        number = _attributes(tag).get("r")
        if number is None:
            cell = _FIRST_CELL.search(piece)
            number = cell[1].decode() if cell else str(self._last + 1)
        self._last = row_number(number)
        return piece

    def _without_cells(self, data: bytes) -> None:
        """Rows that are written `<row/>`, one after another."""
        for tag in data.split(b"<row")[1:]:
            if not tag.rstrip().endswith(b"/>"):
                raise NotPlain
            attributes = _attributes(b"<row" + tag)
            self._last = row_number(attributes.get("r", str(self._last + 1)))
            if is_true(attributes.get("hidden")):
                self.hidden_rows.append(self._last)

    def count_formulas(self) -> int:
        """How many formulas have no stored result; learns the shared ones on the way."""
        if self.uncalculated is None:
            self.uncalculated = 0
            for number, piece in self._pieces(0, len(self.numbers)):
                if b"<f" in piece:
                    self._look_formulas(piece, number)
        return self.uncalculated

    def _look_formulas(self, piece: bytes, number: int) -> None:
        assert self.uncalculated is not None
        for cell in piece.split(b"<c ")[1:]:
            if b"<f" not in cell:
                continue
            place = cell.find(b"<v")
            empty = place < 0 or cell[place : place + 7] == b"<v></v>" or cell[place + 2] in b"/ "
            if empty and not (place >= 0 and b't="str"' in cell):
                self.uncalculated += b"<is>" not in cell
        if b"shared" in piece and b"ref" in piece:
            parse_rows([(number, piece)], self.context)

    def _read_frame(self, frame: bytes) -> None:
        """What stands before and after the rows."""

        def start(tag: str, attributes: dict[str, str]) -> None:
            if tag == "tabColor":
                self.tab_color = attributes
            elif tag == "dimension":
                self.declared = attributes.get("ref")
            elif tag == "col" and is_true(attributes.get("hidden")):
                first, last = attributes.get("min", ""), attributes.get("max", "")
                if first.isdigit() and last.isdigit():
                    self.hidden_columns.append((int(first), int(last)))
            elif tag == "mergeCell":
                self.merged.append(attributes.get("ref", ""))
            elif tag == "tablePart":
                self.table_ids.append(relation(attributes) or "")
            elif tag == "sheetProtection":
                self.protected = is_true(attributes.get("sheet"))

        try:
            parser(start).Parse(frame, True)
        except expat.ExpatError as error:
            raise Damaged(f"broken XML around its rows: {error}") from error
        merged = []
        for ref in self.merged:
            try:
                area = parse_area(ref)[1]
            except RangeError:
                continue
            if area is not None and area.cells > 1:
                merged.append(str(area))
        self.merged = merged

    def _in_order(self) -> None:
        """Rows by number.  Raises Damaged where one is there twice."""
        numbers = self.numbers
        if all(map(int.__lt__, numbers, numbers[1:])):
            return
        order = sorted(range(len(numbers)), key=numbers.__getitem__)
        for a, b in zip(order, order[1:], strict=False):
            if numbers[a] == numbers[b]:
                raise Damaged(f"row {numbers[a]} is there twice")
        for name in ("numbers", "_which", "_starts", "_ends"):
            entries = getattr(self, name)
            setattr(self, name, [entries[i] for i in order])

    def _pieces(self, first: int, last: int) -> Iterator[tuple[int, bytes]]:
        """Number and XML of the rows at these places."""
        for i in range(first, last):
            yield self.numbers[i], self._buffers[self._which[i]][self._starts[i] : self._ends[i]]

    # Parsing them.

    def _parse_all(self) -> None:
        rows = parse_rows(self._pieces(0, len(self.numbers)), self.context)
        self._parsed = {row[0]: row for row in rows}
        self._bounds = bounds(rows)
        self.numbers, self._buffers = [row[0] for row in rows], []
        self.uncalculated = unstored(rows)

    def count(self) -> int:
        """Rows that hold something."""
        return len(self.numbers)

    def rows(self, top: int, bottom: int) -> list[Row]:
        """The filled rows from `top` to `bottom`, both included."""
        first, last = bisect_left(self.numbers, top), bisect_left(self.numbers, bottom + 1)
        if self._parsed is not None:
            return [self._parsed[n] for n in self.numbers[first:last]]
        try:
            return parse_rows(self._pieces(first, last), self.context)
        except SharedFormulaMissing:
            if self.uncalculated is not None:
                raise
            self.count_formulas()
            return parse_rows(self._pieces(first, last), self.context)


def unstored(rows: Iterable[Row]) -> int:
    """How many formulas of parsed rows have no stored result."""
    return sum(not stored for row in rows for _, _, _, stored in row[2])


def bounds(rows: Iterable[Row]) -> list[int]:
    """Top, bottom, left and right of parsed rows; top is 0 where there are none."""
    top, bottom, left, right = 0, 0, 1 << 20, 0
    for row in rows:
        first, last = _extent(row)
        top = min(top or row[0], row[0])
        bottom = max(bottom, row[0])
        left, right = min(left, first), max(right, last)
    return [top, bottom, left, right]


def _extent(row: Row) -> tuple[int, int]:
    segments: Any = row[1]
    return segments[0][0], segments[-1][0] + len(segments[-1][1]) - 1


def _attributes(tag: bytes) -> dict[str, str]:
    """The attributes of a start tag that stands alone."""
    tag = tag.rstrip()
    found: list[dict[str, str]] = []
    if not tag.endswith(b"/>"):
        tag = tag[:-1] + b"/>"
    try:
        parser(lambda _, attributes: found.append(attributes)).Parse(tag, True)
    except expat.ExpatError as error:
        if "prefix" in str(error):
            raise NotPlain from error
        raise Damaged(f"broken XML in a row: {error}") from error
    return found[0]
