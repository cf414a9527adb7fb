"""The host's side: `Sandbox` owns a zygote, `Session` is one isolated Python with state.

A session's process is forked when its first call needs it.  The host writes requests to the
session's own socket and believes nothing that comes back: replies that do not fit the
request's random id are dropped, a malformed one ends that session's process, and every wait
has a deadline.  A process that dies, by its own code or by the host's hand, is replaced at
the next call, with the cells that were read bound again.  When the zygote dies it is started
anew; a call that was lost through that is run again, for it was not the code's fault.

Left out: what code may import and how errors read (`child`), and the walls (`layers`).
Never imports JAX.  A `Sandbox` may be used from several threads; a `Session` from one.
"""

from __future__ import annotations

import array
import itertools
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import wire
from .config import MANDATORY, Layer, Result, SandboxBusy, SandboxConfig, SandboxUnavailable

_BOOT = """
import json, sys, types
package = types.ModuleType("fastask_sandbox")
package.__path__ = [sys.argv[1]]
sys.modules["fastask_sandbox"] = package
from fastask_sandbox.zygote import Zygote
Zygote(int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])).run()
"""
_START_SECONDS = 60.0  # a cold interpreter on a crowded machine
_CONTROL_SECONDS = 20.0
_MAX_STRAY_BYTES = 1 << 20
NO_OUTPUT = "(no output; use print)"
RESTARTED = "(Python was restarted: earlier variables are gone, cells read so far are bound again)"


class _ZygoteDied(Exception):
    """The zygote went away in the middle of something; its children are gone with it."""


class _ChildDied(Exception):
    """A session's process ended; the text says how."""


class _DeadlinePassed(Exception):
    """A session's process did not answer in time."""


class Sandbox:
    """A warm zygote and the sessions made from it; one per worker process.

    Raises SandboxUnavailable when a mandatory wall is missing on this host or the start-up
    self-test could do something forbidden.  Use as a context manager or call `close`.
    """

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self.config = config or SandboxConfig()
        self._lock = threading.RLock()
        self._keys = itertools.count(1)
        self._live = 0
        self._closed = False
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._generation = 0
        self.layers: tuple[Layer, ...] = ()
        with self._lock:
            self._start()
        try:
            self._self_test()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The zygote's process id."""
        if self._process is None:
            raise ValueError("the sandbox is closed")
        return self._process.pid

    @property
    def live(self) -> int:
        """How many sessions hold a process now."""
        return self._live

    def session(self, seed: int = 0) -> Session:
        """A new session; `random` in it is seeded with `seed`.  Costs nothing until it runs."""
        if self._closed:
            raise ValueError("the sandbox is closed")
        return Session(self, seed)

    def close(self) -> None:
        """End the zygote and every session's process."""
        with self._lock:
            self._closed = True
            self._stop()

    # The zygote's life.

    def _start(self) -> None:
        if sys.platform != "linux":
            raise SandboxUnavailable(
                f"run_python needs Linux (seccomp), this is {sys.platform}; run inside a Linux "
                "container or virtual machine"
            )
        if not sys.executable:
            raise SandboxUnavailable("run_python needs sys.executable to start its zygote")
        settings = {
            name: getattr(self.config, name)
            for name in ("memory_mb", "cpu_seconds", "soft_seconds", "output_chars")
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # -I would make Python ignore PYTHONHASHSEED, and equal programs must behave
            # equally everywhere; so its parts are given one by one and the environment
            # holds that seed alone.  exec, not fork: nothing of this process goes along.
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-S", "-P", "-X", "utf8", "-c", _BOOT,
                 str(Path(__file__).parent), str(theirs.fileno()), str(os.getpid()),
                 json.dumps(settings)],
                env={"PYTHONHASHSEED": "0"},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )  # fmt: skip
        self._control = ours
        self._generation += 1
        self._live = 0
        try:
            states: dict[str, list[str]] = self._receive(_START_SECONDS)["hello"]
        except _ZygoteDied:
            reason = self._last_words()
            self._stop()
            raise SandboxUnavailable(f"the Python zygote did not start: {reason}") from None
        walls = [Layer("exec", "on", f"zygote {self._process.pid}, empty environment", True)]
        for name in ("limits", "seccomp", "uid", "landlock", "namespaces"):
            state, detail = states[name]
            walls.append(Layer(name, state, detail, name in MANDATORY))
        missing = [f"{layer.name} ({layer.detail})" for layer in walls if layer.state == "missing"]
        if missing and not self.config.allow_unsafe_python:
            self._stop()
            raise SandboxUnavailable(
                f"run_python is not available on this host: missing {'; '.join(missing)}. Use a "
                "host or container that allows it, or, on your own machine and never in "
                "training, SandboxConfig(allow_unsafe_python=True)"
            )
        self.layers = tuple(walls)

    def _stop(self) -> None:
        self._hang_up()
        if self._process is not None and os.getpid() == self._owner:
            self._process.kill()  # its children are bound to its life by the kernel
            self._process.wait()
            if self._process.stderr is not None:
                self._process.stderr.close()
            self._process = None
        self._live = 0

    def _last_words(self) -> str:
        process = self._process
        assert process is not None and process.stderr is not None
        process.kill()
        text = process.stderr.read().decode("utf-8", "replace").strip()
        return text.splitlines()[-1] if text else f"it ended with status {process.wait()}"

    def _self_test(self) -> None:
        session = self.session()
        try:
            acts = session._probe()
        finally:
            session.close()
        allowed = [name for name, outcome in acts.items() if outcome == "ALLOWED"]
        if allowed and not self.config.allow_unsafe_python:
            raise SandboxUnavailable(
                f"run_python is not available: the self-test could {', '.join(allowed)}"
            )
        state = "missing" if allowed else "on"
        detail = f"possible: {', '.join(allowed)}" if allowed else f"{len(acts)} acts denied"
        self.layers += (Layer("self-test", state, detail, True),)

    # Requests to the zygote.  Each raises _ZygoteDied when it is gone.

    def _send(self, message: dict[str, Any], channel: int | None = None) -> None:
        if os.getpid() != self._owner:
            raise RuntimeError("a sandbox belongs to the process that made it; make one here")
        if self._control is None:
            raise _ZygoteDied
        ancillary = []
        if channel is not None:
            fds = array.array("i", [channel])
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
        try:
            self._control.settimeout(_CONTROL_SECONDS)
            self._control.sendmsg([json.dumps(message).encode()], ancillary)
        except OSError:
            self._hang_up()
            raise _ZygoteDied from None

    def _receive(self, seconds: float) -> dict[str, Any]:
        if self._control is None:
            raise _ZygoteDied
        try:
            self._control.settimeout(seconds)
            data = self._control.recv(1 << 16)
        except OSError:  # a time-out too: a zygote that does not answer is as good as dead
            data = b""
        if not data:
            self._hang_up()
            raise _ZygoteDied
        answer: dict[str, Any] = json.loads(data)
        return answer

    def _answer(self, key: int) -> dict[str, Any]:
        # Answers to a request that was interrupted (Ctrl-C) may still lie before ours.
        while (answer := self._receive(_CONTROL_SECONDS)).get("key") != key:
            pass
        return answer

    def _hang_up(self) -> None:
        # A late answer must not be taken for that of a later request: no second try on this
        # channel.  The next session starts a new zygote.
        if self._control is not None:
            self._control.close()
            self._control = None

    def _spawn(self, seed: int) -> tuple[int, int, socket.socket]:
        """A new child: (zygote generation, key, our end of its socket)."""
        with self._lock:
            if self._closed:
                raise ValueError("the sandbox is closed")
            for _ in range(2):
                if self._live >= self.config.max_live:
                    raise SandboxBusy(
                        f"{self._live} Python sessions are live, the limit; close some or "
                        "raise SandboxConfig.max_live"
                    )
                ours, theirs = socket.socketpair()
                key = next(self._keys)
                with theirs:
                    try:
                        self._send({"do": "spawn", "key": key, "seed": seed}, theirs.fileno())
                    except _ZygoteDied:
                        ours.close()
                        self._restart()
                        continue
                self._live += 1
                return self._generation, key, ours
        raise SandboxUnavailable("the Python zygote dies as soon as it is asked for a session")

    def _restart(self) -> None:
        """Start the zygote anew after its death, with the same walls or not at all."""
        before = self.layers
        self._stop()
        self._start()
        self.layers += tuple(layer for layer in before if layer.name == "self-test")

    def _end(self, generation: int, key: int, wait: bool) -> int | str | None:
        """Kill a child.  With `wait`: its exit code (negative: the signal), after reaping.

        Raises _ZygoteDied when the child's zygote is gone, and the child with it.
        """
        with self._lock:
            if generation != self._generation:
                raise _ZygoteDied
            self._send({"do": "end", "key": key, "wait": wait})
            self._live -= 1
            if not wait:
                return None
            ended: int | str | None = self._answer(key)["ended"]
            return ended

    def _child_pid(self, generation: int, key: int) -> int:
        with self._lock:
            if generation != self._generation:
                raise _ZygoteDied
            self._send({"do": "pid", "key": key})
            return int(self._answer(key)["pid"])


class Session:
    """One isolated Python whose variables live from call to call."""

    def __init__(self, sandbox: Sandbox, seed: int) -> None:
        self._sandbox, self._seed = sandbox, seed
        self._blocks: list[list[Any]] = []
        self._sent = 0
        self._calls = 0
        self._closed = False
        self._child: tuple[int, int, socket.socket] | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The process id of the session's child, None while it has none."""
        if self._child is None:
            return None
        try:
            return self._sandbox._child_pid(*self._child[:2])
        except _ZygoteDied:
            return None

    def bind(self, sheet: str, top_row: int, first_col: int, rows: Sequence[Sequence[Any]]) -> None:
        """Make a block of read cells known to the code (see `prelude.Bindings.bind`).

        Raises TypeError for a value that no cell holds, ValueError for a place below 1.
        """
        if top_row < 1 or first_col < 1:
            raise ValueError(f"rows and columns start at 1, got row {top_row}, col {first_col}")
        self._blocks.append([sheet, top_row, first_col, wire.encode_rows(rows)])

    def run(self, code: str) -> Result:
        """Run code in the session.  Whatever the code does becomes a Result.

        Raises SandboxUnavailable or SandboxBusy when the host's side fails, TypeError for
        code that is no text.
        """
        self._check_open()
        if not isinstance(code, str):
            raise TypeError(f"code must be a text, not {type(code).__name__}")
        limit = self._sandbox.config.code_chars
        if len(code) > limit:
            return Result("", f"the code has {len(code):,} characters, the limit is {limit:,}")
        if self._child is not None and _gone(self._child[2]):
            self._drop(wait=False)  # it died while idle, which is not this call's fault
        lost = False
        for attempt in range(3):
            lost = lost or (self._child is None and self._calls > 0)
            try:
                answer = self._exchange({"code": code})
                result = self._checked(answer)
            except _ZygoteDied:
                if attempt == 2:
                    raise SandboxUnavailable(
                        "the Python zygote died or gave no session process three times running"
                    ) from None
                continue  # not the code's doing: once more, in a new process
            except _DeadlinePassed:
                result = self._stopped(
                    f"time limit: the code did not stop by itself after "
                    f"{self._sandbox.config.soft_seconds:g} s and was killed",
                    timed_out=True,
                )
            except _ChildDied as error:
                result = self._stopped(str(error))
            except wire.MalformedFrame as error:
                result = self._stopped(f"Python sent a malformed reply ({error}) and was killed")
            break
        self._calls += 1
        if lost:
            output = f"{RESTARTED}\n{result.output}"
            result = Result(output, result.error, result.timed_out, state_lost=True)
        return result

    def close(self) -> None:
        """Kill the session's process, if there is one."""
        self._closed = True
        self._drop(wait=False)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the session is closed")

    def _probe(self) -> dict[str, str]:
        try:
            acts = self._exchange({"probe": True})["acts"]
        except (_ZygoteDied, _DeadlinePassed, _ChildDied, wire.MalformedFrame) as error:
            raise SandboxUnavailable(f"the self-test got no answer: {error!r}") from None
        return {str(name): str(outcome) for name, outcome in acts.items()}

    def _stopped(self, reason: str, timed_out: bool = False) -> Result:
        self._drop(wait=False)
        error = f"{reason}; variables are lost, cells read so far will be bound again"
        return Result("", error, timed_out, state_lost=True)

    def _checked(self, answer: dict[str, Any]) -> Result:
        """The child's answer as a Result; it may have been written by hostile code."""
        output, error = answer.get("output"), answer.get("error")
        timed_out = answer.get("timed_out")
        if not isinstance(output, str) or not isinstance(error, str | None):
            raise wire.MalformedFrame("fields of a wrong type")
        cut = self._sandbox.config.output_chars + 200  # the child's own note comes on top
        output = _printable(output[:cut])
        if not output and error is None:
            output = NO_OUTPUT
        return Result(output, None if error is None else _printable(error[:cut]), timed_out is True)

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request and wait for the answer with its id."""
        config = self._sandbox.config
        fresh = self._child is None
        if self._child is None:
            self._child = self._sandbox._spawn(self._seed)
            self._sent = 0
        channel = self._child[2]
        deadline = time.monotonic() + (config.start_seconds if fresh else config.hard_seconds)
        # A character may take twelve bytes in JSON, as two escaped surrogates.
        reply_limit = 12 * (config.output_chars + 200) + 65_536
        received = 0

        def read(size: int) -> bytes:
            nonlocal received
            _set_deadline(channel, deadline)
            data = channel.recv(size)
            received += len(data)
            if received > reply_limit + _MAX_STRAY_BYTES:
                raise wire.MalformedFrame("too much that fits no request")
            return data

        identity = secrets.token_hex(8)
        pending = len(self._blocks)
        frame = wire.pack({"id": identity, "bind": self._blocks[self._sent :], **request})
        try:
            _set_deadline(channel, deadline)
            channel.sendall(frame)
            self._sent = pending
            if fresh:
                # The first frame is written before any code can run, so it can be believed.
                hello = wire.receive(read, reply_limit)
                if hello is not None and "fatal" in hello:
                    raise SandboxUnavailable(f"no walls for a new session: {hello['fatal']}")
                fresh = False
                deadline = time.monotonic() + config.hard_seconds
            while (answer := wire.receive(read, reply_limit)) is not None:
                if answer.get("id") == identity:
                    return answer
            raise _ChildDied(self._how_it_ended())
        except TimeoutError:
            if fresh:  # no code ran yet: a crowded host, or a zygote that hangs
                self._drop(wait=True)
                raise _ZygoteDied from None
            raise _DeadlinePassed from None
        except OSError:  # a reset or broken pipe: the process is gone
            raise _ChildDied(self._how_it_ended()) from None

    def _how_it_ended(self) -> str:
        """Reap the dead child and say why it ended.  Raises _ZygoteDied if that is why."""
        code = self._drop(wait=True)
        if isinstance(code, str):
            raise SandboxUnavailable(f"no process for a new session: {code}")
        if code is None or code >= 0:
            return f"the code ended the Python process (exit status {code})"
        return f"the Python process died (signal {-code}; out of memory, stack or CPU time?)"

    def _drop(self, wait: bool) -> int | str | None:
        if self._child is None:
            return None
        generation, key, channel = self._child
        self._child = None
        channel.close()
        try:
            return self._sandbox._end(generation, key, wait)
        except _ZygoteDied:
            if wait:
                raise
            return None


def _set_deadline(channel: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    channel.settimeout(left)


def _gone(channel: socket.socket) -> bool:
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLHUP)
    return bool(poll.poll(0))


def _printable(text: str) -> str:
    """Lone surrogates escaped: the text goes on to tokenizers and files, as UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
