"""Episodes and their groups on the way through a scheduler."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from envs.core import Message
from fastask_jax.rollout.transcript import Trajectory


@dataclass(eq=False)
class Episode:
    """One copy of a task on its way through the slots."""

    id: str
    task: Any
    trajectory: Trajectory
    key: Any
    group: Group
    began: float = 0.0
    messages: tuple[Message, ...] = ()
    prompt: list[int] | None = None
    slot: int | None = None
    turn: list[int] = field(default_factory=list)
    ended: str | None = None  # why the last turn ended: "stop" or the binding budget
    closing: str | None = None  # the scheduler's own stop reason, once it has ended the episode


@dataclass(eq=False)
class Group:
    """The copies of one task.  oldest: version of the first token that one of them sampled."""

    key: Hashable
    first: bool = False
    oldest: int | None = None
    episodes: list[Episode] = field(default_factory=list, repr=False)
    resetting: int = 0
    unfinished: int = 0

    @property
    def trajectories(self) -> list[Trajectory]:
        """One per copy, in order."""
        return [episode.trajectory for episode in self.episodes]
