"""OpenAI's chat completions, as vLLM, llama.cpp, `fastask serve` and many others speak them.

Tools are native function calls.  A call that can't be understood stays a call, with an `error`
that the environment gives back to the model; in the history its arguments then stand as
{"malformed": TEXT}, since servers refuse a history whose arguments aren't JSON.  Some servers
leave a call that they can't parse in the text, as `<tool_call>`: it is read from there.

Left out: streams, several choices, images.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from envs.core import Message, Reply, ToolCall, ToolSpec
from fastask_jax.policies.remote.config import RemoteConfig
from fastask_jax.policies.remote.dialect import Native, Said, Strange, Usage, counted, guessed, pair
from fastask_jax.rollout.toolcalls import MAX_NAME, OPEN, parse_reply_text


class OpenAIChat:
    """The dialect."""

    name = "openai"
    path = "/chat/completions"

    def headers(self, key: str | None) -> dict[str, str]:
        return {} if key is None else {"Authorization": f"Bearer {key}"}

    def body(
        self,
        config: RemoteConfig,
        system: Sequence[Message],
        history: Sequence[Native],
        tools: Sequence[ToolSpec],
        max_tokens: int,
    ) -> dict[str, Any]:
        before = [{"role": "system", "content": m.content} for m in system]
        body: dict[str, Any] = {
            "model": config.model,
            "messages": [*before, *history],
            "max_completion_tokens": max_tokens,
        }
        if tools:
            body["tools"] = [
                {
                    "type": "function",
                    "function": {
                        "name": tool.name,
                        "description": tool.description,
                        "parameters": tool.parameters,
                    },
                }
                for tool in tools
            ]
        if config.temperature is not None:
            body["temperature"] = config.temperature
        return body

    def told(self, messages: Sequence[Message], ids: Sequence[str]) -> list[Native]:
        out: list[Native] = []
        for message, answered in pair(messages, ids):
            if answered is None:
                out.append({"role": "user", "content": message.content})
            else:
                out.append({"role": "tool", "tool_call_id": answered, "content": message.content})
        return out

    def read(self, value: dict[str, Any], tools: Sequence[ToolSpec]) -> Said:
        try:
            choice = value["choices"][0]
            message = choice["message"]
            text = message.get("content") or ""
            given = message.get("tool_calls") or []
        except (KeyError, IndexError, TypeError, AttributeError):
            raise Strange("there is no choices[0].message") from None
        if not isinstance(text, str) or not isinstance(given, list):
            raise Strange("content is no text, or tool_calls no list")
        calls = [_call(call) for call in given]
        content, in_text = parse_reply_text(text, tools)
        if tools and not given and OPEN in text:
            calls, native_text = list(in_text), content
        else:
            # Without tools that were offered, what looks like a call is text.
            content = content if not in_text else text.strip()
            native_text = text
        ids = tuple(_id(given, n) for n in range(len(calls)))
        native: Native = {"role": "assistant", "content": native_text or None if calls else text}
        if calls:
            native["tool_calls"] = [
                _native(call, id, given[n] if n < len(given) else None)
                for n, (call, id) in enumerate(zip(calls, ids, strict=True))
            ]
        usage = _usage(value.get("usage"), json.dumps(message, default=str))
        reason = "length" if choice.get("finish_reason") == "length" else "stop"
        reply = Reply(content, tuple(calls), usage.completion, reason)
        return Said(reply, native, ids, usage)


def _call(value: Any) -> ToolCall:
    function = value.get("function") if isinstance(value, dict) else None
    function = function if isinstance(function, dict) else {}
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        return ToolCall("", {}, "malformed tool call: it has no function.name")
    name = name[:MAX_NAME]
    if isinstance(arguments, str):
        if not arguments.strip():  # what some servers write for no arguments
            return ToolCall(name)
        return _parsed(name, arguments)
    return checked_call(name, arguments if arguments is not None else {})


def _parsed(name: str, arguments: str) -> ToolCall:
    try:
        return checked_call(name, json.loads(arguments))
    except json.JSONDecodeError as error:
        reason = f"bad JSON: {error.msg} at character {error.pos}"
    except (ValueError, RecursionError):
        reason = "the JSON holds a number too long, or is nested too deeply"
    return ToolCall(name, {}, f"malformed tool call: {reason}")


def checked_call(name: str, arguments: Any) -> ToolCall:
    """A call whose arguments are an object that JSON in UTF-8 can hold, or its error."""
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, "malformed tool call: the arguments must be a JSON object")
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (ValueError, RecursionError):  # half of a surrogate pair, NaN, too deep
        return ToolCall(name, {}, "malformed tool call: the arguments hold what is not JSON")
    return ToolCall(name, arguments)


def _id(given: Sequence[Any], number: int) -> str:
    call = given[number] if number < len(given) else None
    found = call.get("id") if isinstance(call, dict) else None
    return found if isinstance(found, str) and found else f"call_{number}"


def _native(call: ToolCall, id: str, given: Any) -> Native:
    arguments: Any = call.arguments
    if call.error is not None:
        function = given.get("function") if isinstance(given, dict) else None
        raw = function.get("arguments") if isinstance(function, dict) else None
        arguments = {"malformed": raw if isinstance(raw, str) else json.dumps(raw, default=str)}
    name = call.name or "malformed"
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": id, "type": "function", "function": function}


def _usage(value: Any, text: str) -> Usage:
    if not isinstance(value, dict) or type(value.get("completion_tokens")) is not int:
        return Usage(0, guessed(text), estimated=True)
    details = value.get("prompt_tokens_details")
    cached = counted(details.get("cached_tokens")) if isinstance(details, dict) else 0
    prompt = counted(value.get("prompt_tokens"))
    return Usage(prompt, counted(value["completion_tokens"]), min(cached, prompt))


