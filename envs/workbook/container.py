"""The gate before a workbook file is parsed: what kind of file it is, and whether it is safe.

An .xlsx is a zip of XML parts, so a small file may hold gigabytes, or entities that grow
without end.  `open_container` lets nothing of that kind reach the parser: it bounds entries,
unpacked bytes, ratio and number of tags by unpacking every XML part once as a stream, and
refuses any DOCTYPE.  It also picks up the tab colours, which openpyxl's streaming mode leaves
out.  What remains is a file whose parsing is bounded by its own size.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO
from xml.parsers import expat

MIB = 1 << 20


class WorkbookError(ValueError):
    """The file isn't a workbook that can be read; the text says why and what to do."""


class Damaged(Exception):
    """What is wrong inside a file; `damaged` tells it to the user."""


def reason(error: Exception) -> str:
    """The error in one short line."""
    kind = "" if isinstance(error, Damaged) else f"{type(error).__name__}: "
    return f"{kind}{error}".split("\n")[0][:200]


def damaged(path: Path, error: Exception) -> WorkbookError:
    """What the user is told of a file that breaks the reader with `error`."""
    return WorkbookError(
        f"can't read {path}: the file is damaged ({reason(error)}); open it in a spreadsheet "
        "program and save it again"
    )


@dataclass(frozen=True)
class Limits:
    """What a file may hold.

    unpacked, free: bytes of all parts; the ratio counts once more than `free` are out.
    tags: `<` in worksheets and shared strings (a filled cell has about four); other parts may
        hold a tenth, for openpyxl makes heavier objects of them.
    slots: cells of all rows, counted from column A to each row's last cell.
    """

    entries: int = 10_000
    unpacked: int = 512 * MIB
    free: int = 10 * MIB
    ratio: int = 200
    tags: int = 16_000_000
    slots: int = 10_000_000


@dataclass
class Container:
    """An open workbook file.  tab_colors: worksheet part -> "RRGGBB"."""

    file: BinaryIO
    tab_colors: dict[str, str] = field(default_factory=dict)


def open_container(path: Path, limits: Limits) -> Container:
    """Opens and checks a file; the caller closes `file`.  Raises WorkbookError or OSError."""
    if not path.is_file():  # opening a pipe waits for its other end
        raise WorkbookError(f"{path} isn't a file; give the path of an .xlsx file")
    file = open(path, "rb")
    try:
        _check_kind(path, file.read(1 << 16))
        file.seek(0)
        container = Container(file)
        with zipfile.ZipFile(file) as archive:
            _check_sizes(path, archive, limits)
            for info in archive.infolist():
                if info.filename.lower().endswith((".xml", ".rels", ".vml")):
                    _scan_part(path, archive, info, limits, container)
        file.seek(0)
        return container
    except BaseException as error:
        file.close()
        if isinstance(error, WorkbookError) or not isinstance(error, Exception):
            raise
        # Broken archives make zipfile, zlib and seek raise errors of a dozen kinds.
        raise damaged(path, error) from error


def _check_kind(path: Path, head: bytes) -> None:
    if not head:
        raise WorkbookError(f"{path} is empty; give the path of an .xlsx file")
    if head[:2] == b"PK":
        return
    what = "isn't an .xlsx workbook"
    if head.startswith(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"):
        locked = "EncryptedPackage".encode("utf-16-le") in head
        what = "is password-protected" if locked else "is an old .xls workbook"
    elif head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"<":
        what = "is HTML or XML, whatever its name says"
    raise WorkbookError(f"{path} {what}; save it as plain .xlsx and try again")


def _check_sizes(path: Path, archive: zipfile.ZipFile, limits: Limits) -> None:
    """zipfile never unpacks more of an entry than its declared size, so these hold."""
    entries = archive.infolist()
    if any(e.filename.replace("\\", "/").lower() == "xl/workbook.bin" for e in entries):
        raise WorkbookError(f"{path} is a binary .xlsb workbook; save it as plain .xlsx")
    if not any(e.filename == "[Content_Types].xml" for e in entries):
        raise WorkbookError(f"{path} is a zip file without a workbook; save it as plain .xlsx")
    if len(entries) > limits.entries:
        raise WorkbookError(
            f"{path} holds {len(entries):,} parts; the limit is {limits.entries:,}. "
            "Save it anew from a spreadsheet program"
        )
    unpacked = sum(e.file_size for e in entries)
    if unpacked > limits.unpacked:
        raise WorkbookError(
            f"{path} unpacks to {unpacked // MIB:,} MiB; the limit is "
            f"{limits.unpacked // MIB:,} MiB. Split it into smaller workbooks"
        )
    packed = sum(e.compress_size for e in entries)
    if unpacked > limits.free and unpacked > limits.ratio * packed:
        raise WorkbookError(
            f"{path} unpacks to {unpacked // max(packed, 1):,} times its size, as zip bombs do; "
            f"the limit is {limits.ratio}. Save it anew from a spreadsheet program"
        )


class _Seen(Exception):
    """Enough of a part was parsed."""


def _scan_part(
    path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo, limits: Limits, out: Container
) -> None:
    """Counts the part's tags; parses it up to its cells for a DOCTYPE and a tab colour."""
    name = info.filename.lower()
    heavy = not name.startswith(("xl/worksheets/", "xl/sharedstrings"))
    most = limits.tags // 10 if heavy else limits.tags
    color: list[str] = []
    parser = _head_parser(path, color)
    parsing, tags = True, 0
    with archive.open(info) as part:
        while chunk := part.read(1 << 16):
            tags += chunk.count(b"<")
            if tags > most:
                raise WorkbookError(
                    f"{path}: part {info.filename} holds more than {most:,} tags, which is more "
                    "than this reader takes. Split it into smaller workbooks"
                )
            if parsing:
                try:
                    parser.Parse(chunk)
                except (_Seen, expat.ExpatError):
                    parsing = False  # a broken part may be one that is never read
    if color:
        out.tab_colors[info.filename.lstrip("/")] = color[0]


def _head_parser(path: Path, color: list[str]) -> expat.XMLParserType:
    parser = expat.ParserCreate()

    def doctype(*_: object) -> None:
        raise WorkbookError(
            f"{path} holds a DOCTYPE, which no workbook needs; save it anew from a spreadsheet "
            "program"
        )

    def element(tag: str, attributes: dict[str, str]) -> None:
        local = tag.rpartition(":")[2]
        if local == "tabColor":
            color.append(attributes.get("rgb", "")[-6:])
        if local not in ("worksheet", "sheetPr", "tabColor", "outlinePr", "pageSetUpPr"):
            raise _Seen

    parser.StartDoctypeDeclHandler = doctype
    parser.StartElementHandler = element
    return parser
