"""Number formats: what kind of value a format makes of a number, and dates of serial numbers.

A workbook stores dates, times and durations as numbers of days; only the cell's format tells
them from amounts.  How a format would print a value is in `shown`.
"""

from __future__ import annotations

import datetime as dt
import re
from functools import lru_cache

DAY_MS = 86_400_000
LAST_SERIAL = 2_958_466  # the day after 9999-12-31

# Formats that files name by number alone; 27 to 58 depend on the language of the program, so
# the ones here say what kind they are.
BUILTIN = {
    0: "General", 1: "0", 2: "0.00", 3: "#,##0", 4: "#,##0.00",
    5: '"$"#,##0_);("$"#,##0)', 6: '"$"#,##0_);[Red]("$"#,##0)',
    7: '"$"#,##0.00_);("$"#,##0.00)', 8: '"$"#,##0.00_);[Red]("$"#,##0.00)',
    9: "0%", 10: "0.00%", 11: "0.00E+00", 12: "# ?/?", 13: "# ??/??",
    14: "m/d/yyyy", 15: "d-mmm-yy", 16: "d-mmm", 17: "mmm-yy", 18: "h:mm AM/PM",
    19: "h:mm:ss AM/PM", 20: "h:mm", 21: "h:mm:ss", 22: "m/d/yyyy h:mm",
    **{n: "yyyy-mm-dd" for n in (*range(27, 32), 36, *range(50, 59))},
    32: "h:mm", 33: "h:mm:ss", 34: "h:mm", 35: "h:mm:ss",
    37: "#,##0_);(#,##0)", 38: "#,##0_);[Red](#,##0)",
    39: "#,##0.00_);(#,##0.00)", 40: "#,##0.00_);[Red](#,##0.00)",
    41: '_(* #,##0_);_(* (#,##0);_(* "-"_);_(@_)',
    42: '_("$"* #,##0_);_("$"* (#,##0);_("$"* "-"_);_(@_)',
    43: '_(* #,##0.00_);_(* (#,##0.00);_(* "-"??_);_(@_)',
    44: '_("$"* #,##0.00_);_("$"* (#,##0.00);_("$"* "-"??_);_(@_)',
    45: "mm:ss", 46: "[h]:mm:ss", 47: "mm:ss.0", 48: "##0.0E+0", 49: "@",
}  # fmt: skip

TOKEN = re.compile(
    r'"(?P<quoted>[^"]*)"?|\\(?P<escaped>.)|_(?P<skip>.)|\*(?P<fill>.)|\[(?P<bracket>[^\]]*)\]|'
    r"(?P<general>General)|(?P<ampm>AM/PM|A/P)|(?P<date>y+|m+|d+|h+|s+|e+(?![+-])|g+|b+)|"
    r"(?P<exponent>E[+-])|(?P<digit>[0#?])|(?P<other>.)",
    re.IGNORECASE | re.DOTALL,
)
ELAPSED = re.compile(r"h+|m+|s+", re.IGNORECASE)


@lru_cache(maxsize=4096)
def sections(code: str) -> tuple[tuple[tuple[str, str], ...], ...]:
    """The sections of a format, each as (kind of token, text)."""
    found: list[list[tuple[str, str]]] = [[]]
    for match in TOKEN.finditer(code):
        kind = match.lastgroup or "other"
        text = match[kind]
        if kind == "other" and text == ";":
            found.append([])
        else:
            found[-1].append((kind, text))
    return tuple(tuple(tokens) for tokens in found)


@lru_cache(maxsize=4096)
def kind_of(code: str) -> str:
    """What a number of this format is: number, date, datetime, time, duration or text."""
    day = clock = month = False
    for kind, text in sections(code)[0]:
        first = text[:1].lower()
        if kind == "bracket" and ELAPSED.fullmatch(text):
            return "duration"
        if kind == "digit" or kind == "general":
            if not (clock or day):  # 'ss.00' has digits too
                return "number"
        if kind == "ampm":
            clock = True
        elif kind == "date":
            clock |= first in "hs"
            day |= first in "ydegb" or len(text) > 2 and first == "m"
            month |= first == "m"
        elif kind == "other" and text == "@":
            return "text"
    if clock:
        return "datetime" if day else "time"
    return "date" if day or month else "number"


def is_percent(code: str) -> bool:
    return any(kind == "other" and text == "%" for kind, text in sections(code)[0])


@lru_cache(maxsize=1 << 14)
def from_serial(
    serial: float, kind: str, epoch1904: bool
) -> dt.date | dt.datetime | dt.time | dt.timedelta | None:
    """The date, time or duration that a number of days stands for, to the millisecond.

    kind: as `kind_of` gives it.  None where there is none: negative, past the year 9999, or
    Excel's 29 February 1900 (serial 60), a day that never was.
    """
    if kind == "duration":
        try:
            return dt.timedelta(milliseconds=round(serial * DAY_MS))
        except OverflowError:
            return None
    if not 0 <= serial < LAST_SERIAL:
        return None
    days, ms = divmod(round(serial * DAY_MS), DAY_MS)
    if days < 1 and (kind == "time" or kind == "datetime" and not epoch1904):
        return (dt.datetime.min + dt.timedelta(milliseconds=ms)).time()
    if epoch1904:
        base = dt.date(1904, 1, 1)
    elif days > 60:
        base = dt.date(1899, 12, 30)
    elif 1 <= days < 60:
        base = dt.date(1899, 12, 31)
    else:
        return None
    try:
        day = base + dt.timedelta(days=days)
    except OverflowError:
        return None
    if kind == "date" and not ms:
        return day
    return dt.datetime.combine(day, dt.time()) + dt.timedelta(milliseconds=ms)


_ISO = re.compile(
    r"(?:(\d{4})-(\d\d)-(\d\d))?T?(?:(\d\d):(\d\d)(?::(\d\d(?:\.\d+)?))?)?(?:Z|[+-]\d\d:\d\d)?"
)


def to_serial(text: str, epoch1904: bool) -> tuple[float, str] | None:
    """Serial number and kind of an ISO date, time or both; None for other texts."""
    match = _ISO.fullmatch(text.strip())
    if not match or not (match[1] or match[4]):
        return None
    serial = 0.0
    if match[4]:
        seconds = int(match[4]) * 3600 + int(match[5]) * 60 + float(match[6] or 0)
        serial = seconds / 86400
    if not match[1]:
        return serial, "time"
    try:
        day = dt.date(int(match[1]), int(match[2]), int(match[3]))
    except ValueError:
        return None
    if epoch1904:
        days = (day - dt.date(1904, 1, 1)).days
    else:
        days = (day - dt.date(1899, 12, 30)).days
        days -= day < dt.date(1900, 3, 1)
    return days + serial, "datetime" if match[4] else "date"
