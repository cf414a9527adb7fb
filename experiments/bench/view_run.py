"""A run directory without a training: what `fastask view` has to show, of any size, in seconds.

The trajectories are real ones: the scripted explorer (`fastask_jax.policies.explorer`) in the real
environment, its replies as token ids of the shipped tokenizer; only their logprobs are drawn, and
the curves are made up.  A large run repeats a few hundred of them at different steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

from envs.core import Message, Reply
from envs.fast_ask import StreamConfig, TaskStream
from envs.fast_ask.env import FastAskConfig, FastAskEnv
from envs.fast_ask.outline import outline
from envs.fast_ask.tasks import Task
from envs.sandbox import Sandbox, SandboxConfig
from fastask_jax.actor import record
from fastask_jax.model.tokenizers import load_tokenizer, shipped_weights
from fastask_jax.policies.explorer import ExplorerPolicy
from fastask_jax.report.jsonl import plain
from fastask_jax.report.metrics import MetricsWriter, eval_values
from fastask_jax.report.summary import summarize
from fastask_jax.report.traces import TraceWriter
from fastask_jax.rollout.chat import ChatFormat
from fastask_jax.rollout.transcript import Trajectory

ENV = FastAskConfig(prompt="short", max_turns=6)


def play(
    task: Task, env: FastAskEnv, chat: ChatFormat, rng: Random, version: int = 0
) -> Trajectory:
    """One scored episode of the explorer, with logprobs out of the air."""
    trajectory, policy = Trajectory(task.id, 0, 0, task), ExplorerPolicy(rng)
    messages = tuple(env.reset(task))
    trajectory.add_prompt(chat.encode_prompt(messages))
    said = policy.start(list(messages), env.tools, task)
    while True:
        ids = chat.encode_reply(Message("assistant", said.content, said.tool_calls))
        logprobs = [min(0.0, math.log(rng.betavariate(4, 0.25) + 1e-9)) for _ in ids]
        trajectory.add_sampled(ids, logprobs, version)
        step = env.step(Reply(said.content, said.tool_calls, len(ids)))
        if step.done:
            break
        trajectory.add_observation(chat.encode_observation(step.messages))
        said = policy.reply(step.messages)
    trajectory.score, trajectory.stop_reason = env.score(), step.stop_reason
    trajectory.seconds = rng.uniform(0.5, 3.0)
    return trajectory


def episodes(count: int, seed: int = 0, split: str = "train") -> Iterator[Trajectory]:
    """Episodes of the explorer on the first tasks of a stream."""
    stream = TaskStream(StreamConfig(split, seed=seed))
    with Sandbox(SandboxConfig()) as box:
        env, chat = FastAskEnv(ENV, box), chat_format()
        for n in range(count):
            yield play(stream.task(n), env, chat, Random(f"view/{seed}/{n}"), n // 8)
        env.close()


def chat_format() -> ChatFormat:
    return ChatFormat(load_tokenizer(shipped_weights("tiny")))


def write_run(run_dir: Path, count: int, *, distinct: int = 200, seed: int = 0) -> None:
    """Writes a run of `count` trajectories, of which `distinct` differ: two evaluations of 28 tasks
    (fewer in a small run), and 8 rollouts for each update."""
    run_dir = Path(run_dir)
    heldout = min(28, count // 4)
    chat = chat_format()
    found = list(episodes(max(1, min(distinct, count - 2 * heldout)), seed))
    lines = [t.to_json(chat) | outline(t.task) for t in found]
    evaluated = [list(episodes(heldout, seed + side, "heldout")) for side in (1, 2)]
    steps = max(1, -(-(count - 2 * heldout) // 8))
    (run_dir / "evals").mkdir(parents=True, exist_ok=True)
    (run_dir / "config.json").write_text(
        json.dumps({"model": "tiny", "mode": "sync", "env": asdict(ENV)}) + "\n", "utf-8"
    )
    with TraceWriter(run_dir) as traces, MetricsWriter(run_dir) as metrics:
        left = count
        for step in range(steps + 1):
            values = _numbers(step, steps, Random(f"{seed}/{step}")) if step else {}
            for n in range(min(8, left - heldout) if step else 0):
                line = lines[(8 * (step - 1) + n) % len(lines)]
                traces.write({**line, "step": step, "split": "train", "group": 0, "sample": n})
                left -= 1
            if heldout and step in (0, steps):
                tried = evaluated[step > 0]
                for trajectory in tried:
                    line = trajectory.to_json(chat) | outline(trajectory.task)
                    traces.write({"step": step, "split": "eval", **line})
                    left -= 1
                records = [record(t) for t in tried]
                file = run_dir / "evals" / f"step_{step:05d}.json"
                file.write_text(json.dumps(plain(records)) + "\n", "utf-8")
                values |= eval_values(summarize(records))
            metrics.write(step, values)


def _numbers(step: int, steps: int, rng: Random) -> dict[str, Any]:
    done = step / steps
    accuracy = min(1.0, max(0.0, 0.2 + 0.6 * done + rng.gauss(0, 0.05)))
    return {
        "train/reward": accuracy + 0.08, "train/accuracy": accuracy,
        "train/turns": 3.5 - done + rng.gauss(0, 0.1), "train/cells": 120 + rng.gauss(0, 9),
        "policy/staleness": abs(rng.gauss(0, 0.5)), "policy/entropy": 0.3 - 0.2 * done,
        "time/rollout": 3.0, "time/learn": 2.0 + rng.random(), "time/decode": 2.5,
        "time/append": 0.3, "time/pool": 0.2, "time/idle": 2.0, "time/wall": 6.0 * step,
    }  # fmt: skip
