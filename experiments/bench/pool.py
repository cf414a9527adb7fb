"""Episodes per second of the environment pool, and how fast a sandbox session answers.

`python -m experiments.bench.pool`: the oracle plays Fast Ask through the real environment, pool
and sandbox.  Every episode makes at least `min_calls` tool calls, Python among them: types that
need fewer are lengthened by Python calls that count what was read.  Tasks are made beforehand;
workbooks are built inside the measured time, as in training.  Leaves out models: a reply costs
next to nothing here, so the figure is the ceiling that environments set.
"""

from __future__ import annotations

import datetime
import itertools
import statistics
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from envs.core import Message, Reply, Score, ToolCall, ToolSpec
from envs.fast_ask import StreamConfig, Task, TaskStream
from envs.fast_ask.env import FastAskConfig
from envs.fast_ask.tools import TOOLS
from envs.pool import EnvPool, PoolConfig
from envs.sandbox import Sandbox, SandboxConfig
from experiments.bench.report import report
from experiments.config import option, parse, run_main
from fastask_jax.policies.oracle import OraclePolicy

FACTORY = "envs.fast_ask.env:make_env"


@dataclass(frozen=True)
class Config:
    episodes: int = option(420, "episodes a run, of all types and difficulties in turn")
    runs: int = option(5, "measured runs; the medians are reported")
    workers: int = option(2, "worker processes")
    live: int = option(32, "episodes live at one time")
    min_calls: int = option(6, "tool calls of an episode, at least")
    scale: str = option("tiny", "scale of the workbooks: tiny or standard")
    sessions: int = option(100, "sandbox sessions whose first and later calls are timed")

    def __post_init__(self) -> None:
        for name in ("episodes", "runs", "workers", "live", "min_calls", "sessions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


class LongOracle:
    """The oracle, made to take at least `min_calls` tool calls."""

    def __init__(self, min_calls: int) -> None:
        self._oracle = OraclePolicy(one_read_per_call=True)
        self._min_calls = min_calls
        self._calls = 0
        self._kept: Reply | None = None

    def start(self, messages: Sequence[Message], tools: tuple[ToolSpec, ...], task: Task) -> Reply:
        return self._count(self._oracle.start(list(messages), tools, task))

    def reply(self, messages: tuple[Message, ...]) -> Reply:
        if self._kept is None:
            reply = self._oracle.reply(messages)
            if reply.tool_calls or self._calls >= self._min_calls:
                return self._count(reply)
            self._kept = reply
        if self._calls >= self._min_calls:
            return self._kept
        code = "print({name: len(rows) for name, rows in cells.items()})"
        return self._count(Reply("", (ToolCall("run_python", {"code": code}),), tokens=24))

    def _count(self, reply: Reply) -> Reply:
        self._calls += len(reply.tool_calls)
        return reply


def play(pool: EnvPool, tasks: Sequence[Task], live: int, min_calls: int) -> list[Score]:
    """Plays the tasks, `live` at a time; raises RuntimeError for one that isn't solved."""
    scores: list[Score] = []
    playing: dict[Hashable, tuple[LongOracle, Task]] = {}
    waiting = iter(enumerate(tasks))

    def admit(count: int) -> None:
        for number, task in itertools.islice(waiting, count):
            playing[number] = LongOracle(min_calls), task
            pool.reset(number, task)

    admit(live)
    while playing:
        for event in pool.poll():
            policy, task = playing[event.episode_id]
            if event.error is not None:
                raise RuntimeError(f"{task.id} failed: {event.error}")
            if event.score is not None:
                if event.score.parts["correct"] != 1.0:
                    raise RuntimeError(f"the oracle got {task.id} wrong: {event.score.info}")
                scores.append(event.score)
                del playing[event.episode_id]
                admit(1)
            elif event.step is None:
                pool.step(event.episode_id, policy.start(event.messages, TOOLS, task))
            else:
                pool.step(event.episode_id, policy.reply(event.messages))
    return scores


def sandbox_latency(sessions: int) -> tuple[list[float], list[float]]:
    """Milliseconds of a session's first result, session opened and cells bound inside the time,
    and of later calls, for sessions opened one after the other without a pause."""
    day = datetime.date(2024, 3, 1)
    rows: list[list[Any]] = [["order", "region", "ship_date", "amount_cents"]]
    rows += [[f"SO-{n}", "West", day, 1250 + n] for n in range(20)]
    code = 'print(sum(o.amount_cents for o in Orders if o.region == "West"))'
    first, later = [], []
    with Sandbox(SandboxConfig()) as sandbox:
        for seed in range(sessions):
            started = time.perf_counter()
            session = sandbox.session(seed=seed)
            session.bind("Orders", 1, 1, rows)
            outputs = [session.run(code).output]
            first.append(time.perf_counter() - started)
            for _ in range(10):
                started = time.perf_counter()
                outputs.append(session.run(code).output)
                later.append(time.perf_counter() - started)
            session.close()
            if {output.strip() for output in outputs} != {"25190"}:
                raise RuntimeError(f"the sandbox computed {outputs}, expected 25190")
    return [1e3 * seconds for seconds in first], [1e3 * seconds for seconds in later]


def main(argv: list[str] | None = None) -> None:
    config = parse(Config, argv, description=__doc__)
    stream = TaskStream(StreamConfig(scale=config.scale))
    first, later = sandbox_latency(config.sessions)
    rates: list[float] = []
    scores: list[Score] = []
    settings = (FastAskConfig(), SandboxConfig())
    with EnvPool(FACTORY, settings, PoolConfig(workers=config.workers)) as pool:
        play(pool, stream.take(28), config.live, config.min_calls)
        for number in range(config.runs):
            tasks = stream.take(config.episodes)
            started = time.perf_counter()
            scores += play(pool, tasks, config.live, config.min_calls)
            rates.append(config.episodes / (time.perf_counter() - started))
            print(f"run {number + 1}: {rates[-1]:.1f} episodes/s", flush=True)
        stats = pool.stats()
    calls = [score.info["tool_calls"] for score in scores]
    report(
        "pool",
        "episodes/s",
        rates,
        episodes=config.episodes,
        workers=config.workers,
        live=config.live,
        scale=config.scale,
        tool_calls_min=min(calls),
        tool_calls_mean=statistics.fmean(calls),
        python_calls_min=min(score.info["python_calls"] for score in scores),
        exact_match=statistics.fmean(score.parts["correct"] for score in scores),
        worker_busy=statistics.fmean(worker["busy_share"] for worker in stats["workers"]),
        session_first_ms=statistics.median(first),
        session_later_ms=statistics.median(later),
    )


if __name__ == "__main__":
    run_main(main)
