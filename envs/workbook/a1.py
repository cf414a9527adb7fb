"""A1 references: `Sheet!A1:B2`, quoted names, whole columns and rows, single cells.

Only areas: no unions with commas, no R1C1, no references to other workbooks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

MAX_ROW, MAX_COLUMN = 1_048_576, 16_384


class RangeError(ValueError):
    """A reference that can't be understood; the text says what is wrong with it."""


@dataclass(frozen=True)
class Area:
    """A rectangle of cells, 1-based, both ends included."""

    top: int
    left: int
    bottom: int
    right: int

    @property
    def width(self) -> int:
        return self.right - self.left + 1

    @property
    def height(self) -> int:
        return self.bottom - self.top + 1

    @property
    def cells(self) -> int:
        return self.width * self.height

    def clip(self, other: Area) -> Area | None:
        """The part that lies in `other` too, or None."""
        top, left = max(self.top, other.top), max(self.left, other.left)
        bottom, right = min(self.bottom, other.bottom), min(self.right, other.right)
        return Area(top, left, bottom, right) if top <= bottom and left <= right else None

    def __str__(self) -> str:
        first = f"{column_letter(self.left)}{self.top}"
        if self.cells == 1:
            return first
        return f"{first}:{column_letter(self.right)}{self.bottom}"


@lru_cache(maxsize=4096)
def column_letter(column: int) -> str:
    """1 -> A, 27 -> AA."""
    if not 1 <= column <= MAX_COLUMN:
        raise RangeError(f"column {column} is outside 1..{MAX_COLUMN}")
    letters = ""
    while column:
        column, rest = divmod(column - 1, 26)
        letters = chr(65 + rest) + letters
    return letters


def column_index(letters: str) -> int:
    """A -> 1, AA -> 27; RangeError past XFD."""
    index = 0
    for letter in letters.upper():
        index = index * 26 + ord(letter) - 64
    if not 1 <= index <= MAX_COLUMN:
        raise RangeError(f"column {letters} is past XFD")
    return index


_SHEET = re.compile(r"(?:'((?:[^']|'')+)'|([^'!]+))!", re.DOTALL)
_POINT = r"\$?([A-Za-z]{1,3})?\$?([0-9]{1,7})?"
_AREA = re.compile(rf"{_POINT}(?::{_POINT})?")


def parse_area(text: str) -> tuple[str | None, Area | None, bool]:
    """Reads `Sheet!A1:B2` -> (sheet or None, area, open).

    The area is None for a bare sheet name (`Orders`, `'Cap Table'!`): the whole sheet.
    `open` is true where rows or columns were left out (`A:C`, `2:5`): the caller clips
    those to the used range.  Raises RangeError with a text fit for the model.
    """
    stripped = text.strip()
    text = text if len(text) <= 80 else text[:79] + "…"  # as refusals quote it
    match = _SHEET.match(stripped)
    sheet, rest = None, stripped
    if match:
        sheet = (match[1] or "").replace("''", "'") or match[2]
        rest = stripped[match.end() :].strip()
        if not rest:
            return sheet, None, True
    found = _AREA.fullmatch(rest)
    if not found or not any(found.groups()):
        if sheet is None and rest.strip("'") and "!" not in rest and ":" not in rest:
            return rest.strip("'").replace("''", "'"), None, True
        raise RangeError(f"{text!r} is not a range; write Sheet!A1:C20, Sheet!A:C or Sheet!2:5")
    c1, r1, c2, r2 = found.groups()
    two = ":" in rest
    if not two:
        if not (c1 and r1):
            if sheet is None:
                return rest, None, True
            raise RangeError(f"{text!r} is not a range; write {sheet}!{rest}:{rest}")
        c2, r2 = c1, r1
    if bool(c1) != bool(c2) or bool(r1) != bool(r2):
        raise RangeError(f"{text!r} mixes a cell with a whole row or column")
    left, right = (column_index(c1), column_index(c2)) if c1 else (1, MAX_COLUMN)
    top, bottom = (int(r1), int(r2)) if r1 else (1, MAX_ROW)
    left, right = sorted((left, right))
    top, bottom = sorted((top, bottom))
    if top < 1 or bottom > MAX_ROW:
        raise RangeError(f"{text!r}: rows go from 1 to {MAX_ROW}")
    return sheet, Area(top, left, bottom, right), not (c1 and r1)
