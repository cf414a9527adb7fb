"""A free question as an environment: Fast Ask's own, over a workbook that is open already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from envs.core import Message, Reply, Score, Step, ToolSpec
from envs.fast_ask.env import FastAskEnv
from envs.workbook import Workbook

# Told of each message and reply, in order.
Heard = Callable[[Message | Reply], None]


@dataclass(frozen=True)
class Question:
    """The task."""

    text: str
    id: str = "question"


class Asked:
    """One episode about `book`."""

    tools: tuple[ToolSpec, ...] = FastAskEnv.tools

    def __init__(self, env: FastAskEnv, book: Workbook, heard: Heard = lambda entry: None) -> None:
        self._env, self._book, self._heard = env, book, heard

    @property
    def raw(self) -> str:
        """The last message."""
        return self._env.final.content if self._env.final else ""

    def reset(self, task: Question) -> list[Message]:
        messages = self._env.ask(self._book, task.text)
        for message in messages:
            self._heard(message)
        return messages

    def step(self, reply: Reply) -> Step:
        if reply.content or reply.tool_calls or reply.tokens:
            self._heard(reply)
        step = self._env.step(reply)
        for message in step.messages:
            self._heard(message)
        return step

    def score(self) -> Score:
        return self._env.score()

    def close(self) -> None:
        self._env.close()


def spelled(entry: Message | Reply) -> list[str]:
    """What a message or a reply says, as texts; calls as Python spells them."""
    lines = [entry.content] if entry.content else []
    for call in entry.tool_calls:
        arguments: dict[str, Any] = call.arguments
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        lines.append(f"{call.name}({given})" + (f"  # {call.error}" if call.error else ""))
    return lines
