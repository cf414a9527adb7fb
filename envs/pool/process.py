"""One worker as the parent sees it, and the process that it is: start, send, receive, end.

Plain exec of a fresh interpreter.  `multiprocessing`'s spawn would import the parent's main
module in the child (and with it, often, JAX); fork from a process with JAX's threads can
deadlock.  `subprocess` runs no Python code between its vfork and exec, so it is safe there.
Leaves out: what the messages mean, and workers on other hosts (`fastask_jax/fleet/ray_pool.py`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from envs.pool import wire

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from envs.pool.worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


class Worker:
    """The parent's end of a worker's socket.  Never blocks on it; every method is for one thread.

    name: what messages call it.  pid: of its process; None on another host."""

    name: str
    pid: int | None = None

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        self.socket = connection
        self._decoder = wire.Decoder()
        self._outbox = bytearray()

    @property
    def backlog(self) -> int:
        """Bytes that the socket hasn't taken yet."""
        return len(self._outbox)

    def send(self, op: str, key: int, seq: int, payload: bytes) -> None:
        """Queues a message and writes as much as fits."""
        self._outbox += wire.frame((op, key, seq, payload))
        self.flush()

    def flush(self) -> None:
        """Writes what fits.  A dead worker's messages are dropped: `receive` tells of it."""
        try:
            while self._outbox:
                # A slice by memoryview: no copy of a long backlog for each attempt.
                with memoryview(self._outbox) as view:
                    sent = self.socket.send(view)
                del self._outbox[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._outbox.clear()

    def receive(self) -> tuple[list[tuple], bool]:
        """(messages that have arrived, whether the worker has hung up)."""
        messages: list[tuple] = []
        try:
            while True:
                data = self.socket.recv(1 << 20)
                if not data:
                    return messages, True
                messages += self._decoder.feed(data)
                if len(data) < 1 << 16:
                    return messages, False
        except BlockingIOError:
            return messages, False
        except ConnectionResetError:
            return messages, True

    def exited(self) -> bool:
        """Whether the worker has ended."""
        raise NotImplementedError

    def wait(self, seconds: float) -> bool:
        """Waits for a natural end; returns whether it came."""
        deadline = time.monotonic() + seconds
        while not self.exited():
            if time.monotonic() >= deadline:
                return False
            self.receive()  # a worker blocked on a full socket couldn't end
            time.sleep(0.002)
        return True

    def kill(self) -> str:
        """Ends the worker and says how it had ended.  Safe to call twice."""
        raise NotImplementedError


Launch = Callable[[str, bytes, float], Worker]


class WorkerProcess(Worker):
    """A worker process on this host.

    Raises OSError when it can't be started."""

    def __init__(self, factory: str, config: bytes, heartbeat_interval: float):
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        path = [entry or os.getcwd() for entry in sys.path]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _BOOT, json.dumps(path), str(theirs.fileno()),
                     str(os.getpid())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    # The parent's stdout may be read by a program; prints go to stderr.
                    stdout=2,
                    # Own group: what the worker starts can be ended with it, and Ctrl-C at
                    # the terminal reaches the parent alone.
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        self.pid: int = self._process.pid
        self.name = str(self.pid)
        self.send(wire.INIT, 0, 0, wire.dumps((factory, config, heartbeat_interval)))

    def exited(self) -> bool:
        """Whether the process has ended, without reaping it (its pid stays ours)."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            return os.waitid(os.P_PID, self.pid, flags) is not None
        except ChildProcessError:
            return True

    def kill(self) -> str:
        """Ends the worker and its process group, reaps it, and says how it had ended.

        Safe to call twice.  The group is signalled before the leader is reaped, so that the
        number can't have gone to a stranger."""
        ended = self._process.returncode is not None or self.exited()
        if self._process.returncode is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # macOS answers PermissionError for a group of zombies
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                pass  # stuck in the kernel: nothing more can be done from here
        self.socket.close()
        code = self._process.returncode
        if not ended or code is None:
            return "was killed by the pool"
        if code < 0:
            try:
                return f"was killed by {signal.Signals(-code).name}"
            except ValueError:
                return f"was killed by signal {-code}"
        return f"exited with status {code}"
