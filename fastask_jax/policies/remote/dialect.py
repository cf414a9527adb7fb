"""What the two dialects have in common: what a server said in one turn, in our words.

A dialect is three pure functions and two names; it holds no state.  `native` messages are those
of the dialect: what the model said goes back to it as it came, so that its thoughts, signatures
and call ids stay whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from envs.core import Message, Reply, ToolSpec
from fastask_jax.policies.remote.config import RemoteConfig

Native = dict[str, Any]
# For answers that don't count their tokens.
_BYTES_PER_TOKEN = 4
_MOST_TOKENS = 1 << 40  # of one request; what is above breaks divisions


@dataclass(frozen=True)
class Usage:
    """Tokens of one request.  prompt: all of it; cached: of those, what the server had already;
    written: of those, what it keeps.  estimated: the server doesn't say, so it is guessed from
    the text's length."""

    prompt: int
    completion: int
    cached: int = 0
    written: int = 0
    estimated: bool = False


@dataclass(frozen=True)
class Said:
    """One turn.  native: for the history.  ids: of the reply's tool calls, in order."""

    reply: Reply
    native: Native
    ids: tuple[str, ...]
    usage: Usage


class Strange(Exception):
    """The answer isn't in the dialect; the text says what is missing."""


class Dialect(Protocol):
    """name: for people.  path: behind the server's address."""

    name: str
    path: str

    def headers(self, key: str | None) -> dict[str, str]: ...

    def body(
        self,
        config: RemoteConfig,
        system: Sequence[Message],
        history: Sequence[Native],
        tools: Sequence[ToolSpec],
        max_tokens: int | None,
    ) -> dict[str, Any]:
        """The request.  system: the messages of that role; history: all others.  max_tokens: of the
        turn; None: no bound but the model's."""
        ...

    def told(self, messages: Sequence[Message], ids: Sequence[str]) -> list[Native]:
        """New messages for the history.  ids: of the calls that tool messages answer, in order."""
        ...

    def read(self, value: dict[str, Any], tools: Sequence[ToolSpec]) -> Said:
        """Raises Strange."""
        ...


def counted(value: Any) -> int:
    """A count of tokens; 0 where there is none, or one that can't be."""
    return value if type(value) is int and 0 <= value <= _MOST_TOKENS else 0


def guessed(text: str) -> int:
    """About so many tokens has a text that nobody has counted."""
    return -(-len(text.encode("utf-8", "replace")) // _BYTES_PER_TOKEN)


def pair(messages: Sequence[Message], ids: Sequence[str]) -> list[tuple[Message, str | None]]:
    """Messages with the id of the call that each answers; None for those that answer none."""
    left = iter(ids)
    paired = [(m, next(left, None) if m.role == "tool" else None) for m in messages]
    unanswered = next(left, None)
    if unanswered is not None:
        raise RuntimeError(f"the environment hasn't answered the call {unanswered}")
    return paired
