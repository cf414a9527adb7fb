"""Chat completions as OpenAI's clients send and read them, over token ids.

Messages are encoded with the model's own template; what is sampled is parsed as episodes' replies
are.  A call that can't be parsed stays text, for the client to see.  What the engine can't do (stop
texts, top_p, several choices) is refused, not ignored.

Left out: the route (`app.py`), and vision, audio, and structured outputs.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.core import Message, ToolCall, ToolSpec
from fastask_jax.rollout.chat import ChatFormat
from fastask_jax.rollout.toolcalls import OPEN, parse_reply_text
from fastask_jax.serve.bodies import (
    Fields,
    Limits,
    Refused,
    check_lengths,
    is_number,
    is_whole,
    make_key,
    take_seed,
    take_temperature,
)
from fastask_jax.serve.service import Order, Piece

_ROLES = ("system", "developer", "user", "assistant", "tool")
_THOUGHT = "<think>"
_UNFINISHED = "\ufffd"  # bytes of a character that isn't whole yet


@dataclass(frozen=True)
class Asked:
    """A body of /v1/chat/completions, checked.  max_tokens: None takes what a slot has left."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    max_tokens: int | None
    temperature: float
    seed: int | str | None
    logprobs: bool
    stream: bool
    usage: bool


def read_chat(value: Mapping[str, Any], model: str) -> Asked:
    """Raises Refused."""
    fields = Fields(value)
    named = fields.take("model", "the name of the model", lambda v: isinstance(v, str))
    if named != model:
        raise Refused(404, f"there is no such model here: take {model!r}", "model")
    messages = fields.take("messages", "a list of messages", lambda v: isinstance(v, list))
    if not messages:
        raise Refused(400, "messages is empty: give at least one", "messages")
    tools = fields.take("tools", "a list of tools", lambda v: isinstance(v, list), [])
    choice = fields.take("tool_choice", '"auto" or "none"', lambda v: v in ("auto", "none"), "auto")
    limits = [
        fields.take(name, "a whole number from 1", lambda v: is_whole(v, 1), None)
        for name in ("max_completion_tokens", "max_tokens")
    ]
    temperature, seed = take_temperature(fields), take_seed(fields)

    def flag(name: str) -> bool:
        return fields.take(name, "true or false", lambda v: type(v) is bool, False)

    stream, logprobs = flag("stream"), flag("logprobs")
    options = fields.take("stream_options", "an object", lambda v: isinstance(v, dict), {})
    inner = Fields(options)
    usage = inner.take("include_usage", "true or false", lambda v: type(v) is bool, False)
    inner.done()
    for name, what, check in (
        ("n", "1: one choice is made", lambda v: v == 1 and type(v) is int),
        ("top_p", "1: the whole distribution is sampled", lambda v: is_number(v) and v == 1),
        ("top_logprobs", "0: there are none", lambda v: v == 0 and type(v) is int),
        ("presence_penalty", "0: there is none", lambda v: is_number(v) and v == 0),
        ("frequency_penalty", "0: there is none", lambda v: is_number(v) and v == 0),
        ("stop", "left out: turns end at the model's own token", lambda v: v == []),
        ("response_format", '{"type": "text"}', lambda v: v == {"type": "text"}),
        ("parallel_tool_calls", "true or false", lambda v: type(v) is bool),
        ("user", "a text", lambda v: isinstance(v, str)),
    ):
        fields.take(name, what, check, None)
    fields.done()
    return Asked(
        tuple(_message(message, n) for n, message in enumerate(messages)),
        tuple(_tool(tool, n) for n, tool in enumerate(tools)) if choice == "auto" else (),
        next((limit for limit in limits if limit is not None), None),
        temperature, seed, logprobs, stream, usage,
    )  # fmt: skip


def make_order(
    asked: Asked, chat: ChatFormat, limits: Limits, max_len: int, show_tools: bool = True
) -> Order:
    """The tokens of the conversation, and how many may follow.  Raises Refused."""
    least = sum(chat.least_tokens(message.content) for message in asked.messages)
    ids: list[int] = []
    if least < max_len:
        try:
            ids = chat.encode_prompt(asked.messages, (show_tools and asked.tools) or None)
        except ValueError as error:
            raise Refused(400, " ".join(str(error).split()), "messages") from None
    if max(least, len(ids)) >= max_len:
        raise Refused(
            400, f"the messages have {max(least, len(ids))} tokens or more and a slot holds "
            f"{max_len}: shorten them", "messages",
        )  # fmt: skip
    left = max_len - len(ids)
    max_tokens = asked.max_tokens
    if max_tokens is None:
        max_tokens = min(left, limits.max_tokens or left)
    check_lengths(len(ids), max_tokens, limits)
    return Order(ids, max_tokens, asked.temperature, make_key(asked.seed))


def _message(value: Any, number: int) -> Message:
    place = f"messages[{number}]"
    if not isinstance(value, dict) or value.get("role") not in _ROLES:
        raise Refused(400, f"{place} must have a role: {', '.join(_ROLES)}", place)
    role = value["role"]
    calls = value.get("tool_calls") or []
    if calls and (role != "assistant" or not isinstance(calls, list)):
        raise Refused(400, f"{place}.tool_calls must be a list, of an assistant's message", place)
    content = value.get("content")
    if content is None and calls:
        content = ""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if _is_text(part)]
        content = "".join(texts) if len(texts) == len(content) else None
    if not isinstance(content, str):
        raise Refused(400, f"{place}.content must be a text, or parts of type text", place)
    role = "system" if role == "developer" else role
    return Message(role, content, tuple(_call(call, place) for call in calls))


def _is_text(part: Any) -> bool:
    if not isinstance(part, dict) or part.get("type") != "text":
        return False
    return isinstance(part.get("text"), str)


def _call(value: Any, place: str) -> ToolCall:
    function = value.get("function") if isinstance(value, dict) else None
    try:
        name, arguments = function["name"], json.loads(function["arguments"])  # type: ignore[index]
    except (TypeError, KeyError, ValueError, RecursionError):
        name = arguments = None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise Refused(
            400, f"{place}.tool_calls must have function.name, a text, and function.arguments, an "
            "object as JSON text", place,
        )  # fmt: skip
    return ToolCall(name, arguments)


def _tool(value: Any, number: int) -> ToolSpec:
    place = f"tools[{number}]"
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(400, f"{place} must have type function and function.name, a text", place)
    about, parameters = function.get("description") or "", function.get("parameters") or {}
    properties = parameters.get("properties", {}) if isinstance(parameters, dict) else None
    if not isinstance(about, str) or not isinstance(properties, dict):
        raise Refused(400, f"{place}: description is a text, parameters a JSON schema", place)
    return ToolSpec(function["name"], about, parameters)


class Answer:
    """What becomes of an order's pieces."""

    def __init__(self, asked: Asked, chat: ChatFormat, model: str) -> None:
        self._asked, self._chat = asked, chat
        self._head = {
            "id": f"chatcmpl-{os.urandom(12).hex()}", "created": int(time.time()), "model": model
        }  # fmt: skip
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._ended: str | None = None

    def add(self, piece: Piece) -> None:
        self._ids += piece.ids
        self._logprobs += piece.logprobs
        self._ended = piece.ended

    def whole(self, usage: Mapping[str, int]) -> dict[str, Any]:
        """The answer that isn't a stream."""
        content, calls = self._parsed()
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        choice = {"index": 0, "message": message, "finish_reason": self._reason(calls)}
        choice["logprobs"] = self._told(0) if self._asked.logprobs else None
        return {
            **self._head, "object": "chat.completion", "choices": [choice], "usage": _usage(usage)
        }  # fmt: skip

    async def stream(
        self, pieces: AsyncIterator[Piece], usage: Any
    ) -> AsyncIterator[dict[str, Any] | str]:
        """Its events.  Text is sent as far as it can't become a call; calls are sent at the end.
        usage: called at the end."""
        yield self._chunk({"role": "assistant", "content": ""})
        sent, told = "", 0
        async for piece in pieces:
            self.add(piece)
            if piece.ended is None:
                content = self._sure()
                new = content[len(sent) :] if content.startswith(sent) else ""
                if new or self._asked.logprobs:
                    yield self._chunk({"content": new}, told)
                    sent, told = sent + new, len(self._ids)
        content, calls = self._parsed()
        new = content[len(sent) :] if content.startswith(sent) else ""
        if new or (self._asked.logprobs and told < len(self._ids)):
            yield self._chunk({"content": new}, told)
        for place, call in enumerate(calls):
            yield self._chunk({"tool_calls": [{"index": place, **call}]})
        yield self._chunk({}, reason=self._reason(calls))
        if self._asked.usage:
            chunk = self._chunk({})
            yield chunk | {"choices": [], "usage": _usage(usage())}
        yield "[DONE]"

    def _chunk(
        self, delta: dict[str, Any], told: int | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": reason}
        logprobs = self._asked.logprobs and told is not None
        choice["logprobs"] = self._told(told or 0) if logprobs else None
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    @property
    def _text(self) -> str:
        return self._chat.decode(self._ids).removesuffix(self._chat.stop_text)

    def _sure(self) -> str:
        """The part of the content that no later token changes."""
        text = self._text.rstrip(_UNFINISHED)
        start = text.lstrip()
        if start.startswith(_THOUGHT) or _THOUGHT.startswith(start):
            if "</think>" not in text:
                return ""
        if self._asked.tools:
            # What may be the beginning of a call waits.
            opened = text.find(OPEN)
            tail = max(n for n in range(len(OPEN)) if text.endswith(OPEN[:n]))
            text = text[:opened] if opened >= 0 else text[: len(text) - tail]
        return _content(text).rstrip()

    def _parsed(self) -> tuple[str, list[dict[str, Any]]]:
        text = self._text
        content, calls = parse_reply_text(text, self._asked.tools)
        if not self._asked.tools or any(call.error for call in calls):
            return _content(text), []
        return content, [
            {
                "id": f"call_{os.urandom(12).hex()}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call in calls
        ]

    def _reason(self, calls: Sequence[Any]) -> str:
        if self._ended == "length":
            return "length"
        return "tool_calls" if calls else "stop"

    def _told(self, start: int) -> dict[str, Any]:
        """Logprobs from token `start` on."""
        content = []
        for token, logprob in zip(self._ids[start:], self._logprobs[start:], strict=True):
            text = self._chat.decode([token])
            spelled = None if _UNFINISHED in text else list(text.encode())
            content.append(
                {"token": text, "logprob": logprob, "bytes": spelled, "top_logprobs": []}
            )
        return {"content": content, "refusal": None}


def _content(text: str) -> str:
    """A reply without its thought, calls left as text."""
    start = text.lstrip()
    end = text.find("</think>")
    if start.startswith(_THOUGHT):
        text = text[end + len("</think>") :] if end >= 0 else ""
    return text.strip()


def _usage(usage: Mapping[str, int]) -> dict[str, Any]:
    told = {k: v for k, v in usage.items() if k != "cached_tokens"}
    return {**told, "prompt_tokens_details": {"cached_tokens": usage["cached_tokens"]}}
