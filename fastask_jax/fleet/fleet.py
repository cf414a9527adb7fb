"""The fleet: replicas that sample, and one ledger of what they have sampled for the learner.

    with Fleet(links, ledger, deal, copies, seed, judge) as fleet:
        fleet.publish(params, version=0)
        while True:
            groups = fleet.take()          # a batch, none of it over-stale
            ...                            # one update
            fleet.updated(params)

Replicas get groups as long as the ledger permits more, are told of new weights, and go on with
what they have.  A replica that dies is started anew and its groups begin again elsewhere; groups
that no update would take any more are cancelled.  Evaluations run on the same replicas, before
all training groups, by the weights that were published last: no others are published meanwhile.

News are handled on a thread of the fleet's own, under one lock: so groups are dealt while the
learner computes.  Whoever waits, waits with a limit, and then says for whom.

Left out: what a group is worth (`judge`), and the update.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from fastask_jax.fleet.ledger import Finished, Ledger
from fastask_jax.fleet.links import Link
from fastask_jax.fleet.replica import Begin, Broken, Cancel, News, Sampled, Stop, Usage, Weights
from fastask_jax.rollout.transcript import Trajectory

# How often dead replicas are looked for (seconds).
_LOOK = 0.5


class Stalled(RuntimeError):
    """Nothing happens any more; the text says who waits for whom."""


@dataclass
class _Member:
    """What the fleet knows of one replica.  life: how often it has been started."""

    link: Link
    life: int = 0
    heard: float = 0.0
    usage: Usage | None = None
    begun: dict[Hashable, Begin] = field(default_factory=dict)


class Fleet:
    """See the module.

    deal: the task of a group, by its number in the stream of tasks.
    judge: whether a finished group teaches anything; may set its advantages.
    patience: seconds without a group that begins or ends after which whoever waits gives up.
    silence: seconds without a word after which a replica that has work counts as dead and is
        stopped, where it is one that can be started anew.
    restarts: how many deaths of replicas are borne between two batches.
    deaths: replicas that have died so far.
    """

    def __init__(
        self,
        links: Sequence[Link],
        ledger: Ledger[list[Trajectory]],
        deal: Callable[[int], Any],
        copies: int,
        seed: str,
        judge: Callable[[list[Trajectory]], bool],
        *,
        patience: float = 600.0,
        silence: float = 600.0,
        restarts: int = 10,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not links:
            raise ValueError("a fleet has at least one replica")
        self.ledger, self.copies, self.seed, self.patience = ledger, copies, seed, patience
        self.deaths, self._silence = 0, silence
        self._deal, self._judge, self._restarts, self._clock = deal, judge, restarts, clock
        self._members = [_Member(link) for link in links]
        self._spent = 0  # restarts since the last batch
        # What was published last, as links carry it; the learner's own arrays are soon gone.
        self._weights: dict[str, Weights] = {}
        self._dull: list[list[Trajectory]] = []
        self._evaluated: dict[Hashable, list[Trajectory]] | None = None
        self._wanted = 0  # groups of the evaluation under way
        # When a group has begun or ended last: of an evaluation (True) and of training.
        self._progress = {True: clock(), False: clock()}
        self._failure: Exception | None = None
        self._news: queue.SimpleQueue[tuple[int, int, News] | None] = queue.SimpleQueue()
        self._changed = threading.Condition(threading.RLock())
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)

    # -- for the learner ----------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._end()
            raise
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._news.put(None)
        self._end()

    def _end(self) -> None:
        """Ends the replicas in order.  A second Ctrl-C waits for none of them, but leaves none
        either: this process couldn't end before its children."""
        try:
            if self._thread.ident is not None:
                self._thread.join()
            for member in self._members:  # side by side
                member.link.send(Stop())
            for member in self._members:
                member.link.stop()
        except BaseException:
            for member in self._members:
                member.link.stop(0.0)
            raise

    def publish(self, version: int, params: Any) -> None:
        """Gives all replicas the weights of a version; they are the caller's again on return."""
        with self._changed:
            self._raise()
            self._weights = {}
            for member in self._members:
                if member.link.packs not in self._weights:
                    packed = Weights(version, member.link.pack(params))
                    self._weights[member.link.packs] = packed
                member.link.send(self._weights[member.link.packs])
            self._hand_out()

    def updated(self, params: Any) -> int:
        """An update is made: publishes the new weights and cancels the groups that have become
        too old by it; returns their version."""
        with self._changed:
            version = self.ledger.updated()
            for number in self.ledger.cancel_stale():
                self._cancel(number)
            self.publish(version, params)
        return version

    def take(self) -> list[Finished[list[Trajectory]]]:
        """The groups of the next update; waits for them.

        Raises Stalled after `patience` seconds without progress, and the error of a replica.
        """
        found = self._wait(self.ledger.take, "groups for the next update", False)
        self._spent = 0
        return found

    def evaluate(self, tasks: Sequence[Any]) -> list[list[Trajectory]]:
        """One trajectory of each task, by the weights that were published last.  Raises as `take`;
        progress of training groups doesn't count."""
        self.begin_evaluation(tasks)
        try:
            return self._wait(self.evaluation, "an evaluation", True)
        finally:
            self.end_evaluation()

    def begin_evaluation(self, tasks: Sequence[Any]) -> None:
        """The first part of `evaluate`, which doesn't wait."""
        with self._changed:
            self._evaluated = {}
            self._wanted = len(tasks)
            for place, task in enumerate(tasks):
                self._begin(Begin(("evaluation", place), task, 1, "evaluation", first=True))

    def evaluation(self) -> list[list[Trajectory]] | None:
        """The result of the evaluation that has begun; None while it lacks something."""
        with self._changed:
            found = self._evaluated or {}
            if len(found) < self._wanted:
                return None
            return [found["evaluation", place] for place in range(self._wanted)]

    def end_evaluation(self) -> None:
        """Forgets the evaluation, and cancels what it still has under way."""
        with self._changed:
            self._evaluated = None
            for member in self._members:
                for key in [key for key, begin in member.begun.items() if begin.first]:
                    self._cancel(key)

    def drain_dull(self) -> list[list[Trajectory]]:
        """The groups without signal that have ended since the last call."""
        with self._changed:
            ended, self._dull = self._dull, []
            return ended

    def counts(self) -> tuple[dict[str, int], int, int]:
        """The ledger's counts, the groups that wait for an update and those under way."""
        with self._changed:
            return dict(self.ledger.counts), self.ledger.waiting, self.ledger.under_way

    def state(self, to_json: Callable[[Trajectory], Any]) -> dict[str, Any]:
        """The ledger's state with the waiting groups as JSON."""
        with self._changed:
            state = self.ledger.state()
        waiting = [[n, oldest, [*map(to_json, group)]] for n, oldest, group in state["waiting"]]
        return state | {"waiting": waiting}

    def restore(self, state: Mapping[str, Any], from_json: Callable[[Any], Trajectory]) -> None:
        """Goes on from `state`; before the fleet starts."""
        waiting = [(n, oldest, [*map(from_json, group)]) for n, oldest, group in state["waiting"]]
        for number, _, group in waiting:
            task = self._deal(number)
            for trajectory in group:
                trajectory.task = task
        self.ledger.restore({**state, "waiting": waiting})

    def usage(self) -> list[tuple[int, Usage | None]]:
        """How often each replica was started, and what it has told last, since the last start."""
        with self._changed:
            return [(member.life, member.usage) for member in self._members]

    def waits(self) -> str:
        """Who waits for whom, in one line."""
        now, ledger = self._clock(), self.ledger
        parts = []
        for member in self._members:
            state = "runs" if member.link.alive() else "is dead"
            numbers = ", ".join(str(key) for key in list(member.begun)[:4]) or "nothing"
            more = len(member.begun) - 4
            version = member.usage.version if member.usage else "none yet"
            parts.append(
                f"{member.link.name} {state}, spoke {now - member.heard:.0f} s ago, works on "
                f"{numbers}{f' and {more} more' if more > 0 else ''} by weights {version}"
            )
        return (
            f"{ledger.waiting} of {ledger.batch} groups wait for update {ledger.version}, "
            f"{ledger.permits()} more may begin; " + "; ".join(parts)
        )

    # -- for whoever handles the news ---------------------------------------------------------

    def start(self) -> None:
        """Starts the replicas."""
        for place in range(len(self._members)):
            self._start(place)

    def handle(self, place: int, life: int, news: News) -> None:
        """Takes in what a replica has said in one of its lives."""
        member = self._members[place]
        if life != member.life:
            return
        member.heard = self._clock()
        if isinstance(news, Usage):
            member.usage = news
        elif isinstance(news, Broken):
            self._failure = RuntimeError(f"{member.link.name}: {news.text}")
        elif news.key in member.begun:  # else it was cancelled meanwhile
            evaluation = member.begun[news.key].first
            self._progress[evaluation] = member.heard
            if isinstance(news, Sampled):
                if not evaluation:
                    self.ledger.sampled(_number(news.key), news.version)
                return
            begun = member.begun.pop(news.key)
            for trajectory in news.trajectories:
                trajectory.task = begun.task
            if not evaluation:
                number = _number(news.key)
                for trajectory in news.trajectories:
                    trajectory.group = number
                signal = self._judge(news.trajectories)
                if not signal:
                    self._dull.append(news.trajectories)
                self.ledger.finish(number, news.trajectories, signal)
            elif self._evaluated is not None:
                self._evaluated[news.key] = news.trajectories
            self._hand_out()

    def look(self) -> None:
        """Starts replicas anew that have died or fallen silent; what they had under way begins
        again."""
        for place, member in enumerate(self._members):
            if self._failure is not None or (member.link.alive() and not self._hangs(member)):
                continue
            self.deaths += 1
            self._spent += 1
            if self._spent > self._restarts:
                self._failure = RuntimeError(
                    f"{member.link.name} has died or hung, loss {self._spent} of a replica since "
                    "the last batch (fleet.restarts): see its output above"
                )
                return
            lost, member.begun = member.begun, {}
            self._start(place)
            for begin in lost.values():
                if begin.first:
                    self._begin(begin)
                else:
                    self.ledger.lose(_number(begin.key))
            self._hand_out()

    # -- details ------------------------------------------------------------------------------

    def _hangs(self, member: _Member) -> bool:
        """Whether it lives without a word; it is stopped then."""
        silent = self._clock() - member.heard
        if not (member.link.restarts and member.begun and silent > self._silence):
            return False
        member.link.stop(0.0)
        return True

    def _start(self, place: int) -> None:
        member = self._members[place]
        member.life += 1
        member.heard, member.usage = self._clock(), None
        life = member.life
        member.link.start(lambda news: self._news.put((place, life, news)))
        if self._weights:
            member.link.send(self._weights[member.link.packs])

    def _begin(self, begin: Begin) -> None:
        """To the replica that has least to do."""
        member = min(self._members, key=lambda m: (len(m.begun), m.life))
        member.begun[begin.key] = begin
        member.link.send(begin)

    def _hand_out(self) -> None:
        """Begins as many groups as the ledger permits; none before there are weights."""
        while self._weights and self.ledger.permits():
            number = self.ledger.begin()
            task = self._deal(number)
            self._begin(Begin(number, task, self.copies, f"{self.seed}/{number}"))

    def _cancel(self, key: Hashable) -> None:
        for member in self._members:
            if member.begun.pop(key, None) is not None:
                member.link.send(Cancel(key))

    def _wait(self, ready: Callable[[], Any], what: str, evaluation: bool) -> Any:
        with self._changed:
            since = self._clock()
            while True:
                self._raise()
                found = ready()
                if found is not None:
                    return found
                silent = self._clock() - max(self._progress[evaluation], since)
                if silent > self.patience:
                    raise Stalled(
                        f"the learner waits for {what}; no group has begun or ended for "
                        f"{silent:.0f} s: {self.waits()}"
                    )
                self._changed.wait(min(1.0, self.patience))

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        looked = self._clock()
        while True:
            items: list[tuple[int, int, News]] = []
            with suppress(queue.Empty):
                item = self._news.get(timeout=_LOOK)
                if item is None:
                    return
                items.append(item)
            with self._changed:
                try:
                    for place, life, news in items:
                        self.handle(place, life, news)
                    if self._clock() - looked >= _LOOK:
                        looked = self._clock()
                        self.look()
                except Exception as error:  # the learner's to raise
                    self._failure = error
                self._changed.notify_all()


def _number(key: Hashable) -> int:
    assert isinstance(key, int)
    return key
