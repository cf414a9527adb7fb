"""Plays what is missing of one policy: several episodes at a time, faults once more.

A `Player` plays episodes and hands each over as it ends.  `finish` lets it, keeps what is valid,
tries again what a fault of the machinery has ended, and says what is left in the end: such an
episode has no record and counts nowhere, as it is no wrong answer.

Left out: policies that sample in batches (the engine's player is `experiments.evaluate`'s).
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from envs.fast_ask import Task
from fastask_jax.policies.base import Played, record
from fastask_jax.policies.remote import Refused

Job = tuple[Task, int]  # a task and which of its rollouts
# Told of each episode as it ends, in the thread that called.
Ended = Callable[[Task, int, Played], None]


class Player(Protocol):
    """One policy."""

    def play(self, jobs: Sequence[Job], ended: Ended) -> None:
        """Plays the jobs, in any order.  An exception out of `ended` passes through and ends the
        rest; any other says that the policy can't play on."""
        ...


class GaveUp(Exception):
    """Too many faults one after another."""


@dataclass(frozen=True)
class Outcome:
    """left: episodes without a record.  why: what ended the last of them."""

    left: int
    why: str = ""


def finish(
    player: Player,
    jobs: Sequence[Job],
    keep: Callable[[Task, int, dict[str, Any]], None],
    attempts: int = 3,
    in_a_row: int = 8,
) -> Outcome:
    """Plays jobs until each has a record or has failed `attempts` times, or `in_a_row` episodes
    have failed one after another, or the policy refuses to play (`Refused`)."""
    left, why, failed = {(task.id, rollout): (task, rollout) for task, rollout in jobs}, "", 0

    def ended(task: Task, rollout: int, played: Played) -> None:
        nonlocal why, failed
        if played.valid:
            keep(task, rollout, kept(played))
            del left[task.id, rollout]
            failed = 0
            return
        why = f"{task.id}: {played.error or 'no score'}"
        failed += 1
        if failed >= in_a_row:
            raise GaveUp

    try:
        for _ in range(attempts):
            player.play(list(left.values()), ended)
            if not left:
                break
    except Refused as error:
        why = str(error)
    except GaveUp:
        why = f"{failed} episodes failed in a row, the last was {why}"
    return Outcome(len(left), why if left else "")


def kept(played: Played) -> dict[str, Any]:
    """The record of an episode, with the counts that a price is made of."""
    found = record(played)
    usages = getattr(played, "usages", None)
    if usages is not None:
        found["written_tokens"] = sum(usage.written for usage in usages)
        found["estimated"] = any(usage.estimated for usage in usages)
    if not found["tokens"]:  # a script's; no model says nothing
        found["tokens"] = None
    # What it costs is reckoned when it is shown, at the prices given then.
    found.pop("price", None)
    return found


class Threads:
    """Plays one episode a thread, `concurrency` of them at a time.

    run: plays the episode of one job and gives what is `Played`; called from those threads.
    """

    def __init__(self, run: Callable[[Task, int], Any], concurrency: int) -> None:
        self._run, self._concurrency = run, concurrency

    def play(self, jobs: Sequence[Job], ended: Ended) -> None:
        """Raises what `run` raised first; other episodes aren't begun then."""
        todo = deque(jobs)
        done: queue.Queue[tuple[Job, Any]] = queue.Queue()

        def work() -> None:
            while True:
                try:
                    job = todo.popleft()
                except IndexError:
                    return
                try:
                    done.put((job, self._run(*job)))
                except BaseException as error:
                    done.put((job, error))

        # Of a process that is interrupted, they don't hold up the end.
        count = min(self._concurrency, len(jobs))
        threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(len(jobs)):
                job, found = done.get()
                if isinstance(found, BaseException):
                    raise found
                ended(*job, found)
        finally:
            todo.clear()
        for thread in threads:
            thread.join()
