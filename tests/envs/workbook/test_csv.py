"""CSV: what a person means by a field, and nothing lost."""

from __future__ import annotations

import csv
import datetime as dt
import io
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envs.workbook import Area, Limits, WorkbookError, read_workbook
from envs.workbook.delimited import find_delimiter, read_csv


def rows(path: Path, data: bytes) -> dict[int, tuple]:
    path.write_bytes(data)
    return read_workbook(path).sheets[0].rows


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table.csv"


def test_numbers_only_where_nothing_is_lost(path: Path) -> None:
    fields = {
        "5": 5, "-5": -5, "0": 0, "1.50": 1.5, "1e5": "1e5", "007": "007", "+49": "+49", "-": "-",
        "1234567890123456": "1234567890123456", "NA": "NA", "None": "None", "1_000": "1_000",
        "TRUE": True, "false": False, "12.5%": 0.125, "2024-02-29": dt.date(2024, 2, 29),
        "2024-02-30": "2024-02-30", "2024-02-29 10:30": dt.datetime(2024, 2, 29, 10, 30),
        " 5": " 5", "#N/A": "#N/A", "=1+1": "=1+1", "1,234": 1234, "1,234.50": 1234.5,
        "12,34": "12,34", "0x10": "0x10", "1.": "1.", ".5": ".5",
        "١": "١", "inf": "inf", "nan": "nan",
    }  # fmt: skip
    out = io.StringIO()
    csv.writer(out).writerow(fields)
    (row,) = rows(path, out.getvalue().encode()).values()
    assert dict(zip(fields, row, strict=True)) == fields
    assert [type(v) for v in row] == [type(v) for v in fields.values()]


def test_shown_as_it_was_written(path: Path) -> None:
    path.write_bytes(b'a,b,c\n1.50,"1,234.5",12.50%\n')
    (_, cells), = read_workbook(path).sheets[0].cells(Area(2, 1, 2, 3))
    assert [c.shown for c in cells] == ["1.50", "1,234.5", "12.50%"]


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"a;b\n1,5;2\n", ("a", "b", 1.5, 2)),
        (b"a\tb\n1.5\t2\n", ("a", "b", 1.5, 2)),
        (b"a|b\n1.5|2\n", ("a", "b", 1.5, 2)),
        ("\ufeffa,b\n1,2\n".encode(), ("a", "b", 1, 2)),
        ("ä,b\n1,2\n".encode("utf-16"), ("ä", "b", 1, 2)),
        ("\ufeffä,b\n1,2\n".encode("utf-32-le"), ("ä", "b", 1, 2)),
        ("ä;€\n1;2\n".encode("cp1252"), ("ä", "€", 1, 2)),
        (b"sep=|\r\na|b\r\n1|2\r\n", ("a", "b", 1, 2)),
        (b'a;b\n"1;5";x\n', ("a", "b", "1;5", "x")),
        (b"a,b\r1,2\r", ("a", "b", 1, 2)),
    ],
)
def test_delimiters_and_encodings(path: Path, data: bytes, wanted: tuple) -> None:
    found = rows(path, data)
    assert found[1] + found[2] == wanted


def test_a_semicolon_file_with_point_decimals(path: Path) -> None:
    assert rows(path, b"a;b\n1.5;2.75\n3.25;4\n")[2] == (1.5, 2.75)


def test_one_column_and_ragged_rows(path: Path) -> None:
    assert rows(path, b"name\nAda\nBob\n") == {1: ("name",), 2: ("Ada",), 3: ("Bob",)}
    assert rows(path, b"a,b\n1\n\n2,3,4\n") == {1: ("a", "b"), 2: (1,), 4: (2, 3, 4)}


def test_a_csv_says_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "table.xlsx"
    path.write_bytes(b"a,b\n1,2\n")
    book = read_workbook(path)
    assert book.names() == ["table"]
    assert book.notes == ("the file is csv by its content, not xlsx",)


def test_a_huge_one_is_refused() -> None:
    with pytest.raises(WorkbookError, match="more than 1 MiB of text"):
        read_csv(io.BytesIO(b"a,b\n" * (1 << 19)), "big", Limits(unpacked=4 << 20))
    with pytest.raises(WorkbookError, match="filled cells"):
        read_csv(io.BytesIO(b"a,b\n" * 100), "big", Limits(cells=150))
    with pytest.raises(WorkbookError, match="more rows or columns than a sheet"):
        read_csv(io.BytesIO(b"," * 20_000), "wide", Limits())


texts = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0"), min_size=1, max_size=8)
tables = st.lists(st.lists(texts, min_size=2, max_size=2), min_size=2, max_size=6)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(tables.filter(lambda t: not t[0][0].startswith(("\ufeff", "<", "sep=", "PK"))))
def test_texts_come_back(path: Path, table: list[list[str]]) -> None:
    """Letters added on both sides keep the fields from being numbers."""
    wanted = [[f"x{field}x" for field in record] for record in table]
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL).writerows(wanted)
    data = out.getvalue()
    if find_delimiter(data) == ",":
        found = rows(path, data.encode())
        assert [list(found[n]) for n in sorted(found)] == wanted
