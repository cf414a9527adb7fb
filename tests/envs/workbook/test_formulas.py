"""Formula texts: what is shown, and shared ones moved, against openpyxl's translator."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openpyxl.formula.translate import Translator

from envs.workbook.a1 import column_letter
from envs.workbook.formulas import display, moved


@pytest.mark.parametrize(
    ("stored", "shown"),
    [
        ("A1+B1", "=A1+B1"),
        ("_xlfn.UNIQUE(A1:A3)", "=UNIQUE(A1:A3)"),
        ("COUNTA(_xlfn.ANCHORARRAY(C1))", "=COUNTA(C1#)"),
        ("_xlfn.LET(_xlpm.k,2,_xlpm.k*3)", "=LET(k,2,k*3)"),
        ("_xlfn.SINGLE(A:A)", "=@A:A"),
        ("_xlfn._xlws.SORT(A1:A3)", "=SORT(A1:A3)"),
        ('"_xlfn."&A1', '="_xlfn."&A1'),
        ("_xlfn.ANCHORARRAY(Sheet2!A1)+_xlfn.ANCHORARRAY(B1)", "=Sheet2!A1#+B1#"),
    ],
)
def test_what_is_shown(stored: str, shown: str) -> None:
    assert display(stored) == shown


@pytest.mark.parametrize(
    ("text", "down", "right", "wanted"),
    [
        ("A1+$A1+A$1+$A$1", 2, 1, "B3+$A3+B$1+$A$1"),
        ("SUM(A1:B2)", 1, 1, "SUM(B2:C3)"),
        ("'A1'!A1+Sheet1!B2", 1, 0, "'A1'!A2+Sheet1!B3"),
        ('"A1"&A1', 1, 0, '"A1"&A2'),
        ("LOG10(A1)", 1, 0, "LOG10(A2)"),
        ("A:A+$B:$B", 0, 1, "B:B+$B:$B"),
        ("1:1+$2:$2", 1, 0, "2:2+$2:$2"),
        ("A1", -1, 0, "#REF!"),
        ("Table1[[#This Row],[A1]]*B1", 1, 0, "Table1[[#This Row],[A1]]*B2"),
        ("name_A1+x.A1", 1, 1, "name_A1+x.A1"),
    ],
)
def test_moved_formulas(text: str, down: int, right: int, wanted: str) -> None:
    assert moved(text, down, right) == wanted


places = st.tuples(st.integers(1, 50), st.integers(1, 500))
cells = st.builds(
    lambda place, a, b: f"{a}{column_letter(place[0])}{b}{place[1]}",
    places, st.sampled_from(["", "$"]), st.sampled_from(["", "$"]),
)  # fmt: skip


@given(st.lists(cells, min_size=1, max_size=5), st.integers(0, 40), st.integers(0, 20))
def test_moving_agrees_with_openpyxl(refs: list[str], down: int, right: int) -> None:
    text = "+".join(f"SUM({ref},1)" for ref in refs)
    theirs = Translator("=" + text, "A1").translate_formula(row_delta=down, col_delta=right)
    assert "=" + moved(text, down, right) == theirs
