"""One engine in asynchronous training: orders in, news out.

A replica runs wherever a link (`links.py`) has put it, a thread, a process or a Ray actor, and
knows nothing of the learner.  It works on its groups with the weights that came last, whose
episodes go on when others come, and tells when a group samples its first token and when it ends.

Orders and news are plain data that pickle, weights as whatever tree of arrays the link carries.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from fastask_jax.rollout.scheduler import RolloutStats, Scheduler
from fastask_jax.rollout.transcript import Trajectory

# How long an idle replica waits for an order, and a waiting one for a tool, at a time (seconds).
_PATIENCE = 0.05
# How often it tells what it does (seconds).
_TELL = 0.5


@dataclass(frozen=True)
class Begin:
    """Run a group: `copies` episodes of a task; `first` before all groups that aren't."""

    key: Hashable
    task: Any
    copies: int
    seed: str
    first: bool = False


@dataclass(frozen=True)
class Cancel:
    """Drop a group; its key may have ended already."""

    key: Hashable


@dataclass(frozen=True)
class Weights:
    """Go on with these."""

    version: int
    params: Any


@dataclass(frozen=True)
class Stop:
    """End; groups under way are dropped."""


Order = Begin | Cancel | Weights | Stop


@dataclass(frozen=True)
class Sampled:
    """A group has sampled its first token, with weights of this version."""

    key: Hashable
    version: int


@dataclass(frozen=True)
class Ended:
    """All episodes of a group have ended; the trajectories come without their task."""

    key: Hashable
    trajectories: list[Trajectory]


@dataclass(frozen=True)
class Usage:
    """What the replica has done since it began: seconds by kind, and counts.

    idle_seconds: without any group.  Of the rest, `stats.append_seconds` and
    `stats.decode_seconds` are the engine's, `stats.pool_seconds` those of waiting for tools.
    """

    seconds: float
    idle_seconds: float
    version: int
    stats: RolloutStats


@dataclass(frozen=True)
class Broken:
    """The replica has met an error that starting anew wouldn't cure, and has ended."""

    text: str


News = Sampled | Ended | Usage | Broken


class Lost(Exception):
    """What a replica works with is gone, and it ends; starting it anew may cure that."""


def serve(
    scheduler: Scheduler,
    receive: Callable[[float], Sequence[Order]],
    tell: Callable[[News], None],
    place: Callable[[Any], Any] = lambda params: params,
) -> None:
    """Works until it is told to stop.

    receive: waits up to so many seconds for orders.  place: puts weights where the engine is.
    An error of the scheduler is told as `Broken`; Lost is raised.
    """
    try:
        _serve(scheduler, receive, tell, place)
    except Lost:
        raise
    except Exception as error:
        tell(Broken(f"{type(error).__name__}: {error}"))
    finally:
        scheduler.close()


def _serve(
    scheduler: Scheduler,
    receive: Callable[[float], Sequence[Order]],
    tell: Callable[[News], None],
    place: Callable[[Any], Any],
) -> None:
    began = told = time.monotonic()
    idle, version = 0.0, -1
    while True:
        works = scheduler.unfinished > 0 and version >= 0
        before = time.monotonic()
        orders = receive(0.0 if works else _PATIENCE)
        if not works:
            idle += time.monotonic() - before
        # Of several weights only the last ones are looked at.
        weights = next((o for o in reversed(orders) if isinstance(o, Weights)), None)
        if weights is not None:
            version = weights.version
            scheduler.set_weights(place(weights.params), version)
        for order in orders:
            if isinstance(order, Stop):
                return
            if isinstance(order, Begin):
                scheduler.add(order.key, order.task, order.copies, order.seed, first=order.first)
            elif isinstance(order, Cancel):
                scheduler.cancel(order.key)
        if scheduler.unfinished and version >= 0:
            for group in (news := scheduler.round(_PATIENCE)).sampled:
                assert group.oldest is not None
                tell(Sampled(group.key, group.oldest))
            for group in news.ended:
                for trajectory in group.trajectories:
                    trajectory.task = None
                tell(Ended(group.key, group.trajectories))
        now = time.monotonic()
        if now - told >= _TELL:
            told = now
            tell(Usage(now - began, idle, version, copy.deepcopy(scheduler.stats)))
