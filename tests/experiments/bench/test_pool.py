"""The pool benchmark, small, with every part real."""

import json
import os
import signal
import threading

import pytest

from envs.fast_ask import KINDS, StreamConfig, TaskStream, make_task
from envs.fast_ask.env import FastAskConfig, FastAskEnv
from envs.pool import EnvPool, PoolConfig
from envs.sandbox import Sandbox, SandboxConfig
from experiments.bench.pool import FACTORY, LongOracle, main, play
from experiments.config import UsageError
from fastask_jax.policies import run_episode


def test_every_type_takes_six_calls_and_is_solved():
    with Sandbox() as sandbox:
        for kind in KINDS:
            env = FastAskEnv(FastAskConfig(), sandbox)
            score = run_episode(LongOracle(6), env, make_task(5, kind))
            assert score.parts["correct"] == 1.0 and score.info["tool_calls"] >= 6, kind
            assert score.info["python_calls"] >= 1 and score.info["turns"] <= 15, kind


def test_the_last_line_is_the_result(capsys):
    main("--episodes 28 --runs 2 --workers 2 --live 8 --sessions 3".split())
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["bench"] == "pool" and line["unit"] == "episodes/s" and line["runs"] == 2
    assert line["tool_calls_min"] >= 6 and line["python_calls_min"] >= 1
    assert line["exact_match"] == 1.0 and line["value"] > 0 and 0 < line["worker_busy"] <= 1
    assert 0 < line["session_later_ms"] < line["session_first_ms"]


def test_numbers_are_checked():
    with pytest.raises(UsageError, match="workers must be at least 1"):
        main(["--workers", "0"])


@pytest.mark.slow
def test_killed_workers_change_no_score():
    """Real workbooks and real Python sessions, while a worker dies every 0.3 s."""
    tasks = TaskStream(StreamConfig(split="heldout")).take(140)
    settings = (FastAskConfig(), SandboxConfig())
    with EnvPool(FACTORY, settings) as pool:
        calm = {s.info["task"]: (s.total, s.parts) for s in play(pool, tasks, 16, 6)}
    with EnvPool(FACTORY, settings, PoolConfig(max_retries=10, error_budget=1000)) as pool:
        stop, killed = threading.Event(), []

        def reap():
            while not stop.wait(0.3):
                killed.append(pool.stats()["workers"][len(killed) % 2]["pid"])
                os.kill(killed[-1], signal.SIGKILL)

        killer = threading.Thread(target=reap)
        killer.start()
        try:
            scores = play(pool, tasks, 16, 6)
        finally:
            stop.set()
            killer.join()
        stats = pool.stats()
    assert {s.info["task"]: (s.total, s.parts) for s in scores} == calm and len(calm) == 140
    assert stats["restarts"] >= 3 and stats["replays"] >= 3 and stats["errors"] == 0
