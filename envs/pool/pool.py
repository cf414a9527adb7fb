"""The pool's parent side: who runs where, what has been said, and what to do when it breaks.

Every `reset` and `step` gets exactly one `Event`, in the order in which calls finish.  An
episode lives in one worker.  Its task and replies are recorded as bytes and its answers as
values, so when the worker dies, hangs or raises, a new environment is brought to the same
state by replaying them; the replayed answers must equal the recorded ones.  A fault of the
infrastructure so never turns into a wrong answer: it is retried, then reported as an error,
and too many stop the run.  Leaves out: what environments do, and batching.
"""

from __future__ import annotations

import os
import pickle
import selectors
import time
import weakref
from collections import deque
from collections.abc import Hashable
from typing import Any

from envs.core import Reply
from envs.pool import wire
from envs.pool.config import Event, PoolConfig, PoolError
from envs.pool.process import Launch, Worker, WorkerProcess
from envs.pool.state import Call, Episode, Slot


class EnvPool:
    """Environments in worker processes, asynchronous.  For one thread at a time.

    factory: dotted "module:callable"; `make = callable(config)` runs once in each worker and
        `env = make(episode_id)` for each episode, so environments of one worker can share
        what is dear (a sandbox).  When `make` has a `close`, it is called at the end.
    config: anything picklable.
    launch: starts a worker (factory, pickled config, heartbeat interval); by default a process.

    The constructor returns when all workers are ready.  Raises PoolError when a factory can't
    be imported or called, and ValueError or a pickling error for arguments of the wrong form.
    """

    def __init__(self, factory: str, config: Any, pool_config: PoolConfig | None = None,
                 launch: Launch = WorkerProcess):
        module, separator, attribute = factory.partition(":")
        if not (separator and module and attribute):
            raise ValueError(f'factory must be "module:callable", got {factory!r}')
        self.config = pool_config or PoolConfig()
        self._factory = factory
        self._factory_config = wire.dumps(config)
        self._launcher = launch
        self._episodes: dict[Hashable, Episode] = {}
        self._events: deque[Event] = deque()
        self._serial = 0
        self._waiting = 0  # calls that the caller made and that have no event yet
        self._failure: str | None = None
        counts = ("calls", "episodes", "restarts", "replays", "faults", "errors")
        self._totals = dict.fromkeys(counts, 0)
        self._waited = self._worked = 0.0
        self._began = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._slots: list[Slot] = []
        # Not bound to self: runs when the pool is forgotten and at exit as well.
        self._finalizer = weakref.finalize(self, _end, self._slots, os.getpid())
        try:
            for _ in range(self.config.workers):
                process = self._launch()
                now = time.monotonic()
                self._slots.append(Slot(process, now, now))
                self._selector.register(process.socket, selectors.EVENT_READ, self._slots[-1])
                self._watch_writes(self._slots[-1])
            while not all(slot.ready for slot in self._slots):
                self._pump(None)
        except BaseException:
            self.close()
            raise

    # -- what callers use ------------------------------------------------------------------

    def reset(self, episode_id: Hashable, task: Any) -> None:
        """Starts an episode on the least loaded worker.

        Raises ValueError when the id is live, and a pickling error for an unpicklable task."""
        self._check_open()
        if episode_id in self._episodes:
            raise ValueError(f"episode {episode_id!r} is live already; drop it first")
        episode = Episode(episode_id, wire.dumps(task), self._place(), self._next())
        episode.slot.episodes[episode.key] = episode
        self._episodes[episode_id] = episode
        self._waiting += 1
        self._issue(episode, 0)

    def step(self, episode_id: Hashable, reply: Reply) -> None:
        """Gives the policy's reply; the event follows.

        Raises KeyError when it isn't live, ValueError while its last call is unanswered."""
        self._check_open()
        episode = self._episodes.get(episode_id)
        if episode is None:
            raise KeyError(f"episode {episode_id!r} isn't live: reset it first")
        if episode.pending:
            raise ValueError(f"episode {episode_id!r} still has a call in flight: poll first")
        self._waiting += 1
        episode.pending = True
        if episode.failed is not None:
            self._fail(episode, episode.failed)
            return
        episode.replies.append(wire.dumps(reply))
        self._issue(episode, len(episode.replies))

    def poll(self, timeout: float | None = None) -> list[Event]:
        """Events of calls that have finished, waiting for the first one at most `timeout`
        seconds (None: as long as it takes).  Empty on time-out, or when nothing is awaited.

        Deadlines and heartbeats are looked after here.  Raises PoolError when the error
        budget is spent."""
        self._check_open()
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._pump(0.0 if self._events or not self._waiting else remaining)
            if self._events or not self._waiting or (remaining is not None and remaining <= 0):
                events = list(self._events)
                self._events.clear()
                self._waiting -= len(events)
                return events

    def drop(self, episode_id: Hashable) -> None:
        """Forgets an episode; a call in flight gets no event.  Unknown ids are fine."""
        self._check_open()
        episode = self._episodes.pop(episode_id, None)
        kept = [event for event in self._events if event.episode_id != episode_id]
        self._waiting -= len(self._events) - len(kept)
        self._events = deque(kept)
        if episode is None:
            return
        if episode.pending:
            self._waiting -= 1
        self._release(episode)

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and for each worker its pid, busy share and load.

        calls and episodes finished, restarts (workers), replays (episodes brought back),
        faults (exceptions, differing replays), errors (episodes given up); call_seconds and
        wait_seconds are means over calls (run time; queueing before it)."""
        elapsed = max(time.monotonic() - self._began, 1e-9)
        calls = max(self._totals["calls"], 1)
        return {
            **self._totals,
            "live": len(self._episodes),
            "awaited": self._waiting,
            "seconds": elapsed,
            "call_seconds": self._worked / calls,
            "wait_seconds": self._waited / calls,
            "workers": [
                {
                    "pid": slot.process.pid,
                    "busy_share": slot.busy / elapsed,
                    "calls": slot.count,
                    "live": len(slot.episodes),
                    "restarts": slot.restarts,
                }
                for slot in self._slots
            ],
        }

    def close(self) -> None:
        """Ends all workers and frees every episode.  Safe to call twice."""
        if not self._finalizer.alive:
            return
        for slot in self._slots:
            slot.process.send(wire.STOP, 0, 0, b"")
        deadline = time.monotonic() + self.config.close_timeout
        for slot in self._slots:
            slot.process.wait(max(0.0, deadline - time.monotonic()))
        self._finalizer()
        self._selector.close()
        self._episodes.clear()
        self._events.clear()
        self._waiting = 0

    def __enter__(self) -> EnvPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- calls and their answers -----------------------------------------------------------

    def _issue(self, episode: Episode, index: int) -> None:
        slot = episode.slot
        seq = self._next()
        if index == 0:
            op, payload = wire.RESET, wire.dumps((episode.id, episode.task))
        else:
            op, payload = wire.STEP, episode.replies[index - 1]
        slot.calls.append(Call(seq, episode.key, index, time.monotonic()))
        slot.process.send(op, episode.key, seq, payload)
        self._watch_writes(slot)

    def _reissue(self, episode: Episode, slot: Slot) -> None:
        """Plays the whole episode again in a new environment on `slot`, last call included."""
        episode.slot.episodes.pop(episode.key, None)
        episode.slot, episode.key = slot, self._next()
        slot.episodes[episode.key] = episode
        self._totals["replays"] += 1
        for index in range(len(episode.answers) + episode.pending):
            self._issue(episode, index)

    def _answered(self, slot: Slot, message: tuple) -> None:
        kind, seq, started, finished, payload = message
        call = slot.calls.popleft()
        if call.seq != seq:
            self._abort(f"worker {slot.process.name} answered call {seq}, expected {call.seq}")
        slot.idle_since = finished
        slot.busy += finished - started
        slot.count += 1
        self._totals["calls"] += 1
        self._worked += finished - started
        waited = max(0.0, started - call.queued)
        self._waited += waited
        episode = slot.episodes.get(call.key)
        if episode is None:
            return  # dropped, given up or moved meanwhile
        try:
            answer = pickle.loads(payload)
        except Exception as error:
            kind, answer = wire.ERROR, f"its answer can't be unpickled: {error}"
        if kind == wire.ERROR:
            self._totals["faults"] += 1
            slot.faults += 1
            self._retry(episode, answer, self._place(avoid=slot))
            self._spend(answer)
            if slot.faults >= self.config.worker_faults:
                reason = f"raised {slot.faults} exceptions, the last: {answer}"
                self._restart(slot, reason, blame=False)
            return
        step, score = (None, None) if call.index == 0 else answer
        value = answer if step is None else step
        if call.index < len(episode.answers):
            if self.config.verify_replay and value != episode.answers[call.index]:
                self._totals["faults"] += 1
                what = "reset" if call.index == 0 else f"step {call.index}"
                self._fail(episode, f"the replay of {what} differs from the recorded answer; the "
                           "environment isn't deterministic (see PoolConfig.verify_replay)")
                self._spend(episode.failed or "a replay differed")
            return
        episode.attempts = 0
        episode.answers.append(value)
        episode.pending = False
        messages = value if step is None else step.messages
        self._events.append(Event(episode.id, messages, step, score, None,
                                  finished - started, waited))
        if step is not None and step.done:
            self._totals["episodes"] += 1
            slot.episodes.pop(call.key)
            del self._episodes[episode.id]

    def _retry(self, episode: Episode, reason: str, slot: Slot) -> None:
        episode.attempts += 1
        if episode.attempts > self.config.max_retries:
            self._fail(episode, f"failed {episode.attempts} times in a row; the last: {reason}")
        else:
            self._reissue(episode, slot)

    def _fail(self, episode: Episode, reason: str) -> None:
        """Gives an episode up.  Between two calls nobody awaits an event, so it waits too."""
        if episode.failed is None:
            self._totals["errors"] += 1
            self._release(episode)
            episode.failed = reason
        if episode.pending:
            del self._episodes[episode.id]
            self._events.append(Event(episode.id, error=reason))

    def _release(self, episode: Episode) -> None:
        if episode.slot.episodes.pop(episode.key, None) is not None:
            episode.slot.process.send(wire.DROP, episode.key, 0, b"")
            self._watch_writes(episode.slot)

    # -- workers ---------------------------------------------------------------------------

    def _launch(self) -> Worker:
        return self._launcher(self._factory, self._factory_config, self.config.heartbeat_interval)

    def _place(self, avoid: Slot | None = None) -> Slot:
        """The least loaded worker, another than `avoid` where there is another."""
        slots = [slot for slot in self._slots if slot is not avoid] or self._slots
        return min(slots, key=lambda slot: (len(slot.episodes), len(slot.calls)))

    def _pump(self, timeout: float | None) -> None:
        """Takes in what workers have sent, waiting at most `timeout`; then looks for the dead."""
        due = min(slot.due(self.config)[0] for slot in self._slots)
        wait = max(0.0, due - time.monotonic())
        for key, mask in self._selector.select(wait if timeout is None else min(wait, timeout)):
            slot: Slot = key.data
            if slot.process.socket is not key.fileobj:
                continue  # restarted while this batch was worked through
            if mask & selectors.EVENT_WRITE:
                slot.process.flush()
                self._watch_writes(slot)
            if mask & selectors.EVENT_READ:
                self._take(slot)
        # Only after all that has arrived was read: a caller who polls late isn't a fault of
        # workers that answered in time.
        now = time.monotonic()
        for slot in self._slots:
            due, reason = slot.due(self.config)
            if now >= due:
                self._restart(slot, reason)

    def _take(self, slot: Slot) -> None:
        process = slot.process
        messages, hung_up = process.receive()
        if messages:
            slot.seen = time.monotonic()
        for message in messages:
            if slot.process is not process:
                return
            if message[0] in (wire.RESULT, wire.ERROR):
                self._answered(slot, message)
            elif message[0] == wire.READY:
                slot.ready = True
                slot.idle_since = message[3]
            elif message[0] == wire.FATAL:
                reason = f"can't use factory {self._factory!r}: {pickle.loads(message[4])}"
                if slot.restarts == 0:
                    self._abort(reason)  # a wrong factory doesn't get better
                self._restart(slot, reason)
                return
        if hung_up and slot.process is process:
            process.wait(1.0)  # let the exit status arrive
            self._restart(slot, None)

    def _restart(self, slot: Slot, reason: str | None, blame: bool = True) -> None:
        """Ends a worker, starts another in its place and replays its episodes there.

        reason: why the pool ends it; None when it died by itself.  blame: whether the call
        that runs now may be what broke it."""
        self._selector.unregister(slot.process.socket)
        ended = slot.process.kill()
        text = f"worker {slot.process.name} {ended if reason is None else reason}"
        # Only the call that ran can be guilty; the others' episodes are replayed uncharged.
        running = slot.calls[0].key if blame and slot.ready and slot.calls else None
        guilty = slot.episodes.get(running) if running is not None else None
        self._totals["restarts"] += 1
        self._spend(text)
        try:
            slot.process = self._launch()
        except OSError as error:
            self._abort(f"{text}; a new worker can't be started: {error}")
        self._selector.register(slot.process.socket, selectors.EVENT_READ, slot)
        self._watch_writes(slot)
        slot.launched = slot.seen = time.monotonic()
        slot.ready, slot.faults = False, 0
        slot.restarts += 1
        slot.calls.clear()
        # The suspects last, so that one that kills its worker holds up nobody else.
        for episode in sorted(slot.episodes.values(),
                              key=lambda one: (one is guilty, one.attempts)):
            if episode is guilty:
                self._retry(episode, text, slot)
            else:
                self._reissue(episode, slot)

    def _watch_writes(self, slot: Slot) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if slot.process.backlog else 0)
        if self._selector.get_key(slot.process.socket).events != wanted:
            self._selector.modify(slot.process.socket, wanted, slot)

    # -- giving up -------------------------------------------------------------------------

    def _spend(self, reason: str) -> None:
        config, totals = self.config, self._totals
        spent = totals["restarts"] + totals["faults"]
        if spent > config.error_budget + config.error_rate * totals["episodes"]:
            self._abort(
                f"{spent} environment faults ({totals['restarts']} worker restarts) over "
                f"{totals['episodes']} finished episodes, more than PoolConfig.error_budget "
                f"({config.error_budget}) and error_rate ({config.error_rate:g}) allow; "
                f"the last: {reason}"
            )

    def _abort(self, reason: str) -> None:
        self._failure = reason
        self.close()
        raise PoolError(reason)

    def _check_open(self) -> None:
        if self._failure is not None:
            raise PoolError(f"the pool has stopped: {self._failure}")
        if not self._finalizer.alive:
            raise PoolError("the pool is closed")

    def _next(self) -> int:
        self._serial += 1
        return self._serial


def _end(slots: list[Slot], owner: int) -> None:
    if os.getpid() == owner:  # a forked copy of the parent mustn't end its workers
        for slot in slots:
            slot.process.kill()
