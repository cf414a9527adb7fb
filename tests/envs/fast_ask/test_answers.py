"""Which written answers count, for each type, and which do not."""

from __future__ import annotations

import datetime as dt
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.fast_ask import TaskStream
from envs.fast_ask.answers import ANSWER_TYPES, is_right, last_answer, parse, write
from envs.fast_ask.tasks import StreamConfig

RIGHT = [
    ("cents", "12500", "12500"),
    ("cents", "12,500", "12500"),
    ("cents", "12500.", "12500"),
    ("cents", "12500 cents", "12500"),
    ("cents", "12,500 Cents.", "12500"),
    ("cents", "**12500**", "12500"),
    ("cents", "`12500`", "12500"),
    ("cents", "-40", "-40"),
    ("yes_no", "yes", "yes"),
    ("yes_no", "Yes.", "yes"),
    ("yes_no", "NO", "no"),
    ("month", "2025-03", "2025-03"),
    ("date", "2024-02-29", "2024-02-29"),
    ("invoice", "inv-512", "INV-512"),
    ("invoice", "INV-512.", "INV-512"),
    ("row", "Payments!17", "Payments!17"),
    ("row", "payments!A17", "Payments!17"),
    ("row", "Payments!$A$17", "Payments!17"),
    ("row", "'Payments'!17", "Payments!17"),
    ("row", "Payments row 17", "Payments!17"),
    ("row", "Cap Table!B3", "Cap Table!3"),
    ("name", "acorn", "Acorn"),
    ("name", "Acorn.", "Acorn"),
    ("name", " Acorn ", "Acorn"),
]
WRONG = [
    ("cents", "125.00", "12500"),
    ("cents", "$12500", "12500"),
    ("cents", "12500 or 12600", "12500"),
    ("cents", "about 12500", "12500"),
    ("cents", "12 500", "12500"),
    ("cents", "1,2500", "12500"),
    ("cents", "12,50", "1250"),
    ("cents", "12,,500", "12500"),
    ("cents", ",500", "500"),
    ("cents", "1.25e4", "12500"),
    ("cents", "0x30d4", "12500"),
    ("cents", "12_500", "12500"),
    ("cents", "١٢٥٠٠", "12500"),
    ("cents", "１２５００", "12500"),
    ("cents", "12500\u200b", "12500"),
    ("cents", "--40", "-40"),
    ("cents", "- 40", "-40"),
    ("cents", "+12500", "12500"),
    ("cents", "12500, 12600", "12500"),
    ("cents", "12500 dollars", "12500"),
    ("cents", "9" * 40, "12500"),
    ("yes_no", "yes no", "yes"),
    ("yes_no", "yes, no", "yes"),
    ("yes_no", "y", "yes"),
    ("yes_no", "true", "yes"),
    ("yes_no", "yes, it was paid", "yes"),
    ("yes_no", "уes", "yes"),
    ("month", "2025-3", "2025-03"),
    ("month", "March 2025", "2025-03"),
    ("month", "2025-03-01", "2025-03"),
    ("month", "2025-13", "2025-03"),
    ("month", "2025-03 or 2025-04", "2025-03"),
    ("month", "２０２５-03", "2025-03"),
    ("date", "2024-02-30", "2024-02-29"),
    ("date", "2024-2-29", "2024-02-29"),
    ("date", "29.02.2024", "2024-02-29"),
    ("date", "20240229", "2024-02-29"),
    ("date", "2024-W09-4", "2024-02-29"),
    ("date", "2024-02-29T00:00", "2024-02-29"),
    ("invoice", "512", "INV-512"),
    ("invoice", "INV 512", "INV-512"),
    ("invoice", "INV-512 INV-513", "INV-512"),
    ("invoice", "INV-512x", "INV-512"),
    ("invoice", "INV-٥١٢", "INV-512"),
    ("row", "17", "Payments!17"),
    ("row", "row 17", "Payments!17"),
    ("row", "Payments", "Payments!17"),
    ("row", "Payments!17:18", "Payments!17"),
    ("row", "Payments!A17:G17", "Payments!17"),
    ("row", "Payments!17 or Payments!18", "Payments!17"),
    ("row", "Ledger!17", "Payments!17"),
    ("row", "'Payments!17", "Payments!17"),
    ("name", "Acorn or Alder", "Acorn"),
    ("name", "Acorn, Alder", "Acorn"),
    ("name", "Acornn", "Acorn"),
    ("name", "the customer Acorn", "Acorn"),
]


@pytest.mark.parametrize(("kind", "said", "truth"), RIGHT)
def test_right(kind: str, said: str, truth: str) -> None:
    assert is_right(said, truth, kind)


@pytest.mark.parametrize(("kind", "said", "truth"), WRONG)
def test_wrong(kind: str, said: str, truth: str) -> None:
    assert not is_right(said, truth, kind)


@pytest.mark.parametrize("kind", ANSWER_TYPES)
@pytest.mark.parametrize("said", [None, "", " ", ".", "**", "none", "x" * 201, "ANSWER: 5", "\x00"])
def test_nothing_is_never_right(kind: str, said: str | None) -> None:
    truth = {"cents": "5", "name": "Acorn", "yes_no": "no", "month": "2025-03",
             "invoice": "INV-5", "date": "2025-03-01", "row": "Payments!5"}[kind]  # fmt: skip
    assert not is_right(said, truth, kind)


@given(st.text(max_size=60), st.sampled_from(ANSWER_TYPES))
def test_any_text_parses_or_not_but_never_raises(text: str, kind: str) -> None:
    value = parse(text, kind)
    if kind == "date":
        assert value is None or isinstance(value, dt.date)
    if kind == "cents":
        assert value is None or type(value) is int


def test_unknown_types_are_named() -> None:
    with pytest.raises(ValueError, match="unknown answer type 'money'"):
        parse("5", "money")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ANSWER: 5", "5"),
        ("ANSWER:5", "5"),
        ("  ANSWER:\t5  ", "5"),
        ("I think so.\nANSWER: 5\n", "5"),
        ("ANSWER: 5\r\n", "5"),
        ("ANSWER: 4\nNo, wait.\nANSWER: 5", "5"),
        ("ANSWER: 5\nANSWER:", ""),
        ("ANSWER: 5\nthat is all", "5"),
        ("The ANSWER: 5", None),
        ("answer: 5", None),
        ("**ANSWER: 5**", None),
        ("ANSWER 5", None),
        ("ANSWER:\n5", ""),
        ("", None),
        ("5", None),
    ],
)
def test_the_last_answer_line_counts(text: str, said: str | None) -> None:
    assert last_answer(text) == said


def test_long_replies_cost_little() -> None:
    started = time.perf_counter()
    assert last_answer("ANSWER: a" + " " * 300_000 + "b") is not None
    assert last_answer("ANSWER:" * 100_000) is not None
    assert last_answer("\n" * 300_000) is None
    assert parse("'" * 200, "row") is None and parse("1," * 100, "cents") is None
    assert time.perf_counter() - started < 2


def test_every_truth_is_right_in_its_own_words_and_wrong_in_others() -> None:
    tasks = TaskStream(StreamConfig(seed=2)).take(280)
    for task in tasks:
        assert is_right(task.truth, task.truth, task.answer_type)
        assert is_right(f" {task.truth}. ", task.truth, task.answer_type)
        other = next(
            t for t in tasks if t.answer_type == task.answer_type and t.truth != task.truth
        )
        assert not is_right(other.truth, task.truth, task.answer_type)


def test_how_truths_are_written() -> None:
    assert write(12500, "cents") == "12500"
    assert write(True, "yes_no") == "yes" and write(False, "yes_no") == "no"
    assert write(("Ledger", 9), "row") == "Ledger!9"
    assert write(dt.date(2024, 2, 29), "date") == "2024-02-29"
