"""Which taskset of `verifiers` is played, and the tasks of it that a run is dealt.

A task here is a place in the taskset's own order, which every process finds anew by loading the
taskset; so that order must not change from load to load.  Light: imports nothing of verifiers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any


@dataclass(frozen=True)
class TasksetChoice:
    """A taskset, and how it is played.

    taskset: id of an installed taskset, as `vf-eval` takes it.
    args: its config as a JSON object, what `vf-eval` takes as --env.taskset.NAME.
    harness: id of the program that plays it; none: the taskset's own, or the chat loop of
        `envs.verifiers.harness`.
    harness_args: the harness's config as a JSON object.
    max_turns: replies that a policy may give; none: what taskset and harness say.
    timeout: seconds that the harness may take for an episode, the policy's own time included.
    solved: total reward from which an episode counts as correct in tables; learning goes by the
        reward itself.
    """

    taskset: str = ""
    args: str = "{}"
    harness: str | None = None
    harness_args: str = "{}"
    max_turns: int | None = None
    timeout: float = 1800.0
    solved: float = 1.0

    def __post_init__(self) -> None:
        for name in ("args", "harness_args"):
            _object(name, getattr(self, name))
        if self.max_turns is not None and self.max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, not {self.max_turns}")
        if not (self.timeout > 0 and math.isfinite(self.timeout)):
            raise ValueError(f"timeout must be above 0 and finite, not {self.timeout}")
        if not math.isfinite(self.solved):
            raise ValueError(f"solved must be finite, not {self.solved}")

    @property
    def taskset_config(self) -> dict[str, Any]:
        return {**_object("args", self.args), "id": self.taskset}

    @property
    def harness_config(self) -> dict[str, Any]:
        return _object("harness_args", self.harness_args)


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name} is not JSON ({error}): {text[:80]!r}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a JSON object, such as {{}}, not {text[:80]!r}")
    if "id" in value:
        raise ValueError(f'{name} can\'t hold "id": ids have options of their own')
    return value


@dataclass(frozen=True)
class VerifiersTask:
    """The task at place `index` of a taskset."""

    id: str
    index: int


@dataclass(frozen=True)
class DealConfig:
    """How tasks are dealt.

    taskset: its id.  count: its tasks; None where it has no end.  heldout: of these, the first,
    which only evaluations see.  seed: of the order of the others.
    """

    taskset: str
    count: int | None
    heldout: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count is not None and self.count <= self.heldout:
            raise ValueError(
                f"taskset {self.taskset} has {self.count} tasks, and {self.heldout} are kept for "
                "evaluation: set loop.eval_tasks lower, so that some are left to train on"
            )


class VerifiersStream:
    """Deals the tasks that aren't held out, again and again, each pass shuffled anew; those of an
    endless taskset in their order.  Task number n follows from the config and n alone."""

    def __init__(self, config: DealConfig, cursor: int = 0) -> None:
        self.config = config
        self.cursor = cursor
        self._pass: tuple[int, list[int]] = (-1, [])

    def task(self, n: int) -> VerifiersTask:
        c = self.config
        if c.count is None:
            return self._named(c.heldout + n)
        turn, place = divmod(n, c.count - c.heldout)
        if self._pass[0] != turn:
            order = list(range(c.heldout, c.count))
            Random(f"{c.seed}/{turn}").shuffle(order)
            self._pass = (turn, order)
        return self._named(self._pass[1][place])

    def _named(self, index: int) -> VerifiersTask:
        return VerifiersTask(f"{self.config.taskset}-{index}", index)

    def heldout(self) -> list[VerifiersTask]:
        return [self._named(index) for index in range(self.config.heldout)]

    def take(self, count: int) -> list[VerifiersTask]:
        """The next `count` tasks."""
        tasks = [self.task(n) for n in range(self.cursor, self.cursor + count)]
        self.cursor += count
        return tasks

    def __iter__(self) -> Iterator[VerifiersTask]:
        while True:
            yield self.take(1)[0]
