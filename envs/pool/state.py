"""What the pool remembers: live episodes, calls on their way, and one place per worker.

Plain records; the rules that change them are in `envs.pool.pool`."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from envs.core import Message, Step
from envs.pool.config import PoolConfig
from envs.pool.process import Worker


@dataclass(eq=False)
class Episode:
    """One live episode: where it runs and all it takes to bring it back.

    key: names this life of it in the worker; each replay gets a new one.
    pending: the caller awaits an event.
    attempts: faults in a row since the last new answer.
    failed: given up between two calls; the next call is answered with this text."""

    id: Hashable
    task: bytes
    slot: Slot
    key: int
    replies: list[bytes] = field(default_factory=list)
    answers: list[tuple[Message, ...] | Step] = field(default_factory=list)
    pending: bool = True
    attempts: int = 0
    failed: str | None = None


@dataclass(frozen=True)
class Call:
    """A call sent to a worker; index 0 is the reset, index i the i-th reply."""

    seq: int
    key: int
    index: int
    queued: float


@dataclass(eq=False)
class Slot:
    """The place of one worker: the process in it changes, the counts go on.

    calls: sent and not answered, first in first out.
    idle_since: when the call before the first of `calls` ended.
    faults: exceptions since the process started."""

    process: Worker
    launched: float
    seen: float
    ready: bool = False
    idle_since: float = 0.0
    calls: deque[Call] = field(default_factory=deque)
    episodes: dict[int, Episode] = field(default_factory=dict)
    faults: int = 0
    busy: float = 0.0
    count: int = 0
    restarts: int = 0

    def due(self, config: PoolConfig) -> tuple[float, str]:
        """(when patience with this worker ends, what to say then); time.monotonic."""
        if not self.ready:
            return (self.launched + config.start_timeout,
                    f"wasn't ready {config.start_timeout:g} s after its start")
        silent = (self.seen + config.heartbeat_timeout,
                  f"gave no sign of life for {config.heartbeat_timeout:g} s")
        if not self.calls:
            return silent
        late = (max(self.calls[0].queued, self.idle_since) + config.call_timeout,
                f"didn't finish a call within {config.call_timeout:g} s")
        return min(silent, late)
