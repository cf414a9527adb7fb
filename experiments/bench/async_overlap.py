"""Steps per hour of asynchronous over synchronous training, by how long tools take.

`python -m experiments.bench.async_overlap`: the real loop, engine and update, on two devices (fake
ones on a CPU), with an environment that answers at once and a pool that holds its answers back as
long as a tool would take.  The learner's cost and the rollouts' own are measured first; the
headline is at the latency with which a synchronous rollout takes as long as learning.
`--curve true` also runs latencies up to ten times that, and draws them.

The workload suits the question: prompts that a group shares (an engine reads them once, the
learner scores every copy), a few short turns, and rewards that differ.  Leaves out what tools do.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import zlib
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
from matplotlib.figure import Figure

from envs.core import Message, Reply, Score, Step, ToolSpec
from envs.pool import Event
from experiments.bench.report import report
from experiments.config import option, parse, run_main
from fastask_jax.actor import Actor
from fastask_jax.collect import Asynchronous, Batches, Source, Synchronous
from fastask_jax.fleet.config import FleetConfig
from fastask_jax.fleet.links import ThreadLink
from fastask_jax.learn import Objective, OptimizerConfig, PackConfig, make_train_step
from fastask_jax.loop import LoopConfig, Trainer
from fastask_jax.model import ModelConfig, init_params, make_mesh
from fastask_jax.model.tokenizers import load_tokenizer, shipped_weights
from fastask_jax.report.metrics import read_metrics
from fastask_jax.report.plots import save
from fastask_jax.rollout.chat import ChatFormat
from fastask_jax.rollout.engine import Engine, EngineConfig
from fastask_jax.rollout.pools import InlinePool
from fastask_jax.rollout.scheduler import RolloutConfig, Scheduler

# Tokens of a slot and of a row.
LENGTH = 768
CURVE = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True)
class Config:
    steps: int = option(8, "measured updates a run; the ones that fill the pipeline come before")
    runs: int = option(3, "runs of each kind, in turn; the medians are reported")
    max_staleness: int = option(2, "updates that a token may be old")
    curve: bool = option(False, "also latencies of 0 to 10 times, and a plot")
    plot: Path = option(Path("async_overlap.png"), "where the plot goes")

    def __post_init__(self) -> None:
        for name in ("steps", "runs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class Task:
    id: str


class Stream:
    """Tasks without end."""

    cursor = 0

    def task(self, number: int) -> Task:
        return Task(f"task {number}")

    def take(self, count: int) -> list[Task]:
        self.cursor += count
        return [self.task(number) for number in range(self.cursor - count, self.cursor)]


class Environment:
    """A long prompt, two answers, and a reward that depends on every letter."""

    tools: tuple[ToolSpec, ...] = ()
    TURNS = 3

    def reset(self, task: Task) -> list[Message]:
        self.task, self.said = task, list[str]()
        return [Message("user", f"{task.id}: " + "net revenue of North in March 2024, " * 56)]

    def step(self, reply: Reply) -> Step:
        self.said.append(reply.content)
        if len(self.said) == self.TURNS:
            return Step((), True, "answered")
        return Step((Message("tool", f"{len(reply.content)} letters"),), False)

    def score(self) -> Score:
        mark = zlib.crc32("".join(self.said).encode("utf-8", "replace")) % 100 / 100
        info: dict[str, Any] = dict.fromkeys(
            ("type", "family", "difficulty", "answer", "truth"), ""
        )
        info |= {"turns": self.TURNS, "cells": 0, "tool_calls": 0, "malformed": 0}
        return Score(mark, {"correct": mark}, info | {"task": self.task.id})

    def close(self) -> None:
        pass


class SlowPool(InlinePool):
    """Hands out the answer to each call when a tool that takes `latency` seconds would have."""

    def __init__(self, latency: float) -> None:
        super().__init__(lambda _: Environment())
        self.latency = latency
        self._held: list[tuple[float, Event]] = []

    def poll(self, timeout: float | None = None) -> list[Event]:
        now = time.monotonic()
        self._held += [(now + self.latency, event) for event in super().poll()]
        if self._held and timeout:
            wait = min(due for due, _ in self._held) - now
            time.sleep(max(0.0, min(wait, timeout)))
            now = time.monotonic()
        ready = [event for due, event in self._held if due <= now]
        self._held = [(due, event) for due, event in self._held if due > now]
        return ready

    def drop(self, episode_id: Hashable) -> None:
        self._held = [(due, event) for due, event in self._held if event.episode_id != episode_id]
        super().drop(episode_id)


class Bench:
    """Compiled parts that all runs share: the first runs compile, the later ones only run."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.batches = Batches(groups=2, copies=8)
        self.fleet = FleetConfig(max_staleness=config.max_staleness)
        self.chat = ChatFormat(load_tokenizer(shipped_weights("tiny")))
        self.model = ModelConfig(
            vocab_size=2560, hidden_size=128, num_layers=4, mixers=("full_attention",), heads=4,
            kv_heads=2, head_dim=32, feed_forwards=("dense",), intermediate_size=384,
            initializer_range=0.1,
        )  # fmt: skip
        devices = jax.devices()
        self.mesh, self.device = make_mesh(devices=devices[:1]), devices[-1]
        self.params = init_params(self.model, jax.random.key(0))
        self.step_fn = make_train_step(
            self.model, Objective(), OptimizerConfig(learning_rate=1e-5), micro_batch_rows=2,
            mesh=self.mesh,
        )  # fmt: skip
        rollouts = self.batches.groups * self.batches.copies
        slots = rollouts * (1 + config.max_staleness)
        shape = EngineConfig(
            slots, LENGTH, append_rows=2, append_buckets=(32, 256), decode_rows=rollouts,
            attend_buckets=(LENGTH,), decode_steps=8,
        )  # fmt: skip
        self.rollout = RolloutConfig(max_turn_tokens=8, max_tokens=64)
        # One engine where the learner is, for synchronous runs, and one beside it.
        self.engines = {
            device: Engine(self.model, shape, self.chat.stop_id, make_mesh(devices=[device]))
            for device in (devices[0], self.device)
        }
        self.here = devices[0]

    @contextmanager
    def source(self, mode: str, latency: float) -> Iterator[Source]:
        pool = SlowPool(latency)
        if mode == "sync":
            actor = Actor(self.engines[self.here], self.chat, pool, (), self.rollout)
            yield Synchronous(actor, Stream(), self.batches)
        else:
            engine = self.engines[self.device]
            scheduler = Scheduler(engine, pool, self.chat, self.rollout)
            links = [ThreadLink("replica 0", scheduler, partial(engine.place, alias=False))]
            yield Asynchronous(
                links, Stream().task, self.chat, self.fleet, self.rollout, self.batches
            )

    def run(self, mode: str, latency: float) -> list[dict[str, Any]]:
        """The measured lines of metrics of one run of the loop."""
        warm = 1 if mode == "sync" else 2 + self.config.max_staleness
        loop = LoopConfig(
            steps=warm + self.config.steps, batch_size=16, group_size=8, eval_tasks=0,
            save_every=10_000, traces=0,
        )  # fmt: skip
        with ExitStack() as stack:
            run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
            source = stack.enter_context(self.source(mode, latency))
            pack = PackConfig((LENGTH,), 2, 16)
            Trainer(loop, run_dir, self.step_fn, pack, source, []).run(self.params)
            return read_metrics(run_dir)[-self.config.steps - 1 :]


def seconds_per_step(lines: list[dict[str, Any]]) -> float:
    return (lines[-1]["time/wall"] - lines[0]["time/wall"]) / (len(lines) - 1)


def mean(lines: list[dict[str, Any]], name: str) -> float:
    return statistics.fmean(line[name] for line in lines[1:])


def main(argv: list[str]) -> None:
    config = parse(Config, argv, prog="python -m experiments.bench.async_overlap")
    if jax.config.jax_num_cpu_devices < 2:  # type: ignore[attr-defined]
        jax.config.update("jax_num_cpu_devices", 2)
    bench = Bench(config)
    for mode in ("sync", "async"):  # compiles
        bench.run(mode, 0.0)
    lines = bench.run("sync", 0.0)
    learn, rollout = mean(lines, "time/learn"), mean(lines, "time/rollout")
    latency = max(0.0, learn - rollout) / Environment.TURNS
    print(f"learning {learn:.2f} s, rollouts {rollout:.2f} s; latency {latency:.2f} s", flush=True)
    measured: dict[float, dict[str, list[list[dict[str, Any]]]]] = {}
    for times in CURVE if config.curve else (1.0,):
        found: dict[str, list[list[dict[str, Any]]]] = {"sync": [], "async": []}
        for _ in range(config.runs if times == 1.0 else 1):
            for mode, runs in found.items():
                runs.append(bench.run(mode, times * latency))
        measured[times] = found
        rates = {mode: 3600 / statistics.median(map(seconds_per_step, runs))
                 for mode, runs in found.items()}  # fmt: skip
        print(
            f"latency x {times:g}: {rates['async']:.0f} steps an hour, synchronous "
            f"{rates['sync']:.0f}",
            flush=True,
        )
    if config.curve:
        print(f"plot: {draw(measured, latency, config.plot)}")
    head = measured[1.0]
    waits = [mean(run, "time/rollout") / seconds_per_step(run) for run in head["async"]]
    report(
        "async_overlap",
        "steps/h",
        [3600 / seconds_per_step(run) for run in head["async"]],
        peer="synchronous",
        peer_runs=[3600 / seconds_per_step(run) for run in head["sync"]],
        learner_wait=statistics.median(waits),
        latency_seconds=latency,
        learn_seconds=learn,
        rollout_seconds=rollout,
        max_staleness=config.max_staleness,
        group_staleness=statistics.median(
            mean(run, "rollout/group_staleness") for run in head["async"]
        ),
        dropped=sum(line["rollout/dropped"] for run in head["async"] for line in run),
    )


def draw(measured: dict[float, Any], latency: float, path: Path) -> Path:
    """Steps per hour of both modes over the tools' latency."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for mode, colour, name in (
        ("async", "#2b5fa8", "asynchronous"),
        ("sync", "#d1601f", "synchronous"),
    ):
        at = [times * latency for times in measured]
        rates = [
            3600 / statistics.median(map(seconds_per_step, found[mode]))
            for found in measured.values()
        ]
        axes.plot(at, rates, color=colour, marker="o", markersize=5, linewidth=2, label=name)
    axes.set_xlabel("seconds that a tool takes")
    axes.set_title("updates an hour", fontsize=11, loc="left")
    axes.set_ylim(0)
    axes.set_xlim(0)
    axes.grid(axis="y", color="#e3e3e3", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return save(figure, path)


if __name__ == "__main__":
    run_main(main)
