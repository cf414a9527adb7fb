"""Workbook files: what is written is what is read, and what can't be read is one clear error."""

from __future__ import annotations

import datetime as dt
import os
import re
import socket
import zipfile
from pathlib import Path

import openpyxl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envs.workbook import (
    Area,
    CellError,
    Sheet,
    Workbook,
    WorkbookError,
    read_workbook,
    write_xlsx,
)
from envs.workbook.container import open_file

ERRORS = ("#N/A", "#DIV/0!", "#REF!", "#VALUE!", "#NAME?", "#NUM!", "#NULL!")
texts = st.text(
    st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="\ufffe\uffff"),
    min_size=1,
    max_size=12,
).filter(lambda t: "_x" not in t)
values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**15), 10**15),
    st.floats(-1e12, 1e12).filter(lambda f: f != int(f)),
    texts,
    st.sampled_from(("=1+1", "#N/A", "00501", "TRUE", "1e5", " padded ", "'quoted'")),
    st.sampled_from(ERRORS).map(CellError),
    st.dates(dt.date(1901, 1, 1), dt.date(2200, 1, 1)),
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.dictionaries(st.integers(1, 40), st.lists(values, min_size=1, max_size=6), max_size=8))
def test_values_come_back_as_they_were(tmp_path: Path, rows: dict[int, list]) -> None:
    sheet = Sheet("Data", {r: tuple(cells) for r, cells in rows.items()})
    path = tmp_path / "book.xlsx"
    write_xlsx(Workbook([sheet]), path)
    (back,) = read_workbook(path).sheets
    used = sheet.used()
    assert back.used() == used
    if used:
        for (r1, ours), (r2, theirs) in zip(sheet.block(used), back.block(used), strict=True):
            assert r1 == r2
            assert [type(v) for v in theirs] == [type(v) for v in ours]
            for our, their in zip(ours, theirs, strict=True):
                # openpyxl writes 15 or 16 digits of a float
                assert their == (pytest.approx(our, rel=1e-14) if type(our) is float else our)


def test_formats_dates_and_tab_colours_are_real_ones(tmp_path: Path) -> None:
    day = dt.date(2024, 2, 29)
    sheet = Sheet(
        "It's here", {3: ("day", "amount_cents"), 4: (day, 12500)}, "DECADE", {2: '#,##0"c"'}
    )
    path = tmp_path / "book.xlsx"
    write_xlsx(Workbook([sheet, Sheet("Plain")]), path)
    ws = openpyxl.load_workbook(path)["It's here"]
    assert ws["A4"].is_date and ws["A4"].number_format == "yyyy-mm-dd"
    assert ws["A4"].value == dt.datetime(2024, 2, 29)
    assert ws["B4"].value == 12500 and ws["B4"].number_format == '#,##0"c"'
    assert ws["B3"].number_format == "General"
    assert ws.sheet_properties.tabColor.rgb[-6:] == "DECADE"
    book = read_workbook(path)
    assert book.names() == ["It's here", "Plain"]
    assert [s.tab_color for s in book.sheets] == ["DECADE", None]
    assert book["it's HERE"].rows == sheet.rows and book["Plain"].used() is None
    assert type(book["It's here"].rows[4][0]) is dt.date


def test_times_and_durations(tmp_path: Path) -> None:
    book = openpyxl.Workbook()
    ws = book.active
    ws["B2"] = dt.datetime(2024, 5, 6, 7, 8)
    ws["C2"] = dt.time(9, 30)
    ws["D2"] = dt.timedelta(hours=30)
    ws["E2"], ws["E2"].number_format = dt.datetime(2024, 5, 6), "yyyy-mm-dd hh:mm"
    path = tmp_path / "book.xlsx"
    book.save(path)
    row = read_workbook(path).sheets[0].rows[2]
    assert row == (
        None,
        dt.datetime(2024, 5, 6, 7, 8),
        dt.time(9, 30),
        dt.timedelta(hours=30),
        dt.datetime(2024, 5, 6),
    )


def test_formulas_give_their_stored_result(tmp_path: Path) -> None:
    book = openpyxl.Workbook()
    book.active["A1"], book.active["A2"] = 3, "=A1*2"
    path = tmp_path / "book.xlsx"
    book.save(path)  # openpyxl stores no results
    (sheet,) = read_workbook(path, calculate=False).sheets
    assert (sheet.rows, sheet.uncalculated) == ({1: (3,)}, 1)
    _rewrite(path, lambda name, data: re.sub(rb"<v ?/>", b"<v>6</v>", data))
    (sheet,) = read_workbook(path).sheets
    assert (sheet.rows, sheet.uncalculated) == ({1: (3,), 2: (6,)}, 0)


def test_an_empty_text_is_a_result(book: Path) -> None:
    _with_rows(
        book,
        '<row r="1"><c r="A1" t="str"><f>""</f><v></v></c><c r="B1" t="str"><f>""</f></c>'
        '<c r="C1"><f>1</f></c><c r="D1"/></row>',
    )
    assert read_workbook(book, calculate=False).sheets[0].uncalculated == 2


def test_an_error_cell_is_not_the_text_of_its_code() -> None:
    assert CellError("#N/A") == CellError("#N/A") != CellError("#REF!")
    assert CellError("#N/A") != "#N/A" and str(CellError("#N/A")) == "#N/A"
    assert len({CellError("#N/A"), CellError("#N/A"), "#N/A"}) == 2


def test_used_range_and_blocks() -> None:
    sheet = Sheet("S", {4: (None, None, "x"), 9: (None, 1, None, None), 11: (None, None)})
    assert sheet.used() == Area(4, 2, 9, 3)
    assert list(sheet.block(Area(8, 1, 10, 4))) == [
        (8, [None] * 4),
        (9, [None, 1, None, None]),
        (10, [None] * 4),
    ]
    assert list(sheet.block(Area(4, 3, 4, 5))) == [(4, ["x", None, None])]
    assert Sheet("E").used() is None and Sheet("E", {1: (None,)}).used() is None
    with pytest.raises(KeyError, match="no sheet named 'T'; sheets: S"):
        Workbook([sheet])["T"]


# --- what can't be read ----------------------------------------------------------------


def _rewrite(path: Path, change) -> None:
    """Passes every part of a workbook file through `change(name, data)`; None drops it."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in parts.items():
            changed = change(name, data)
            if changed is not None:
                archive.writestr(name, changed)


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.xlsx"
    write_xlsx(Workbook([Sheet("S", {1: ("name", "cents"), 2: ("Ada", 5)}, "FACADE")]), path)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(WorkbookError) as caught:
        read_workbook(path)
    text = str(caught.value)
    assert str(path) in text and "\n" not in text and len(text) < 500
    return text


def test_no_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such workbook"):
        read_workbook(tmp_path / "none.xlsx")
    assert "is a folder" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"\0\1\2 binary \0", "isn't a workbook of a known kind"),
        (b"\xef\xbb\xbf<html><table></table></html>", "is HTML"),
        (b"<?xml version='1.0'?><Workbook xmlns='urn:schemas-microsoft-com:office:spreadsheet'>",
         "an XML spreadsheet of Excel 2003"),
        (b"%PDF-1.7", "PDF"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(2000), "damaged"),
        (
            b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + "-EncryptedPackage".encode("utf-16-le"),
            "password-protected",
        ),
        (b"PK\x03\x04 and then nothing", "damaged"),
    ],
)
def test_other_files_are_named_for_what_they_are(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "thing.xlsx"
    path.write_bytes(content)
    assert says in refusal(path)


def test_a_zip_that_is_no_workbook(tmp_path: Path) -> None:
    path = tmp_path / "other.xlsx"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    assert "is a zip file without a workbook" in refusal(path)
    write_xlsx(Workbook([Sheet("S")]), path)
    _rewrite(path, lambda name, data: data.replace(b"spreadsheetml.sheet.main", b"wordprocessing"))
    assert "is a document of another program" in refusal(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("xl/workbook.bin", b"\x00")
    assert "damaged" in refusal(path)


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_what_is_no_file_is_not_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "thing.xlsx"
    with socket.socket(socket.AF_UNIX) as server:
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            server.bind(str(path))
        else:
            path = Path("/dev/zero")
        assert "isn't a file" in refusal(path)
        with pytest.raises(WorkbookError, match="isn't a file"):
            open_file(path)


def test_every_cut_of_a_file_is_refused(book: Path) -> None:
    whole = book.read_bytes()
    for share in range(1, 20):
        book.write_bytes(whole[: len(whole) * share // 20])
        assert "damaged" in refusal(book)


@pytest.mark.parametrize("part", ["xl/workbook.xml", "xl/worksheets/sheet1.xml"])
def test_broken_parts(book: Path, part: str) -> None:
    _rewrite(book, lambda name, data: data[: len(data) // 2] if name == part else data)
    assert "can't read" in refusal(book)


SAVE_AGAIN = "; open it in a spreadsheet program and save it again"
MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"


def _with_rows(path: Path, rows: str) -> None:
    """Puts other rows into the file's first sheet."""
    sheet = f'<worksheet xmlns="{MAIN}"><sheetData>{rows}</sheetData></worksheet>'.encode()
    _rewrite(path, lambda name, data: sheet if name.endswith("/sheet1.xml") else data)


@pytest.mark.parametrize(
    ("rows", "cause"),
    [
        ('<row r="3"><c r="A3"><v>1</v></c></row><row r="2"/><row r="3"><c r="B3"><v>9</v></c>'
         "</row>", "row 3 is there twice"),
        ('<row r="2"><c r="A2"><v>1</v></c><c r="A2"><v>2</v></c></row>',
         "cell A2 is there twice"),
        ('<row r="0"><c><v>1</v></c></row>', "a row has the number 0"),
        ('<row r="-1"><c><v>1</v></c></row>', "a row has the number -1"),
        ('<row r="99999999"><c r="A99999999"><v>1</v></c></row>', "has the number 99999999"),
        ('<row r="1"><c r="A1"><v>1</v></c><c r="B7"><v>1</v></c></row>',
         "row 1 holds a cell of row 7"),
        ('<row r="4"><c r="XFE4"><v>1</v></c></row>', "row 4 holds a cell past column XFD"),
        ('<row r="4"><c r="ZZZZ4"><v>1</v></c></row>', "cell 'ZZZZ4': no such place"),
        ('<row r="4"><c r="A4"><v>NaN</v></c></row>', "cell 'A4': ValueError: 'NaN' is no number"),
        ('<row r="4"><c r="A4" t="s"><v>99</v></c></row>', "'A4': there is no shared string 99"),
        ('<row r="4"><c t="s"><v>-1</v></c></row>', "'A4': there is no shared string -1"),
        ('<row r="x"/>', "a row has the number 'x'"),
    ],
)  # fmt: skip
def test_damaged_rows_are_named(book: Path, rows: str, cause: str) -> None:
    _with_rows(book, rows)
    said = refusal(book)
    assert said.startswith(f"can't read {book}: the file is damaged (sheet 'S': ")
    assert cause in said and said.endswith(SAVE_AGAIN)


def test_rows_in_any_order_and_without_numbers(book: Path) -> None:
    _with_rows(
        book,
        '<row r="3"><c r="B3"><v>1</v></c><c r="A3"><v>2</v></c></row><row r="1"><c><v>3</v></c>'
        '</row><row><c><v>4</v></c><c><v>5</v></c></row><row><c r="A9"><v>6</v></c></row>',
    )
    rows = read_workbook(book).sheets[0].rows
    assert rows == {3: (2, 1), 1: (3,), 2: (4, 5), 9: (6,)}


def _several(path: Path, *names: str) -> Path:
    write_xlsx(Workbook([Sheet(name, {1: (name,)}) for name in names]), path)
    return path


@pytest.mark.parametrize(
    ("part", "old", "new", "cause"),
    [
        ("xl/workbook.xml", b'name="Two"', b'name="one"', "two sheets are named 'one'"),
        ("xl/workbook.xml", b'name="Two"', b'name=""', "a sheet has no name"),
    ],
)
def test_no_sheet_is_lost(
    tmp_path: Path, part: str, old: bytes, new: bytes | None, cause: str
) -> None:
    path = _several(tmp_path / "book.xlsx", "One", "Two", "Three")

    def change(name: str, data: bytes) -> bytes | None:
        if name == part:
            assert old in data
            return None if new is None else data.replace(old, new)
        return data

    _rewrite(path, change)
    said = refusal(path)
    assert f"the file is damaged ({cause}" in said and said.endswith(SAVE_AGAIN)


@pytest.mark.parametrize("change", ["part", "rId77", ""])
def test_a_sheet_without_its_part_is_listed_as_damaged(tmp_path: Path, change: str) -> None:
    path = _several(tmp_path / "book.xlsx", "One", "Two", "Three")

    def drop(name: str, data: bytes) -> bytes | None:
        if change == "part":
            return None if name == "xl/worksheets/sheet2.xml" else data
        wanted = name == "xl/workbook.xml"
        return data.replace(b'"rId2"', f'"{change}"'.encode()) if wanted else data

    _rewrite(path, drop)
    book = read_workbook(path)
    assert [s.used() is None for s in book.sheets] == [False, True, False]
    assert book["Two"].marks.damage == "the part with its cells is missing"
    assert book.notes == ("sheet 'Two' can't be read: the part with its cells is missing",)


def test_names_that_spreadsheet_programs_tell_apart_are_all_found(tmp_path: Path) -> None:
    book = read_workbook(_several(tmp_path / "book.xlsx", "Strasse", "Straße"))
    assert [book[name].rows[1] for name in book.names()] == [("Strasse",), ("Straße",)]
    assert book["STRASSE"].name == "Strasse"
    with pytest.raises(ValueError, match="two sheets are named 'orders'"):
        Workbook([Sheet("Orders"), Sheet("orders")])


@pytest.mark.parametrize("damage", [False, True])
def test_chart_sheets_are_not_read(tmp_path: Path, damage: bool) -> None:
    path = tmp_path / "book.xlsx"
    book = openpyxl.Workbook()
    book.active["A1"] = 5
    book.create_chartsheet("Chart", 0)
    book.save(path)
    if damage:
        _rewrite(path, lambda name, data: b"<" if "chartsheets/" in name else data)
    found = [(s.name, s.rows, s.marks.kind) for s in read_workbook(path).sheets]
    assert found == [("Chart", {}, "chart"), ("Sheet", {1: (5,)}, "worksheet")]


def test_flipped_bytes_never_raise_anything_else(book: Path) -> None:
    whole = book.read_bytes()
    for place in range(0, len(whole), 23):
        broken = bytearray(whole)
        broken[place] ^= 0x5A
        book.write_bytes(bytes(broken))
        try:
            assert read_workbook(book).sheets
        except WorkbookError as error:
            assert str(book) in str(error)
