"""Records survive whatever ends a process, and none is taken for one of another setup."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.fast_ask import StreamConfig, TaskStream
from fastask_jax.evaluation.store import RECORDS, SETUP, RecordStore
from fastask_jax.evaluation.tasks import digest, freeze

TASKS = {"digest": "d1", "count": 2, "ids": ["t0", "t1"]}
SETTINGS = {"env.max_turns": 6}
POLICIES = {"base": {"weights": "w1"}}


def open_store(place, tasks=TASKS, settings=SETTINGS, policies=POLICIES):
    return RecordStore(place, tasks, settings, policies)


def test_what_ended_is_kept_and_the_rest_is_missing(tmp_path) -> None:
    with open_store(tmp_path) as store:
        store.add("base", "t1", 0, {"correct": True})
        store.add("base", "t0", 1, {"correct": False})
        assert store.missing("base", ["t0", "t1"], 2) == [(0, 0), (1, 1)]
    with open_store(tmp_path) as store:
        found = store.of("base", ["t0", "t1"], 2)
        assert [(r["task"], r["rollout"], r["correct"]) for r in found] == [
            ("t0", 1, False), ("t1", 0, True),
        ]  # fmt: skip
        assert len(store.of("base", ["t0", "t1"], 1)) == 1  # fewer rollouts are no other setup
        with pytest.raises(BlockingIOError, match="is being written"):
            open_store(tmp_path)


@given(st.data())
def test_a_kill_at_any_byte_loses_the_torn_line_alone(tmp_path_factory, data) -> None:
    place = tmp_path_factory.mktemp("store")
    with open_store(place) as store:
        for number in range(3):
            store.add("base", "t0", number, {"answer": "größer\n"})
    whole = (place / RECORDS).read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    (place / RECORDS).write_bytes(whole[:cut])
    left = whole[:cut].count(b"\n")
    with open_store(place) as store:
        assert len(store.records) == left
        for _, number in store.missing("base", ["t0"], 3):
            store.add("base", "t0", number, {"answer": "größer\n"})
    assert (place / RECORDS).read_bytes() == whole


def test_another_setup_is_refused_with_what_differs(tmp_path) -> None:
    with open_store(tmp_path) as store:
        store.add("base", "t0", 0, {})
    before = (tmp_path / SETUP).read_bytes()
    for changed, said in [
        ({"tasks": TASKS | {"digest": "d2", "ids": ["t9"]}}, r"begun with digest=d1 \(now d2\):"),
        ({"settings": {"env.max_turns": 7}}, r"env.max_turns=6 \(now 7\)"),
        ({"policies": {"base": {"weights": "w2"}}}, r"base's weights=w1 \(now w2\)"),
        ({"policies": {"base": {}}}, r"base's weights=w1 \(now None\)"),
    ]:
        with pytest.raises(ValueError, match=said + ".* go on with that, or give another"):
            open_store(tmp_path, **changed)
    assert (tmp_path / SETUP).read_bytes() == before
    # Another policy is none; it and those before it are remembered.
    with open_store(tmp_path, policies={"oracle": {"kind": "oracle"}}) as store:
        assert store.missing("base", ["t0"], 1) == []
    assert set(json.loads((tmp_path / SETUP).read_text())["policies"]) == {"base", "oracle"}


def test_damage_is_named(tmp_path) -> None:
    with open_store(tmp_path) as store:
        store.add("base", "t0", 0, {})
    (tmp_path / SETUP).unlink()
    with pytest.raises(ValueError, match="setup.json is missing"):
        open_store(tmp_path)
    (tmp_path / SETUP).write_text("{}")
    with pytest.raises(ValueError, match="is no setup of an evaluation"):
        open_store(tmp_path)


def test_one_that_never_began_leaves_nothing(tmp_path) -> None:
    place = tmp_path / "run"
    with pytest.raises(KeyError), open_store(place):
        raise KeyError
    assert not place.exists()
    with open_store(place) as store:
        store.add("base", "t0", 0, {})
    with pytest.raises(KeyError), open_store(place):
        raise KeyError
    assert {p.name for p in place.iterdir()} == {RECORDS, SETUP}


def test_the_digest_is_over_all_that_a_policy_meets() -> None:
    tasks, named = freeze(StreamConfig("heldout"), 3)
    assert named["digest"] == digest(tasks) == digest(TaskStream(StreamConfig("heldout")).take(3))
    assert named["ids"] == [task.id for task in tasks]
    other = [
        freeze(StreamConfig("heldout", seed=1), 3)[1]["digest"],
        freeze(StreamConfig("heldout"), 2)[1]["digest"],
        digest([*tasks[:2], replace(tasks[2], truth="0")]),
        digest([*tasks[:2], replace(tasks[2], attempt=tasks[2].attempt + 1)]),  # its workbook
    ]
    assert len({named["digest"], *other}) == 5
