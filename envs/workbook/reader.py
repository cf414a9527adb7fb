"""`read_workbook`: a file of any kind as a workbook, read in a process of its own.

Small files are read whole and their process ends; of large ones the outline comes first and
rows when they are asked for, from the process or from the store that keeps what was read.  One
zygote per process that asks serves all its files; it starts with the first.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from envs.workbook.container import Damaged, Limits, WorkbookError, damaged, open_file
from envs.workbook.model import Value, Workbook
from envs.workbook.opened import Feed, OpenedWorkbook, Values
from envs.workbook.store import BlockStore
from envs.workbook.wire import receive, send

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from envs.workbook.worker import main; main()"
)
_EXECUTABLE = sys.executable
_START_SECONDS = 60.0  # a cold interpreter on a crowded machine
_GRACE = 15.0  # beyond the worker's own deadline


def read_workbook(
    path: str | os.PathLike[str],
    limits: Limits | None = None,
    *,
    store: BlockStore | None = None,
    calculate: bool = True,
) -> Workbook:
    """Reads an .xlsx, .xlsm, .xlsb, .xls, .ods or .csv file, by its content.

    store: where large books are kept, and found when they are opened again.
    calculate: formulas without a stored result are calculated, where an engine is installed
        (`pip install 'fastask-jax[workbooks]'`) and can; `Sheet.uncalculated` counts the others,
        whose cells read as empty.

    Rows of a large file are read when asked for, so a workbook of this function may raise
    WorkbookError then too.  Close it to let go of the file at once.

    Raises FileNotFoundError, OSError or WorkbookError, of one line.
    """
    path, limits = Path(path), limits or Limits()
    with open_file(path) as file:
        digest = None if store is None else store.digest(file)
        kept = None if store is None or digest is None else store.find(digest)
        try:
            if kept is not None:
                book = OpenedWorkbook(kept.outline, kept, limits)
                if calculate and any(sheet["uncalculated"] for sheet in kept.outline["sheets"]):
                    worker = Worker(path, file, limits, None)
                    worker.ask("open")
                    book.calculator = worker.calculate
                    book.calculate()
                    worker.close()
                return book
            writing = store.writing(digest) if store is not None and digest is not None else None
            worker = Worker(path, file, limits, writing)
            said = worker.ask("open")
            small = said["rows"] is not None
            feed: Feed = Rows(said["rows"]) if small else worker
            book = OpenedWorkbook(said["outline"], feed, limits)
        except Damaged as error:
            raise damaged(path, error) from error
    book.calculator = worker.calculate if calculate else None
    if small:
        book.uncalculated()
        book.calculator = None
        worker.close()
    return book


def recalculated(
    path: str | os.PathLike[str], limits: Limits | None = None
) -> dict[str, dict[tuple[int, int], Value]]:
    """Results of all formulas that the engine can calculate, whatever the file has stored.

    Sheet name -> (row, column) -> value.  Raises as `read_workbook` does, and WorkbookError
    where no engine is installed.
    """
    path, limits = Path(path), limits or Limits()
    with open_file(path) as file:
        worker = Worker(path, file, limits, None)
    outline = worker.ask("open")["outline"]
    results = worker.ask("calculate", everything=True)
    worker.close()
    if results is None:
        raise WorkbookError(
            f"{path} can't be calculated: no engine is installed; "
            "pip install 'fastask-jax[workbooks]'"
        )
    values = Values(outline["formats"], outline["epoch1904"])
    found: dict[str, dict[tuple[int, int], Value]] = {s["name"]: {} for s in outline["sheets"]}
    for sheet, row, column, raw in results:
        found[outline["sheets"][sheet]["name"]][row, column] = values.value(raw, 0)
    return found


class Rows:
    """All rows of a small file."""

    def __init__(self, sheets: list[list[list[Any]]]) -> None:
        self._sheets = sheets

    def rows(self, sheet: int, top: int, bottom: int) -> list[list[Any]]:
        rows = self._sheets[sheet]
        return [row for row in rows if top <= row[0] <= bottom]

    def uncalculated(self, sheet: int) -> int:
        """Of formulas without a stored result; the outline of a small file has it."""
        return sum(not stored for row in self._sheets[sheet] for _, _, _, stored in row[2])

    def close(self) -> None:
        """Nothing to let go of."""


class Worker:
    """The process that reads one file.  Its faults are WorkbookErrors that name the file."""

    def __init__(
        self, path: Path, file: BinaryIO, limits: Limits, store: dict[str, str] | None
    ) -> None:
        self._path, self._limits = path, limits
        self.peak = 0  # bytes of memory that it took so far
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(limits.seconds + _GRACE)
        self._end = weakref.finalize(self, self._channel.close)
        with theirs:
            file.seek(0)
            _zygote().fork(
                {"name": path.name, "limits": asdict(limits), "store": store},
                [file.fileno(), theirs.fileno()],
            )

    def ask(self, do: str, **arguments: Any) -> Any:
        """The worker's answer.  Raises WorkbookError."""
        path = self._path
        with self._lock:
            if not self._end.alive:
                raise WorkbookError(f"{path} is closed; read it again")
            try:
                send(self._channel, {"do": do, "with": arguments})
                said = receive(self._channel)
            except (EOFError, OSError, ValueError) as error:
                self.close()
                raise WorkbookError(
                    f"can't read {path}: that takes more than {self._limits.seconds} s or "
                    f"{self._limits.memory >> 20:,} MiB, or breaks the reader; open it in a "
                    "spreadsheet program and save it again, or split it"
                ) from error
        self.peak = said["peak"]
        if "ok" in said:
            return said["ok"]
        if "damaged" in said:
            raise damaged(path, Damaged(said["damaged"]))
        what = said["refused"].removeprefix("the file ")
        raise WorkbookError(f"{path} {what}")

    def rows(self, sheet: int, top: int, bottom: int) -> list[list[Any]]:
        rows: list[list[Any]] = self.ask("rows", sheet=sheet, top=top, bottom=bottom)
        return rows

    def uncalculated(self, sheet: int) -> int:
        return int(self.ask("uncalculated", sheet=sheet))

    def calculate(self) -> list[list[Any]] | None:
        """Results of formulas that the file holds none of; None without an engine."""
        results: list[list[Any]] | None = self.ask("calculate", everything=False)
        return results

    def keep(self) -> bool:
        """Waits until the store has the file; whether it does."""
        done = kept = False
        while not done:
            done, kept = self.ask("keep")
        return bool(kept)

    def close(self) -> None:
        self._end()


class Zygote:
    """The warm process that makes workers."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not _EXECUTABLE:
            raise WorkbookError("reading workbooks needs sys.executable to start its worker")
        with theirs:
            self._process = subprocess.Popen(
                [_EXECUTABLE, "-s", "-S", "-P", "-X", "utf8", "-c", _BOOT,
                 str(theirs.fileno()), str(self.owner), json.dumps(_import_path())],
                env={},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )  # fmt: skip
        self._control.settimeout(_START_SECONDS)
        try:
            if self._control.recv(16) != b"ready":
                raise EOFError
        except (OSError, EOFError) as error:
            self.close()
            raise WorkbookError("the process that reads workbooks didn't start") from error

    def fork(self, request: dict[str, Any], numbers: list[int]) -> None:
        with self._lock:
            socket.send_fds(self._control, [json.dumps(request).encode()], numbers)

    def close(self) -> None:
        """Ends it; workers that still write a store finish that."""
        self._control.close()
        if self.owner == os.getpid():
            self._process.wait()


_lock = threading.Lock()
_running: Zygote | None = None


def _zygote() -> Zygote:
    """This process's zygote, started anew after a fork or when it died."""
    global _running
    with _lock:
        if _running is not None and _running.owner == os.getpid():
            if _running._process.poll() is None:
                return _running
            _running.close()
        _running = Zygote()
        return _running


def _import_path() -> list[str]:
    """Where the worker finds what this process would.

    Last comes the folder of this package: an editable installation isn't on the path, its finder
    is left to `site`, which the worker does without."""
    return [os.path.abspath(path) for path in [*sys.path, str(Path(__file__).parents[2])]]


@atexit.register
def _close() -> None:
    if _running is not None and _running.owner == os.getpid():
        _running.close()
