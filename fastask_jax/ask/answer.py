"""What an asked question gives back, and the errors of one that can't be asked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from envs.core import Score
from fastask_jax.ask.values import kind_and_value


class AskError(ValueError):
    """The question can't be asked or wasn't answered; the text says what to do."""


class Unreachable(AskError):
    """The model's server doesn't answer, so that no other question would be answered either."""


@dataclass(frozen=True)
class Answer:
    """One answered question.

    question: as it was asked, with single spaces.
    answer: the value as the model has written it, or None when it gave none.
    type, value: what `values.kind_and_value` makes of it; None without an answer.
    evidence: the ranges that were read, as `Sheet!A1:D20`, in order, each once.
    turns, tool_calls, cells: what it took; cells counts repeated reads again.
    tokens: that the model has sampled.
    stop_reason: "answered", or why there is no answer: "no_answer" (it ended without one),
        "max_turns", "length" (one turn too long), "token_budget", "context" (no room left),
        "deadline".
    seconds: from the question to the answer; compiling, at an asker's first, is part of it.
    policy: the folder of the weights, or the model and its server.
    uncalculated: sheet -> formulas that the model saw as empty cells, since the file holds no
        result of theirs and none could be calculated; sheets without any are left out.
    raw: its last message as it stands.
    transcript: what the model said and called and what it was told, in order.
    """

    question: str
    answer: str | None
    type: str | None
    value: Any
    evidence: tuple[str, ...]
    turns: int
    cells: int
    tool_calls: int
    tokens: int
    stop_reason: str
    seconds: float
    policy: str
    uncalculated: dict[str, int]
    raw: str = ""
    transcript: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """What a caller needs: all but `raw` and `transcript`, which hold what was read."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(self).items()
            if name not in ("raw", "transcript")
        }

    def to_json(self) -> str:
        """`as_dict` on one line, in ASCII."""
        return json.dumps(self.as_dict())


def make_answer(
    question: str,
    score: Score,
    *,
    stop_reason: str | None,
    tokens: int,
    seconds: float,
    policy: str,
    uncalculated: dict[str, int],
    raw: str = "",
    transcript: tuple[str, ...] = (),
) -> Answer:
    """The answer in the score of an episode of `envs.fast_ask`."""
    info = score.info
    said = info["answer"] or None
    kind, value = (None, None) if said is None else kind_and_value(said)
    return Answer(
        question=question,
        answer=said,
        type=kind,
        value=value,
        evidence=tuple(dict.fromkeys(info["ranges"])),
        turns=info["turns"],
        cells=info["cells"],
        tool_calls=info["tool_calls"],
        tokens=tokens,
        stop_reason=stop_reason or "no_answer",
        seconds=round(seconds, 3),
        policy=policy,
        uncalculated=uncalculated,
        raw=raw,
        transcript=transcript,
    )
