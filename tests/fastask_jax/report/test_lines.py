"""metrics.jsonl and traces.jsonl: one object a line, cut back on resume, torn lines dropped."""

import datetime
import json
import math
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from fastask_jax.report.jsonl import JsonLines, plain, read_jsonl
from fastask_jax.report.metrics import REWARD, MetricsWriter, eval_values, read_metrics
from fastask_jax.report.traces import TraceWriter, read_traces

ROOT = Path(__file__).parents[3]


def test_one_object_a_step_readable_while_open(tmp_path) -> None:
    with MetricsWriter(tmp_path / "new" / "run") as metrics:
        metrics.write(0, {"eval/exact_match": 0.25})
        metrics.write(1, {REWARD: np.float32(0.5), "loss": math.nan, "tokens": np.int64(3)})
        got = read_metrics(tmp_path / "new" / "run")
    assert got == [
        {"step": 0, "eval/exact_match": 0.25},
        {"step": 1, REWARD: 0.5, "loss": None, "tokens": 3},
    ]


def test_steps_must_rise(tmp_path) -> None:
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(3, {})
        with pytest.raises(ValueError, match="step 3 come after those of step 3"):
            metrics.write(3, {})


def test_a_new_run_never_replaces_an_old_one(tmp_path) -> None:
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(1, {})
    with pytest.raises(FileExistsError, match="--resume true, or give another --run-dir"):
        MetricsWriter(tmp_path)
    assert len(read_metrics(tmp_path)) == 1


@pytest.mark.parametrize(("after", "kept"), [(-1, 0), (0, 1), (4, 5), (9, 10), (50, 10)])
def test_resume_keeps_exactly_the_lines_up_to_the_restored_step(tmp_path, after, kept) -> None:
    with MetricsWriter(tmp_path) as metrics:
        for step in range(10):
            metrics.write(step, {"x": step * 0.1})
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()
    with MetricsWriter(tmp_path, after_step=after) as metrics:
        assert (tmp_path / "metrics.jsonl").read_text().splitlines() == before[:kept]
        metrics.write(max(after, 9) + 1, {"x": 1.0})
    assert len(read_metrics(tmp_path)) == kept + 1


def test_resume_without_a_file_starts_one(tmp_path) -> None:
    with MetricsWriter(tmp_path, after_step=7) as metrics:
        metrics.write(8, {})
    assert read_metrics(tmp_path) == [{"step": 8}]


def test_a_torn_last_line_is_dropped_and_a_damaged_one_is_named(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "rew')
    assert [m["step"] for m in read_metrics(tmp_path)] == [1, 2]
    with MetricsWriter(tmp_path, after_step=2) as metrics:
        metrics.write(3, {"x": 1})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3, "x": 1}\n'
    path.write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_metrics(tmp_path)


def test_lines_survive_kill_9(tmp_path) -> None:
    code = (
        "import os, signal, sys\n"
        "from fastask_jax.report.metrics import MetricsWriter\n"
        "m = MetricsWriter(sys.argv[1])\n"
        "for s in range(5): m.write(s, {'x': s})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    assert [m["step"] for m in read_metrics(tmp_path)] == list(range(5))


def test_traces_hold_transcripts_and_are_cut_by_step(tmp_path) -> None:
    trace = {"step": 1, "messages": [{"role": "user", "content": "wie viel? 12 €"}]}
    with TraceWriter(tmp_path) as traces:
        traces.write(trace)
        traces.write(trace)
        traces.write({**trace, "step": 2})
        with pytest.raises(ValueError, match="integer `step`"):
            traces.write({"messages": []})
    assert "12 €" in (tmp_path / "traces.jsonl").read_text("utf-8")
    TraceWriter(tmp_path, after_step=1).close()
    assert read_traces(tmp_path) == [trace, trace]


def test_plain_values() -> None:
    @dataclass
    class Task:
        truth: tuple[int, ...]
        day: datetime.date

    got = plain({"task": Task((1, 2), datetime.date(2024, 3, 1)), "a": np.arange(2), 3: {"b", "a"}})
    assert got == {"task": {"truth": [1, 2], "day": "2024-03-01"}, "a": [0, 1], "3": ["a", "b"]}
    assert json.dumps(got)
    with pytest.raises(TypeError, match="no place in a JSON line"):
        plain(object())


def test_jsonl_needs_objects(tmp_path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match="line 1 is not a JSON object"):
        read_jsonl(path)
    with pytest.raises(ValueError, match="line 1"):
        JsonLines(path, after_step=3)


def test_eval_values_are_the_numbers_of_a_summary() -> None:
    assert eval_values({"exact_match": 0.5, "tasks": 128, "parts": {"correct": 1}}) == {
        "eval/exact_match": 0.5,
        "eval/tasks": 128,
    }


def test_a_run_is_not_resumed_while_it_still_runs(tmp_path) -> None:
    code = (
        "import sys, time\n"
        "from fastask_jax.report.metrics import MetricsWriter\n"
        "lines = MetricsWriter(sys.argv[1])\n"
        "for step in range(3): lines.write(step, {})\n"
        "print('written', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "written\n"
        with pytest.raises(BlockingIOError, match="a run that hasn't ended.*another --run-dir"):
            MetricsWriter(tmp_path, after_step=0)
        assert len(read_metrics(tmp_path)) == 3  # and not one of its lines was cut off
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    MetricsWriter(tmp_path, after_step=0).close()  # a kill leaves no lock behind
    assert len(read_metrics(tmp_path)) == 1
