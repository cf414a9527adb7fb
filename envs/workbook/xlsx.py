"""The source of .xlsx and .xlsm files: their package, and cells out of its XML on demand."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from envs.workbook.cells import Context, Row
from envs.workbook.container import MIB, Archive, Damaged, Limits, ahead, reason
from envs.workbook.grid import book_outline, sheet_outline, spans
from envs.workbook.package import Package, Strings, read_package, relations
from envs.workbook.sheetxml import SheetXml
from envs.workbook.xml import as_utf8, walk

WHOLE = 4 * MIB  # XML of all sheets up to which they are parsed at once


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
