"""Workbook files: what is written is what is read, and what can't be read is one clear error."""

from __future__ import annotations

import datetime as dt
import re
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
    assert read_workbook(path).sheets[0].rows == {1: (3,)}
    _rewrite(path, lambda name, data: re.sub(rb"<v ?/>", b"<v>6</v>", data))
    assert read_workbook(path).sheets[0].rows == {1: (3,), 2: (6,)}


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
        (b"a,b\n1,2\n", "isn't an .xlsx"),
        (b"\xef\xbb\xbf<html><table></table></html>", "HTML or XML"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(2000), "old .xls"),
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
    assert "can't read" in refusal(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("xl/workbook.bin", b"\x00")
    assert ".xlsb" in refusal(path)


def test_every_cut_of_a_file_is_refused(book: Path) -> None:
    whole = book.read_bytes()
    for share in range(1, 20):
        book.write_bytes(whole[: len(whole) * share // 20])
        assert "damaged" in refusal(book)


@pytest.mark.parametrize("part", ["xl/workbook.xml", "xl/worksheets/sheet1.xml"])
def test_broken_parts(book: Path, part: str) -> None:
    _rewrite(book, lambda name, data: data[: len(data) // 2] if name == part else data)
    assert "can't read" in refusal(book)


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
