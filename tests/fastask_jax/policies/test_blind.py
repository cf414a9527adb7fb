"""The blind policy: constants of the training split, and how little they earn."""

from __future__ import annotations

from collections import Counter

import pytest

from envs.core import Message
from envs.fast_ask import KINDS, StreamConfig, TaskStream, answers, make_task
from fastask_jax.policies.blind import BlindPolicy


@pytest.fixture(scope="module")
def blind() -> BlindPolicy:
    return BlindPolicy.of_scale("tiny")


def hits(blind: BlindPolicy, count: int, seed: int = 0) -> tuple[Counter, Counter]:
    right: Counter = Counter()
    asked: Counter = Counter()
    for task in TaskStream(StreamConfig("heldout", seed=seed)).take(count):
        asked[task.type] += 1
        right[task.type] += answers.is_right(blind.guess(task), task.truth, task.answer_type)
    return right, asked


def test_constants_are_the_most_frequent_truths() -> None:
    tasks = TaskStream(StreamConfig()).take(280)
    blind = BlindPolicy.fit(tasks)
    assert set(blind.constants) == set(KINDS)
    for kind, guess in blind.constants.items():
        counts = Counter(t.truth for t in tasks if t.type == kind)
        assert counts[guess] == max(counts.values())
        assert all(c < counts[guess] or truth >= guess for truth, c in counts.items())


def test_blind_stays_below_12_percent_on_the_held_out_tasks(blind: BlindPolicy) -> None:
    right, asked = hits(blind, 128)
    assert right.total() / asked.total() < 0.12


@pytest.mark.slow
def test_blind_stays_below_12_percent_in_the_long_run(blind: BlindPolicy) -> None:
    right, asked = hits(blind, 2800, seed=1)
    assert right.total() / asked.total() < 0.12
    for kind in KINDS:
        share = right[kind] / asked[kind]
        if KINDS[kind].answer_type == "yes_no":
            assert share == 0.5, "yes and no are balanced exactly"
        else:
            assert share < 0.08, (kind, blind.constants[kind])


def test_it_answers_at_once(blind: BlindPolicy) -> None:
    task = make_task(3, "region_target")
    reply = blind.start([Message("user", task.question)], (), task)
    assert reply.content == f"ANSWER: {blind.constants['region_target']}" and not reply.tool_calls
    with pytest.raises(RuntimeError, match="first reply"):
        blind.reply(())
    with pytest.raises(ValueError, match="no constant for task type"):
        BlindPolicy({}).guess(task)
