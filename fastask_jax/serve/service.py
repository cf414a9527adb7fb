"""One engine that answers requests of many clients: continuous batching over its slots.

    service = Service(engine, params)
    service.start()
    order = Order(ids, max_tokens=64, temperature=1.0, key=episode_key(0, "task", 0, 0))
    ticket = service.submit(order, tell)       # tell(Piece) after each decode call, to the last

A thread owns the engine.  Between two decode calls it takes new weights, drops what was cancelled,
and gives slots to requests that wait.  A slot whose request has ended keeps its state: a request
that begins with exactly what such a slot holds, by the same weights, goes on there and only what
is new is fed (that is what the turns of a conversation are).  Others take a free slot, or the one
whose state was used longest ago.  Requests know nothing of slots: one that finds no state is fed
whole, and samples the same but for rounding.

Running requests go on with new weights, their text fed anew first; each token is told with the
version that made it.  What a request samples depends on its key, its ids and the weights alone,
not on its company.

Left out: HTTP, JSON, deadlines.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from fastask_jax.rollout.engine import Engine, Params, Sampled, Turn
from fastask_jax.rollout.feeding import Feeder

# The version of weights that nobody has named.
UNNAMED = -1


class Busy(Exception):
    """As many requests wait as may; ask again later."""


class Stopping(Exception):
    """The service ends, or has met an error."""


class Cancelled(Exception):
    """Whoever asked has gone."""


class Outdated(Exception):
    """The service has older weights than the request wants."""


@dataclass(frozen=True)
class Order:
    """What a request wants.

    ids: the whole text so far.  key: [2] uint32; what is sampled depends on it and on each token's
        place in the text.  temperature: 0 is greedy.  stop: tokens that end it besides the
        engine's own.  version: the oldest weights that may begin it; None takes any.
    """

    ids: list[int]
    max_tokens: int
    temperature: float
    key: np.ndarray
    stop: frozenset[int] = frozenset()
    version: int | None = None


@dataclass(frozen=True)
class Piece:
    """What one decode call has sampled for a request, by weights of `version`.

    ended: "stop", "length", or None (goes on).
    """

    ids: list[int]
    logprobs: list[float]
    version: int
    ended: str | None


Tell = Callable[[Piece | Exception], None]


@dataclass(eq=False)
class Ticket:
    """A request on its way.  promised: see `Service.submit`.  reused: tokens that its slot held
    already, None before it has one."""

    order: Order
    tell: Tell = field(repr=False)
    sampled: list[int] = field(default_factory=list, repr=False)
    promised: bool = False
    reused: int | None = None
    over: bool = False

    @property
    def text(self) -> list[int]:
        """All that its slot holds."""
        return self.order.ids + self.sampled


class Service:
    """See the module.

    params: weights where the engine wants them, called `UNNAMED`.  queue: requests that may wait
    while all slots are taken.  on_failure: called on the engine's thread when an error has ended
    it.

    Attributes: `version` of the weights that the next request begins with; `failure`, the error
    that has ended the engine's thread; `ended`, requests so far by how they ended; `tokens` so far
    that were "sampled", "fed" as text of a request, "reused" as a slot held them, "shared" with an
    equal text, and fed "again" to newer weights.
    """

    def __init__(
        self,
        engine: Engine,
        params: Params,
        *,
        queue: int = 256,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine, self.queue, self.on_failure = engine, queue, on_failure
        self.version = UNNAMED
        self.failure: Exception | None = None
        self.ended: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self._params, self._made_by = params, UNNAMED
        self._newer: tuple[Params, int] | None = None
        self._waiting: deque[Ticket] = deque()
        self._running: dict[int, Ticket] = {}
        self._feeder = Feeder(engine)
        self._free = list(range(engine.config.slots))[::-1]
        # What idle slots hold, by the weights of now; the one used longest ago comes first.
        self._held: dict[int, list[int]] = {}
        self._draining = self._aborted = self._ending = False
        # Guards all of the above; the engine and what feeds it belong to the thread.
        self._changed = threading.Condition()
        # Not waited for by an interpreter that ends on an error elsewhere.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # -- for clients, from any thread -----------------------------------------------------------

    def start(self) -> None:
        """Begins to work."""
        self._thread.start()

    def check(self, order: Order) -> None:
        """Raises ValueError for an order that no slot can carry out."""
        size, limit = self.engine.model.vocab_size, self.engine.config.max_len
        if not order.ids:
            raise ValueError("ids is empty: give at least one token")
        if order.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {order.max_tokens}")
        if min(order.ids) < 0 or max(order.ids) >= size:
            raise ValueError(f"ids must be from 0 to {size - 1}, the model's vocabulary")
        if len(order.ids) + order.max_tokens > limit:
            raise ValueError(
                f"{len(order.ids)} ids and max_tokens {order.max_tokens} are more than the "
                f"{limit} tokens that a slot holds: shorten one of them"
            )

    def submit(self, order: Order, tell: Tell, *, promised: bool = False) -> Ticket:
        """Takes a request.  `tell` gets its pieces, the last one with `ended`, or an error in
        place of the rest; it is called on other threads and must not block.  promised: it goes on
        with something that was admitted, so that neither the queue's length nor `drain` keeps it
        out.

        Raises ValueError (see `check`), Busy, Outdated or Stopping.
        """
        self.check(order)
        ticket = Ticket(order, tell, promised=promised)
        with self._changed:
            if self._aborted or (self._draining and not promised):
                raise Stopping(self._farewell())
            if order.version is not None and order.version > self.version:
                raise Outdated(
                    f"weights {order.version} are wanted and these are {self.version}: give the "
                    "newer ones first"
                )
            idle = self.engine.config.slots - len(self._running)
            if len(self._waiting) >= self.queue + idle and not promised:
                self.ended["refused"] += 1
                raise Busy(f"{len(self._waiting)} requests wait already: ask again later")
            self._waiting.append(ticket)
            self._changed.notify()
        return ticket

    def check_alive(self) -> None:
        """Raises Stopping where no request would be taken any more."""
        if self._draining:
            raise Stopping(self._farewell())

    def cancel(self, ticket: Ticket) -> None:
        """Whoever asked has gone; nothing happens to a request that has ended."""
        with self._changed:
            if not ticket.over:
                self._end(ticket, "cancelled", Cancelled("the request was cancelled"))
                if ticket in self._waiting:
                    self._waiting.remove(ticket)

    def set_weights(self, params: Params, version: int) -> None:
        """What the next decode call works with; `params` must stay as they are until others
        come."""
        with self._changed:
            self._newer, self.version = (params, version), version
            self._changed.notify()

    def drain(self) -> None:
        """Takes no more requests and ends those that wait; what runs or is promised goes on."""
        with self._changed:
            self._draining = True
            self._refuse([ticket for ticket in self._waiting if not ticket.promised])

    def _refuse(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            self._waiting.remove(ticket)
            self._end(ticket, "refused", Stopping(self._farewell()))

    def abort(self, how: str = "refused") -> None:
        """As `drain`, and ends what runs or is promised."""
        with self._changed:
            self._draining = self._aborted = True
            self._refuse(list(self._waiting))
            for ticket in self._running.values():
                if not ticket.over:
                    self._end(ticket, how, Stopping(self._farewell()))

    def stop(self, timeout: float = 30.0) -> None:
        """Ends all requests, and the thread when it has finished its decode call."""
        with self._changed:
            self.abort()
            self._ending = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    @property
    def load(self) -> dict[str, int]:
        """Requests that run and that wait, and idle slots that hold a state."""
        with self._changed:
            running = sum(not ticket.over for ticket in self._running.values())
            return {"running": running, "waiting": len(self._waiting), "held": len(self._held)}

    def warm(self) -> None:
        """Compiles all that requests will need; before `start`."""
        engine, config = self.engine, self.engine.config
        filler = [engine.stop_id] * config.max_len
        for size in config.append_buckets:
            engine.append(self._params, {0: filler[: size + 1]}, fresh=True)
        if config.slots > 1:
            engine.share({1: 0})
        order = Turn(np.zeros(2, np.uint32), 1)
        for size in config.attend_buckets or ():
            engine.append(self._params, {0: filler[: size - 1] or filler[:1]}, fresh=True)
            if engine.room(0):
                engine.decode(self._params, {0: order}, 1.0)

    # -- the engine's thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._prepare():
                self._decode()
        except Exception as error:
            self.failure = error
            self.abort("failed")
            self.on_failure()

    def _prepare(self) -> bool:
        """Waits for work and feeds what the next decode call needs; False at the end."""
        with self._changed:
            while not (self._ending or self._newer or self._waiting or self._running):
                self._changed.wait()
            if self._ending:
                return False
            for slot in [slot for slot, ticket in self._running.items() if ticket.over]:
                self._park(slot)
            if self._newer is not None:
                self._params, self._made_by = self._newer
                self._newer = None
                # No state of other weights is of use any more.
                self._free.extend(self._held)
                self._held.clear()
                texts = {slot: ticket.text for slot, ticket in self._running.items()}
                copied = self._feeder.put(texts, fresh=True)
                self.tokens["again"] += sum(len(texts[slot]) for slot in texts.keys() - copied)
            self._admit()
        self._feeder.run(self._params, self.engine.config.append_calls)
        return True

    def _admit(self) -> None:
        """Gives slots to those that wait, in their order."""
        texts: dict[int, list[int]] = {}
        room = min(len(self._waiting), len(self._free) + len(self._held))
        admitted = [self._waiting.popleft() for _ in range(room)]
        # First those that go on where they were, so that no other takes their slot.
        for ticket in admitted:
            slot = self._holder(ticket.order.ids)
            if slot is not None:
                ticket.reused = len(self._held.pop(slot))
                if new := ticket.order.ids[ticket.reused :]:
                    self._feeder.put({slot: new})
                self.tokens["fed"] += len(new)
                self.tokens["reused"] += ticket.reused
                self._running[slot] = ticket
        for ticket in admitted:
            if ticket.reused is not None:
                continue
            slot = self._free.pop() if self._free else next(iter(self._held))
            self._held.pop(slot, None)
            texts[slot], ticket.reused = ticket.order.ids, 0
            self._running[slot] = ticket
        copied = self._feeder.put(texts, fresh=True)
        for slot, ids in texts.items():
            self.tokens["shared" if slot in copied else "fed"] += len(ids)

    def _holder(self, ids: list[int]) -> int | None:
        """The idle slot that holds the longest text with which `ids` begin."""
        fitting = [s for s, held in self._held.items() if ids[: len(held)] == held]
        return max(fitting, key=lambda slot: len(self._held[slot]), default=None)

    def _decode(self) -> None:
        with self._changed:
            running = {
                slot: ticket
                for slot, ticket in self._running.items()
                if not ticket.over and slot not in self._feeder
            }
        if not running:
            return
        turns = {
            slot: Turn(ticket.order.key, ticket.order.max_tokens - len(ticket.sampled))
            for slot, ticket in running.items()
        }
        temperatures = {slot: ticket.order.temperature for slot, ticket in running.items()}
        results = self.engine.decode(self._params, turns, temperatures)
        with self._changed:
            for slot, sampled in results.items():
                self._deliver(slot, sampled)

    def _deliver(self, slot: int, sampled: Sampled) -> None:
        ticket = self._running[slot]
        ids, logprobs, ended = sampled.ids, sampled.logprobs, sampled.ended
        ticket.sampled.extend(ids)
        stop = next((n for n, token in enumerate(ids, 1) if token in ticket.order.stop), None)
        if stop is not None:  # what comes behind it stays in the slot, where no text fits it
            ids, logprobs, ended = ids[:stop], logprobs[:stop], "stop"
        self.tokens["sampled"] += len(ids)
        if ticket.over:  # cancelled meanwhile
            return
        piece = Piece(ids, logprobs, self._made_by, ended)
        if ended is None:
            ticket.tell(piece)
        else:
            self._end(ticket, ended, piece)
            self._park(slot)

    def _park(self, slot: int) -> None:
        text = self._running.pop(slot).text
        if slot in self._feeder:  # it holds a part of it only
            self._feeder.drop(slot)
            self._free.append(slot)
        else:
            self._held[slot] = text

    def _end(self, ticket: Ticket, how: str, last: Piece | Exception) -> None:
        self.ended[how] += 1
        ticket.over = True
        ticket.tell(last)

    def _farewell(self) -> str:
        if self.failure is not None:
            return f"the engine has failed ({type(self.failure).__name__}: {self.failure})"
        return "the server is shutting down: ask it again later"
