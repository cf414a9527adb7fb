"""References and formulas of OpenDocument files, as Excel writes them."""

from __future__ import annotations

import re
from collections.abc import Callable


def quoted_sheet(name: str) -> str:
    return name if re.fullmatch(r"\w+", name) else "'" + name.replace("'", "''") + "'"


_ADDRESS = re.compile(r"\$?(?:'((?:[^']|'')+)'|([^.'\[\]:;]*))\.(\$?[A-Za-z]+\$?[0-9]+)")


def target(text: str) -> tuple[str, str] | None:
    """Sheet and range of `$Sheet1.$A$1:.$B$2`."""
    ends = text.split(":.") if ":." in text else re.split(r":(?=\$?['\w])", text)
    first = _ADDRESS.fullmatch(ends[0])
    if not first:
        return None
    sheet = (first[1] or first[2] or "").replace("''", "'")
    if len(ends) == 1:
        return sheet, first[3]
    last = ends[1] if ":." in text else (m[3] if (m := _ADDRESS.fullmatch(ends[1])) else "")
    return (sheet, f"{first[3]}:{last}") if last else None


def display(formula: str) -> str:
    """`of:=SUM([.A1:.A3];2)` as `=SUM(A1:A3,2)`."""
    text = re.sub(r"^[a-z]+:(?==)", "", formula.strip())

    def reference(match: re.Match[str]) -> str:
        inner = match[1]
        found = target(inner)
        if found:
            return f"{quoted_sheet(found[0])}!{found[1]}" if found[0] else found[1]
        return inner.replace(".", "")

    out, last = [], 0
    for quoted in re.finditer(r'"(?:[^"]|"")*"', text):
        out += [_plain(text[last : quoted.start()], reference), quoted[0]]
        last = quoted.end()
    out.append(_plain(text[last:], reference))
    shown = "".join(out)
    return shown if shown.startswith("=") else "=" + shown


def _plain(text: str, reference: Callable[[re.Match[str]], str]) -> str:
    return re.sub(r"\[([^\]]*)\]", reference, text).replace(";", ",")
