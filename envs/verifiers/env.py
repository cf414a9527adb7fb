"""An installed taskset of `verifiers` as an environment of ours: `VerifiersEnv`.

The taskset's harness plays the episode and asks for the model's turns; `reset` and `step` give
what it asked and take what the policy said (`exchange`).  Its own code judges the episode: the
score's total is the taskset's reward.  A fault of taskset, harness or tools is an exception, for
the pool to retry, never a score.

Left out: stopping a tool that hangs; that is the pool's deadline, which ends the worker.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Hashable
from typing import Any

from envs.core import Message, Reply, Score, Step, ToolSpec
from envs.verifiers.choice import TasksetChoice, VerifiersTask
from envs.verifiers.exchange import STOPPED, Asked, Ended, Exchange
from envs.verifiers.host import Host

ANSWER_CHARS = 200
COMPLETED = "agent_completed"  # verifiers' word for a harness that ended by itself
_CLOSE_SECONDS = 10.0


class VerifiersEnv:
    """One episode at a time; `reset` starts the next.  Not thread-safe."""

    tools: tuple[ToolSpec, ...] = ()

    def __init__(self, host: Host, tools: tuple[ToolSpec, ...] | None = None) -> None:
        """tools: those that the policy knows of; other ones are refused.  None takes any."""
        self._host, self._known = host, tools
        self._exchange: Exchange | None = None

    def reset(self, task: VerifiersTask) -> list[Message]:
        """Raises ValueError for a task that isn't there, RuntimeError for an episode that fails."""
        self.close()
        self._task, self._trace = task, None
        self._kind = self._host.task(task.index)
        self.turns = self.tool_calls = self.malformed = 0
        self._said = ""
        self._ended: str | None = None
        self._started = time.monotonic()
        self._exchange = self._host.start(self._kind)
        first = self._next(self._exchange)
        if isinstance(first, Ended):
            raise RuntimeError(f"{task.id}: its harness never asked the model")
        self.tools = first.tools
        if self._known is not None and self.tools != self._known:
            raise RuntimeError(
                f"{task.id} offers other tools ({_names(self.tools)}) than the taskset's first "
                f"task ({_names(self._known)}): a run has one set of tools"
            )
        return list(first.messages)

    def step(self, reply: Reply) -> Step:
        if self._exchange is None or self._ended is not None:
            raise RuntimeError("this episode is over; call reset first")
        if reply.tokens or reply.content or reply.tool_calls:
            self.turns += 1
            self.tool_calls += len(reply.tool_calls)
            self.malformed += sum(call.error is not None for call in reply.tool_calls)
            self._said = reply.content
        self._exchange.reply(reply)
        found = self._next(self._exchange)
        if isinstance(found, Asked):
            return Step(found.messages, False)
        self._trace = found.trace
        condition = found.trace.stop_condition
        cut = condition == STOPPED or (condition == COMPLETED and reply.stop_reason == "length")
        self._ended = "length" if cut else "answered" if condition == COMPLETED else condition
        return Step((), True, self._ended)

    def _next(self, exchange: Exchange) -> Asked | Ended:
        found = exchange.wait(self._host.choice.timeout)
        if isinstance(found, Ended) and found.error is not None:
            raise RuntimeError(f"{self._task.id}: {found.error}")
        return found

    def score(self) -> Score:
        """The taskset's reward.  Raises RuntimeError before the episode's end.

        parts: each reward of the taskset with its weight, and `correct`: 1 where their sum reaches
        `TasksetChoice.solved`."""
        if self._trace is None:
            raise RuntimeError("the episode isn't over: only then its taskset judges it")
        trace, choice = self._trace, self._host.choice
        total = float(trace.reward)
        if not math.isfinite(total):
            raise RuntimeError(f"{self._task.id}: its reward is {total}")
        rewards = {name: r.value for name, r in trace.rewards.items() if r is not None}
        # Only what every episode has: keyed rewards may differ from task to task.
        fixed = [fn.__name__ for fn in self._kind.hooks("reward")]
        parts = {name: float(rewards.get(name, 0.0)) for name in fixed if name in trace.rewards}
        parts["correct"] = float(total >= choice.solved)
        info: dict[str, Any] = {
            "task": self._task.id,
            "type": type(self._kind).__name__,
            "family": choice.taskset,
            "difficulty": "all",
            "answer": self._said[:ANSWER_CHARS],
            "truth": None,
            "turns": self.turns,
            "tool_calls": self.tool_calls,
            "malformed": self.malformed,
            "cells": 0,
            "rewards": rewards,
            "metrics": dict(trace.metrics),
            "stop_reason": self._ended,
            "seconds": time.monotonic() - self._started,
        }
        return Score(total, parts, info)

    def close(self) -> None:
        """Ends an episode that is under way, with its tool servers."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None and not exchange.over.is_set():
            exchange.cancel()
            exchange.over.wait(_CLOSE_SECONDS)


def _names(tools: tuple[ToolSpec, ...]) -> str:
    return ", ".join(tool.name for tool in tools) or "none"


class EnvMaker:
    """Makes environments that share one host; `close` ends it and its tool servers."""

    def __init__(self, choice: TasksetChoice, tools: tuple[ToolSpec, ...]) -> None:
        self._host, self._tools = Host(choice), tools

    def __call__(self, episode_id: Hashable) -> VerifiersEnv:
        return VerifiersEnv(self._host, self._tools)

    def close(self) -> None:
        self._host.close()


def make_env(settings: tuple[TasksetChoice, tuple[ToolSpec, ...]]) -> EnvMaker:
    """Factory for `EnvPool`: one host for all episodes of a worker."""
    return EnvMaker(*settings)


def describe(choice: TasksetChoice) -> dict[str, Any]:
    """`count` of its tasks (None: endless) and `tools` that its first task offers, as JSON.

    Raises as `Host` and `VerifiersEnv.reset` do."""
    host = Host(choice)
    try:
        count = host.count()
        env = VerifiersEnv(host)
        try:
            env.reset(VerifiersTask(f"{choice.taskset}-0", 0))
        finally:
            env.close()
        return {
            "count": count,
            "tools": [[tool.name, tool.description, tool.parameters] for tool in env.tools],
        }
    finally:
        host.close()


def main(text: str) -> int:
    """Prints `describe` of a choice given as JSON; a refusal as one line on stderr, exit code 1."""
    import sys

    try:
        print(json.dumps(describe(TasksetChoice(**json.loads(text)))))
    except (ValueError, RuntimeError, TimeoutError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0
