"""Where replicas run: threads of this process, and processes of their own.

A link starts its replica, carries orders to it, and hands its news to a callback.  What a
process that died had under way is lost, and `start` may be called again; a thread shares the
learner's process, so its errors end the run.

Left out: other machines (`ray_link.py`), and what the orders mean (`fleet.py`).
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeVar

from fastask_jax.fleet.replica import Broken, News, Order, Stop, serve
from fastask_jax.rollout.scheduler import Scheduler

T = TypeVar("T")


class Link(Protocol):
    """One replica.  After `start`, `send` reaches it until `alive` is false.

    `pack` makes of the learner's weights, which are the learner's again when it returns, what a
    `Weights` order to this replica carries, or to any other whose `packs` is the same.  `stop`
    ends the replica, in order where it answers in time.  `restarts`: whether it can be started
    anew.
    """

    name: str
    packs: str
    restarts: bool

    def start(self, tell: Callable[[News], None]) -> None: ...

    def send(self, order: Order) -> None: ...

    def pack(self, params: Any) -> Any: ...

    def alive(self) -> bool: ...

    def stop(self, timeout: float = 30.0) -> None: ...


class ThreadLink:
    """A replica on a thread of this process.

    copy: a copy of the learner's weights on the engine's devices.
    """

    restarts = False

    def __init__(self, name: str, scheduler: Scheduler, copy: Callable[[Any], Any]) -> None:
        self.name = self.packs = name
        self._scheduler, self._copy = scheduler, copy
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, tell: Callable[[News], None]) -> None:
        if self._thread is not None:
            raise RuntimeError(f"{self.name} shares this process and can't be started again")
        arguments = (self._scheduler, partial(gathered, self._orders), tell)
        # Not waited for by an interpreter that ends on an error elsewhere.
        self._thread = threading.Thread(target=serve, args=arguments, name=self.name, daemon=True)
        self._thread.start()

    def send(self, order: Order) -> None:
        self._orders.put(order)

    def pack(self, params: Any) -> Any:
        return self._copy(params)

    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def stop(self, timeout: float = 30.0) -> None:
        self.send(Stop())
        if self._thread is not None:
            self._thread.join(timeout)


class ProcessLink:
    """A replica in a process of its own.

    factory: "module:function" that, called with `settings` there, is a context manager of the
    scheduler and of a function that puts weights (a tree of NumPy arrays) on its devices.
    """

    packs = "NumPy arrays"
    restarts = True

    def __init__(self, name: str, factory: str, settings: Any) -> None:
        self.name = name
        self._factory, self._settings = factory, settings
        self._process: multiprocessing.process.BaseProcess | None = None
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()

    def start(self, tell: Callable[[News], None]) -> None:
        # Never forked: this process holds JAX and its threads.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(
            target=_run, args=(self._factory, self._settings, theirs), name=self.name
        )
        self._process.start()
        theirs.close()
        # What the last process didn't get is lost with it, as what it had under way.
        self._orders.put(None)
        self._orders = queue.SimpleQueue()
        for name, body, argument in (("news", _relay, tell), ("orders", _send, self._orders)):
            threading.Thread(
                target=body, args=(ours, argument), name=f"{self.name}-{name}", daemon=True
            ).start()

    def send(self, order: Order) -> None:
        self._orders.put(order)

    def pack(self, params: Any) -> Any:
        from fastask_jax.distributed import host_copy

        return host_copy(params)

    def alive(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def stop(self, timeout: float = 30.0) -> None:
        self.send(Stop())
        if self._process is not None:
            self._process.join(timeout)
            self._process.kill()
            self._process.join()


def _relay(pipe: Connection, tell: Callable[[News], None]) -> None:
    """Hands on what the replica says until it is gone."""
    while True:
        try:
            tell(pipe.recv())
        except (EOFError, OSError):
            return


def _send(pipe: Connection, orders: queue.SimpleQueue[Order | None]) -> None:
    """Sends orders, so that nobody has to wait for a replica that is busy compiling."""
    while (order := orders.get()) is not None:
        try:
            pipe.send(order)
        except OSError:
            return


def _run(factory: str, settings: Any, pipe: Connection) -> None:
    """The body of a replica's process."""
    # Ctrl-C reaches all processes of a terminal; the learner's, which knows what to save, ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_learner, name="learner", daemon=True).start()

    def receive(timeout: float) -> Sequence[Order]:
        found: list[Order] = []
        while pipe.poll(timeout if not found else 0.0):
            try:
                found.append(pipe.recv())
            except (EOFError, OSError):  # the learner is gone
                return [*found, Stop()]
        return found

    def tell(news: News) -> None:
        try:
            pipe.send(news)
        except OSError:
            pass  # `receive` will see it

    serve_made(factory, settings, receive, tell)


def _end_with_learner() -> None:
    """Ends this process when the learner's is gone, also while it compiles and reads no orders;
    its environments end with it."""
    learner = multiprocessing.parent_process()
    assert learner is not None
    learner.join()
    os._exit(1)


def serve_made(
    factory: str,
    settings: Any,
    receive: Callable[[float], Sequence[Order]],
    tell: Callable[[News], None],
) -> None:
    """`serve` with what a factory makes here (see `ProcessLink`); its errors are told too."""
    module, _, function = factory.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
        with make(settings) as (scheduler, place):
            serve(scheduler, receive, tell, place)
    except Exception as error:
        tell(Broken(f"{type(error).__name__}: {error}"))


def gathered(items: queue.SimpleQueue[T], timeout: float | None = None) -> list[T]:
    """All that a queue holds; waits up to so many seconds for the first (None: for ever)."""
    found: list[T] = []
    try:
        found.append(items.get(timeout != 0, timeout or None))
        while True:
            found.append(items.get(False))
    except queue.Empty:
        return found
