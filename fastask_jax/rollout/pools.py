"""What the scheduler needs of an environment pool, and the simplest one: in this process.

`envs.pool.EnvPool` runs environments in worker processes.  `InlinePool` answers the same calls
by running them at once, for one-off episodes (`fastask ask`) and for tests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, Protocol

from envs.core import Environment, Reply
from envs.pool import Event


class Pool(Protocol):
    """Every `reset` and `step` is answered by one event of a later `poll`, in any order."""

    def reset(self, episode_id: Hashable, task: Any) -> None: ...

    def step(self, episode_id: Hashable, reply: Reply) -> None: ...

    def poll(self, timeout: float | None = None) -> list[Event]: ...

    def drop(self, episode_id: Hashable) -> None: ...


class InlinePool:
    """Environments in this process; `make(episode_id)` gives the environment of one episode.

    An exception in an environment becomes the event's `error`, as in `EnvPool` (which retries
    first).  There are no deadlines.
    """

    def __init__(self, make: Callable[[Hashable], Environment]) -> None:
        self._make = make
        self._live: dict[Hashable, Environment] = {}
        self._events: deque[Event] = deque()

    def reset(self, episode_id: Hashable, task: Any) -> None:
        if episode_id in self._live:
            raise ValueError(f"episode {episode_id!r} is live already; drop it first")
        try:
            environment = self._live[episode_id] = self._make(episode_id)
            messages = tuple(environment.reset(task))
        except Exception as error:
            self._fail(episode_id, error)
        else:
            self._events.append(Event(episode_id, messages))

    def step(self, episode_id: Hashable, reply: Reply) -> None:
        environment = self._live.get(episode_id)
        if environment is None:
            raise KeyError(f"episode {episode_id!r} isn't live: reset it first")
        try:
            step = environment.step(reply)
            score = environment.score() if step.done else None
        except Exception as error:
            self._fail(episode_id, error)
        else:
            self._events.append(Event(episode_id, step.messages, step, score))
            if step.done:
                self._live.pop(episode_id).close()

    def poll(self, timeout: float | None = None) -> list[Event]:
        """The events so far; `timeout` is not needed, as calls have finished when they return."""
        events = list(self._events)
        self._events.clear()
        return events

    def drop(self, episode_id: Hashable) -> None:
        self._events = deque(e for e in self._events if e.episode_id != episode_id)
        environment = self._live.pop(episode_id, None)
        if environment is not None:
            environment.close()

    def close(self) -> None:
        for episode_id in list(self._live):
            self.drop(episode_id)

    def _fail(self, episode_id: Hashable, error: Exception) -> None:
        self._events.append(Event(episode_id, error=f"{type(error).__name__}: {error}"))
        environment = self._live.pop(episode_id, None)
        if environment is not None:
            environment.close()
