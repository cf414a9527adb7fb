"""What a policy is, and how one episode runs between it and an environment.

A policy is anything that can act: our engine, an API, the oracle, a constant guess.  Trained
policies are rolled out in batches by `fastask_jax.rollout` instead.
"""

from __future__ import annotations

from typing import Any, Protocol

from envs.core import Environment, Message, Reply, Score, ToolSpec


class Played(Protocol):
    """A finished episode as reports need it: `rollout.transcript.Trajectory`, and what
    `policies.remote` gives."""

    task_id: str
    score: Score | None
    stop_reason: str | None
    error: str | None
    seconds: float

    @property
    def valid(self) -> bool: ...

    @property
    def sampled(self) -> int: ...


class Policy(Protocol):
    """Acts in one episode at a time."""

    def start(self, messages: list[Message], tools: tuple[ToolSpec, ...], task: Any) -> Reply:
        """The first reply.  Only oracles and constant guesses may look at `task`."""
        ...

    def reply(self, messages: tuple[Message, ...]) -> Reply:
        """The next reply, after the environment's messages."""
        ...


def run_episode(policy: Policy, env: Environment, task: Any) -> Score:
    """Plays one task to its end and returns its score."""
    try:
        reply = policy.start(env.reset(task), env.tools, task)
        while True:
            step = env.step(reply)
            if step.done:
                return env.score()
            reply = policy.reply(step.messages)
    finally:
        env.close()


def record(played: Played) -> dict[str, Any]:
    """What reports need to know of a scored episode of Fast Ask, by any policy.

    A policy that counts them adds `prompt_tokens` and `price` (US dollars or None).  Raises
    ValueError for an episode without a score.
    """
    score = played.score
    if score is None:
        raise ValueError(f"{played.task_id} has no score")
    info = score.info
    found = {
        **{key: info[key] for key in ("task", "type", "family", "difficulty", "answer", "truth")},
        "correct": bool(score.parts["correct"]),
        "reward": score.total,
        "parts": dict(score.parts),
        "turns": info["turns"],
        "cells": info["cells"],
        "tool_calls": info["tool_calls"],
        "malformed": info["malformed"],
        "tokens": played.sampled,
        "seconds": played.seconds,
        "stop_reason": played.stop_reason,
    }
    extra = ("prompt_tokens", "cached_tokens", "waited", "price")
    return found | {name: getattr(played, name) for name in extra if hasattr(played, name)}
