"""A value as a spreadsheet program shows it: percent, thousands, currency, dates, fractions.

Follows Excel's number formats in English: sections with conditions, scaling commas, literals
between digits, elapsed time, exponents, fractions.  Left out: colours, column widths (nothing
becomes ####), fill characters, and calendars other than the Gregorian.
"""

from __future__ import annotations

import re
from decimal import ROUND_HALF_UP, Context, Decimal
from fractions import Fraction
from typing import Any

from envs.workbook.formats import DAY_MS, ELAPSED, from_serial, kind_of, sections

_CONDITION = re.compile(r"(<=|>=|<>|<|>|=)\s*(-?\d+(?:\.\d+)?)")
_MONTHS = (
    "January February March April May June July August September October November December"
).split()
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_WIDE = Context(prec=700)  # digits of the largest number with decimals
Tokens = list[tuple[str, str]]


def show(value: object, code: str = "General", epoch1904: bool = False) -> str:
    """The text of a stored value: None, bool, number (dates as serials) or text."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, (int, float)):
        return _number(value, code, epoch1904)
    text = str(value)
    last = sections(code)[-1]
    if ("other", "@") not in last:
        return text
    return "".join(text if token == ("other", "@") else _literal(*token) for token in last)


def general(value: float) -> str:
    """A number in the format General, at most 11 characters of digits."""
    if value == int(value) and abs(value) < 1e11:
        return str(int(value))
    if 1e-4 <= abs(value) < 1e11:
        whole = len(str(int(abs(value))))
        text = f"{value:.{max(0, 10 - whole)}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    mantissa, _, exponent = f"{value:.5E}".partition("E")
    return f"{mantissa.rstrip('0').rstrip('.')}E{exponent}"


def _number(value: int | float, code: str, epoch1904: bool) -> str:
    tokens, negative = _section(value, code)
    if any(kind == "general" for kind, _ in tokens):
        return "".join(
            general(abs(value) if negative else value) if kind == "general" else _literal(kind, t)
            for kind, t in tokens
        )
    if not tokens:
        return ""
    if kind_of(code) not in ("number", "text"):
        return _date(value, tokens, kind_of(code), epoch1904)
    if ("other", "@") in tokens:
        return general(value)
    amount = Decimal(f"{value:.15g}")
    return _digits(abs(amount), tokens, amount < 0 and not negative)


def _section(value: float, code: str) -> tuple[Tokens, bool]:
    """The section for the value, and whether that section shows the sign itself."""
    parts = [list(tokens) for tokens in sections(code)]
    conditions = []
    for tokens in parts[:3]:
        found = [m for kind, t in tokens if kind == "bracket" and (m := _CONDITION.fullmatch(t))]
        conditions.append(found[0] if found else None)
    if any(conditions):
        for tokens, condition in zip(parts, conditions, strict=False):
            if condition is None or _holds(value, condition[1], float(condition[2])):
                return tokens, condition is not None and value < 0 and condition[1][0] == "<"
        return parts[-1], False
    if len(parts) > 1 and value < 0:
        return parts[1], True
    if len(parts) > 2 and value == 0:
        return parts[2], False
    return parts[0], False


def _holds(value: float, sign: str, bound: float) -> bool:
    return {
        "<": value < bound, "<=": value <= bound, ">": value > bound, ">=": value >= bound,
        "=": value == bound, "<>": value != bound,
    }[sign]  # fmt: skip


def _literal(kind: str, text: str) -> str:
    """What a token that is no placeholder prints."""
    if kind == "skip":
        return " "
    if kind == "bracket":  # [$€-407] holds a currency sign
        return text[1:].partition("-")[0] if text.startswith("$") else ""
    return "" if kind == "fill" else text


def _digits(amount: Decimal, tokens: Tokens, minus: bool) -> str:
    """A number without its sign, through the placeholders of one section."""
    digits = [i for i, (kind, _) in enumerate(tokens) if kind == "digit"]
    for i, token in enumerate(tokens):
        if token == ("other", "%"):
            amount *= 100
        elif token == ("other", "/") and digits and i > digits[0]:
            return _trimmed(_fraction(amount, tokens, i), minus)
    if not digits:
        return ("-" if minus else "") + "".join(_literal(*token) for token in tokens)
    point = next((i for i, token in enumerate(tokens) if token == ("other", ".")), None)
    exponent = next((i for i, (kind, _) in enumerate(tokens) if kind == "exponent"), None)
    end = len(tokens) if exponent is None else exponent
    whole = [i for i in digits if i < (end if point is None else min(point, end))]
    part = [i for i in digits if point is not None and point < i < end]
    commas = {i for i, token in enumerate(tokens) if token == ("other", ",")}
    last = whole[-1] if whole else -1
    stop = end if point is None else point
    for i in range(last + 1, stop):
        if i not in commas:
            break
        amount /= 1000
    grouped = bool(whole) and any(whole[0] < i < last for i in commas)
    power = 0
    if exponent is not None and amount:
        step = max(1, len(whole))
        power = amount.adjusted() // step * step
        amount = amount.scaleb(-power)
    rounded = amount.quantize(Decimal(1).scaleb(-len(part)), ROUND_HALF_UP, _WIDE)
    if exponent is not None and rounded.adjusted() >= max(1, len(whole)):
        power += max(1, len(whole))
        rounded = rounded.scaleb(-max(1, len(whole)))
    left, _, right = f"{rounded:f}".partition(".")
    shown = _whole(left if int(left) else "", [tokens[i][1] for i in whole], grouped)
    decimals = _decimals(right, [tokens[i][1] for i in part])
    out = []
    for i, (kind, text) in enumerate(tokens):
        if i in whole:
            out.append(shown[whole.index(i)])
        elif i in part:
            out.append(decimals[part.index(i)])
        elif kind == "digit":  # of the exponent
            if i == next(d for d in digits if d > end):
                width = sum(d > end for d in digits)
                out.append(f"{abs(power):0{width}d}")
        elif kind == "exponent":
            out.append("E" + ("-" if power < 0 else "+" if text[1] == "+" else ""))
        elif i not in commas:
            out.append(_literal(kind, text))
    text = "".join(out)
    zero = not rounded
    return _trimmed(text, minus and not zero)


def _trimmed(text: str, minus: bool) -> str:
    text = text.strip(" ")
    return "-" + text if minus else text


def _whole(digits: str, places: list[str], grouped: bool) -> list[str]:
    """The digits left of the point, one string a placeholder; the first takes the surplus."""
    padded: list[str] = []
    for n, place in enumerate(reversed(places)):
        if n < len(digits):
            padded.append(digits[-1 - n])
        else:
            padded.append({"0": "0", "?": " ", "#": ""}[place])
    surplus = digits[: max(0, len(digits) - len(places))]
    if padded:
        padded[-1] = surplus + padded[-1]
    if grouped:
        count = 0
        for n, text in enumerate(padded):
            out = ""
            for digit in reversed(text):
                out = digit + ("," if count and count % 3 == 0 and digit.isdigit() else "") + out
                count += 1
            padded[n] = out
    return padded[::-1]


def _decimals(digits: str, places: list[str]) -> list[str]:
    """The digits right of the point; zeros at the end go where the place is # or ?."""
    out = list(digits)
    for n in range(len(places) - 1, -1, -1):
        if out[n] != "0" or places[n] == "0":
            break
        out[n] = " " if places[n] == "?" else ""
    return out


def _fraction(amount: Decimal, tokens: Tokens, slash: int) -> str:
    """`# ?/?`, `?/?` and fixed denominators such as `# ?/16`."""
    after = "".join(t for kind, t in tokens[slash + 1 :] if kind in ("digit", "other"))
    fixed = re.match(r"[1-9][0-9]*", after)
    before = [i for i, (kind, _) in enumerate(tokens[:slash]) if kind == "digit"]
    gap = any(
        kind not in ("digit",) for kind, _ in tokens[before[0] : before[-1]]
    )  # a whole part stands before the numerator
    whole = int(amount) if gap else 0
    rest = Fraction(amount) - whole
    if fixed:
        bottom = int(fixed[0])
        top = round(rest * bottom)
    else:
        places = sum(kind == "digit" for kind, _ in tokens[slash + 1 :])
        near = rest.limit_denominator(10 ** max(1, places) - 1)
        top, bottom = near.numerator, near.denominator
    if gap and top == bottom:
        whole, top = whole + 1, 0
    if gap and not top:
        return str(whole)
    return f"{whole} {top}/{bottom}" if whole else f"{top}/{bottom}"


def _date(value: float, tokens: Tokens, kind: str, epoch1904: bool) -> str:
    if value < 0 and kind != "duration" or abs(value) > 1e12:
        return "####"
    moment: Any = from_serial(value, "datetime", epoch1904)
    ms = round(abs(value) * DAY_MS)
    if moment is None or not hasattr(moment, "year"):
        # Excel's own days: 0 January 1900, and 29 February of a year that had none
        year, month, day, weekday = (1900, 2, 29, 2) if 60 <= value < 61 else (1900, 1, 0, 5)
    else:
        year, month, day, weekday = moment.year, moment.month, moment.day, moment.weekday()
    out = ["-" if value < 0 else ""]
    half = any(k == "ampm" for k, _ in tokens)
    fraction = sum(k == "digit" for k, _ in tokens)
    if not fraction:
        ms = (ms + 500) // 1000 * 1000
    seconds = ms // 1000
    hour, minute, second = seconds // 3600 % 24, seconds // 60 % 60, seconds % 60
    for i, (k, text) in enumerate(tokens):
        first, n = text[:1].lower(), len(text)
        if k == "bracket" and ELAPSED.fullmatch(text):
            unit = {"h": 3600, "m": 60, "s": 1}[first]
            out.append(f"{seconds // unit:0{n}d}")
        elif k == "ampm":
            names = text.split("/")
            out.append(names[hour >= 12])
        elif k == "digit":
            place = sum(kk == "digit" for kk, _ in tokens[:i])
            out.append(f"{ms % 1000:03d}000"[place])
        elif k != "date":
            out.append(_literal(k, text))
        elif first in "yeb":
            out.append(f"{year % 100:02d}" if first == "y" and n < 3 else f"{year:04d}")
        elif first == "d":
            name = _DAYS[weekday]
            out.append((name if n > 3 else name[:3]) if n > 2 else f"{day:0{n}d}")
        elif first == "h":
            out.append(f"{(hour + 11) % 12 + 1 if half else hour:0{min(n, 2)}d}")
        elif first == "s":
            out.append(f"{second:0{min(n, 2)}d}")
        elif first == "m" and n < 3 and _minutes(tokens, i):
            out.append(f"{minute:0{n}d}")
        elif first == "m":
            name = _MONTHS[month - 1]
            out.append({1: str(month), 2: f"{month:02d}", 3: name[:3], 4: name}.get(n, name[0]))
    return "".join(out).strip(" ")


def _minutes(tokens: Tokens, place: int) -> bool:
    """An m after hours or before seconds is minutes, any other months."""

    def unit(i: int) -> str:
        kind, text = tokens[i]
        if kind == "date" or kind == "bracket" and ELAPSED.fullmatch(text):
            return text[0].lower()
        return ""

    before = next((u for i in range(place - 1, -1, -1) if (u := unit(i))), "")
    after = next((u for i in range(place + 1, len(tokens)) if (u := unit(i))), "")
    return before == "h" or after == "s"
