"""One episode of a taskset between two sides that each want to call the other.

A harness of `verifiers` asks a model and waits; a policy of ours is asked by `step` and waits.
Here they meet: the harness's model requests end at `PolicyClient`, which stands where verifiers'
training client does, and become messages of our protocol; what the policy replies goes back as a
chat completion.  Token ids never pass: the policy keeps its own, and what it said is not encoded
again.

That only fits conversations that grow at their end.  A harness that rewrites them (compaction,
several conversations side by side), images, and wire formats other than chat completions are
refused, in one line.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients.train import serialize_completion
from verifiers.v1.dialects import ChatDialect

from envs.core import Message, Reply, ToolCall, ToolSpec

STOPPED = "policy_budget"  # the stop condition of an episode that our side ends


@dataclass(frozen=True)
class Asked:
    """What is new for the policy: messages, and the tools that the harness offers."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]


@dataclass(frozen=True)
class Ended:
    """The episode's trace, scored; or why there is none."""

    trace: Any = None
    error: str | None = None


class Unsupported(Exception):
    """The taskset or its harness wants what can't be trained on here; the text says what."""


@dataclass
class Exchange:
    """The meeting place of one episode.  `ask` and `end` are called on the event loop, the others
    by the environment's thread."""

    loop: asyncio.AbstractEventLoop
    trace: Any = None
    problem: str | None = None  # why it is refused
    cancel: Callable[[], object] = lambda: None
    over: threading.Event = field(default_factory=threading.Event)
    _events: queue.SimpleQueue[Asked | Ended] = field(default_factory=queue.SimpleQueue)
    _waiting: asyncio.Future[Reply] | None = None
    _said: list[Any] = field(default_factory=list)  # the conversation so far
    _replies: int = 0

    # -- the harness's side -------------------------------------------------------------------

    async def ask(self, prompt: Sequence[Any], tools: Sequence[Any]) -> vf.Response:
        """The policy's next reply.  Raises Unsupported."""
        if self._waiting is not None:
            raise Unsupported("its harness sends several requests at a time")
        known, new = prompt[: len(self._said)], prompt[len(self._said) :]
        if [_identity(m) for m in known] != [_identity(m) for m in self._said]:
            raise Unsupported(
                "its harness rewrites the conversation, or leads several: only one that grows at "
                "its end can be trained on"
            )
        messages = tuple(_message(message, begins=not self._said) for message in new)
        if not messages:
            raise Unsupported("its harness asks again without having said anything new")
        self._waiting = self.loop.create_future()
        self._events.put(Asked(messages, tuple(_tool(tool) for tool in tools)))
        try:
            reply = await self._waiting
        finally:
            self._waiting = None
        response = self._response(reply)
        self._said = [*prompt, response.message]
        return response

    def end(self, ended: Ended) -> None:
        self._events.put(ended)
        self.over.set()

    def _response(self, reply: Reply) -> vf.Response:
        if reply.stop_reason == "length" and not (
            reply.tokens or reply.content or reply.tool_calls
        ):
            # A budget has ended the episode between two turns: it is judged by what there is.
            self.trace.stop(STOPPED)
        self._replies += 1
        calls = [
            vf.ToolCall(
                id=f"call_{self._replies}_{place}",
                name=call.name,
                # What can't be parsed is no JSON either; the harness tells the model so.
                arguments=json.dumps(call.arguments) if call.error is None else call.error,
            )
            for place, call in enumerate(reply.tool_calls)
        ]
        finish = "length" if reply.stop_reason == "length" else "tool_calls" if calls else "stop"
        response = vf.Response(
            id=f"reply_{self._replies}",
            created=0,
            model="policy",
            message=vf.AssistantMessage(content=reply.content or None, tool_calls=calls or None),
            finish_reason=finish,
            usage=vf.Usage(prompt_tokens=0, completion_tokens=reply.tokens),
        )
        response.raw = serialize_completion(response, "policy")
        return response

    # -- the environment's side ---------------------------------------------------------------

    def wait(self, seconds: float) -> Asked | Ended:
        """What comes next.  Raises TimeoutError."""
        try:
            return self._events.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"the harness said nothing for {seconds:g} s") from None

    def reply(self, reply: Reply) -> None:
        def settle() -> None:
            if self._waiting is not None and not self._waiting.done():
                self._waiting.set_result(reply)

        self.loop.call_soon_threadsafe(settle)


class PolicyClient(vf.Client):
    """The model of every rollout: its requests go to the exchange of their episode."""

    def __init__(self) -> None:
        self.exchanges: dict[str, Exchange] = {}  # by trace id

    async def get_response(
        self,
        dialect: Any,
        body: dict[str, Any],
        sampling: Any,
        session_id: str | None = None,
        turn: Any = None,
        headers: Any = None,
    ) -> vf.Response:
        exchange = self.exchanges[str(session_id)]
        try:
            if not isinstance(dialect, ChatDialect):
                raise Unsupported(
                    "its harness doesn't speak chat completions, the one wire format of training"
                )
            return await exchange.ask(turn.prompt, turn.tools or ())
        except Unsupported as error:
            exchange.problem = str(error)
            raise vf.ProviderError(str(error), status_code=400) from None


def _identity(message: Any) -> Any:
    """What makes two messages one: harnesses send empty contents and lists as they like."""
    calls = getattr(message, "tool_calls", None) or []
    content = _text(message.content)
    return (
        message.role,
        content.strip() if message.role == "assistant" else content,
        [(c.id, c.name, c.arguments) for c in calls],
    )


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if any(part.type != "text" for part in content):
        raise Unsupported("it shows images; our policies read text")
    return "\n".join(part.text for part in content)


def _message(message: Any, begins: bool) -> Message:
    """begins: of the first request, whose prompt may hold turns of both sides."""
    content = _text(message.content)
    if message.role == "assistant":
        if not begins:
            raise Unsupported("its harness puts words into the policy's mouth in mid-episode")
        calls = tuple(
            ToolCall(c.name, json.loads(c.arguments or "{}")) for c in message.tool_calls or ()
        )
        return Message("assistant", content, calls)
    if message.role == "system" and not begins:
        raise Unsupported("its harness sends a system message in mid-episode")
    return Message(message.role, content)


def _tool(tool: Any) -> ToolSpec:
    if tool.type != "function":
        raise Unsupported(f"its tool {tool.name!r} is no function")
    return ToolSpec(tool.name, tool.description or "", dict(tool.parameters or {}))
