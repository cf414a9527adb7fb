"""Anthropic's Messages API: tools as `tool_use` blocks, their results as `tool_result`.

What the model said goes back block by block as it came, thoughts with their signatures
included.  The beginning of a conversation that stays the same is marked for the server's cache,
as a turn otherwise pays for all earlier ones again.

Left out: streams, images, server-side tools, batches.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from envs.core import Message, Reply, ToolCall, ToolSpec
from fastask_jax.policies.remote.config import RemoteConfig
from fastask_jax.policies.remote.dialect import Native, Said, Strange, Usage, counted, guessed, pair
from fastask_jax.policies.remote.openai_chat import checked_call
from fastask_jax.rollout.toolcalls import MAX_NAME

URL = "https://api.anthropic.com/v1"
VERSION = "2023-06-01"
_CACHED = {"cache_control": {"type": "ephemeral"}}
_CUT = ("max_tokens", "model_context_window_exceeded")


class AnthropicMessages:
    """The dialect."""

    name = "anthropic"
    path = "/messages"

    def headers(self, key: str | None) -> dict[str, str]:
        headers = {"anthropic-version": VERSION}
        return headers if key is None else {**headers, "x-api-key": key}

    def body(
        self,
        config: RemoteConfig,
        system: Sequence[Message],
        history: Sequence[Native],
        tools: Sequence[ToolSpec],
        max_tokens: int,
    ) -> dict[str, Any]:
        *earlier, last = history
        *blocks, end = last["content"]
        body: dict[str, Any] = {
            "model": config.model,
            "max_tokens": max_tokens,
            "messages": [*earlier, {**last, "content": [*blocks, {**end, **_CACHED}]}],
        }
        if system:
            body["system"] = "\n\n".join(message.content for message in system)
        if tools:
            body["tools"] = [
                {
                    "name": tool.name,
                    "description": tool.description,
                    "input_schema": tool.parameters,
                }
                for tool in tools
            ]
        if config.temperature is not None:
            body["temperature"] = config.temperature
        return body

    def told(self, messages: Sequence[Message], ids: Sequence[str]) -> list[Native]:
        blocks: list[dict[str, Any]] = []
        for message, answered in pair(messages, ids):
            # The API refuses empty texts.
            text = message.content or "(nothing)"
            if answered is None:
                blocks.append({"type": "text", "text": text})
            else:
                block = {"type": "tool_result", "tool_use_id": answered, "content": text}
                if text.startswith("error: "):
                    block["is_error"] = True  # type: ignore[assignment]
                blocks.append(block)
        return [{"role": "user", "content": blocks}] if blocks else []

    def read(self, value: dict[str, Any], tools: Sequence[ToolSpec]) -> Said:
        blocks = value.get("content")
        if not isinstance(blocks, list) or not all(isinstance(b, dict) for b in blocks):
            raise Strange("content is no list of blocks")
        texts = [b["text"] for b in blocks if b.get("type") == "text" and _is_text(b, "text")]
        uses = [block for block in blocks if block.get("type") == "tool_use"]
        if not all(_is_text(use, "id") for use in uses):
            raise Strange("a tool_use block has no id")
        # Neither empty texts nor arguments that aren't an object may come back.
        kept = [_native(b) for b in blocks if b.get("type") != "text" or b.get("text")]
        usage = _usage(value.get("usage"), json.dumps(blocks, default=str))
        reply = Reply(
            "".join(texts).strip(),
            tuple(map(_call, uses)),
            usage.completion,
            "length" if value.get("stop_reason") in _CUT else "stop",
        )
        # An answer of nothing at all can't be sent back: the API wants a block in each message.
        native = {"role": "assistant", "content": kept or [{"type": "text", "text": "(nothing)"}]}
        return Said(reply, native, tuple(use["id"] for use in uses), usage)


def _is_text(block: dict[str, Any], name: str) -> bool:
    return isinstance(block.get(name), str)


def _call(use: dict[str, Any]) -> ToolCall:
    name = use.get("name")
    if not isinstance(name, str) or not name:
        return ToolCall("", {}, "malformed tool call: it has no name")
    return checked_call(name[:MAX_NAME], use.get("input", {}))


def _native(block: dict[str, Any]) -> dict[str, Any]:
    if block.get("type") != "tool_use":
        return block
    call = _call(block)
    if call.error is None:
        return block
    raw = json.dumps(block.get("input"), default=str)
    return {**block, "name": call.name or "malformed", "input": {"malformed": raw}}


def _usage(value: Any, text: str) -> Usage:
    if not isinstance(value, dict) or type(value.get("output_tokens")) is not int:
        return Usage(0, guessed(text), estimated=True)
    cached = counted(value.get("cache_read_input_tokens"))
    written = counted(value.get("cache_creation_input_tokens"))
    prompt = counted(value.get("input_tokens")) + cached + written
    return Usage(prompt, counted(value["output_tokens"]), cached, written)
