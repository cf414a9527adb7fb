"""The type and the value of an answer to a free question.

A generated task says which type its truth has; a free question doesn't, so the type follows from
how the answer is written, by the same rules that rewards go by (`envs.fast_ask.answers`).

Left out: units.  "12500" may be cents or a count: the question tells, not the answer.
"""

from __future__ import annotations

import re
from typing import Any

from envs.fast_ask import answers

# The first that fits.
_TYPES = ("yes_no", "month", "date", "invoice", "row", "cents")
_DECIMAL = re.compile(r"-?(?:\d{1,15}|\d{1,3}(?:,\d{3}){1,4})\.\d{1,12}", re.A)
_ROW = re.compile(r"'?(.+?)'?(?:!\D*| row )\d+", re.I | re.A)


def kind_and_value(text: str) -> tuple[str, Any]:
    """(type, value as JSON can hold it):

    yes_no: true or false.  month: "2024-03".  date: "2024-03-31".  invoice: "INV-12".
    row: {"sheet": ..., "row": ...}.  cents: an int, where the answer says that it is cents.
    number: an int or, with decimals, a float.  name: any other text, as it is.
    """
    for kind in _TYPES:
        value = answers.parse(text, kind)
        if value is None:
            continue
        if kind == "row":
            assert isinstance(value, tuple)
            match = _ROW.search(text)
            return kind, {"sheet": match[1] if match else value[0], "row": value[1]}
        if kind == "date":
            return kind, str(value)
        if kind == "cents" and "cent" not in text.lower():
            kind = "number"
        return kind, value
    bare = text.strip().strip("*`").removesuffix(".").strip()
    if _DECIMAL.fullmatch(bare):
        return "number", float(bare.replace(",", ""))
    return "name", text
