"""Workbook files of every kind behind one interface: an outline, and rows of a sheet.

An outline is JSON: what `envs.workbook.opened` makes a workbook of.  Rows are those of
`cells`.  A `Source` runs in the worker process, never in the one that asks.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Protocol

from envs.workbook.cells import Context, Row
from envs.workbook.container import (
    MIB,
    Archive,
    Damaged,
    Limits,
    WorkbookError,
    ahead,
    kind_of_file,
    reason,
)
from envs.workbook.package import Package, Strings, read_package, relations
from envs.workbook.sheetxml import SheetXml, bounds
from envs.workbook.xml import as_utf8, walk

WHOLE = 4 * MIB  # XML of all sheets up to which they are parsed at once


class Source(Protocol):
    """outline: see `sheet_outline`.  rows: the filled ones of a sheet.
    numbers: their numbers, ascending.  uncalculated: formulas without a stored result.
    heavy: worth keeping in a store once read."""

    outline: dict[str, Any]
    heavy: bool

    def rows(self, sheet: int, top: int, bottom: int) -> list[Row]: ...

    def numbers(self, sheet: int) -> list[int]: ...

    def uncalculated(self, sheet: int) -> int: ...


def open_source(file: BinaryIO, name: str, limits: Limits) -> Source:
    """The source for a file, by its content.  name: the file's, without folders.

    Raises WorkbookError, Damaged, and whatever the readers below raise for broken files.
    """
    kind = kind_of_file(file, "the file")
    file.seek(0)
    if kind == "xlsx":
        source: Source = XlsxSource(file, limits)
    elif kind == "xls":
        from envs.workbook.legacy import read_xls

        source = read_xls(file, limits)
    elif kind == "xlsb":
        from envs.workbook.legacy import read_xlsb

        source = read_xlsb(file, limits)
    elif kind == "ods":
        from envs.workbook.ods import read_ods

        source = read_ods(file, limits)
    else:
        from envs.workbook.delimited import read_csv

        source = read_csv(file, os.path.splitext(name)[0] or name, limits)
    extension = os.path.splitext(name)[1].lower().lstrip(".")
    alike = {"xlsx": ("xlsx", "xlsm", "xltx", "xltm", "xlam"), "csv": ("csv", "tsv", "tab", "txt")}
    if extension and extension not in alike.get(kind, (kind, "xlt", "ots")):
        source.outline["notes"].append(f"the file is {kind} by its content, not {extension}")
    source.outline["kind"] = kind
    return source


def sheet_outline(name: str, used: list[int] | None, **more: Any) -> dict[str, Any]:
    """What an outline says of one sheet.

    used: top, left, bottom, right of the filled cells.  declared: the used range that the file
    claims.  merged: A1 ranges.  hidden_rows, hidden_columns: [first, last] pairs.
    uncalculated: formulas without a stored result, or None where that isn't known yet.
    damage: why its cells can't be read.
    """
    return {
        "name": name,
        "used": used,
        "state": "visible",
        "kind": "worksheet",
        "tab_color": None,
        "declared": None,
        "merged": [],
        "hidden_rows": [],
        "hidden_columns": [],
        "tables": [],
        "uncalculated": 0,
        "protected": False,
        "damage": None,
    } | more


def book_outline(**more: Any) -> dict[str, Any]:
    """An outline without sheets.  notes: what a person should know about the file."""
    return {
        "kind": "",
        "epoch1904": False,
        "formats": ["General"],
        "names": [],
        "notes": [],
        "sheets": [],
    } | more


def spans(numbers: list[int]) -> list[list[int]]:
    """Numbers as [first, last] pairs of those that follow each other."""
    out: list[list[int]] = []
    for number in sorted(set(numbers)):
        if out and out[-1][1] == number - 1:
            out[-1][1] = number
        else:
            out.append([number, number])
    return out


class Grid:
    """Rows of all sheets in memory: the source of the kinds that are read at once."""

    heavy = True

    def __init__(self, outline: dict[str, Any], sheets: list[list[Row]], limits: Limits) -> None:
        self.outline = outline
        self._sheets = [{row[0]: row for row in rows} for rows in sheets]
        cells = sum(len(s[1]) for rows in sheets for row in rows for s in row[1])
        check_cells(cells, limits)
        self.heavy = cells > 20_000
        for sheet, rows in zip(outline["sheets"], sheets, strict=True):
            top, bottom, left, right = bounds(rows)
            sheet["used"] = [top, left, bottom, right] if top else None

    def numbers(self, sheet: int) -> list[int]:
        return sorted(self._sheets[sheet])

    def uncalculated(self, sheet: int) -> int:
        count: int = self.outline["sheets"][sheet]["uncalculated"]
        return count

    def rows(self, sheet: int, top: int, bottom: int) -> list[Row]:
        found = self._sheets[sheet]
        if bottom - top < len(found):
            return [found[n] for n in range(top, bottom + 1) if n in found]
        return [found[n] for n in sorted(found) if top <= n <= bottom]


def check_cells(cells: int, limits: Limits) -> None:
    if cells > limits.cells:
        raise WorkbookError(
            f"holds {cells:,} filled cells; the limit is {limits.cells:,}. Split it into smaller "
            "workbooks"
        )


class XlsxSource:
    """An .xlsx, .xlsm or Strict Open XML file."""

    def __init__(self, file: BinaryIO, limits: Limits) -> None:
        self._archive = Archive(file, limits)
        self._limits = limits
        package = read_package(self._archive)
        self._strings_part = package.strings_part
        self._strings: Strings | None = None
        parts = [e.part for e in package.sheets if e.part and e.kind == "worksheet"]
        self._whole = sum(map(self._archive.size, set(parts))) <= WHOLE
        self._sheets: list[SheetXml | None] = []
        self.outline = book_outline(
            epoch1904=package.epoch1904,
            formats=package.formats,
            notes=list(package.notes),
            names=[vars(name) for name in package.names],
        )
        for entry in package.sheets:
            with _inside(entry.name):
                found, said = self._sheet(package, entry.part, entry.kind)
            said |= {"name": entry.name, "state": entry.state, "kind": entry.kind}
            self._sheets.append(found)
            self.outline["sheets"].append(said)
        if not package.sheets:
            raise Damaged("it lists no sheets")
        self.heavy = sum(sheet.size for sheet in self._sheets if sheet) > 1 << 20

    def _sheet(
        self, package: Package, part: str | None, kind: str
    ) -> tuple[SheetXml | None, dict[str, Any]]:
        if kind != "worksheet":
            return None, sheet_outline("", None)
        if part is None:
            return None, sheet_outline("", None, damage="the part with its cells is missing")
        context = Context(self._shared_strings, package.epoch1904)

        def document() -> Generator[bytes]:
            chunks = self._archive.chunks(part)
            large = self._archive.size(part) > 4 * MIB
            yield from ahead(chunks) if large else chunks

        sheet = SheetXml(document, context, self._whole)
        used = sheet.used
        said = sheet_outline(
            "",
            [used.top, used.left, used.bottom, used.right] if used else None,
            tab_color=None if sheet.tab_color is None else package.color(sheet.tab_color),
            declared=sheet.declared,
            merged=sheet.merged,
            hidden_rows=spans(sheet.hidden_rows),
            hidden_columns=[list(pair) for pair in sheet.hidden_columns],
            uncalculated=sheet.uncalculated,
            protected=sheet.protected,
        )
        if sheet.table_ids:
            links = relations(self._archive, part)
            for number in sheet.table_ids:
                target = links.get(number, ("", ""))[1]
                try:
                    said["tables"].append(read_table(self._archive.read(target)))
                except Damaged as error:
                    self.outline["notes"].append(f"a table can't be read ({reason(error)})")
        return sheet, said

    def _shared_strings(self) -> Strings | None:
        if self._strings is None and self._strings_part is not None:
            self._strings = Strings(as_utf8(self._archive.read(self._strings_part)))
        return self._strings

    def uncalculated(self, sheet: int) -> int:
        found = self._sheets[sheet]
        if found is None:
            return 0
        with _inside(self.outline["sheets"][sheet]["name"]):
            return found.count_formulas()

    def numbers(self, sheet: int) -> list[int]:
        found = self._sheets[sheet]
        return [] if found is None else found.numbers

    def rows(self, sheet: int, top: int, bottom: int) -> list[Row]:
        found = self._sheets[sheet]
        if found is None:
            return []
        with _inside(self.outline["sheets"][sheet]["name"]):
            return found.rows(top, bottom)


@contextmanager
def _inside(name: str) -> Iterator[None]:
    """Names the sheet in what is said of its damage."""
    try:
        yield
    except (Damaged, zlib.error) as error:
        raise Damaged(f"sheet {name[:40]!r}: {reason(error)}") from error


def read_table(data: bytes) -> dict[str, Any]:
    """Name, range, column names and whether it has header and totals rows."""
    table: dict[str, Any] = {"name": "", "ref": "", "columns": [], "header": True, "totals": False}

    def start(tag: str, attributes: dict[str, str]) -> None:
        if tag == "table":
            table["name"] = attributes.get("displayName") or attributes.get("name", "")
            table["ref"] = attributes.get("ref", "")
            table["header"] = attributes.get("headerRowCount", "1") != "0"
            table["totals"] = attributes.get("totalsRowCount", "0") not in ("", "0")
        elif tag == "tableColumn":
            table["columns"].append(attributes.get("name", ""))

    walk(data, start)
    return table
