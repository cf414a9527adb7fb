"""Where replicas run, continued: actors on the nodes of a Ray cluster.

    with connected(config, workers):              # FleetConfig
        link = RayLink("replica 0", "module:function", settings, config.ray_request())

The actor runs the replica in one thread of it; two more take orders and give news.  On the
learner's side two threads of each link wait for Ray, so that nobody else ever waits for a node.
Weights go through Ray's object store: put there once for each version, fetched once by each node.

A node that is lost takes its actors along.  Ray restarts none: `alive` turns false once Ray knows
of the loss, and `start` asks for a new actor, which Ray puts on a node that lives and has room.

Left out: how nodes are started (docs/ray.md), and what the orders mean (`fleet.py`).
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

from fastask_jax.fleet.config import FleetConfig
from fastask_jax.fleet.links import gathered, serve_made
from fastask_jax.fleet.replica import Broken, News, Order, Stop, Weights

# How often an actor that can't be reached is asked again (seconds).
_AGAIN = 0.5


@contextmanager
def connected(config: FleetConfig, workers: int) -> Iterator[None]:
    """This process takes part in the config's cluster; with no address, it starts Ray here.
    workers: environment workers of each replica.

    Raises ModuleNotFoundError without Ray, and ConnectionError where no cluster answers.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # late calls fail, and don't start Ray again
    if not config.ray_address:
        # Named after the systems on which it is the default: Ray then listens on loopback only.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray = ray_module()
    if config.ray_address:
        ray.init(config.ray_address, logging_level="WARNING")
    else:
        # Ray's CPUs are a count of what fits; here everything does.
        each = config.ray_request().get("CPU", 0.0)
        each += workers * config.ray_request("ray_pools").get("CPU", 0.0)
        cpus = math.ceil(config.replicas * each)
        ray.init("local", num_cpus=cpus, include_dashboard=False, logging_level="WARNING")
    try:
        yield
    finally:
        ray.shutdown()


class RayLink:
    """A replica in a Ray actor.  `connected` comes first.

    factory, settings: as `ProcessLink` has them; they must mean the same on every node.
    request: what the actor takes of its node, by Ray's names.
    """

    packs = "Ray object"
    restarts = True

    def __init__(
        self, name: str, factory: str, settings: Any, request: Mapping[str, float]
    ) -> None:
        self.name = name
        self._factory, self._settings, self._request = factory, settings, request
        self._actor: Any = None
        self._gone = threading.Event()
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()

    def start(self, tell: Callable[[News], None]) -> None:
        ray, other = ray_module(), dict(self._request)
        actor_class = ray.remote(
            num_cpus=other.pop("CPU", 0.0),
            num_gpus=other.pop("GPU", 0.0),
            resources=other,
            max_concurrency=3,  # run, push and pull
            max_restarts=0,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": _environment()},
        )(_Host)
        self._actor, self._gone = actor_class.remote(), threading.Event()
        self._actor.run.remote(self._factory, self._settings)
        # What the last actor didn't get is lost with it, as what it had under way.
        self._orders.put(None)
        self._orders = queue.SimpleQueue()
        for name, body, arguments in (
            ("news", _relay, (ray, self._actor, tell, self._gone)),
            ("orders", _send, (ray, self._actor, tell, self._orders)),
        ):
            threading.Thread(
                target=body, args=arguments, name=f"{self.name}-{name}", daemon=True
            ).start()

    def send(self, order: Order) -> None:
        self._orders.put(order)

    def pack(self, params: Any) -> Any:
        from fastask_jax.distributed import host_copy

        return ray_module().put(host_copy(params))

    def alive(self) -> bool:
        return self._actor is not None and not self._gone.is_set()

    def stop(self, timeout: float = 30.0) -> None:
        self.send(Stop())
        if self._actor is not None:
            self._gone.wait(timeout)
            end_actor(ray_module(), self._actor)


class _Host:
    """The actor.  Each of its methods has one call under way at most."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[News | None] = queue.SimpleQueue()

    def run(self, factory: str, settings: Any) -> None:
        """The replica, from its start to its end."""
        try:
            serve_made(factory, settings, partial(gathered, self._orders), self._news.put)
        finally:
            self._news.put(None)

    def push(self, orders: Sequence[Order]) -> None:
        """Takes orders; weights are fetched here, while the replica goes on with older ones."""
        last = max((n for n, order in enumerate(orders) if isinstance(order, Weights)), default=-1)
        for number, order in enumerate(orders):
            if isinstance(order, Weights):
                if number < last:
                    continue
                order = replace(order, params=ray_module().get(order.params))
            self._orders.put(order)

    def pull(self) -> list[News | None]:
        """The next news, as soon as there are any; None is the last."""
        return gathered(self._news)


def _relay(
    ray: ModuleType, actor: Any, tell: Callable[[News], None], gone: threading.Event
) -> None:
    """Hands on what the replica says until it is gone."""
    try:
        while True:
            for news in ray.get(actor.pull.remote()):
                if news is None:
                    return
                tell(news)
    except ray.exceptions.RayError as error:
        if not _tell_fault(ray, error, tell):
            _await_verdict(ray, actor)
    finally:
        end_actor(ray, actor)
        gone.set()


def _send(
    ray: ModuleType,
    actor: Any,
    tell: Callable[[News], None],
    orders: queue.SimpleQueue[Order | None],
) -> None:
    """Sends orders, the next ones when the last ones have come: Ray may reorder calls."""
    while None not in (batch := gathered(orders)):
        try:
            ray.get(actor.push.remote(batch))
        except ray.exceptions.RayError as error:
            if _tell_fault(ray, error, tell):
                end_actor(ray, actor)
            return  # `_relay` sees that the actor is gone


def _tell_fault(ray: ModuleType, error: Exception, tell: Callable[[News], None]) -> bool:
    """Tells of an error that is the code's, not a node's; whether it was one."""
    if isinstance(error, ray.exceptions.RayTaskError):
        text = f"{type(error.cause).__name__}: {error.cause}"
    elif getattr(error, "actor_init_failed", False):
        text = str(error).strip().splitlines()[-1]
    else:
        return False
    tell(Broken(text))
    return True


def _await_verdict(ray: ModuleType, actor: Any) -> None:
    """Waits until Ray has found out why an actor can't be reached.

    As long as Ray doesn't know that the node is lost, it would put the next actor there too.
    An actor that answers again is no better than a dead one: what it said meanwhile is lost.
    """
    while True:
        try:
            ray.get(actor.push.remote([]))
            return
        except ray.exceptions.ActorUnavailableError:
            time.sleep(_AGAIN)
        except ray.exceptions.RayError:
            return


def end_actor(ray: ModuleType, actor: Any) -> None:
    """Ends an actor, at once."""
    # Ray says so where it knows of no such actor any more, and after a shutdown.
    with suppress(Exception):
        ray.kill(actor, no_restart=True)


def _environment() -> dict[str, str]:
    """JAX's platforms here, where they are chosen or a CPU: replicas must find the same kind."""
    import jax

    chosen = jax.config.jax_platforms  # type: ignore[attr-defined]
    if not chosen and jax.default_backend() == "cpu":
        chosen = "cpu"
    return {"JAX_PLATFORMS": chosen} if chosen else {}


def ray_module() -> ModuleType:
    """Ray.  Raises ModuleNotFoundError that says what to install."""
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ModuleNotFoundError(
            "fleet.place=ray needs Ray: pip install '.[ray]'", name="ray"
        ) from None
    return ray
