"""A1 references: what is read, what is refused, and that areas print as they are read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.workbook import Area, RangeError, column_index, column_letter, parse_area
from envs.workbook.a1 import MAX_COLUMN, MAX_ROW

columns = st.integers(1, MAX_COLUMN)
rows = st.integers(1, MAX_ROW)


@given(columns)
def test_columns_round_trip(column: int) -> None:
    assert column_index(column_letter(column)) == column
    assert column_index(column_letter(column).lower()) == column


def test_column_letters() -> None:
    assert [column_letter(n) for n in (1, 26, 27, 52, 703, MAX_COLUMN)] == [
        "A", "Z", "AA", "AZ", "AAA", "XFD",
    ]  # fmt: skip
    with pytest.raises(RangeError, match="outside"):
        column_letter(0)
    with pytest.raises(RangeError, match="past XFD"):
        column_index("XFE")


def area_of(c1: int, c2: int, r1: int, r2: int) -> Area:
    return Area(min(r1, r2), min(c1, c2), max(r1, r2), max(c1, c2))


@given(columns, columns, rows, rows)
def test_areas_round_trip_in_any_corner_order(c1: int, c2: int, r1: int, r2: int) -> None:
    area = area_of(c1, c2, r1, r2)
    assert parse_area(f"S!{area}") == ("S", area, False)
    text = f"S!${column_letter(c2)}{r1}:{column_letter(c1).lower()}${r2}"
    assert parse_area(text) == ("S", area, False)
    assert area.cells == area.width * area.height >= 1


areas = st.builds(area_of, columns, columns, rows, rows)


@given(areas, areas)
def test_clip_is_the_intersection(one: Area, two: Area) -> None:
    both = one.clip(two)
    assert both == two.clip(one)
    corner = (max(one.top, two.top), max(one.left, two.left))
    inside = corner[0] <= min(one.bottom, two.bottom) and corner[1] <= min(one.right, two.right)
    assert (both is not None) == inside
    if both:
        assert (both.top, both.left) == corner and both.clip(one) == both


WHOLE = Area(1, 1, MAX_ROW, MAX_COLUMN)


@pytest.mark.parametrize(
    ("text", "sheet", "area", "is_open"),
    [
        ("Orders!A1", "Orders", Area(1, 1, 1, 1), False),
        ("Orders!A1:D20", "Orders", Area(1, 1, 20, 4), False),
        ("  Orders!b2:a1 ", "Orders", Area(1, 1, 2, 2), False),
        ("Orders!$A$1:$D$20", "Orders", Area(1, 1, 20, 4), False),
        ("Orders!A:C", "Orders", Area(1, 1, MAX_ROW, 3), True),
        ("Orders!$C:$a", "Orders", Area(1, 1, MAX_ROW, 3), True),
        ("Orders!2:5", "Orders", Area(2, 1, 5, MAX_COLUMN), True),
        ("Orders!5:2", "Orders", Area(2, 1, 5, MAX_COLUMN), True),
        ("Orders!", "Orders", None, True),
        ("Orders", "Orders", None, True),
        ("'Cap Table'!A1:B2", "Cap Table", Area(1, 1, 2, 2), False),
        ("'It''s fine'!C3", "It's fine", Area(3, 3, 3, 3), False),
        ("'a!b'!C3", "a!b", Area(3, 3, 3, 3), False),
        ("'2024'!C3", "2024", Area(3, 3, 3, 3), False),
        ("'Cap Table'", "Cap Table", None, True),
        ("Cap Table!A1", "Cap Table", Area(1, 1, 1, 1), False),
        ("Umsätze!A1", "Umsätze", Area(1, 1, 1, 1), False),
        ("A1:B2", None, Area(1, 1, 2, 2), False),
        ("A:B", None, Area(1, 1, MAX_ROW, 2), True),
        ("S!XFD1048576", "S", Area(MAX_ROW, MAX_COLUMN, MAX_ROW, MAX_COLUMN), False),
    ],
)
def test_what_is_read(text: str, sheet: str | None, area: Area | None, is_open: bool) -> None:
    assert parse_area(text) == (sheet, area, is_open)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "!",
        "!A1",
        ":",
        "A1:",
        ":B2",
        "A1:B",
        "A:B2",
        "1:B",
        "S!A1:B2:C3",
        "S!A1,B2",
        "S!R1C1:R2C2",
        "S!A0",
        "S!A1:B0",
        "S!A1048577",
        "S!XFE1",
        "S!A1:XFE2",
        "S!A",
        "S!7",
        "S!foo bar",
        "[Book2]S!A1:",
        "S!A1:T!B2",
        "S!A-1",
        "S!A1.5",
        "S!Ａ1",
        "S!A１",
        "''",
    ],
)
def test_what_is_refused_with_a_text_for_the_model(text: str) -> None:
    with pytest.raises(RangeError) as refusal:
        parse_area(text)
    assert len(str(refusal.value)) > 10 and "\n" not in str(refusal.value)


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        sheet, area, is_open = parse_area(text)
    except RangeError:
        return
    assert sheet is None or sheet
    assert is_open if area is None else area.clip(WHOLE) == area
