"""The policies that need no engine of ours, as players: scripts, and models behind HTTP.

Each episode has an environment of its own, all of a player one sandbox.  An opened player ends
with its `with` block.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from envs.core import Score
from envs.fast_ask import Task
from envs.fast_ask.env import FastAskConfig, FastAskEnv
from envs.sandbox import Sandbox, SandboxConfig
from fastask_jax.evaluation.play import Threads
from fastask_jax.policies.base import Policy, run_episode
from fastask_jax.policies.blind import BlindPolicy
from fastask_jax.policies.oracle import OraclePolicy
from fastask_jax.policies.remote import Refused, RemotePolicy, RemoteTrajectory


@dataclass(frozen=True)
class ScriptEpisode:
    """An episode that a script has played; see `policies.base.Played`."""

    task_id: str
    score: Score | None
    stop_reason: str | None
    error: str | None
    seconds: float
    sampled: int = 0

    @property
    def valid(self) -> bool:
        return self.score is not None


@contextmanager
def script_player(
    kind: str, scale: str, env: FastAskConfig, sandbox: SandboxConfig
) -> Iterator[Threads]:
    """kind: "blind" or "oracle".  One episode at a time: all that they do is use the machine."""
    policy: Policy = (
        BlindPolicy.of_scale(scale) if kind == "blind" else OraclePolicy(use_helper=True)
    )
    with Sandbox(sandbox) as box:

        def run(task: Task, rollout: int) -> ScriptEpisode:
            began = time.perf_counter()
            try:
                score = run_episode(policy, FastAskEnv(env, box), task)
            except Exception as error:  # of the environment: the scripts have no faults to have
                said, took = f"{type(error).__name__}: {error}", time.perf_counter() - began
                return ScriptEpisode(task.id, None, "error", said, took)
            reason, took = score.info["stop_reason"], time.perf_counter() - began
            return ScriptEpisode(task.id, score, reason, None, took)

        yield Threads(run, 1)


@contextmanager
def remote_player(
    policy: RemotePolicy, env: FastAskConfig, sandbox: SandboxConfig, concurrency: int
) -> Iterator[Threads]:
    """A model that others serve, `concurrency` episodes at a time; the policy is closed too.

    A conversation that the server refuses (a filter, a history that it doesn't take) is a fault of
    its episode alone: the others are still played.
    """
    with policy, Sandbox(sandbox) as box:

        def run(task: Task, rollout: int) -> RemoteTrajectory:
            try:
                return policy.run(FastAskEnv(env, box), task, sample=rollout)
            except Refused as error:
                if not error.own:
                    raise
                return RemoteTrajectory(task.id, error=str(error), stop_reason="error")

        yield Threads(run, concurrency)
