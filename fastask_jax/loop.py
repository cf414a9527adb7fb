"""The training loop: rollouts -> one update, and again; files, evaluations, checkpoints.

Where rollouts come from is the source's (`collect.py`).  From a synchronous one a run is
deterministic: step n takes the next tasks of the stream, samples with a seed made of the run's
seed and n, and trains on exactly what it sampled; so a run that was killed and resumed from its
last committed checkpoint is the run that was never interrupted.  From an asynchronous one a
resumed run trains on no group twice and loses none that had ended.  Evaluation shares the
engine, the weights and the decoding mode of training.

With several processes (`fastask_jax.distributed`) each runs this same loop: it rolls out its share
of the tasks on a device of its own, all get all trajectories, and one update runs over the mesh of
all devices.  Process 0 alone writes and shows what a run leaves behind, checkpoints excepted.

Left out: what is trained (the caller builds model, source and objective), and plots
(`fastask_jax.report`).
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastask_jax._exit import resumable
from fastask_jax.actor import Record
from fastask_jax.collect import CUT, Batches, Collected, Source
from fastask_jax.distributed import Channel, Quiet, is_main
from fastask_jax.learn import Objective, PackConfig, TrainState, TrainStep, pack, results
from fastask_jax.learn.checkpoint import Checkpointer
from fastask_jax.model import check_finite
from fastask_jax.model.lora import fingerprint
from fastask_jax.policies.base import record
from fastask_jax.report import metrics as names
from fastask_jax.report.jsonl import JsonLines, plain
from fastask_jax.report.metrics import MetricsWriter, eval_values, read_metrics
from fastask_jax.report.progress import Progress
from fastask_jax.report.summary import summarize
from fastask_jax.report.traces import TraceWriter


@dataclass(frozen=True)
class LoopConfig:
    """The run's length and its batches.

    steps: updates.  batch_size: rollouts of a step; a multiple of group_size.
    group_size: copies of a task, at least 2: the group that advantages are centred in.
    refill_rounds: how often groups without signal (all rewards equal) are replaced by new tasks
        within a synchronous step; an asynchronous one always does.
    eval_every: steps between evaluations; one is made before the first step and after the last.
    eval_tasks: held-out tasks of an evaluation; 0 makes none.
    save_every: steps between checkpoints.  keep_last: how many of them are kept.  keep_every:
        those of steps that this divides are kept for ever; none without it.
    traces: trajectories a step written to traces.jsonl.
    gap_alarm: mean |log(learner's / sampler's probability)| of a step's tokens above which a
        warning is shown, of those that the step's own weights sampled: it should be rounding.
    seed: of tasks' order and sampling.
    """

    steps: int = 100
    batch_size: int = 256
    group_size: int = 8
    refill_rounds: int = 0
    eval_every: int = 20
    eval_tasks: int = 128
    save_every: int = 20
    keep_last: int = 2
    keep_every: int | None = None
    traces: int = 8
    gap_alarm: float = 0.01
    seed: int = 0

    def batches(self, kind: str) -> Batches:
        """What a source needs to know of it; kind: of advantage."""
        groups = self.batch_size // self.group_size
        return Batches(groups, self.group_size, self.seed, kind, self.refill_rounds)

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "group_size", "eval_every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"loop.{name} must be at least 1, not {getattr(self, name)}")
        if self.keep_last < 1:
            raise ValueError(f"loop.keep_last must be at least 1, not {self.keep_last}")
        if self.keep_every is not None and self.keep_every < 1:
            raise ValueError(f"loop.keep_every must be at least 1, not {self.keep_every}")
        for name in ("refill_rounds", "eval_tasks", "traces"):
            if getattr(self, name) < 0:
                raise ValueError(f"loop.{name} must be 0 or more, not {getattr(self, name)}")
        if not self.gap_alarm > 0:
            raise ValueError(f"loop.gap_alarm must be above 0, not {self.gap_alarm}")
        if self.group_size < 2:
            raise ValueError(
                "loop.group_size must be at least 2, not 1: an advantage compares the rollouts of "
                "a group, so one alone teaches nothing"
            )
        if self.batch_size % self.group_size:
            near = max(1, round(self.batch_size / self.group_size)) * self.group_size
            raise ValueError(
                f"loop.batch_size ({self.batch_size}) must be a multiple of loop.group_size "
                f"({self.group_size}); {near} is"
            )


@dataclass
class Trainer:
    """One run.

    settings: configs by name, those that the trainer doesn't know itself and without which the
    run would be another one (`env`); a resumed run must have the same.
    began: when the run began, on this process's `time.monotonic`; `run` takes off what earlier
    sessions of a resumed run took.
    """

    config: LoopConfig
    run_dir: Path
    step_fn: TrainStep
    pack_config: PackConfig
    source: Source
    eval_tasks: Sequence[Any]
    on_eval: Callable[[int, list[Record]], None] = lambda step, records: None
    on_start: Callable[[], object] = lambda: None  # the run may begin: nothing was refused
    settings: Mapping[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    _checkpoints: Checkpointer = field(init=False)
    _base: dict[str, Any] = field(init=False, default_factory=dict)  # of a run with LoRA
    _channel: Channel = field(init=False)

    def __post_init__(self) -> None:
        self.run_dir = Path(self.run_dir)
        keep = (self.config.keep_last, self.config.keep_every)
        self._checkpoints = Checkpointer(self.run_dir, *keep)
        self._channel = Channel("loop")

    @property
    def objective(self) -> Objective:
        return self.step_fn.objective

    def run(self, params: Any, resume: bool = False) -> TrainState:
        """Trains from `params`, or on from the last committed checkpoint; returns the state.

        Raises FileExistsError when the run directory holds a run and `resume` is false,
        BlockingIOError while that run still runs, and ValueError when it can't be resumed with
        these settings.
        """
        with ExitStack() as stack:
            stack.enter_context(self._checkpoints)
            # Refusals of process 0 (the directory holds another run) stop the others too.
            metrics = self._channel.run("taking the run", lambda: self._take(stack, resume))
            state, done = self._begin(params, resume)
            traces, progress = self._channel.run(
                "opening the run's files", lambda: self._open(stack, metrics, done, resume)
            )
            stack.enter_context(resumable(self.run_dir))
            groups = self._open_groups(stack, done, resume)
            stack.enter_context(self.source)
            self._publish(state)
            if done is None:
                count = len(self.eval_tasks)
                tasks = f"{count} task" + "s" * (count != 1)
                progress.note(f"evaluating {tasks}; what runs for the first time compiles")
                values = self._evaluate(0, progress)
                metrics.write(0, values | self._wall())
                self._save(0, state)
            for step in range((done or 0) + 1, self.config.steps + 1):
                state, values = self._step(step, state, traces, groups)
                warning = gap_warning(values, self.config.gap_alarm)
                if warning is not None:
                    progress.note(f"step {step}: {warning}")
                if step % self.config.eval_every == 0 or step == self.config.steps:
                    values |= self._evaluate(step, progress)
                metrics.write(step, values | self._wall())
                progress.update(step, values)
                if step % self.config.save_every == 0 or step == self.config.steps:
                    self._save(step, state)
        return state

    def _wall(self) -> dict[str, float]:
        return {names.WALL_SECONDS: time.monotonic() - self.began}

    def _take(self, stack: ExitStack, resume: bool) -> Any:
        """The writer of metrics, whose lock keeps other starts out.  What an earlier session has
        written stays, until it is clear that this one may go on."""
        if not is_main():
            return Quiet()
        return stack.enter_context(MetricsWriter(self.run_dir, sys.maxsize if resume else None))

    def _begin(self, params: Any, resume: bool) -> tuple[TrainState, int | None]:
        """The state to start from, and the steps that it has behind it; None for a new run."""
        if self.step_fn.lora is not None:
            weights = int(fingerprint(self.step_fn.frozen))
            self._base = {"lora.alpha": self.step_fn.lora.alpha, "fingerprint of weights": weights}
        restored = None
        if resume:
            restored = self._checkpoints.restore_latest(self.step_fn.abstract(params))
        if restored is None:
            return self.step_fn.init(params), None
        done = int(restored.host_state["step"])
        self._check_resumable(done, restored.host_state.get("settings", {}))
        check_finite(restored.state.params, f"the weights of step {done} in {self.run_dir}")
        self.source.restore(restored.host_state)
        return restored.state, done

    def _open(self, stack: ExitStack, metrics: Any, done: int | None, resume: bool) -> Any:
        """The writer of traces and the progress bar; silent but on process 0."""
        if not is_main():
            return Quiet(), Quiet()
        kept = self._kept(done, resume)
        traces = stack.enter_context(TraceWriter(self.run_dir, kept))
        self.on_start()
        if kept is not None:
            lines = read_metrics(self.run_dir)
            # Also what a kill undid was time of the run.
            self.began -= lines[-1].get(names.WALL_SECONDS, 0.0) if lines else 0.0
            metrics.cut(kept)
        return traces, stack.enter_context(Progress(self.config.steps, done or 0))

    def _open_groups(self, stack: ExitStack, done: int | None, resume: bool) -> Any:
        """The writer of groups.jsonl: which groups each asynchronous update has taken."""
        if not (is_main() and self.source.numbered):
            return Quiet()
        return stack.enter_context(
            JsonLines(self.run_dir / "groups.jsonl", self._kept(done, resume))
        )

    @staticmethod
    def _kept(done: int | None, resume: bool) -> int | None:
        """The step after which lines of an earlier try are cut off (-1: all of them)."""
        return -1 if done is None and resume else done

    def _save(self, step: int, state: TrainState) -> None:
        host_state = {"step": step, "settings": self._settings(), **self.source.state()}
        self._checkpoints.save(step, state, host_state)

    def _settings(self) -> dict[str, Any]:
        """What decides which tasks a run sees, what it samples, how that is rewarded and what is
        learned from it; the same for its whole life.

        The optimizer is no part of it: a run that diverged goes on with a lower rate.  Neither is
        what a run on another machine or mesh needs otherwise.  With LoRA the weights that aren't
        trained are, as no checkpoint holds them.
        """
        names = ("seed", "batch_size", "group_size", "eval_tasks")
        found = {f"loop.{name}": getattr(self.config, name) for name in names}
        found["pack.row_lengths"] = plain(self.pack_config.row_lengths)
        configs = {**self.settings, **self.source.settings()}
        configs["objective"] = getattr(self.step_fn, "objective", None)
        for name, config in configs.items():
            if config is not None:
                found |= dict(_flat(name, config))
        found.pop("rollout.stall_timeout", None)
        return found | self._base

    def _check_resumable(self, done: int, saved: Record) -> None:
        if done > self.config.steps:
            raise ValueError(
                f"the run in {self.run_dir} has made {done} steps already; resume it with "
                f"loop.steps of {done} or more, or give another --run-dir"
            )
        now = self._settings()
        changed = [name for name in now if name in saved and saved[name] != now[name]]
        if changed:
            was = ", ".join(f"{name}={saved[name]} (now {now[name]})" for name in changed)
            raise ValueError(
                f"the run in {self.run_dir} was begun with {was}: resume it with that, or give "
                "another --run-dir"
            )

    def _step(
        self, step: int, state: TrainState, traces: TraceWriter | Quiet, groups: JsonLines | Quiet
    ) -> tuple[TrainState, dict[str, Any]]:
        began = time.monotonic()
        found = self.source.collect(step)
        rolled = time.monotonic()
        valid = [t for t in found.ended if t.valid]
        if found.ended and not valid:
            raise RuntimeError(
                f"step {step}: all {len(found.ended)} rollouts failed: {found.ended[0].error}"
            )
        values: dict[str, Any] = {}
        if found.useful:
            state, learned = self.step_fn(state, pack(found.useful, self.pack_config))
            values = results(learned)
            if values["optim/skipped"]:
                raise FloatingPointError(
                    f"step {step}: the update isn't finite; the last checkpoint is intact. "
                    "Resume from it with a lower optimizer.learning_rate"
                )
            self._publish(state)
        for trajectory in found.ended[: self.config.traces]:
            traces.write({"step": step, **trajectory.to_json(self.source.chat)})
        groups.write({"step": step, "groups": found.groups})
        seconds = time.monotonic() - began
        values |= _rollout_values(found, valid) | found.values
        values |= {
            names.TOKENS_PER_SECOND: sum(len(t) for t in valid) / seconds,
            "train/version": int(state.version),
            "time/rollout": rolled - began,
            "time/learn": seconds - (rolled - began),
        }
        worked = sum(values[f"time/{name}"] for name in ("append", "decode", "pool"))
        values.setdefault("time/idle", max(0.0, seconds - worked))
        return state, values

    def _publish(self, state: TrainState) -> None:
        self.source.weights(self.step_fn.policy(state), int(state.version))

    def _evaluate(self, step: int, progress: Progress | Quiet) -> dict[str, Any]:
        if not self.eval_tasks:
            return {}
        began = time.monotonic()
        records = self.source.evaluate(self.eval_tasks)
        if is_main():
            write_records(self.run_dir, f"step_{step:05d}", records)
            self.on_eval(step, records)
        summary = summarize(records)
        progress.note(
            f"evaluation at step {step}: exact match {summary['exact_match']:.1%} "
            f"({summary['low']:.1%} to {summary['high']:.1%}), reward {summary['mean_reward']:.3f}"
        )
        return eval_values(summary) | {"time/eval": time.monotonic() - began}


def _rollout_values(found: Collected, valid: Sequence[Any]) -> dict[str, Any]:
    """Means over the rollouts that have ended; none where none has."""
    if not valid:
        return {}
    records = [record(t) for t in valid]

    def mean(values: Iterable[float]) -> float:
        return float(np.mean(list(values)))

    return {
        names.REWARD: mean(r["reward"] for r in records),
        names.ACCURACY: mean(r["correct"] for r in records),
        names.TURNS: mean(r["turns"] for r in records),
        "train/cells": mean(r["cells"] for r in records),
        "train/tool_calls": mean(r["tool_calls"] for r in records),
        "train/malformed_calls": mean(r["malformed"] for r in records),
        "train/cut": mean(r["stop_reason"] in CUT for r in records),
        "train/failed": len(found.ended) - len(valid),
        **{
            f"train/{name}": mean(r["parts"][name] for r in records) for name in records[0]["parts"]
        },
    }


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The fields of a config under dotted names, as JSON gives them back."""
    if is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from _flat(f"{name}.{part.name}", getattr(value, part.name))
    elif isinstance(value, float) and math.isinf(value):
        yield name, str(value)
    else:
        yield name, plain(value)


def gap_warning(values: Record, alarm: float) -> str | None:
    """What to say of a step whose sampler and learner disagree on the same weights, or None."""
    gap = values.get("policy/gap")
    if gap is None or gap <= alarm:
        return None
    return (
        f"warning: sampler and learner differ by {gap:.2g} nats a token (loop.gap_alarm is "
        f"{alarm:g}): they don't score one distribution, so the updates are off-policy"
    )


def write_records(run_dir: Path, name: str, records: Sequence[Record]) -> None:
    """Keeps an evaluation's records in `RUN/evals/NAME.json`."""
    path = Path(run_dir) / "evals" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plain(list(records))) + "\n", "utf-8")


def read_records(run_dir: Path, name: str) -> list[Record]:
    return json.loads((Path(run_dir) / "evals" / f"{name}.json").read_text("utf-8"))
