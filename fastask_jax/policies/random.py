"""A policy that calls tools at random: a floor for comparisons, and a fuzzer for environments.

Arguments follow the tool's schema loosely: right types, meaningless values, and now and then a
malformed call or an early answer.  Deterministic from its seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from envs.core import Message, Reply, ToolCall, ToolSpec

_TEXTS = (
    "",
    "A1",
    "A1:C5",
    "Sheet1!A:D",
    "'No Such Sheet'!B2:B9",
    "print(1 + 1)",
    "x = [",
    "North",
    "2024-03-01",
)
_ANSWERS = ("0", "yes", "no", "12500", "2024-03", "Orders row 5")


class RandomPolicy:
    """Calls a random tool with random arguments, or answers, with probability `answer_rate`."""

    def __init__(
        self, seed: int = 0, answer_rate: float = 0.2, malformed_rate: float = 0.1
    ) -> None:
        for label, rate in (("answer_rate", answer_rate), ("malformed_rate", malformed_rate)):
            if not 0 <= rate <= 1:
                raise ValueError(f"{label} must lie between 0 and 1, not {rate}")
        self._random = random.Random(seed)
        self._answer_rate, self._malformed_rate = answer_rate, malformed_rate
        self._tools: tuple[ToolSpec, ...] = ()

    def start(
        self, messages: Sequence[Message], tools: tuple[ToolSpec, ...], task: Any = None
    ) -> Reply:
        self._tools = tools
        return self.reply(())

    def reply(self, messages: Sequence[Message]) -> Reply:
        if not self._tools or self._random.random() < self._answer_rate:
            return Reply(f"ANSWER: {self._random.choice(_ANSWERS)}", tokens=8)
        tool = self._random.choice(self._tools)
        if self._random.random() < self._malformed_rate:
            error = "malformed tool call: missing </tool_call>"
            return Reply("", (ToolCall(tool.name, {}, error),), tokens=16)
        properties = tool.parameters.get("properties", {})
        required = tool.parameters.get("required", ())
        arguments = {
            key: self._value(schema)
            for key, schema in properties.items()
            if key in required or self._random.random() < 0.7
        }
        return Reply("", (ToolCall(tool.name, arguments),), tokens=24)

    def _value(self, schema: dict[str, Any]) -> Any:
        if "enum" in schema:
            return self._random.choice(list(schema["enum"]))
        kind = schema.get("type", "string")
        if isinstance(kind, list):
            kind = self._random.choice(kind)
        if kind == "integer":
            return self._random.randint(-5, 2000)
        if kind == "number":
            return self._random.uniform(-5, 2000)
        if kind == "boolean":
            return self._random.random() < 0.5
        if kind == "array":
            items = schema.get("items", {})
            return [self._value(items) for _ in range(self._random.randint(0, 3))]
        if kind == "object":
            return {}
        return self._random.choice(_TEXTS)
