"""Tasks and their stream: determinism, splits, balance, wordings, clues, guessability."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.fast_ask import (
    DIFFICULTIES,
    FAMILIES,
    KINDS,
    SPLITS,
    StreamConfig,
    Task,
    TaskStream,
    build_workbook,
    make_task,
)
from envs.fast_ask.questions import word

ROOT = Path(__file__).parents[3]

specs = st.tuples(
    st.integers(0, 2**30), st.sampled_from(list(KINDS)), st.sampled_from(DIFFICULTIES)
)


def fingerprint(task: Task) -> str:
    sheets = [(s.name, s.tab_color, s.rows, s.formats) for s in build_workbook(task).sheets]
    return hashlib.sha256(repr((task, sheets)).encode()).hexdigest()


PRINT_FINGERPRINTS = """
import hashlib, json
from envs.fast_ask import *
prints = {}
for scale in ("tiny", "standard"):
    for number, kind in enumerate(KINDS):
        task = make_task(number, kind, DIFFICULTIES[number % 3], scale)
        sheets = [(s.name, s.tab_color, s.rows, s.formats) for s in build_workbook(task).sheets]
        prints[task.id] = hashlib.sha256(repr((task, sheets)).encode()).hexdigest()
print(json.dumps(prints))
"""


@pytest.mark.parametrize("hash_seed", ["0", "4242"])
def test_same_tasks_in_any_process_and_hash_seed(hash_seed: str) -> None:
    child = subprocess.run(
        [sys.executable, "-c", PRINT_FINGERPRINTS],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    theirs = json.loads(child.stdout)
    ours = {
        task.id: fingerprint(task)
        for scale in ("tiny", "standard")
        for number, kind in enumerate(KINDS)
        for task in [make_task(number, kind, DIFFICULTIES[number % 3], scale)]
    }
    assert theirs == ours and len(ours) == 28


@settings(max_examples=60, deadline=None)
@given(specs)
def test_a_task_is_its_seed(spec: tuple[int, str, str]) -> None:
    task = make_task(*spec)
    first = fingerprint(task)
    for other in range(20):  # push it out of every cache
        make_task(other, "region_net")
    assert make_task(*spec) == task
    assert fingerprint(pickle.loads(pickle.dumps(task))) == first
    assert len(pickle.dumps(task)) < 2000


@settings(max_examples=100, deadline=None)
@given(specs)
def test_every_seed_gives_a_task(spec: tuple[int, str, str]) -> None:
    seed, kind, difficulty = spec
    task = make_task(seed, kind, difficulty)
    assert (task.seed, task.type, task.difficulty) == spec
    assert task.family == KINDS[kind].family and task.type in FAMILIES[task.family]
    if task.answer_type == "yes_no":
        assert task.truth == ("yes" if seed % 2 else "no")
    assert task.question in [word(KINDS[kind], task.ask, i) for i in range(3)]


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="unknown task type 'sums'; one of: region_net"):
        make_task(1, "sums")
    with pytest.raises(ValueError, match="unknown difficulty 'brutal'; one of: easy"):
        make_task(1, "region_net", "brutal")
    with pytest.raises(ValueError, match="unknown scale 'huge'; one of: tiny, standard"):
        make_task(1, "region_net", "easy", "huge")
    with pytest.raises(ValueError, match="0 or more"):
        make_task(-1, "region_net")
    with pytest.raises(ValueError, match="at least one difficulty"):
        StreamConfig(types=())
    with pytest.raises(ValueError, match="unknown split 'test'"):
        StreamConfig(split="test")


# --- the stream ------------------------------------------------------------------------


def test_each_pass_deals_every_type_once_in_an_order_of_its_own() -> None:
    tasks = TaskStream(StreamConfig()).take(14 * 30)
    orders = set()
    for start in range(0, len(tasks), 14):
        dealt = tuple(t.type for t in tasks[start : start + 14])
        assert sorted(dealt) == sorted(KINDS)
        orders.add(dealt)
    assert len(orders) == 30


def test_difficulties_and_yes_no_are_dealt_evenly_within_each_type() -> None:
    tasks = TaskStream(StreamConfig("heldout")).take(14 * 60)
    difficulties = Counter((t.type, t.difficulty) for t in tasks)
    assert set(difficulties.values()) == {20}
    answers = Counter((t.type, t.difficulty, t.truth) for t in tasks if t.answer_type == "yes_no")
    assert len(answers) == 3 * 3 * 2 and set(answers.values()) == {10}


def test_splits_share_no_seed_and_no_question() -> None:
    train, heldout = (TaskStream(StreamConfig(split)).take(2800) for split in SPLITS)
    assert not {t.seed for t in train} & {t.seed for t in heldout}
    # whatever the streams' own seeds: the split is a bit of every task's seed
    assert {t.seed >> 1 & 1 for t in train} == {0} and {t.seed >> 1 & 1 for t in heldout} == {1}
    for seed in (0, 1, 99):
        others = TaskStream(StreamConfig("heldout", seed=seed)).take(28)
        assert {t.seed >> 1 & 1 for t in others} == {1}


def test_training_tasks_do_not_repeat() -> None:
    tasks = TaskStream(StreamConfig()).take(5600)
    assert len({t.id for t in tasks}) == 5600


def test_the_cursor_is_the_whole_state() -> None:
    config = StreamConfig(seed=5)
    whole = TaskStream(config).take(40)
    first = TaskStream(config)
    head = first.take(17)
    rest = TaskStream(config, first.cursor).take(23)
    assert head + rest == whole
    assert [t for t, _ in zip(TaskStream(config), range(5), strict=False)] == whole[:5]
    assert TaskStream(config).task(33) == whole[33]
    assert TaskStream(StreamConfig(seed=6)).take(40) != whole


def test_a_stream_of_some_types_and_difficulties() -> None:
    config = StreamConfig(difficulties=("hard",), types=("paid_on", "region_net"))
    tasks = TaskStream(config).take(20)
    assert Counter(t.type for t in tasks) == {"paid_on": 10, "region_net": 10}
    assert {t.difficulty for t in tasks} == {"hard"}


# --- wording and clues -----------------------------------------------------------------


def test_all_three_wordings_of_every_type_are_used_about_equally() -> None:
    used: Counter = Counter()
    for seed in range(150):
        for kind in KINDS.values():
            task = make_task(seed, kind.name)
            fitting = [i for i in range(3) if word(kind, task.ask, i) == task.question]
            assert len(fitting) == 1, "wordings of one type differ"
            used[kind.name, fitting[0]] += 1
    assert len(used) == 14 * 3 and min(used.values()) > 25


def test_clues_stand_for_the_invoice_in_15_to_20_percent_of_reconciliation_tasks() -> None:
    for scale, count in (("tiny", 14 * 400), ("standard", 14 * 20)):
        config = StreamConfig(scale=scale, types=FAMILIES["reconciliation"])
        tasks = TaskStream(config).take(count * 5 // 14)
        clues = Counter(t.ask.get("by", "id") for t in tasks)
        share = 1 - clues["id"] / len(tasks)
        slack = 0.0 if scale == "tiny" else 0.06
        assert 0.15 - slack <= share <= 0.20 + slack, (scale, clues)
        if scale == "tiny":
            assert clues["payment"] > 50 and clues["signature"] > 50
        for task in tasks:
            if task.ask.get("by", "id") != "id":
                assert "INV-" not in task.question and not task.question.count("payment P")


def test_questions_never_show_their_answer() -> None:
    for task in TaskStream(StreamConfig(seed=3)).take(1400):
        if task.answer_type != "yes_no":  # those wordings may say "yes or no"
            assert not re.search(rf"(?<![\w-]){task.truth}(?![\w-])", task.question), task
