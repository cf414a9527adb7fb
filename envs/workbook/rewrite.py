"""A worksheet written anew, so that its rows can be told apart without a parser.

For documents with comments, CDATA sections, prefixes, or in another encoding than UTF-8.  Slow,
and rarely needed: no large program writes such sheets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from xml.sax.saxutils import escape, quoteattr

from envs.workbook.container import Damaged
from envs.workbook.xml import as_utf8, walk

_DEEPEST = 100


def written_anew(chunks: Iterator[bytes], take: Callable[[bytes], None]) -> bytes:
    """Gives `take` each row, from `<row` to before its `</row>`; returns the document without
    them.  Raises Damaged for broken XML, and for what is no worksheet."""
    frame: list[str] = []
    row: list[str] | None = None
    path: list[str] = []

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal row
        if tag == "row" and path[-1:] == ["sheetData"]:
            row = []
        path.append(tag)
        if len(path) > _DEEPEST:
            raise Damaged("its elements are nested too deep")
        words = "".join(f" {key}={quoteattr(value)}" for key, value in attributes.items())
        (frame if row is None else row).append(f"<{tag}{words}>")

    def end(tag: str) -> None:
        nonlocal row
        path.pop()
        if row is not None and tag == "row" and path[-1:] == ["sheetData"]:
            take("".join(row).encode())
            row = None
        else:
            (frame if row is None else row).append(f"</{tag}>")

    def text(data: str) -> None:
        if row is not None:
            row.append(escape(data, {"\r": "&#13;"}))

    data = as_utf8(b"".join(chunks))
    if data[:5] == b"<?xml":  # it says what the document was in before
        data = data[data.find(b"?>") + 2 :]
    walk(data, start, end, text)
    if frame[:1] and not frame[0].startswith(("<worksheet", "<dialogsheet", "<macrosheet")):
        raise Damaged(f"the part is a {frame[0][:40]}, not a worksheet")
    return "".join(frame).encode()
