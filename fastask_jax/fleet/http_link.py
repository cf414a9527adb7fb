"""Replicas that are `fastask serve` processes: the engine there, all else on a thread here.

The thread runs a scheduler over the server's slots, and its environments; a server that is lost
ends it, and `start` connects anew.  Weights reach servers as folders on a disk that they share
with the learner: each version is written once, and removed when a newer one is there and nobody
reads it any more.

Left out: the requests (`server_client.py`) and the turns (`remote.py`).
"""

from __future__ import annotations

import queue
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

from fastask_jax.fleet.links import gathered
from fastask_jax.fleet.replica import Broken, Lost, News, Order, Stop, serve
from fastask_jax.fleet.server_client import ServerClient
from fastask_jax.rollout.scheduler import Scheduler

# How often a link that connects looks whether it is to end (seconds).
_LOOK = 0.1


class Written:
    """One version's folder; whoever reads it holds it meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder)
        self._folder, self._lock = folder, threading.Lock()
        self._readers, self._wanted = 0, True

    def hold(self) -> bool:
        """Whether it is there, and stays until `release`."""
        with self._lock:
            self._readers += self._wanted
            return self._wanted

    def release(self) -> None:
        with self._lock:
            self._readers -= 1
            self._tidy()

    def drop(self) -> None:
        """Newer ones are there."""
        with self._lock:
            self._wanted = False
            self._tidy()

    def _tidy(self) -> None:
        if not (self._wanted or self._readers):
            shutil.rmtree(self._folder, ignore_errors=True)


class WeightsFolder:
    """Versions of weights below `root`, this run's own folder; gone when its block ends.

    save: writes weights to a new folder.
    """

    def __init__(self, root: Path, save: Callable[[Path, Any], None]) -> None:
        self._root, self._save = root.resolve(), save
        self._count, self._last = 0, None  # type: int, Written | None

    def __enter__(self) -> Self:
        self._root.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._last is not None:
            self._last.drop()

    def write(self, params: Any) -> Written:
        """Weights of the next version.  The first one's writer has the run directory for itself,
        so what others have left there belongs to a run that was killed."""
        if not self._count:
            for left in self._root.iterdir():
                if re.fullmatch(r"0\d{5}", left.name):
                    shutil.rmtree(left)
        self._count += 1
        folder = self._root / f"{self._count:06d}"
        self._save(folder, params)
        if self._last is not None:
            self._last.drop()
        self._last = Written(folder)
        return self._last


class HttpLink:
    """A replica whose engine is a server.

    make: called for each life with an event that is set when the link is to end, a context manager
    of the scheduler; raises Lost where the server can't be reached.
    """

    packs = "folder of weights"
    restarts = True

    def __init__(
        self,
        name: str,
        make: Callable[[threading.Event], AbstractContextManager[Scheduler]],
        folder: WeightsFolder,
    ) -> None:
        self.name = name
        self._make, self._folder = make, folder
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()

    def start(self, tell: Callable[[News], None]) -> None:
        if self._thread is not None:
            self.stop()
            if self._thread.is_alive():
                raise RuntimeError(f"{self.name} hangs and can't be started again")
        # What the last life didn't get is lost with it, as what it had under way.
        self._orders, self._ending = queue.SimpleQueue(), threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(self._orders, self._ending, tell), name=self.name, daemon=True
        )
        self._thread.start()

    def _run(
        self,
        orders: queue.SimpleQueue[Order],
        ending: threading.Event,
        tell: Callable[[News], None],
    ) -> None:
        try:
            with self._make(ending) as scheduler:
                serve(scheduler, partial(gathered, orders), tell)
        except Lost as error:
            if not ending.is_set():
                print(f"{self.name} is lost: {error}", file=sys.stderr, flush=True)
        except Exception as error:
            tell(Broken(f"{type(error).__name__}: {error}"))

    def send(self, order: Order) -> None:
        self._orders.put(order)

    def pack(self, params: Any) -> Any:
        return self._folder.write(params)

    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def stop(self, timeout: float = 30.0) -> None:
        self._ending.set()
        self.send(Stop())
        if self._thread is not None:
            self._thread.join(timeout)


@contextmanager
def connected_server(
    client: ServerClient, ending: threading.Event, max_len: int, wanted: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """What the server tells of its model.  Raises Lost where it can't be reached or the link is
    to end, and ValueError for another model than the learner's, whose fields are `wanted`."""
    with client:
        asked = client.get("/v1/models")
        while not asked.done():
            if ending.wait(_LOOK):
                raise Lost("the run ends")
        [found] = asked.result()["data"]
        for name, value in wanted.items():
            if found[name] != value:
                raise ValueError(
                    f"{client.url} serves another model: its {name} is {found[name]}, the "
                    f"learner's {value}"
                )
        if found["max_len"] < max_len:
            raise ValueError(
                f"{client.url} holds {found['max_len']} tokens a slot, engine.max_len is "
                f"{max_len}: start it with --max-len {max_len}"
            )
        yield found
