"""The blind policy: for each question type the best constant answer, and no look at the book.

It is what a policy earns by learning the answers' distribution instead of the task (yes or no
pays half the time), so every accuracy is shown beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from envs.core import Message, Reply, ToolSpec
from envs.fast_ask import StreamConfig, Task, TaskStream

FIT_TASKS = 1400  # 100 of each type


class BlindPolicy:
    """constants: type -> the answer that is given to each question of that type."""

    def __init__(self, constants: Mapping[str, str]) -> None:
        self.constants = dict(constants)

    @classmethod
    def fit(cls, tasks: Iterable[Task]) -> BlindPolicy:
        """The most frequent truth of each type; of equally frequent ones, the first in the
        alphabet.  `tasks` are training tasks: held-out ones would flatter the guess."""
        counts: dict[str, Counter[str]] = {}
        for task in tasks:
            counts.setdefault(task.type, Counter())[task.truth] += 1
        return cls({kind: min(c, key=lambda a: (-c[a], a)) for kind, c in counts.items()})

    @classmethod
    def of_scale(cls, scale: str = "tiny", count: int = FIT_TASKS) -> BlindPolicy:
        """Fitted on the first `count` training tasks of a scale."""
        return cls.fit(TaskStream(StreamConfig("train", scale)).take(count))

    def guess(self, task: Task) -> str:
        """Raises ValueError for a type that was not among the training tasks."""
        if task.type not in self.constants:
            raise ValueError(f"no constant for task type {task.type!r}; fit on tasks of all types")
        return self.constants[task.type]

    def start(self, messages: list[Message], tools: tuple[ToolSpec, ...], task: Any) -> Reply:
        return Reply(f"ANSWER: {self.guess(task)}", tokens=8)

    def reply(self, messages: tuple[Message, ...]) -> Reply:
        raise RuntimeError("a blind policy ends its episode with its first reply")
