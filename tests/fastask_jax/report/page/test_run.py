"""A run directory read for its page: lists, details, runs of earlier forms, damage."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.fast_ask import make_task
from envs.fast_ask.outline import outline
from fastask_jax.report.page.detail import detail
from fastask_jax.report.page.run import read_run
from fastask_jax.report.stats import wilson
from fastask_jax.report.traces import read_traces


def hostile_trace() -> dict:
    path = Path(__file__).with_name("conftest.py")
    spec = importlib.util.spec_from_file_location("page_conftest", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.hostile_trace()


def everything(run) -> list[dict]:
    return [detail for chunk in range(len(run.chunks)) for detail in run.details(chunk)]


def test_list_and_details_are_the_traces(runs) -> None:
    run = read_run(runs[0], "first")
    traces = read_traces(runs[0])
    details = everything(run)
    assert len(run.episodes) == len(details) == len(traces) == 73  # evaluations are traced whole
    assert len({e["id"] for e in run.episodes}) == 73
    for episode, shown, trace in zip(run.episodes[:-1], details, traces, strict=False):
        assert episode["type"] == trace["info"]["type"]
        assert (episode["outcome"] == "right") == (trace["parts"]["correct"] == 1)
        assert [t["text"] for t in shown["turns"]] == [t["text"] for t in trace["turns"]]
        assert [r["range"] for r in shown["reads"]] == trace["info"]["ranges"]
        assert [[s["name"], s["role"]] for s in shown["sheets"]] == [
            [name, role] for name, _, _, role in trace["sheets"]
        ]
        for said in shown["turns"]:
            assert said["role"] != "reply" or len(said["chars"]) == said["tokens"]
    assert run.overview["weights"]["parts"] == {"correct": 1, "efficiency": 0.1, "concise": 0.05}
    assert any(shown["reads"] for shown in details)


def test_accuracies_are_those_of_the_records(runs) -> None:
    run = read_run(runs[0], "first")
    first, last = run.overview["accuracy"]
    assert first["label"] == "base" and last["label"] == f"step {last['step']}"
    records = json.loads((runs[0] / "evals" / f"{last['name']}.json").read_text())
    right = sum(r["correct"] for r in records)
    low, high = wilson(right, len(records))
    assert last["all"] == {
        "exact_match": right / len(records), "low": low, "high": high, "tasks": len(records),
    }  # fmt: skip
    assert set(last["by_difficulty"]) <= {"easy", "medium", "hard"}


def test_a_run_of_an_earlier_form_has_its_sheets_rebuilt(tmp_path) -> None:
    task = make_task(3, "top_vendor", "medium")
    info = {"type": task.type, "truth": task.truth, "answer": "x", "ranges": ["Ledger!A1:C9"]}
    turns = [{"role": "reply", "text": "ANSWER: x", "tokens": 3, "logprob": -1.0}]
    old = {"step": 1, "task": task.id, "group": 0, "sample": 0, "parts": {"correct": 0.0},
           "info": info, "turns": turns}  # fmt: skip
    changed = {**old, "sample": 1, "info": info | {"truth": "another"}}
    (tmp_path / "traces.jsonl").write_text(f"{json.dumps(old)}\n{json.dumps(changed)}\n")
    run = read_run(tmp_path, "old")
    assert [e["question"] for e in run.episodes] == [task.question, ""]
    shown, unknown = everything(run)
    names = [name for name, *_ in outline(task)["sheets"]]
    assert shown["outline"] == "rebuilt" and [s["name"] for s in shown["sheets"]] == names
    assert shown["reads"] == [
        {"sheet": "Ledger", "area": [1, 1, 9, 3], "range": "Ledger!A1:C9", "turn": 0, "call": 0}
    ]
    assert "chars" not in shown["turns"][0] and shown["turns"][0]["versions"] == []
    assert unknown["outline"] == "" and unknown["sheets"] == [] and unknown["reads"]


def test_records_of_an_evaluation_alone_are_a_run_too(tmp_path) -> None:
    task = make_task(5, "paid_by", "hard")
    record = {"task": task.id, "type": task.type, "family": task.family, "answer": "no",
              "difficulty": "hard", "truth": task.truth, "correct": False, "reward": 0.1,
              "parts": {"correct": 0.0}, "turns": 2, "cells": 30, "seconds": 1.0}  # fmt: skip
    (tmp_path / "evals").mkdir()
    (tmp_path / "evals" / "oracle.json").write_text(json.dumps([record]))
    run = read_run(tmp_path, "evaluation")
    [episode] = run.episodes
    assert (episode["split"], episode["outcome"]) == ("oracle", "wrong")
    assert episode["question"] == task.question
    assert everything(run)[0]["turns"] == [] and everything(run)[0]["sheets"]
    assert run.overview["accuracy"][0]["label"] == "oracle" and run.overview["steps"] == []


def test_what_is_no_run_or_damaged_gets_one_line(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="is no run directory.*give the --run-dir"):
        read_run(tmp_path, "x")
    (tmp_path / "evals").mkdir()
    (tmp_path / "evals" / "a.json").write_text("[1]")
    with pytest.raises(ValueError, match="a.json is not a list of records"):
        read_run(tmp_path, "x")
    (tmp_path / "evals" / "a.json").write_text('[{"type": "t"}]')
    with pytest.raises(ValueError, match="evals/a.json: a record without 'correct'"):
        read_run(tmp_path, "x")
    record = dict.fromkeys(("correct", "reward", "turns", "cells", "seconds", "difficulty"), 1)
    record |= {"type": "t", "family": "f", "parts": {"correct": 1}}
    for wrong in ({"type": ["t"]}, {"reward": "much"}, {"reward": 10**400}, {"parts": 5}):
        (tmp_path / "evals" / "a.json").write_text(json.dumps([record | wrong]))
        with pytest.raises(ValueError, match="evals/a.json: a damaged record"):
            read_run(tmp_path, "x")
    (tmp_path / "evals" / "a.json").unlink()
    (tmp_path / "traces.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_run(tmp_path, "x")


def test_a_file_that_has_shrunk_is_told(tmp_path) -> None:
    (tmp_path / "traces.jsonl").write_text('{"step": 1, "task": "t"}\n{"step": 2, "task": "u"}\n')
    run = read_run(tmp_path, "x")
    (tmp_path / "traces.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="has changed; open the run again"):
        everything(run)


def test_a_number_that_no_float_holds_is_left_open(tmp_path) -> None:
    for name in ("traces.jsonl", "metrics.jsonl"):
        (tmp_path / name).write_text(f'{{"step": 1{"0" * 400}, "reward": 1{"0" * 400}}}\n')
    run = read_run(tmp_path, "x")
    assert [(e["step"], e["reward"]) for e in run.episodes] == [(0, None)]
    everything(run)


def test_a_torn_last_line_is_left_out(tmp_path) -> None:
    (tmp_path / "traces.jsonl").write_text('{"step": 1, "task": "t"}\n{"step": 2, "ta')
    assert [e["step"] for e in read_run(tmp_path, "x").episodes] == [1]


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)


@given(st.sampled_from(list(hostile_trace())), ANY, st.sampled_from(["top", "info", "turn"]))
@settings(deadline=None)
def test_details_of_any_trace_are_plain(name, value, where) -> None:
    """Whatever stands in a field of a trace, its details are JSON with finite numbers."""
    trace = hostile_trace()
    if where == "top":
        trace[name] = value
    elif where == "info":
        trace["info"]["reads"] = value
    else:
        trace["turns"][1]["chars"] = value
    shown = json.loads(json.dumps(detail(trace, lambda task, truth: None), allow_nan=False))
    assert all(isinstance(turn["text"], str) for turn in shown["turns"])
    assert all(math.isfinite(x) for read in shown["reads"] for x in read["area"])
