"""Formulas that a file holds no results of, against results worked out by hand."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import openpyxl
import pytest
from openpyxl.workbook.defined_name import DefinedName

from envs.workbook import Area, BlockStore, CellError, read_workbook
from envs.workbook.opened import OpenedWorkbook
from envs.workbook.reader import recalculated

pytest.importorskip("formualizer")


def made(path: Path, formulas: dict[str, object], names: dict[str, str] | None = None) -> Path:
    book = openpyxl.Workbook()
    book.active.title = "S"
    inputs = {"A1": 1, "A2": 2, "A3": "x", "A4": dt.date(2024, 2, 29), "A5": "#N/A"}
    for ref, value in inputs.items():
        book.active[ref] = value
    book.create_sheet("My sheet")["A1"] = 40
    for name, text in (names or {}).items():
        book.defined_names[name] = DefinedName(name, attr_text=text)
    for ref, value in formulas.items():
        book.active[ref] = value
    book.save(path)
    return path


def results(path: Path, count: int) -> list:
    book = read_workbook(path)
    assert not book.notes
    return [row[0] for _, row in book["S"].block(Area(1, 2, count, 2))]


def test_results_by_hand(tmp_path: Path) -> None:
    wanted = {
        "=A1+A2": 3, '=A1&"x"': "1x", "=SUM(A1:A2)*2": 6, "=A1>0": True,
        "=1/0": CellError("#DIV/0!"), "='My sheet'!A1+A2": 42, "=IFERROR(1/0,7)": 7,
        "=B1+B3": 9, "=YEAR(A4)": 2024,
        "=A1/A2": 0.5, "=Rate*A2": 0.4, "=SUM(Both)": 3, "=A3": "x", "=LEN(A3)": 1,
    }  # fmt: skip
    formulas = {f"B{n}": text for n, text in enumerate(wanted, 1)}
    path = made(tmp_path / "book.xlsx", formulas, {"Rate": "0.2", "Both": "S!$A$1:$A$2"})
    assert results(path, len(wanted)) == list(wanted.values())


def test_what_cannot_be_known_is_left_and_so_is_what_depends_on_it(tmp_path: Path) -> None:
    texts = ["=[1]Other!A1", "=B1+1", "=NOSUCH(1)", "=B3", "=IFERROR(B1,0)", "=Unknown+1", "=A1+A2"]
    path = made(tmp_path / "book.xlsx", {f"B{n}": t for n, t in enumerate(texts, 1)})
    book = read_workbook(path)
    assert [row[0] for _, row in book["S"].block(Area(1, 2, 7, 2))] == [None] * 6 + [3]
    assert book.uncalculated() == {"S": 6}
    (_, (cell,)), = book["S"].cells(Area(7, 2, 7, 2))
    assert (cell.value, cell.formula, cell.stored, cell.calculated) == (3, "=A1+A2", False, True)
    assert set(book["S"].remarks(Area(1, 2, 7, 2))) == {(n, 2) for n in range(1, 7)}


def test_stored_results_stand_and_can_be_calculated_anew(tmp_path: Path) -> None:
    import zipfile

    path = made(tmp_path / "book.xlsx", {"B1": "=A1+A2"})
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    name = "xl/worksheets/sheet1.xml"
    parts[name] = parts[name].replace(b"<v />", b"<v>999</v>").replace(b"<v/>", b"<v>999</v>")
    with zipfile.ZipFile(path, "w") as archive:
        for part, data in parts.items():
            archive.writestr(part, data)
    assert results(path, 1) == [999]
    assert recalculated(path) == {"S": {(1, 2): 3}, "My sheet": {}}


def test_a_large_book_is_calculated_when_it_is_needed_and_from_the_store(tmp_path: Path) -> None:
    book = openpyxl.Workbook(write_only=True)
    sheet = book.create_sheet("S")
    for n in range(1, 24_001):
        sheet.append(["word " * 40, n, f"=B{n}*2" if n > 23_990 else n])
    path = tmp_path / "book.xlsx"
    book.save(path)
    store = BlockStore(tmp_path / "kept")
    for _ in range(2):
        found = read_workbook(path, store=store)
        assert isinstance(found, OpenedWorkbook)
        rows = dict(found["S"].block(Area(23_990, 2, 24_000, 3)))
        assert rows[23_990] == [23_990, 23_990] and rows[24_000] == [24_000, 48_000]
        assert found.uncalculated() == {}
        if hasattr(found.feed, "keep"):
            assert found.feed.keep()
    assert not hasattr(found.feed, "keep")
