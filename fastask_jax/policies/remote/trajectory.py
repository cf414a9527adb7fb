"""The record of an episode that a model elsewhere has played.

It has the names of `rollout.transcript.Trajectory`, so that what reads outcomes, counts and traces
reads both; it has texts and counts where ours has tokens, for nobody tells those.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from envs.core import Message, Reply, Score
from fastask_jax.policies.remote.config import Price
from fastask_jax.policies.remote.dialect import Usage
from fastask_jax.rollout.toolcalls import CLOSE, OPEN
from fastask_jax.rollout.transcript import OBSERVATION, PROMPT, REPLY

Entry = tuple[Message, ...] | Reply


@dataclass
class RemoteTrajectory:
    """One episode.

    group, sample: which task of a batch, and which of its copies.
    stop_reason: the environment's ("answered", "no_answer", "max_turns", "length") or the
        policy's ("token_budget", "context", "deadline"); "error" when the episode failed.
    error: an infrastructure fault, of the server or the environment; such a trajectory is not
        `valid` and never a wrong answer.
    seconds: tools and answered requests.  waited: on top of them, for a busy or broken server.
    tries: requests, failed ones included.
    entries: in order, what the model was told (messages) and what it said (replies).
    usages: tokens of each reply's request.
    final: what it said last, as text.
    """

    task_id: str
    group: int = 0
    sample: int = 0
    task: Any = field(default=None, repr=False)
    model: str = ""
    score: Score | None = None
    stop_reason: str | None = None
    error: str | None = None
    advantage: float = 0.0
    seconds: float = 0.0
    waited: float = 0.0
    tries: int = 0
    rates: Price | None = None
    entries: list[Entry] = field(default_factory=list, repr=False)
    usages: list[Usage] = field(default_factory=list, repr=False)

    @property
    def valid(self) -> bool:
        """Scored and without an infrastructure fault."""
        return self.error is None and self.score is not None

    @property
    def reward(self) -> float:
        """The score's total; 0 for an episode that isn't valid."""
        return self.score.total if self.score is not None and self.error is None else 0.0

    @property
    def replies(self) -> list[Reply]:
        return [entry for entry in self.entries if isinstance(entry, Reply)]

    @property
    def turns(self) -> int:
        """How many times the model spoke."""
        return len(self.replies)

    @property
    def final(self) -> str:
        replies = self.replies
        return replies[-1].content if replies else ""

    @property
    def sampled(self) -> int:
        """How many tokens the model sampled."""
        return sum(usage.completion for usage in self.usages)

    @property
    def prompt_tokens(self) -> int:
        """Tokens that were read, each time they were sent."""
        return sum(usage.prompt for usage in self.usages)

    @property
    def cached_tokens(self) -> int:
        """Of `prompt_tokens`, those that the server had already."""
        return sum(usage.cached for usage in self.usages)

    @property
    def estimated(self) -> bool:
        """Whether a server didn't count its tokens, so that the numbers are guesses."""
        return any(usage.estimated for usage in self.usages)

    @property
    def price(self) -> float | None:
        """US dollars; None where no price was given, or tokens weren't counted."""
        rates = self.rates
        if rates is None or self.estimated:
            return None
        cached = rates.prompt if rates.cached is None else rates.cached
        written = rates.prompt if rates.written is None else rates.written
        total = 0.0
        for usage in self.usages:
            total += (usage.prompt - usage.cached - usage.written) * rates.prompt
            total += usage.cached * cached + usage.written * written
            total += usage.completion * rates.completion
        return total / 1e6

    def __len__(self) -> int:
        """Tokens of the whole text, as far as they were counted: the last prompt and its
        answer."""
        last = self.usages[-1] if self.usages else Usage(0, 0)
        return last.prompt + last.completion

    def to_json(self, chat: object = None) -> dict[str, Any]:
        """As `Trajectory.to_json` (whose argument it takes and doesn't need); calls are spelled in
        the text of a reply as our models write them."""
        turns: list[dict[str, Any]] = []
        usages = iter(self.usages)
        for place, entry in enumerate(self.entries):
            if isinstance(entry, Reply):
                used = next(usages, Usage(0, 0))
                turn: dict[str, Any] = {"role": REPLY, "text": spelled(entry)}
                turn |= {"tokens": used.completion, "prompt_tokens": used.prompt}
            else:
                role = OBSERVATION if place else PROMPT
                text = "\n".join(f"{m.role}\n{m.content}" for m in entry)
                turn = {"role": role, "text": text, "tokens": None}
            turns.append(turn)
        return {
            "task": self.task_id,
            "group": self.group,
            "sample": self.sample,
            "model": self.model,
            "valid": self.valid,
            "error": self.error,
            "stop_reason": self.stop_reason,
            "reward": self.reward,
            "parts": dict(self.score.parts) if self.score else {},
            "info": dict(self.score.info) if self.score else {},
            "advantage": self.advantage,
            "seconds": self.seconds,
            "waited": self.waited,
            "tries": self.tries,
            "tokens": len(self),
            "sampled": self.sampled,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "estimated": self.estimated,
            "price": self.price,
            "turns": turns,
        }


def spelled(reply: Reply) -> str:
    """A reply as one text, calls included."""
    parts = [reply.content] if reply.content else []
    for call in reply.tool_calls:
        said: dict[str, Any] = {"name": call.name, "arguments": call.arguments}
        if call.error is not None:
            said["error"] = call.error
        parts.append(f"{OPEN}\n{json.dumps(said, ensure_ascii=False)}\n{CLOSE}")
    return "\n".join(parts)
