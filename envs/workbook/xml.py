"""XML as workbooks hold it: names without their prefixes, no DOCTYPE, any encoding.

Prefixes are dropped rather than resolved: the parts of a workbook use no two names that differ
by namespace alone, Strict and Transitional files differ in nothing else, and rows can then be
parsed without the document around them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from xml.parsers import expat

from envs.workbook.container import Damaged, WorkbookError

Start = Callable[[str, dict[str, str]], None]
_DECLARED = re.compile(rb"""\s*<\?xml[^>]*?encoding\s*=\s*["']([A-Za-z0-9._-]+)["']""")


def doctype(*_: object) -> None:
    """No workbook needs one, and entities are declared there."""
    raise WorkbookError(
        "holds a document type declaration (DOCTYPE), which no workbook needs; save it anew from "
        "a spreadsheet program"
    )


def parser(
    start: Start,
    end: Callable[[str], None] | None = None,
    text: Callable[[str], None] | None = None,
) -> expat.XMLParserType:
    """An expat parser that gives local names and refuses every DOCTYPE."""
    made = expat.ParserCreate()
    made.buffer_text = True
    made.StartDoctypeDeclHandler = doctype

    def local(tag: str, attributes: dict[str, str]) -> None:
        start(tag.rpartition(":")[2], attributes)

    def local_end(tag: str) -> None:
        if end is not None:
            end(tag.rpartition(":")[2])

    made.StartElementHandler = local
    if end is not None:
        made.EndElementHandler = local_end
    if text is not None:
        made.CharacterDataHandler = text
    return made


def walk(
    data: bytes,
    start: Start,
    end: Callable[[str], None] | None = None,
    text: Callable[[str], None] | None = None,
) -> None:
    """Parses a whole document.  Raises Damaged for broken XML, WorkbookError for a DOCTYPE."""
    try:
        parser(start, end, text).Parse(data, True)
    except expat.ExpatError as error:
        raise Damaged(f"broken XML: {error}") from error


def relation(attributes: dict[str, str], name: str = "id") -> str | None:
    """The value of `r:id`, under whatever prefix."""
    for key, value in attributes.items():
        if key.endswith(":" + name):
            return value
    return None


def is_true(value: str | None) -> bool:
    return value in ("1", "true", "on")


def as_utf8(data: bytes) -> bytes:
    """The document in UTF-8 without a byte order mark, whatever it was in."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16").encode()
    if data[:3] == b"\xef\xbb\xbf":
        return data[3:]
    declared = _DECLARED.match(data[:200])
    if declared and declared[1].lower() not in (b"utf-8", b"utf8", b"us-ascii", b"ascii"):
        try:
            return data.decode(declared[1].decode()).encode()
        except LookupError as error:
            raise Damaged(f"unknown encoding {declared[1].decode()!r}") from error
    return data
