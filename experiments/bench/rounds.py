"""What lies between two decode calls, and what is compiled for them.

`python -m experiments.bench.rounds`: the tiny policy at the quickstart's sizes answers Fast Ask
questions in their real environments for `rounds` decode rounds.  `value` is the host's share of
the time: all that is spent neither in the engine's calls nor in waiting for an environment where
nothing can be decoded; `peer_value` is the engine's.  The first `warm_up` rounds aren't timed;
`programs` are those that the engine has compiled in all of them, and `compiled_late` whatever XLA
has compiled in the timed ones.
"""

from __future__ import annotations

import time
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from typing import Any

import jax

from envs.fast_ask.tools import TOOLS
from envs.pool import Event
from experiments.bench.report import report
from experiments.config import option, parse, run_main
from experiments.fast_ask import PRESET_CONFIGS
from experiments.rollouts import environments
from experiments.training import load
from fastask_jax.rollout.engine import Engine
from fastask_jax.rollout.pools import Pool
from fastask_jax.rollout.scheduler import Scheduler


@dataclass(frozen=True)
class Config:
    rounds: int = option(500, "decode rounds that are timed")
    warm_up: int = option(100, "decode rounds before")
    seed: int = option(0, "of what is sampled")

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.warm_up < 1:
            raise ValueError("rounds and warm_up must be at least 1")


class Waiting:
    """A pool that counts the seconds in which somebody waits for it with nothing else to do."""

    def __init__(self, pool: Pool) -> None:
        self._pool, self.seconds = pool, 0.0
        self.reset, self.step, self.drop = pool.reset, pool.step, pool.drop

    def poll(self, timeout: float | None = None) -> list[Event]:
        began = time.perf_counter()
        events = self._pool.poll(timeout)
        if timeout != 0:
            self.seconds += time.perf_counter() - began
        return events


def compilations() -> list[float]:
    """A list that gets the seconds of whatever XLA compiles from now on."""
    seen: list[float] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return seen


def main(argv: list[str]) -> None:
    config = parse(Config, argv)
    run = PRESET_CONFIGS["tiny"]
    model, params, chat = load(run)
    compiled = compilations()
    with environments(run) as pool:
        engine = Engine(model, run.engine, chat.stop_id)
        waiting = Waiting(pool)
        scheduler = Scheduler(engine, waiting, chat, run.rollout, TOOLS)
        scheduler.set_weights(engine.place(params), 0)
        stream, numbers = run.tasks.stream("train"), count()

        def rounds(wanted: int) -> float:
            """Seconds of so many rounds that decode."""
            began, goal = time.perf_counter(), scheduler.stats.rounds + wanted
            while scheduler.stats.rounds < goal:
                while scheduler.unfinished < 2 * run.engine.slots:
                    [task] = stream.take(1)  # a prompt of its own for each episode
                    scheduler.add(next(numbers), task, 1, f"{config.seed}")
                scheduler.round(60.0)
            return time.perf_counter() - began

        rounds(config.warm_up)
        before, early, waited = deepcopy(scheduler.stats), len(compiled), waiting.seconds
        seconds = rounds(config.rounds)
        spent = scheduler.stats.minus(before)
        late, waited = len(compiled) - early, waiting.seconds - waited
        scheduler.close()
    # Where the devices were done before the host's work beside them, all of that work counts as
    # the host's: more than they have waited.
    busy = spent.append_seconds + spent.decode_seconds - spent.late_seconds
    total = seconds - waited
    report(
        "rounds", "share of a round", [(total - busy) / total],
        peer="engine", peer_runs=[busy / total], higher_is_better=False,
        rounds=config.rounds, programs=sum(engine.traces.values()), by_kind=dict(engine.traces),
        compiled_late=late, waited=waited / seconds, occupancy=spent.occupancy,
        sampled_tokens=spent.sampled_tokens, late=spent.late_seconds / total,
        tokens_per_second=spent.sampled_tokens / seconds,
    )  # fmt: skip


if __name__ == "__main__":
    run_main(main)
