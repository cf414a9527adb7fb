"""The inside of a pool worker: many live environments, one call at a time.

Started by exec (never fork) through `envs.pool.process`, so it begins as a clean interpreter
in tens of milliseconds.  JAX must not come in: it would cost seconds and gigabytes in each
worker, and its threads make the forks of a sandbox unsafe.  Leaves out: deadlines, retries
and replay, which are the parent's; a worker that is in doubt reports and goes on, or dies.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable
from typing import Any

from envs.core import Environment, Step
from envs.pool import wire

FORBIDDEN = ("jax", "jaxlib")


class _StartError(Exception):
    """The factory can't be used; the text says why."""


def check_no_jax(when: str) -> None:
    """Raises RuntimeError when JAX has been imported into this process."""
    found = [name for name in FORBIDDEN if name in sys.modules]
    if found:
        raise RuntimeError(
            f"{found[0]} is loaded in an environment worker {when}; environments must stay free "
            "of JAX: move that import out of the module that the factory pulls in"
        )


def load_factory(factory: str, config: bytes) -> Callable[[Hashable], Environment]:
    """Imports "module:callable" and calls it with the config: the environment maker.

    Raises _StartError with one clear line (and the traceback where there is one)."""
    module_name, _, attribute = factory.partition(":")
    try:
        check_no_jax("at its start")
        module = importlib.import_module(module_name)
        check_no_jax(f"after importing {module_name}")
    except Exception as error:
        hint = ""
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            hint = " (a factory lives in a module on sys.path, not in a notebook or script)"
        raise _StartError(
            f"importing {module_name} failed: {error}{hint}\n{traceback.format_exc()}"
        ) from error
    function = getattr(module, attribute, None)
    if function is None:
        raise _StartError(f"module {module_name} has no attribute {attribute!r}")
    if not callable(function):
        raise _StartError(f"{attribute} is {type(function).__name__}, not a callable")
    try:
        make = function(pickle.loads(config))
        check_no_jax(f"after calling {factory}")
    except Exception as error:
        raise _StartError(
            f"calling it failed: {type(error).__name__}: {error}\n{traceback.format_exc()}"
        ) from error
    if not callable(make):
        raise _StartError(
            f"it returned {type(make).__name__}; a factory returns a callable that makes one "
            "environment from an episode id"
        )
    return make


class Worker:
    """Serves one parent over one socket until told to stop or cut off."""

    def __init__(self, connection: socket.socket, parent: int):
        self._socket = connection
        self._parent = parent
        self._lock = threading.Lock()
        self._live: dict[int, Environment] = {}
        self._make: Callable[[Hashable], Environment] | None = None

    def serve(self) -> None:
        decoder = wire.Decoder()
        while True:
            data = self._socket.recv(1 << 18)
            if not data:
                return
            for op, key, seq, payload in decoder.feed(data):
                if op == wire.STOP:
                    return
                if op == wire.INIT:
                    if not self._start(*pickle.loads(payload)):
                        return
                elif op == wire.DROP:
                    self._close(key)
                else:
                    self._call(op, key, seq, payload)

    def shut_down(self) -> None:
        """Closes every environment, then the maker when it has a `close`."""
        for key in list(self._live):
            self._close(key)
        close = getattr(self._make, "close", None)
        if close is not None:
            close()

    def _start(self, factory: str, config: bytes, interval: float) -> bool:
        started = time.monotonic()
        # The beat starts before the import: a slow factory isn't a dead worker.
        threading.Thread(target=self._beat, args=(interval,), daemon=True).start()
        try:
            self._make = load_factory(factory, config)
        except _StartError as error:
            self._send(wire.FATAL, 0, started, time.monotonic(), wire.dumps(str(error)))
            return False
        self._send(wire.READY, 0, started, time.monotonic(), b"")
        return True

    def _call(self, op: str, key: int, seq: int, payload: bytes) -> None:
        started = time.monotonic()
        try:
            answer = wire.dumps(self._reset(key, payload) if op == wire.RESET
                                else self._step(key, payload))
            kind = wire.RESULT
        except Exception as error:
            # The state of this environment is unknown now; the parent replays it in a new one.
            self._close(key)
            text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            kind, answer = wire.ERROR, wire.dumps(text)
        self._send(kind, seq, started, time.monotonic(), answer)

    def _reset(self, key: int, payload: bytes) -> Any:
        episode_id, task = pickle.loads(payload)
        assert self._make is not None, "reset before init"
        environment = self._live[key] = self._make(episode_id)
        messages = tuple(environment.reset(pickle.loads(task)))
        check_no_jax("after a reset")
        return messages

    def _step(self, key: int, payload: bytes) -> Any:
        environment = self._live.get(key)
        if environment is None:
            raise RuntimeError("this episode isn't live in its worker (an earlier call failed)")
        step = environment.step(pickle.loads(payload))
        if not isinstance(step, Step):
            raise TypeError(f"step() returned {type(step).__name__}, expected envs.core.Step")
        if not step.done:
            return step, None
        score = environment.score()
        self._close(key)
        return step, score

    def _close(self, key: int) -> None:
        environment = self._live.pop(key, None)
        if environment is None:
            return
        try:
            environment.close()
        except Exception:
            # The answer is already known and stands; but a leak must be seen somewhere.
            traceback.print_exc()

    def _send(self, *message: Any) -> None:
        data = wire.frame(message)
        with self._lock:
            self._socket.sendall(data)

    def _beat(self, interval: float) -> None:
        """Reports life, and ends the process when the parent is gone.

        Both signs of that are needed: a process that the parent forked keeps the socket open,
        and a new parent pid is only seen when looked for.  (PR_SET_PDEATHSIG would not do: it
        fires when the thread that started the worker ends.)"""
        poller = select.poll()
        poller.register(self._socket, getattr(select, "POLLRDHUP", 0))
        try:
            while not poller.poll(interval * 1000) and os.getppid() == self._parent:
                self._send(wire.BEAT, 0, 0.0, 0.0, b"")
        except OSError:
            pass
        os._exit(1)


def main(descriptor: int, parent: int) -> None:
    """Entry point of the process; `descriptor` is its end of the socket pair."""
    # Ctrl-C is for the parent, which then closes the pool; SIGTERM keeps its default.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    worker = Worker(connection, parent)
    try:
        worker.serve()
    except (BrokenPipeError, ConnectionResetError):
        pass
    worker.shut_down()
