"""Several processes that are one run: how they start, tell each other things, and share weights.

    with started(DistributedConfig(coordinator="10.0.0.2:8476", num_processes=4, process_id=1)):
        channel = Channel("rollout")
        parts = channel.gather("rollout", sample_my_share)      # a list, one part a process

Every process runs the same program over one mesh of all their devices.  What happens on the host
alone (files, environments) can fail on one of them; a `Channel` raises that error on all, and no
process waits for another beyond a deadline.  Messages go through the key-value store of
`jax.distributed`, so they may come from any thread; only `gather`, `local_copy` and
`host_copy` move data over the devices and belong to the main thread.  With one process everything
here is a plain call.

Left out: processes that come and go (a lost one ends the run, which resumes from its last
checkpoint), and models that don't fit one device of each process when they sample.
"""

from __future__ import annotations

import ipaddress
import json
import pickle
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import jax
import numpy as np
from jax._src import distributed as _jax_distributed  # the key-value store has no public name
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

T = TypeVar("T")

_FAILED = "fastask/failed"
# How often a waiting process looks whether another one has failed, in seconds.
_LOOK = 2.0
# How long a process that ends waits for the others to end, in seconds.
_SHUTDOWN = 60


class PeerError(RuntimeError):
    """Another process of the run failed or didn't come; the text says which one and why."""


@dataclass(frozen=True)
class DistributedConfig:
    """How the processes of a run find each other; the defaults are one process alone.

    auto: JAX finds out by itself: Cloud TPU slices, GKE, SLURM and Open MPI.
    coordinator: HOST:PORT of process 0, any free port there.
    num_processes, process_id: how many processes there are, and which of them this one is.
    start_timeout: seconds within which all of them must have started.
    """

    auto: bool = False
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    start_timeout: int = 300

    def __post_init__(self) -> None:
        given = (self.coordinator, self.num_processes, self.process_id)
        if self.auto and any(value is not None for value in given):
            raise ValueError(
                "distributed.auto finds the processes by itself: leave out coordinator, "
                "num_processes and process_id"
            )
        if any(value is None for value in given) and any(value is not None for value in given):
            raise ValueError(
                "distributed.coordinator, distributed.num_processes and distributed.process_id "
                "belong together: give all three or none"
            )
        if self.start_timeout < 1:
            raise ValueError(f"distributed.start_timeout must be above 0, not {self.start_timeout}")
        if self.coordinator is None or self.num_processes is None or self.process_id is None:
            return
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"distributed.coordinator is HOST:PORT, not {self.coordinator!r}")
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                f"distributed.process_id is 0 to {self.num_processes - 1} for "
                f"{self.num_processes} processes, not {self.process_id}"
            )


@contextmanager
def started(config: DistributedConfig) -> Iterator[None]:
    """Joins the run's processes together for the length of the block.

    Must come before anything asks JAX for its devices.  Raises ConnectionError when process 0
    can't be reached.  (JAX itself ends process 0 when others don't come, and every process when
    one dies: exit code 134, with a text of its own.)  An error that leaves the block is told to
    the others, who then stop too.
    """
    if not config.auto and config.coordinator is None:
        yield
        return
    # It would keep SIGTERM for itself, and a run that is told to end must end: its checkpoints
    # stand that.
    jax.config.update("jax_enable_preemption_service", False)
    if config.coordinator is not None and config.process_id:
        _wait_for(config.coordinator, config.start_timeout)
    try:
        jax.distributed.initialize(
            coordinator_address=config.coordinator,
            num_processes=config.num_processes,
            process_id=config.process_id,
            coordinator_bind_address=(
                config.coordinator if _is_loopback(config.coordinator) else None
            ),
            initialization_timeout=config.start_timeout,
            shutdown_timeout_seconds=_SHUTDOWN,
        )
    except (RuntimeError, ValueError) as error:
        where = config.coordinator or "found by itself"
        raise ConnectionError(
            f"the processes of this run can't start, coordinator {where}: {_line(error)}; its port "
            "must be free on process 0's host"
        ) from error
    try:
        yield
    except BaseException as error:
        text = f"process {jax.process_index()} failed: {type(error).__name__}: {_line(error)}"
        # Now: what comes next may end the process, where the others are gone already.
        print(text, file=sys.stderr, flush=True)
        with suppress(jax.errors.JaxRuntimeError):  # the coordinator may be what failed
            _client().key_value_set(_FAILED, text)
        with suppress(jax.errors.JaxRuntimeError):
            jax.distributed.shutdown()
        raise
    jax.distributed.shutdown()


def is_main() -> bool:
    """Whether this is process 0, which writes what a run leaves behind."""
    return jax.process_index() == 0


class Channel:
    """An ordered series of messages between all processes; one thread uses it at a time.

    name: the same on all processes, which make channels of one name in the same order.
    deadline: seconds that a process waits for the others at one point.

    Every method is called by all processes in the same order, with the same `what`: the point
    that the program has reached, shown in errors.
    """

    _made: Counter[str] = Counter()

    def __init__(self, name: str, deadline: float = 1200.0) -> None:
        if not deadline > 0:
            raise ValueError(f"deadline must be above 0 seconds, not {deadline}")
        self.deadline = deadline
        self._prefix = f"fastask/{name}.{Channel._made[name]}"
        Channel._made[name] += 1
        self._count = 0

    def exchange(self, what: str, value: Any = None) -> list[Any]:
        """The value that each process gives (JSON, and small), in order of process.

        Raises PeerError where a process has failed, is at another point or doesn't come.
        """
        if jax.process_count() == 1:
            return [value]
        return self._exchange(_Message(what, value))

    def run(self, what: str, action: Callable[[], T]) -> T:
        """Runs `action` on every process.  Its error is raised where it happened, and as a
        PeerError on the others."""
        try:
            result = action()
        except PeerError:
            raise  # the others know
        except Exception as error:
            self._tell(what, error)
            raise
        self.exchange(what)
        return result

    def on_main(self, what: str, action: Callable[[], T]) -> T:
        """Runs `action` on process 0 alone; all get its result (JSON) or its error."""
        result = None
        if is_main():
            try:
                result = action()
            except Exception as error:
                self._tell(what, error)
                raise
        return self.exchange(what, result)[0]

    def gather(self, what: str, action: Callable[[], T]) -> list[T]:
        """Runs `action` on every process; all get all results, in order of process.

        Results are pickled, and travel over the devices: they may be large.
        """
        if jax.process_count() == 1:
            return [action()]
        payload = self.run(what, lambda: pickle.dumps(action()))
        sizes = self.exchange(f"{what}, size", len(payload))
        # Each width is a compilation, hence a power of two.
        width = 1 << (max(sizes) - 1).bit_length()
        padded = np.frombuffer(payload.ljust(width, b"\0"), np.uint8)
        rows = multihost_utils.process_allgather(padded)
        return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def _tell(self, what: str, error: Exception) -> None:
        """In place of the message that the others wait for."""
        if jax.process_count() > 1:
            failure = f"process {jax.process_index()} failed at {what!r}: "
            message = _Message(what, None, f"{failure}{type(error).__name__}: {_line(error)}")
            with suppress(PeerError):
                self._exchange(message)

    def _exchange(self, mine: _Message) -> list[Any]:
        """Process 0 collects what all say and answers with the whole, or with the first error."""
        index, base = jax.process_index(), f"{self._prefix}/{self._count}"
        self._count += 1
        client = _client()
        if index:
            client.key_value_set(f"{base}/{index}", mine.to_json())
            if mine.error:
                raise PeerError(mine.error)
            answer = _Answer.from_json(self._await(f"{base}/all", mine.what, 0))
        else:
            answer = self._collect(base, mine)
            client.key_value_set(f"{base}/all", answer.to_json())
            if not answer.error:  # all have come here, so all have read the answer before
                client.key_value_delete(f"{self._prefix}/{self._count - 2}/")
        if answer.error:
            raise PeerError(answer.error)
        return answer.values

    def _collect(self, base: str, mine: _Message) -> _Answer:
        if mine.error:
            return _Answer([], mine.error)
        values = [mine.value]
        for index in range(1, jax.process_count()):
            try:
                message = _Message.from_json(self._await(f"{base}/{index}", mine.what, index))
            except PeerError as error:
                return _Answer([], str(error))
            if message.error:
                return _Answer([], message.error)
            if message.what != mine.what:
                return _Answer(
                    [],
                    f"process 0 is at {mine.what!r} and process {index} at {message.what!r}: "
                    "all processes must run the same program with the same settings",
                )
            values.append(message.value)
        return _Answer(values, "")

    def _await(self, key: str, what: str, of: int) -> str:
        end = time.monotonic() + self.deadline
        while (left := end - time.monotonic()) > 0:
            try:
                return _client().blocking_key_value_get(key, int(1000 * min(left, _LOOK)) + 1)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise PeerError(
                        f"the coordinator (process 0) is lost: {_line(error)}"
                    ) from error
            failure = _failure()
            if failure is not None:
                raise PeerError(failure)
        raise PeerError(
            f"process {jax.process_index()} waited {self.deadline:g} s at {what!r} for process "
            f"{of}, which is stuck or gone"
        )


@dataclass(frozen=True)
class _Json:
    def to_json(self) -> str:
        return json.dumps(self.__dict__)

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class _Message(_Json):
    what: str
    value: Any
    error: str = ""


@dataclass(frozen=True)
class _Answer(_Json):
    values: list[Any]
    error: str


class Quiet:
    """Stands in for a writer on the processes that write nothing: takes any call."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **options: None


def deal(names: Sequence[Hashable]) -> list[int]:
    """The places in `names` that fall to this process.

    Names are dealt in turn; equal ones stay together, in order.
    """
    turn = {name: number for number, name in enumerate(dict.fromkeys(names))}
    mine, count = jax.process_index(), jax.process_count()
    return [place for place, name in enumerate(names) if turn[name] % count == mine]


def local_copy(tree: Any) -> Any:
    """A tree of arrays on the first device of this process, from wherever the mesh holds them.

    All processes call it.  Arrays that lie there already are returned as they are.  Each array
    is gathered on its own, so other devices hold one more array at a time.
    """
    device = jax.local_devices()[0]

    def copy(leaf: jax.Array) -> jax.Array:
        if leaf.sharding.device_set == {device}:
            return leaf
        gathered = _replicated(leaf)
        for shard in gathered.addressable_shards:
            if shard.device == device:
                return shard.data
        return jax.device_put(gathered.addressable_data(0), device)

    return jax.tree.map(copy, tree)


def host_copy(tree: Any) -> Any:
    """A tree of arrays as NumPy arrays on process 0, and None in their places on the others.

    All processes call it.  Each array is gathered on its own.
    """

    def copy(leaf: jax.Array) -> np.ndarray | None:
        whole = leaf if leaf.is_fully_addressable else _replicated(leaf)
        return np.asarray(whole) if is_main() else None

    return jax.tree.map(copy, tree)


def _replicated(leaf: jax.Array) -> jax.Array:
    if leaf.is_fully_replicated:
        return leaf
    if not isinstance(leaf.sharding, NamedSharding):
        raise ValueError(f"an array over several devices needs a mesh, not {leaf.sharding}")
    # One at a time: a process that ran ahead would hold every thread that JAX's CPU backend has
    # for its devices, and all would wait for each other.
    return jax.block_until_ready(
        jax.device_put(leaf, NamedSharding(leaf.sharding.mesh, PartitionSpec()))
    )


def _client() -> Any:
    client = _jax_distributed.global_state.client
    assert client is not None, "several processes have a coordinator"
    return client


def _failure() -> str | None:
    """What a process that left `started` with an error has said."""
    try:
        return _client().key_value_try_get(_FAILED)
    except jax.errors.JaxRuntimeError:
        return None


def _wait_for(coordinator: str, timeout: float) -> None:
    """Asks by hand first: JAX would end the process where nobody answers."""
    host, _, port = coordinator.rpartition(":")
    end = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise ConnectionError(
                    f"nobody answers at {coordinator} after {timeout:g} s ({error}): start process "
                    "0 there, with the same coordinator, and open the port to this host"
                ) from error
        time.sleep(0.2)


def _is_loopback(address: str | None) -> bool:
    """Whether a coordinator's address can be reached from its own machine alone."""
    host = (address or "").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]
