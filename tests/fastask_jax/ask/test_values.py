"""Types of answers to free questions, as they are written."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.fast_ask import answers
from fastask_jax.ask.values import kind_and_value


@pytest.mark.parametrize(
    "text, kind, value",
    [
        ("42", "number", 42),
        ("-12,500", "number", -12500),
        ("12500 cents", "cents", 12500),
        ("125.50", "number", 125.5),
        ("1,125.50", "number", 1125.5),
        ("**Yes.**", "yes_no", True),
        ("no", "yes_no", False),
        ("2024-03", "month", "2024-03"),
        ("2024-03-31", "date", "2024-03-31"),
        ("2024-02-31", "name", "2024-02-31"),
        ("INV-0012", "invoice", "INV-0012"),
        ("Payments!17", "row", {"sheet": "Payments", "row": 17}),
        ("'My Sheet'!A17", "row", {"sheet": "My Sheet", "row": 17}),
        ("Acme Corp", "name", "Acme Corp"),
        ("1.2.3", "name", "1.2.3"),
    ],
)
def test_what_an_answer_is(text, kind, value):
    assert kind_and_value(text) == (kind, value)
    assert type(kind_and_value(text)[1]) is type(value)


@given(st.text(min_size=1))
def test_every_text_is_something_that_json_holds(text):
    kind, value = kind_and_value(text)
    assert kind in {*answers.ANSWER_TYPES, "number"} and json.dumps(value)
