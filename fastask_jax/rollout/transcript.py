"""The record of one episode: a single growing list of token ids and what is known of each.

Ids are only ever appended: the prompt, then in turn what the model sampled and what the
environment answered.  Sampled ids are never decoded and encoded again, so what the learner
scores is exactly what the sampler saw.  Only sampled tokens carry the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from envs.core import Score

if TYPE_CHECKING:
    from fastask_jax.rollout.chat import ChatFormat

PROMPT, REPLY, OBSERVATION = "prompt", "reply", "observation"
NO_VERSION = -1


@dataclass(frozen=True)
class Span:
    """Tokens start..end (exclusive) of the trajectory; `kind` is prompt, reply or observation."""

    kind: str
    start: int
    end: int


@dataclass
class Trajectory:
    """One episode of one policy on one task.

    group, sample: which task of the batch, and which of its copies; advantages go by `group`.
    stop_reason: the environment's ("answered", "max_turns", "length") or the scheduler's
        ("token_budget", "context", "max_turns"); "error" when the episode failed.
    error: an infrastructure fault; such a trajectory is not `valid` and never a wrong answer.
    advantage: set by the learner.
    seconds: from the first token of the prompt to the score, tools and queueing included.

    Arrays, one entry per token: `ids` int32, `mask` bool (sampled), `logprobs` float32 at the
    sampling temperature (0 off the mask), `versions` int32 of the policy (-1 off the mask).
    """

    task_id: str
    group: int
    sample: int
    task: Any = field(default=None, repr=False)
    score: Score | None = None
    stop_reason: str | None = None
    error: str | None = None
    advantage: float = 0.0
    seconds: float = 0.0
    spans: list[Span] = field(default_factory=list, repr=False)
    _ids: list[int] = field(default_factory=list, repr=False)
    _mask: list[bool] = field(default_factory=list, repr=False)
    _logprobs: list[float] = field(default_factory=list, repr=False)
    _versions: list[int] = field(default_factory=list, repr=False)

    def add_prompt(self, ids: Sequence[int]) -> None:
        """Begins the trajectory; ValueError if it has begun already."""
        if self.spans:
            raise ValueError("a trajectory has one prompt, at its start")
        self._append(PROMPT, ids, False, [0.0] * len(ids), [NO_VERSION] * len(ids))

    def add_sampled(self, ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Appends tokens that policy `version` sampled; pieces of one turn join into one span."""
        if not self.spans:
            raise ValueError("a trajectory begins with its prompt")
        if len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} sampled ids but {len(logprobs)} logprobs")
        joined = self.spans.pop().start if self.spans[-1].kind == REPLY else None
        self._append(REPLY, ids, True, logprobs, [version] * len(ids), joined)

    def add_observation(self, ids: Sequence[int]) -> None:
        """Appends what the environment said; ValueError if no reply came before it."""
        if not self.spans or self.spans[-1].kind != REPLY:
            raise ValueError("an observation follows a reply")
        self._append(OBSERVATION, ids, False, [0.0] * len(ids), [NO_VERSION] * len(ids))

    def _append(
        self,
        kind: str,
        ids: Sequence[int],
        sampled: bool,
        logprobs: Sequence[float],
        versions: list[int],
        start: int | None = None,
    ) -> None:
        if not len(ids):
            raise ValueError(f"a {kind} of no tokens")
        self.spans.append(
            Span(kind, len(self._ids) if start is None else start, len(self._ids) + len(ids))
        )
        self._ids.extend(map(int, ids))
        self._mask.extend([sampled] * len(ids))
        self._logprobs.extend(map(float, logprobs))
        self._versions.extend(versions)

    # -- what there is ----------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> NDArray[np.int32]:
        return np.asarray(self._ids, np.int32)

    @property
    def mask(self) -> NDArray[np.bool_]:
        return np.asarray(self._mask, np.bool_)

    @property
    def logprobs(self) -> NDArray[np.float32]:
        return np.asarray(self._logprobs, np.float32)

    @property
    def versions(self) -> NDArray[np.int32]:
        return np.asarray(self._versions, np.int32)

    @property
    def valid(self) -> bool:
        """Scored and without an infrastructure fault."""
        return self.error is None and self.score is not None

    @property
    def reward(self) -> float:
        """The score's total; 0 for an episode that isn't valid (leave it out of its group)."""
        return self.score.total if self.score is not None and self.error is None else 0.0

    @property
    def turns(self) -> int:
        """How many times the policy spoke."""
        return sum(span.kind == REPLY for span in self.spans)

    @property
    def sampled(self) -> int:
        """How many tokens the policy sampled."""
        return sum(span.end - span.start for span in self.spans if span.kind == REPLY)

    @property
    def prompt_tokens(self) -> int:
        """Tokens in front of each turn, as a server would count them that is sent the whole
        conversation with every request."""
        return sum(span.start for span in self.spans if span.kind == REPLY)

    def span_ids(self, span: Span) -> list[int]:
        return self._ids[span.start : span.end]

    def to_json(self, chat: ChatFormat) -> dict[str, Any]:
        """One line of traces.jsonl: outcome, counts, and the text of every span with its role,
        token count and, for replies, summed logprob, policy version(s), and for each token the
        characters of the text that are its own and its logprob."""
        turns: list[dict[str, Any]] = []
        for span in self.spans:
            ids = self.span_ids(span)
            turn: dict[str, Any] = {
                "role": span.kind,
                "text": chat.decode(ids),
                "tokens": span.end - span.start,
            }
            if span.kind == REPLY:
                logprobs = self._logprobs[span.start : span.end]
                turn["logprob"] = float(sum(logprobs))
                turn["chars"] = chat.lengths(ids)
                turn["logprobs"] = [round(value, 3) for value in logprobs]
                turn["versions"] = sorted(set(self._versions[span.start : span.end]))
            turns.append(turn)
        return {
            "task": self.task_id,
            "group": self.group,
            "sample": self.sample,
            "valid": self.valid,
            "error": self.error,
            "stop_reason": self.stop_reason,
            "reward": self.reward,
            "parts": dict(self.score.parts) if self.score else {},
            "info": dict(self.score.info) if self.score else {},
            "advantage": self.advantage,
            "seconds": self.seconds,
            "tokens": len(self),
            "sampled": self.sampled,
            "turns": turns,
        }
