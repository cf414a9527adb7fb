"""What a policy is, and how one episode runs between it and an environment.

A policy is anything that can act: our engine, an API, the oracle, a constant guess.  Trained
policies are rolled out in batches by `fastask_jax.rollout` instead.
"""

from __future__ import annotations

from typing import Any, Protocol

from envs.core import Environment, Message, Reply, Score, ToolSpec


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
