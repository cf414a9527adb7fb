"""Number formats against what Excel shows, and dates against its own arithmetic."""

from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openpyxl.utils.datetime import CALENDAR_MAC_1904, CALENDAR_WINDOWS_1900, to_excel

from envs.workbook.formats import BUILTIN, from_serial, is_percent, kind_of, to_serial
from envs.workbook.shown import show


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("General", "number"), ("0.00", "number"), ('0" days"', "number"), ("0;[Red]0", "number"),
        ('#,##0,," M"', "number"), ('"yes";"yes";"no"', "number"), (r"0\d", "number"),
        (r"General\ \h", "number"), ("0.00E+00", "number"), ("@", "text"), ("# ?/?", "number"),
        ("[$€-407] #,##0.00", "number"), ('_(* #,##0_);_(@_)', "number"),
        ("[$-409]d-mmm-yy;@", "date"), ('mmmm" "yyyy', "date"), ('yyyy"年"m"月"', "date"),
        ("[Magenta]mm/dd/yy", "date"), ("m", "date"), ("mmm", "date"), ("d", "date"),
        ("yyyy-mm-dd hh:mm", "datetime"), ("m/d/yyyy h:mm AM/PM", "datetime"),
        ("h:mm", "time"), ("mm:ss", "time"), ("mm:ss.0", "time"), ("h AM/PM", "time"),
        ("[h]:mm", "duration"), ("[mm]:ss", "duration"), ("[ss]", "duration"),
    ],
)  # fmt: skip
def test_what_a_format_makes_of_a_number(code: str, kind: str) -> None:
    assert kind_of(code) == kind


def test_the_numbered_formats() -> None:
    dates = {n for n, code in BUILTIN.items() if kind_of(code) not in ("number", "text")}
    assert dates == {*range(14, 23), *range(27, 37), 45, 46, 47, *range(50, 59)}
    assert {n for n, code in BUILTIN.items() if is_percent(code)} == {9, 10}


@pytest.mark.parametrize(
    ("value", "code", "text"),
    [
        (0.125, "0.0%", "12.5%"), (0.5, "0%", "50%"), (1234.5, "#,##0.00", "1,234.50"),
        (-1234.5, r'_(* #,##0.00_);_(* \(#,##0.00\);_(* "-"??_);_(@_)', "(1,234.50)"),
        (0, r'_(* #,##0.00_);_(* \(#,##0.00\);_(* "-"??_);_(@_)', "-"),
        (1234567, "#,##0,", "1,235"), (12345, "0.00E+00", "1.23E+04"), (0.5, "# ?/?", "1/2"),
        (0.00012, "0.0E+00", "1.2E-04"), (99999, "##0.0E+0", "100.0E+3"),
        (1234.5, "[$€-407] #,##0.00", "€ 1,234.50"), (123456789, "000-00-0000", "123-45-6789"),
        (501, "00000", "00501"), (-3, "0;[Red]0", "3"), (-3, "0", "-3"),
        (12500000, '#,##0,,"M"', "13M"),
        (2.5, '0.0" days"', "2.5 days"), (1.5, "# ??/16", "1 8/16"), (3, "# ?/?", "3"),
        (1 / 3, "General", "0.333333333"), (1e-5, "General", "1E-05"),
        (0.1 + 0.2, "General", "0.3"),
        (123456789012, "General", "1.23457E+11"), (5.0, "General", "5"), (1e20, "General", "1E+20"),
        (1.005, "0.00", "1.01"), (0.005, "0.00", "0.01"), (-0.001, "0.00", "0.00"),
        (7, "#.##", "7."),
        (-5, "[<0]\"under \"0;0", "under 5"), (15, '[>10]"big";"small"', "big"),
        (3, '[>10]"big";"small"', "small"),
        (45000, "[$-409]d-mmm-yy;@", "15-Mar-23"),
        (45000.75, "yyyy-mm-dd hh:mm", "2023-03-15 18:00"),
        (45000, "dddd, mmmm dd, yyyy", "Wednesday, March 15, 2023"),
        (45000.5, "h:mm AM/PM", "12:00 PM"),
        (0, "h:mm AM/PM", "12:00 AM"), (1.75, "[h]:mm", "42:00"), (62.5, "[h]:mm", "1500:00"),
        (0.5, "[mm]:ss", "720:00"), (60, "yyyy-mm-dd", "1900-02-29"),
        (0, "yyyy-mm-dd", "1900-01-00"),
        (1, "yyyy-mm-dd", "1900-01-01"), (61, "yyyy-mm-dd", "1900-03-01"),
        (-1, "yyyy-mm-dd", "####"),
        (True, "0.00", "TRUE"), (None, "0.00", ""), ("x", "0.00", "x"),
        ("x", '0;0;0;"<"@">"', "<x>"),
        (5, ";;;", ""),
    ],
)  # fmt: skip
def test_what_is_shown(value: object, code: str, text: str) -> None:
    assert show(value, code) == text


def test_the_two_epochs_and_the_day_that_never_was() -> None:
    days = {0: None, 1: "1900-01-01", 59: "1900-02-28", 60: None, 61: "1900-03-01", -1: None}
    for serial, day in days.items():
        found = from_serial(serial, "date", False)
        assert (None if found is None else str(found)) == day
    assert from_serial(0, "date", True) == dt.date(1904, 1, 1)
    assert from_serial(2_958_466, "date", False) is None  # past the year 9999
    assert from_serial(0.5, "datetime", False) == dt.time(12)
    assert from_serial(0.5, "datetime", True) == dt.datetime(1904, 1, 1, 12)
    assert from_serial(1e300, "duration", False) is None


moments = st.datetimes(dt.datetime(1904, 1, 2), dt.datetime(9999, 12, 30)).map(
    lambda m: m.replace(microsecond=m.microsecond // 1000 * 1000)
)


@given(moments, st.booleans())
def test_dates_agree_with_openpyxl(moment: dt.datetime, mac: bool) -> None:
    serial = to_excel(moment, CALENDAR_MAC_1904 if mac else CALENDAR_WINDOWS_1900)
    found = from_serial(serial, "datetime", mac)
    assert found == moment
    told = to_serial(moment.isoformat(), mac)
    assert told is not None and told[1] == "datetime"
    assert told[0] == pytest.approx(serial, abs=1e-8)


@given(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(sorted(BUILTIN.values())))
def test_every_number_is_shown(value: float, code: str) -> None:
    assert isinstance(show(value, code), str)


@given(st.floats(-1e15, 1e15), st.text("0#?.,%Ee+-/\"\\_*[]ymdhs;@ $€hAMP", max_size=12))
def test_any_code_is_taken(value: float, code: str) -> None:
    assert kind_of(code) and isinstance(show(value, code), str)
