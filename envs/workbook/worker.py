"""The process that reads a file, so that no file can hurt the one that asks.

A zygote is started by exec, imports the readers, and forks a child for each file on request;
the child sets its limits on memory and time, opens the file through a descriptor it was given,
and answers over its own socket.  A child that dies, or is stopped by its timer, is a file that
can't be read, no more.  Between two requests the child of a large file turns it into blocks for
the store, when it was told of one, and finishes that after the host has hung up.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable
from typing import Any, BinaryIO

from envs.workbook import cells, formulas, package, sheetxml, xml  # noqa: F401  (before forking)
from envs.workbook.a1 import MAX_ROW
from envs.workbook.container import Damaged, Limits, WorkbookError, reason
from envs.workbook.grid import Source
from envs.workbook.sources import open_source
from envs.workbook.store import StoreWriter
from envs.workbook.wire import MOST, receive, send


def zygote(control: socket.socket, host: int) -> None:
    """Forks a child for each request until the host closes the channel or is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children need no reaping
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the host's matter
    gc.collect()
    gc.freeze()
    control.send(b"ready")
    while os.getppid() == host:
        try:
            data, numbers, _, _ = socket.recv_fds(control, 1 << 16, 2)
        except ConnectionError:
            return
        if not data:
            return
        if os.fork() == 0:
            status = 70
            try:
                control.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                request = json.loads(data)
                with os.fdopen(numbers[0], "rb") as file, socket.socket(fileno=numbers[1]) as ours:
                    Child(ours, file, request).serve()
                status = 0
            except (EOFError, ConnectionError):
                status = 0
            finally:
                os._exit(status)
        for number in numbers:
            os.close(number)


_TOO_MUCH = f"holds more than {MOST >> 20} MiB of texts where that was asked for; read less of it"


def _check_fits(rows: Iterable[cells.Row]) -> None:
    """Raises WorkbookError for texts too long to send: many cells may share a long one."""
    left = MOST
    for row in rows:
        for _, values, _ in row[1]:
            left -= sum(len(value) for value in values if type(value) is str)
        if left < 0:
            raise WorkbookError(_TOO_MUCH)


class Child:
    """Reads one file and answers questions about it."""

    def __init__(self, channel: socket.socket, file: BinaryIO, request: dict[str, Any]) -> None:
        self._channel, self._file, self._name = channel, file, request["name"]
        self._limits = Limits(**request["limits"])
        self._store: dict[str, str] | None = request["store"]
        self._writer: StoreWriter | None = None
        self._source: Source | None = None
        limits, seconds = self._limits, self._limits.seconds
        for what, most in (
            (resource.RLIMIT_AS, limits.memory),
            (resource.RLIMIT_CPU, 3 * seconds),
            (resource.RLIMIT_FSIZE, limits.unpacked),  # of the store; it is abandoned then
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_NOFILE, 64),
        ):
            hard = resource.getrlimit(what)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(what, (most, most))

    def serve(self) -> None:
        gc.disable()  # reading makes no cycles, and its objects are many
        sys.setswitchinterval(0.0005)  # a thread unpacks while this one looks for rows
        while True:
            while self._writer is not None and not self._writer.done:
                if select.select([self._channel], [], [], 0)[0]:
                    break
                self._convert()
            try:
                request = receive(self._channel)
            except (EOFError, ConnectionError):
                break
            signal.setitimer(signal.ITIMER_REAL, self._limits.seconds)
            answer = self._answer(request)
            signal.setitimer(signal.ITIMER_REAL, 0)
            answer["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            try:
                send(self._channel, answer)
            except (MemoryError, ValueError):
                send(self._channel, {"refused": _TOO_MUCH, "peak": answer["peak"]})
        while self._writer is not None and not self._writer.done:
            self._convert()

    def _convert(self) -> None:
        """One step of writing the store; a file that can't be read to its end isn't kept."""
        assert self._writer is not None
        try:
            self._writer.step()
        except Exception:  # what is wrong is told when the rows are asked for
            self._writer.abandon()

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"ok": getattr(self, "do_" + request["do"])(**request.get("with", {}))}
        except WorkbookError as error:
            return {"refused": str(error)}
        except MemoryError:
            self._source = self._writer = None
            return {"refused": f"takes more than {self._limits.memory >> 20:,} MiB of memory to "
                    "read; split it into smaller workbooks"}  # fmt: skip
        except ImportError as error:
            return {"refused": str(error)}
        except Exception as error:  # broken files raise errors of a dozen kinds
            return {"damaged": reason(error)}

    def do_open(self) -> dict[str, Any]:
        """The outline, and all rows of a small file."""
        source = self._source = open_source(self._file, self._name, self._limits)
        said: dict[str, Any] = {"outline": source.outline, "rows": None}
        if not source.heavy:
            sheets = range(len(source.outline["sheets"]))
            said["rows"] = [source.rows(sheet, 1, MAX_ROW) for sheet in sheets]
            _check_fits(row for rows in said["rows"] for row in rows)
        elif self._store is not None:
            self._writer = StoreWriter(source, self._file, **self._store)
        return said

    def do_rows(self, sheet: int, top: int, bottom: int) -> list[cells.Row]:
        if self._source is None:
            raise Damaged("it was never opened")
        rows = self._source.rows(sheet, top, bottom)
        _check_fits(rows)
        return rows

    def do_uncalculated(self, sheet: int) -> int:
        if self._source is None:
            raise Damaged("it was never opened")
        return self._source.uncalculated(sheet)

    def do_calculate(self, everything: bool) -> list[list[Any]] | None:
        """Results of formulas: see `recalculate.calculate`."""
        from envs.workbook.recalculate import calculate

        if self._source is None:
            raise Damaged("it was never opened")
        return calculate(self._source, everything)

    def do_keep(self) -> list[bool]:
        """A second's work on the store; whether that is done, and whether the file is kept."""
        writer, until = self._writer, time.monotonic() + 1
        while writer is not None and not writer.done and time.monotonic() < until:
            self._convert()
        return [True, False] if writer is None else [writer.done, writer.kept]


def main() -> None:
    """argv: the number of the control socket, and the host's process id."""
    zygote(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
