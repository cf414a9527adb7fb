"""The small protocol between policies and environments.

An environment is one live episode: it hands out messages, takes replies, and in the end
scores itself.  Everything here is plain data that pickles fast; nothing here knows about
tokens, models or JAX.  Chat templates and tool-call parsing belong to the policy side
(`fastask_jax.rollout.chat`), so a reply arrives here already structured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class ToolSpec:
    """A tool as the model sees it; `parameters` is a JSON schema of type object."""

    name: str
    description: str
    parameters: dict[str, Any]


@dataclass(frozen=True)
class ToolCall:
    """One call in a reply.  `error` is set when the call could not be parsed: the
    environment then answers with that text as a tool message (errors are data)."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Message:
    """One chat message; role is system, user, assistant or tool."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Reply:
    """What a policy said in one turn.

    tokens: how many tokens it sampled for this turn (the concise reward counts them).
    stop_reason: "stop" (the model ended its turn) or "length" (a budget ended it).
    """

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tokens: int = 0
    stop_reason: str = "stop"


@dataclass(frozen=True)
class Step:
    """The environment's answer to a reply.  When `done`, `stop_reason` says why:
    "answered", "max_turns", "length"."""

    messages: tuple[Message, ...]
    done: bool
    stop_reason: str | None = None


@dataclass(frozen=True)
class Score:
    """Reward of a finished episode: total = weighted sum of `parts`; `info` is for logs."""

    total: float
    parts: dict[str, float]
    info: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """One live episode.  `close` frees what it holds (sandbox sessions)."""

    tools: tuple[ToolSpec, ...]

    def reset(self, task: Any) -> list[Message]: ...

    def step(self, reply: Reply) -> Step: ...

    def score(self) -> Score: ...

    def close(self) -> None: ...
