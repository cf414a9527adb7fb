"""Settings of a policy that others serve, and what its tokens cost."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Price:
    """US dollars for a million tokens, as the vendor's list has them.

    cached: of the prompt's tokens that the server had already; None charges them as `prompt`.
    written: of the prompt's tokens that it keeps for later (Anthropic); None: as `prompt`.
    """

    prompt: float
    completion: float
    cached: float | None = None
    written: float | None = None

    def __post_init__(self) -> None:
        for name in ("prompt", "completion", "cached", "written"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"a price must be 0 or more and finite, {name} isn't: {value}")


@dataclass(frozen=True)
class RemoteConfig:
    """Who is asked, and within which bounds.

    model: its name at the server.
    temperature: None leaves it to the server; some models take none.
    max_turn_tokens: sampled in one turn, thoughts included; a turn cut there is a "length" reply.
    max_tokens: sampled in an episode, over all turns ("token_budget"); None: no bound.
    deadline: seconds that an episode may take ("deadline"): tools and answered requests; what is
        spent on waiting for a busy or broken server isn't the model's time.
    silence: seconds after which a try without an answer counts as lost.
    retry: seconds after which a request that fails isn't tried again.
    requests_per_minute: of all episodes together; None: no bound.
    connections: requests at a time.
    price: for `RemoteTrajectory.price`; None where nobody knows it.
    """

    model: str
    temperature: float | None = None
    max_turn_tokens: int = 4096
    max_tokens: int | None = None
    deadline: float = 600.0
    silence: float = 120.0
    retry: float = 120.0
    requests_per_minute: float | None = None
    connections: int = 64
    price: Price | None = None

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("name a model: --model NAME")
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 or more and finite, not {self.temperature}")
        for name in ("max_turn_tokens", "max_tokens", "connections"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        for name in ("deadline", "silence", "requests_per_minute"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, not {value}")
        if not 0 <= self.retry < math.inf:
            raise ValueError(f"retry must be 0 or more and finite, not {self.retry}")
