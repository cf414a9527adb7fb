"""The host's side of the zygote: `Sandbox` starts it, checks it, and asks it for processes.

When the zygote dies, or does not answer, it is started anew with the same demands on the
walls.  A process belongs to one zygote's life, its generation: what is asked about a process
of an earlier generation is answered by ZygoteDied, for the process is gone too.

Left out: what happens on a session's own socket (`session`), what code may import and how
errors read (`child`), and the walls (`layers`).  A `Sandbox` may be used from several
threads.  Never imports JAX.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from .config import MANDATORY, Layer, SandboxBusy, SandboxConfig, SandboxUnavailable
from .session import Session, ZygoteDied

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
            for name in ("memory_mb", "cpu_seconds", "soft_seconds", "output_chars", "spares")
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
        except ZygoteDied:
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

    # Requests to the zygote.  Each raises ZygoteDied when it is gone.

    def _send(self, message: dict[str, Any]) -> None:
        if os.getpid() != self._owner:
            raise RuntimeError("a sandbox belongs to the process that made it; make one here")
        if self._control is None:
            raise ZygoteDied
        try:
            self._control.settimeout(_CONTROL_SECONDS)
            self._control.send(json.dumps(message).encode())
        except OSError:
            self._hang_up()
            raise ZygoteDied from None

    def _receive(self, seconds: float) -> dict[str, Any]:
        if self._control is None:
            raise ZygoteDied
        try:
            self._control.settimeout(seconds)
            data, received, _, _ = socket.recv_fds(self._control, 1 << 16, 1)
        except OSError:  # a time-out too: a zygote that does not answer is as good as dead
            data = b""
        if not data:
            self._hang_up()
            raise ZygoteDied
        answer: dict[str, Any] = json.loads(data)
        if received:
            answer["channel"] = socket.socket(fileno=received[0])
        return answer

    def _answer(self, key: int) -> dict[str, Any]:
        # Answers to a request that was interrupted (Ctrl-C) may still lie before ours.
        while (answer := self._receive(_CONTROL_SECONDS)).get("key") != key:
            if "channel" in answer:
                answer["channel"].close()
        return answer

    def _hang_up(self) -> None:
        # A late answer must not be taken for that of a later request: no second try on this
        # channel.  The next session starts a new zygote.
        if self._control is not None:
            self._control.close()
            self._control = None

    def _spawn(self) -> tuple[int, int, socket.socket]:
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
                key = next(self._keys)
                try:
                    self._send({"do": "spawn", "key": key})
                    answer = self._answer(key)
                except ZygoteDied:
                    self._restart()
                    continue
                if "channel" not in answer:
                    raise SandboxUnavailable(f"no process for a session: {answer['error']}")
                self._live += 1
                return self._generation, key, answer["channel"]
        raise SandboxUnavailable("the Python zygote dies as soon as it is asked for a session")

    def _restart(self) -> None:
        """Start the zygote anew after its death, with the same walls or not at all."""
        before = self.layers
        self._stop()
        self._start()
        self.layers += tuple(layer for layer in before if layer.name == "self-test")

    def _end(self, generation: int, key: int, wait: bool) -> int | None:
        """Kill a child.  With `wait`: its exit code (negative: the signal), after reaping.

        Raises ZygoteDied when the child's zygote is gone, and the child with it.
        """
        with self._lock:
            if generation != self._generation:
                raise ZygoteDied
            self._send({"do": "end", "key": key, "wait": wait})
            self._live -= 1
            if not wait:
                return None
            ended: int | None = self._answer(key)["ended"]
            return ended

    def _child_pid(self, generation: int, key: int) -> int:
        with self._lock:
            if generation != self._generation:
                raise ZygoteDied
            self._send({"do": "pid", "key": key})
            return int(self._answer(key)["pid"])
