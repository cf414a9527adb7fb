"""The inside of one session: reads requests, runs code, answers.  Runs behind the walls.

State lives in one namespace for as long as the process does.  A soft time limit is raised
in the code as an exception, so that state survives it; the hard limit is the host's, which
kills the process.  Nothing here is a wall: code in the session can change all of it, and
then it only spoils its own answers.  So this file cares about clear answers to honest code.
"""

from __future__ import annotations

import builtins
import gc
import io
import os
import random
import signal
import sys
import types
from collections.abc import Callable
from typing import Any

from . import wire
from .prelude import Bindings

CHANNEL = 3
MAX_REQUEST = 256 << 20
ERROR_CHARS = 2_000
_FRAMES_SHOWN = 4


class TimeLimit(BaseException):
    """The soft limit.  Not an Exception, so that `except Exception` lets it pass."""


class _Output(io.TextIOBase):
    """Standard output of one call: keeps the first `limit` characters, counts them all."""

    def __init__(self, limit: int) -> None:
        self._limit, self._kept, self._total = limit, 0, 0
        self._parts: list[str] = []

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if self._kept < self._limit:
            part = text[: self._limit - self._kept]
            self._parts.append(part)
            self._kept += len(part)
        self._total += len(text)
        return len(text)

    def text(self) -> str:
        text = "".join(self._parts)
        if self._total > self._kept:
            text += f"\n... cut: {self._kept:,} of {self._total:,} characters shown; print less"
        return text


class Interpreter:
    """One session's namespace and how code runs in it."""

    def __init__(self, soft_seconds: float, output_chars: int) -> None:
        self._soft, self._output_chars = soft_seconds, output_chars
        self._bindings = Bindings()
        self._sources: dict[str, list[str]] = {}
        self._armed = False
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        self._space = main.__dict__
        self._space["__builtins__"] = builtins

    def warm_up(self) -> None:
        """Touch, before anyone waits, the memory that a first call writes to."""
        self.run("print(0)")
        self._sources.clear()

    def bind(self, blocks: list[list[Any]]) -> None:
        """blocks: [sheet, top row, first column, encoded rows]; updates the namespace."""
        for sheet, top_row, first_col, rows in blocks:
            self._bindings.bind(sheet, top_row, first_col, wire.decode_rows(rows))
        if blocks:
            self._space.update(self._bindings.namespace)

    def run(self, code: str) -> dict[str, Any]:
        """The answer to one call: output, error (or None), timed_out."""
        output = _Output(self._output_chars)
        # Set anew each time: earlier code may have replaced any of them.
        sys.stdin, sys.stdout, sys.stderr = None, output, output
        signal.signal(signal.SIGALRM, self._on_alarm)
        error, timed_out = None, False
        try:
            try:
                self._armed = True
                # Repeated, for code that catches the first one by accident.
                signal.setitimer(signal.ITIMER_REAL, self._soft, 0.05)
                error = self._attempt(code)
            finally:
                self._armed = False
        except TimeLimit:
            timed_out = True
            error = f"time limit: stopped after {self._soft:g} s; variables set so far are kept"
        except MemoryError:  # while the first one was being described
            error = "MemoryError"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return {"output": output.text(), "error": error, "timed_out": timed_out}

    def _on_alarm(self, signum: int, frame: Any) -> None:
        if self._armed:
            raise TimeLimit

    def _attempt(self, code: str) -> str | None:
        name = f"<call {len(self._sources) + 1}>"
        self._sources[name] = code.splitlines()
        try:
            exec(compile(code, name, "exec", dont_inherit=True), self._space)
        except TimeLimit:
            raise
        except BaseException as error:  # SystemExit too: a session outlives its code
            return self._describe(error, name)
        return None

    def _describe(self, error: BaseException, current: str) -> str:
        """The last frames that are the code's own, then the error, then a hint."""
        lines = []
        if isinstance(error, SyntaxError) and error.filename == current:
            lines.append(f"  line {error.lineno}: {(error.text or '').strip()[:200]}")
            text = f"{type(error).__name__}: {error.msg}"
        else:
            lines = self._frames(error, current)
            text = type(error).__name__
            try:
                detail = str(error)
            except TimeLimit:
                raise
            except BaseException as second:  # whatever it does, SystemExit too
                detail = f"(its text raised {type(second).__name__})"
            if detail:
                text += f": {_shorten(detail, ERROR_CHARS)}"
        hint = self._hint(error)
        return "\n".join([*lines, text, *([hint] if hint else [])])

    def _frames(self, error: BaseException, current: str) -> list[str]:
        own = []
        trace = error.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            if code.co_filename in self._sources:
                own.append((code.co_filename, trace.tb_lineno, code.co_name))
            trace = trace.tb_next
        left_out = len(own) - _FRAMES_SHOWN
        if left_out > 0:
            own[1 : 1 + left_out] = []
        lines = []
        for file, number, function in own:
            source = self._sources[file]
            line = source[number - 1].strip()[:200] if 0 < number <= len(source) else ""
            where = "" if file == current else f"{file[1:-1]}, "
            inside = "" if function == "<module>" else f", in {function}"
            lines.append(f"  {where}line {number}{inside}: {line}")
        if left_out > 0:
            lines.insert(1, f"  ... {left_out} more")
        return lines

    def _hint(self, error: BaseException) -> str:
        if isinstance(error, NameError):
            names = ["cells", *self._bindings.names.values()]
            return f"names from reads: {', '.join(names)}"
        if isinstance(error, SystemExit):
            return "the session goes on; variables are kept"
        if isinstance(error, MemoryError):
            return "the memory of this session is limited; variables are kept"
        if isinstance(error, PermissionError):
            return "files, processes and the network are not available here"
        return ""


def _shorten(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]} ... cut ... {text[-limit // 4 :]}"


class _Loaded:
    """Import finder of a session: what is loaded is all there is, and the error says so."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        raise ModuleNotFoundError(
            f"no module {name!r} here; only computing modules of the standard library are "
            "(math, re, datetime, statistics, decimal, collections, itertools, json, ...)",
            name=name,
        )


def serve(settings: dict[str, Any], probe: Callable[[], dict[str, str]]) -> None:
    """Answer requests on the channel until the host closes it.

    settings: soft_seconds, output_chars.  probe: the self-test's acts, run on request.
    """
    sys.meta_path[:] = [_Loaded]
    sys.path[:] = []
    interpreter = Interpreter(settings["soft_seconds"], settings["output_chars"])
    # Bound here, so that code that replaces names in modules does not reach this loop.
    receive, pack, os_read, os_write = wire.receive, wire.pack, os.read, os.write

    def read(size: int) -> bytes:
        return os_read(CHANNEL, size)

    interpreter.warm_up()
    gc.enable()
    while (request := receive(read, MAX_REQUEST)) is not None:
        if "seed" in request:  # in the first one, for this process may have been a spare
            random.seed(request["seed"])
            os_write(CHANNEL, pack({"begins": True}))  # from here on the code is to blame
        if "probe" in request:
            answer: dict[str, Any] = {"acts": probe()}
        else:
            interpreter.bind(request["bind"])
            answer = interpreter.run(request["code"])
        answer["id"] = request["id"]
        data = memoryview(pack(answer))
        while data:
            data = data[os_write(CHANNEL, data) :]
