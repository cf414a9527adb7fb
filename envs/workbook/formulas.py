"""Formula texts: as a person writes them, and a shared one moved to another cell.

Files hold newer functions with prefixes (`_xlfn.UNIQUE`), spilled ranges and implicit
intersection as functions; one formula copied over a range is stored once.  No parser: texts
are cut into strings, quoted names, brackets and references, and everything else stays.
"""

from __future__ import annotations

import re

from envs.workbook.a1 import MAX_COLUMN, MAX_ROW, column_index, column_letter

_PREFIX = re.compile(r"_xl(?:fn|ws|pm|udf)\.", re.IGNORECASE)
_TOKEN = re.compile(
    r'"(?:[^"]|"")*"'
    r"|'(?:[^']|'')*'"
    r"|\[(?:[^\[\]]|\[[^\]]*\])*\]"
    r"|(?<![\w.$\\])\$?[A-Za-z]{1,3}\$?[0-9]{1,7}(?![\w.(!])"
    r"|(?<![\w.$\\])\$?[A-Za-z]{1,3}:\$?[A-Za-z]{1,3}(?![\w.(!])"
    r"|(?<![\w.$\\:])\$?[0-9]{1,7}:\$?[0-9]{1,7}(?![\w.(!:])"
)
_POINT = re.compile(r"(\$?)([A-Za-z]{0,3})(\$?)([0-9]{0,7})")
_FUNCTION = re.compile(r"_xlfn\.(ANCHORARRAY|SINGLE)\(", re.IGNORECASE)


def display(text: str) -> str:
    """The formula with its "=" and without what only files write."""
    text = text.strip()
    if text.startswith("="):
        text = text[1:]
    while match := _FUNCTION.search(text):
        close = _closing(text, match.end())
        if close is None:
            break
        inner = text[match.end() : close]
        inner = f"{inner}#" if match[1].upper() == "ANCHORARRAY" else f"@{inner}"
        text = text[: match.start()] + inner + text[close + 1 :]
    if "_xl" in text:
        out, last = [], 0
        for quoted in re.finditer(r'"(?:[^"]|"")*"', text):
            out += [_PREFIX.sub("", text[last : quoted.start()]), quoted[0]]
            last = quoted.end()
        text = "".join(out) + _PREFIX.sub("", text[last:])
    return "=" + text


def _closing(text: str, start: int) -> int | None:
    """The bracket that closes one opened before `start`."""
    depth, quote = 1, ""
    for i in range(start, len(text)):
        c = text[i]
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        elif c == "(":
            depth += 1
        elif c == ")":
            depth -= 1
            if not depth:
                return i
    return None


def moved(text: str, rows: int, columns: int) -> str:
    """The formula as it reads when copied so far down and right; what leaves the sheet is #REF!."""

    def point(part: str) -> str | None:
        match = _POINT.fullmatch(part)
        if not match:
            return None
        fixed_column, letters, fixed_row, digits = match.groups()
        if not letters:  # a whole row has its only $ in front
            fixed_row = fixed_row or fixed_column
            fixed_column = ""
        out = ""
        if letters:
            column = column_index(letters) + (0 if fixed_column else columns)
            if not 1 <= column <= MAX_COLUMN:
                return None
            out += fixed_column + column_letter(column)
        if digits:
            row = int(digits) + (0 if fixed_row else rows)
            if not 1 <= row <= MAX_ROW:
                return None
            out += fixed_row + str(row)
        return out

    def token(match: re.Match[str]) -> str:
        text = match[0]
        if text[0] in "\"'[":
            return text
        try:
            parts = [point(part) for part in text.split(":")]
        except ValueError:  # letters past XFD: a name, not a reference
            return text
        return "#REF!" if None in parts else ":".join(p for p in parts if p)

    return _TOKEN.sub(token, text)
