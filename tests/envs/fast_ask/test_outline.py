"""Outlines of tasks: what the sheets of generated workbooks are for, and tasks from their ids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.fast_ask import DIFFICULTIES, KINDS, build_workbook, make_task
from envs.fast_ask.outline import outline, recall

COUNTS = {"easy": (1, 0), "medium": (1, 2), "hard": (0, 2)}  # helpers, decoys of tiny workbooks


@pytest.mark.parametrize("kind", KINDS)
def test_roles_are_those_that_the_difficulty_promises(kind) -> None:
    for difficulty in DIFFICULTIES:
        told = outline(make_task(11, kind, difficulty))
        roles = [role for *_, role in told["sheets"]]
        assert (roles.count("helper"), roles.count("decoy")) == COUNTS[difficulty]
        assert roles.count("notes") == 1 and roles.count("source") >= 4
    assert sum(r == "decoy" for *_, r in outline(make_task(1, kind, "hard", "standard"))["sheets"])


def test_an_outline_holds_what_get_workbook_metadata_tells() -> None:
    task = make_task(8, "paid_on", "medium")
    book = build_workbook(task)
    told = outline(task)
    assert told["question"] == task.question
    assert [row[:3] for row in told["sheets"]] == [
        [sheet.name, str(sheet.used()), sheet.tab_color] for sheet in book.sheets
    ]


@given(st.integers(0, 2**28), st.sampled_from(list(KINDS)), st.sampled_from(DIFFICULTIES))
def test_a_task_is_found_by_its_id(seed, kind, difficulty) -> None:
    task = make_task(seed, kind, difficulty)
    assert recall(task.id, task.truth) == task
    assert recall(task.id, task.truth + "0") is None


@pytest.mark.parametrize(
    "text", ["", "t7", "tiny-easy-paid_on--5", "tiny-easy-paid_on-x", "huge-easy-paid_on-5",
             "tiny-easy-nothing-5", "tiny-easy-paid_on-05", "a-b-c-d-e"],
)  # fmt: skip
def test_other_ids_are_no_tasks(text) -> None:
    assert recall(text, "1") is None
