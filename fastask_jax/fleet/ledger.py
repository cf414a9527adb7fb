"""Which groups of rollouts are under way, which wait for an update, and which one has taken:
the bookkeeping of asynchronous training, without a model, a clock or a thread.

Update w makes version w + 1 of the weights from version w.  A token of version v is then w - v
updates old, and no update takes a group with a token older than `max_staleness`.  Three rules keep
that from costing much: so few groups are under way or waiting that the next updates can take them
all (AReaL's capacity); those under way that have become too old are cancelled before they end;
and what waits is taken oldest first.  The bound itself is checked whenever an update takes a
group, so that no order of events can break it.

Groups without signal (all rewards equal) and groups that are dropped make room for others at
once, so every update gets a full batch.  Each group is in one place at any time, and a saved
ledger holds all that a resumed run needs: groups that were under way begin again, groups that
waited wait, and none that an update has taken comes back.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Payload = TypeVar("Payload")


@dataclass(frozen=True)
class Finished(Generic[Payload]):
    """A group that waits for an update.

    number: its place in the stream of tasks.  oldest: version of the oldest token that any of its
    rollouts has sampled.
    """

    number: int
    oldest: int
    payload: Payload


@dataclass
class Ledger(Generic[Payload]):
    """The groups of one run.

    batch: groups an update takes.  max_staleness: see above; 0 is on-policy.
    spare: groups under way beyond those that updates can take within the bound: whoever ends
      first is taken, and the rest may be cancelled (over-sampling).
    version: updates made so far.
    counts: how many groups were "taken", "dull" (without signal), "cancelled" (too old while
      under way), "dropped" (too old while waiting) and "lost" (failed; begun again).
    """

    batch: int
    max_staleness: int = 0
    spare: int = 0
    version: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    _next: int = 0
    _again: list[int] = field(default_factory=list)
    # Groups by number, with the version of their oldest token; None before the first.
    _under_way: dict[int, int | None] = field(default_factory=dict)
    _waiting: list[Finished[Payload]] = field(default_factory=list)
    _learning: int = 0  # groups that the update in progress has taken

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch must be at least 1 group, not {self.batch}")
        for name in ("max_staleness", "spare", "version"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")

    # -- from tasks to finished groups --------------------------------------------------------

    def permits(self) -> int:
        """How many more groups may begin now; never 0 while nothing is under way, no update is
        being made and too few groups wait for the next one."""
        room = (self.max_staleness + 1) * self.batch + self.spare
        # Those of the update in progress count until it is made: what begins now begins with the
        # weights that it started from.
        return max(0, room - len(self._under_way) - len(self._waiting) - self._learning)

    @property
    def waiting(self) -> int:
        """Groups that wait for an update."""
        return len(self._waiting)

    @property
    def under_way(self) -> int:
        """Groups that are being sampled."""
        return len(self._under_way)

    def begin(self) -> int:
        """The number of the next task, whose group is under way from now on: that of a group that
        has to begin again, else one that was never dealt.

        Raises RuntimeError without a permit.
        """
        if not self.permits():
            raise RuntimeError("no permit: as many groups are under way as updates can take")
        if self._again:
            number = self._again.pop(0)
        else:
            number, self._next = self._next, self._next + 1
        self._under_way[number] = None
        return number

    def sampled(self, number: int, version: int) -> None:
        """A rollout of the group has sampled a token with these weights."""
        oldest = self._oldest(number)
        self._under_way[number] = version if oldest is None else min(version, oldest)

    def finish(self, number: int, payload: Payload, signal: bool = True) -> None:
        """All rollouts of the group have ended; without `signal` it makes room for another."""
        oldest = self._oldest(number)
        del self._under_way[number]
        if not signal or oldest is None:
            self.counts["dull"] += 1
        else:
            self._waiting.append(Finished(number, oldest, payload))
            self._drop()

    def lose(self, number: int) -> None:
        """The group failed for no fault of the policy: its task begins again."""
        self._oldest(number)
        del self._under_way[number]
        self._again.append(number)
        self.counts["lost"] += 1

    def cancel_stale(self) -> list[int]:
        """Takes out the groups under way that no update will take any more; returns them, so that
        their slots are freed.  Their tasks are not dealt again: slow ones would starve others."""
        stale = [n for n, oldest in self._under_way.items() if self._too_old(oldest)]
        for number in stale:
            del self._under_way[number]
        self.counts["cancelled"] += len(stale)
        return stale

    # -- from finished groups to updates ------------------------------------------------------

    def take(self) -> list[Finished[Payload]] | None:
        """A batch for the next update, the oldest first; None while too few groups wait."""
        if len(self._waiting) < self.batch:
            return None
        self._waiting.sort(key=lambda group: (group.oldest, group.number))
        taken, self._waiting = self._waiting[: self.batch], self._waiting[self.batch :]
        self.counts["taken"] += len(taken)
        self._learning = len(taken)
        return taken

    def updated(self) -> int:
        """An update is made: returns the version of the new weights."""
        self.version += 1
        self._learning = 0
        self._drop()
        return self.version

    def staleness(self, group: Finished[Payload]) -> int:
        """Updates since the group's oldest token."""
        return self.version - group.oldest

    # -- saving -------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint made now has to hold; the payloads of waiting groups as they are."""
        return {
            "version": self.version,
            "next": self._next,
            "again": sorted([*self._again, *self._under_way]),
            "waiting": [(g.number, g.oldest, g.payload) for g in self._waiting],
            "counts": dict(self.counts),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from `state`; groups that were under way begin again."""
        self.version, self._next = int(state["version"]), int(state["next"])
        self._again = [int(number) for number in state["again"]]
        self._under_way, self._learning = {}, 0
        self._waiting = [Finished(int(n), int(old), load) for n, old, load in state["waiting"]]
        self.counts = Counter(state["counts"])

    # -- details ------------------------------------------------------------------------------

    def _drop(self) -> None:
        fresh = [group for group in self._waiting if not self._too_old(group.oldest)]
        self.counts["dropped"] += len(self._waiting) - len(fresh)
        self._waiting = fresh

    def _too_old(self, oldest: int | None) -> bool:
        return oldest is not None and self.version - oldest > self.max_staleness

    def _oldest(self, number: int) -> int | None:
        try:
            return self._under_way[number]
        except KeyError:
            raise KeyError(f"group {number} isn't under way: was it cancelled?") from None
