"""Which tasks of a taskset a run is dealt, and what a choice refuses; needs no verifiers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.verifiers.choice import DealConfig, TasksetChoice, VerifiersStream
from experiments.config import UsageError, parse
from experiments.verifiers import PRESETS, Config


@given(count=st.integers(2, 40), data=st.data(), seed=st.integers(0, 3))
def test_each_pass_deals_every_task_once_and_none_that_is_held_out(count, data, seed):
    heldout = data.draw(st.integers(0, count - 1))
    stream = VerifiersStream(DealConfig("set", count, heldout, seed))
    kept = {task.index for task in stream.heldout()}
    assert kept == set(range(heldout))
    for _ in range(3):
        dealt = [task.index for task in stream.take(count - heldout)]
        assert sorted(dealt) == list(range(heldout, count))


@given(n=st.integers(0, 500), heldout=st.integers(0, 5), count=st.none() | st.integers(6, 9))
def test_a_task_follows_from_its_number_alone(n, heldout, count):
    config = DealConfig("set", count, heldout)
    resumed = VerifiersStream(config, cursor=n)
    told = VerifiersStream(config)
    told.take(n % 7)
    assert resumed.take(2) == [told.task(n), told.task(n + 1)]
    assert told.task(n).id == f"set-{told.task(n).index}"


def test_passes_are_shuffled_anew():
    stream = VerifiersStream(DealConfig("set", 30, 10))
    first, second = stream.take(20), stream.take(20)
    assert first != second and first != sorted(first, key=lambda task: task.index)


def test_a_taskset_with_nothing_left_to_train_on_is_refused():
    with pytest.raises(ValueError, match="has 8 tasks, and 8 are kept for evaluation"):
        DealConfig("set", 8, 8)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("args", "{", "args is not JSON"),
        ("args", "[]", "args must be a JSON object"),
        ("harness_args", '{"id": "x"}', 'harness_args can\'t hold "id"'),
        ("max_turns", 0, "max_turns must be at least 1, not 0"),
        ("timeout", float("inf"), "timeout must be above 0 and finite"),
        ("solved", float("nan"), "solved must be finite"),
    ],
)
def test_a_choice_refuses_what_makes_no_sense(field, value, said):
    with pytest.raises(ValueError, match=said):
        TasksetChoice("set", **{field: value})


def test_the_command_line_wants_a_taskset_and_takes_every_field():
    with pytest.raises(UsageError, match=r"env\.taskset is missing"):
        parse(Config, [], prog="python -m experiments.verifiers")
    flags = ["--preset", "tiny", "--env.taskset", "abc-v1", "--env.args", '{"n": 2}']
    found = parse(Config, flags, presets=PRESETS, prog="python -m experiments.verifiers")
    assert found.env.taskset_config == {"id": "abc-v1", "n": 2}
    assert found.loop == PRESETS["tiny"].loop and not found.pool.verify_replay
