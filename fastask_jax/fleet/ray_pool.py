"""Environment workers on the nodes of a Ray cluster: the processes of an `EnvPool`, elsewhere.

    EnvPool(factory, settings, config, launch=ray_workers({"CPU": 1.0}))

Each worker is an actor, which starts the pool's own worker process on its node and passes bytes
between the two.  The pool sees what it sees of a process here, so deadlines, restarts and the
replay of episodes are its own: a node that is lost is some workers that hung up.  Replicas on hosts
with accelerators can so leave their tools to hosts with many cores.

Left out: starting nodes (docs/ray.md), and replicas (`ray_link.py`).
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from envs.pool.process import Launch, Worker, WorkerProcess
from fastask_jax.fleet.ray_link import end_actor, ray_module

# Seconds for which an actor waits for its process before it answers that nothing came.
_HOLD = 5.0


def ray_workers(request: Mapping[str, float]) -> Launch:
    """What `EnvPool` launches workers with; each takes `request` of its node, by Ray's names."""

    def launch(factory: str, config: bytes, heartbeat_interval: float) -> RayWorker:
        return RayWorker(factory, config, heartbeat_interval, request)

    return launch


class RayWorker(Worker):
    """A worker on some node, as `WorkerProcess` is one here.  Ray is connected already."""

    def __init__(
        self,
        factory: str,
        config: bytes,
        heartbeat_interval: float,
        request: Mapping[str, float],
    ) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        ray, other = ray_module(), dict(request)
        actor_class = ray.remote(
            num_cpus=other.pop("CPU", 0.0),
            num_gpus=other.pop("GPU", 0.0),
            resources=other,
            max_concurrency=2,  # push and pull
            max_restarts=0,
            scheduling_strategy="SPREAD",
        )(_Place)
        self._actor = actor_class.remote(factory, config, heartbeat_interval)
        self._gone = threading.Event()
        self.name = f"in Ray actor {self._actor._actor_id.hex()}"
        for body in (self._push, self._pull):
            threading.Thread(
                target=body, args=(ray, theirs), name=f"ray-worker{body.__name__}", daemon=True
            ).start()

    def receive(self) -> tuple[list[tuple], bool]:
        """As here; when a call began and ended is told by this host's clock."""
        messages, hung_up = super().receive()
        now = time.monotonic()
        return [
            (kind, seq, now - (finished - started), now, payload)
            for kind, seq, started, finished, payload in messages
        ], hung_up

    def exited(self) -> bool:
        return self._gone.is_set()

    def kill(self) -> str:
        ended = self._gone.is_set()
        end_actor(ray_module(), self._actor)
        self.socket.close()
        return "was lost with its node or its actor" if ended else "was killed by the pool"

    def _push(self, ray: Any, theirs: socket.socket) -> None:
        """Hands on what the pool writes, the next when the last has come: Ray may reorder calls."""
        with suppress(OSError, ray.exceptions.RayError):  # `_pull` sees that the actor is gone
            while data := theirs.recv(1 << 20):
                ray.get(self._actor.push.remote(data))

    def _pull(self, ray: Any, theirs: socket.socket) -> None:
        """Hands on what the worker writes, until it hangs up or the actor is lost."""
        try:
            while (data := ray.get(self._actor.pull.remote())) is not None:
                theirs.sendall(data)
        except (OSError, ray.exceptions.RayError):
            pass
        finally:
            self._gone.set()
            with suppress(OSError):
                theirs.shutdown(socket.SHUT_RDWR)  # the pool sees that it hung up
            theirs.close()


class _Place:
    """The actor: a worker process on its node, and its bytes."""

    def __init__(self, factory: str, config: bytes, heartbeat_interval: float) -> None:
        self._process = WorkerProcess(factory, config, heartbeat_interval)
        self._process.socket.setblocking(True)

    def push(self, data: bytes) -> None:
        with suppress(OSError):  # `pull` tells that it hung up
            self._process.socket.sendall(data)

    def pull(self) -> bytes | None:
        """What the worker has written, as soon as there is something; None when it hung up."""
        ready, _, _ = select.select([self._process.socket], [], [], _HOLD)
        if not ready:
            return b""
        try:
            return self._process.socket.recv(1 << 20) or None
        except OSError:
            return None
