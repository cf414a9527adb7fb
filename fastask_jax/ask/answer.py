"""What an asked question gives back, and the error of one that can't be asked."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


class AskError(ValueError):
    """The question can't be asked or wasn't answered; the text says what to do."""


@dataclass(frozen=True)
class Answer:
    """One answered question.

    answer: the value, or None when the model gave none.  raw: its last message as it stands.
    transcript: what the model said and called and what it was told, in order.
    evidence: the ranges that were read, as `Sheet!A1:D20`, in order, each once.
    turns, tool_calls, cells: what it took; cells counts repeated reads again.
    stop_reason: "answered", or why there is no answer: "no_answer" (it ended without one),
        "max_turns", "length" (one turn too long), "token_budget", "context" (no room left).
    seconds: from the question to the answer; compiling, at an asker's first, is part of it.
    checkpoint: the folder of the weights.
    uncalculated: sheet -> formulas that the model saw as empty cells, since the file holds no
        result of theirs and none could be calculated; sheets without any are left out.
    """

    answer: str | None
    raw: str
    transcript: tuple[str, ...]
    evidence: tuple[str, ...]
    turns: int
    cells: int
    tool_calls: int
    stop_reason: str
    seconds: float
    checkpoint: str
    uncalculated: dict[str, int]

    def to_json(self) -> str:
        """One JSON object on one line, in ASCII."""
        return json.dumps(asdict(self))
