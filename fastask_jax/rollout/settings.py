"""Budgets of rollouts, and what is counted while they run."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass(frozen=True)
class RolloutConfig:
    """Budgets of an episode; each has its own stop reason.

    temperature: of sampling; 0 is greedy (evaluation).
    max_turn_tokens: per turn; a turn cut there goes to the environment as a "length" reply,
        which decides whether the episode goes on.
    max_tokens: sampled tokens per episode, over all turns ("token_budget").
    max_turns: turns per episode ("max_turns"); None leaves it to the environment.
    tools_in_prompt: whether the prompt shows the tools' schemas in the template's own block.
    evict_after: seconds that an episode waits for its tool after which its slot may be given to
        an episode that has none; it is fed anew later, which may change what it samples by a
        rounding error.  None: never, so that results don't depend on how long tools take.
    stall_timeout: seconds without any event, with every slot waiting, after which the rollout
        gives up with an error.
    The engine's `max_len` bounds the whole trajectory ("context").
    """

    temperature: float = 1.0
    max_turn_tokens: int = 256
    max_tokens: int = 2048
    max_turns: int | None = None
    tools_in_prompt: bool = False
    evict_after: float | None = None
    stall_timeout: float = 300.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 or more and finite, not {self.temperature}")
        for name in ("max_turn_tokens", "max_tokens", "stall_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.evict_after is not None and not self.evict_after >= 0:
            raise ValueError(f"evict_after must be 0 or more, or None, not {self.evict_after}")
        if self.max_turns is not None and self.max_turns < 1:
            raise ValueError(f"max_turns must be at least 1 or None, not {self.max_turns}")


@dataclass
class RolloutStats:
    """Where a rollout's time and tokens went; filled by `rollout`.  Times in seconds.

    late_seconds: of `decode_seconds`, the host's work beside decode calls that were done before
        it: at most so long have the devices waited for it.
    pool_seconds: waiting for environments with nothing else to do.
    """

    rounds: int = 0
    row_steps: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    shared_tokens: int = 0
    observation_tokens: int = 0
    refed_tokens: int = 0
    evictions: int = 0
    append_seconds: float = 0.0
    decode_seconds: float = 0.0
    late_seconds: float = 0.0
    pool_seconds: float = 0.0
    seconds: float = 0.0
    stop_reasons: Counter[str] = field(default_factory=Counter)

    def minus(self, before: RolloutStats) -> RolloutStats:
        """What was added since."""
        return RolloutStats(
            **{f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(self)}
        )

    @property
    def occupancy(self) -> float:
        """Share of the decoded rows' steps that sampled a token."""
        return self.sampled_tokens / max(1, self.row_steps)
