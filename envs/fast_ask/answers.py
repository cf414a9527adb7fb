"""Answers: how a truth is written, and how an `ANSWER:` line is read back.

An answer is right only when its last `ANSWER:` line parses to the expected type and equals
the truth exactly (Fast Ask post, reward section).  Money is whole cents: "12500" and
"12,500" parse, "125.00" does not.
"""

from __future__ import annotations

import datetime as dt
import re

ANSWER_TYPES = ("cents", "name", "yes_no", "month", "invoice", "date", "row")

# ASCII: a digit of another script is no digit here, whatever int() thinks of it.
_CENTS = re.compile(r"(-?)(\d{1,18}|\d{1,3}(?:,\d{3}){1,5})(?: ?cents)?", re.I | re.A)
_ROW = re.compile(r"('?)([A-Z][\w ]{0,40}?)\1(?:!\$?[A-Z]{0,3}\$?| row )(\d{1,7})", re.I | re.A)
_MONTH = re.compile(r"\d{4}-(0[1-9]|1[0-2])", re.A)
_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.A)
_INVOICE = re.compile(r"INV-\d{1,12}", re.I | re.A)


def last_answer(text: str) -> str | None:
    """What stands on the last line that begins with `ANSWER:`, or None."""
    for line in reversed(text.split("\n")):
        line = line.strip()
        if line.startswith("ANSWER:"):
            return line.removeprefix("ANSWER:").strip()
    return None


def parse(text: str | None, answer_type: str) -> object | None:
    """The typed value of an answer, or None when it doesn't parse as that type."""
    if not text or len(text) > 200:
        return None
    text = text.strip().strip("*`").removesuffix(".").strip()
    if answer_type == "cents":
        match = _CENTS.fullmatch(text)
        return int(match[1] + match[2].replace(",", "")) if match else None
    if answer_type == "yes_no":
        return {"yes": True, "no": False}.get(text.lower())
    if answer_type == "month":
        return text if _MONTH.fullmatch(text) else None
    if answer_type == "date":
        if not _DATE.fullmatch(text):
            return None
        try:
            return dt.date.fromisoformat(text)
        except ValueError:
            return None
    if answer_type == "invoice":
        return text.upper() if _INVOICE.fullmatch(text) else None
    if answer_type == "row":
        match = _ROW.fullmatch(text)
        return (match[2].lower(), int(match[3])) if match else None
    if answer_type == "name":
        return text.casefold() or None
    raise ValueError(f"unknown answer type {answer_type!r}; types: {', '.join(ANSWER_TYPES)}")


def write(truth: object, answer_type: str) -> str:
    """The answer as the model should write it."""
    if answer_type == "yes_no":
        return "yes" if truth else "no"
    if answer_type == "row":
        assert isinstance(truth, tuple)
        return f"{truth[0]}!{truth[1]}"
    return str(truth)


def is_right(text: str | None, truth: str, answer_type: str) -> bool:
    """`truth` is a written answer; both sides go through the same parser."""
    value = parse(text, answer_type)
    return value is not None and value == parse(truth, answer_type)
