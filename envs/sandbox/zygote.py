"""The zygote: a warm, empty CPython that forks one walled child per session on request.

The host starts it by exec, never by fork, so it holds nothing of the host: no task, no
answer, no environment.  It loads the modules that sessions may use, freezes the collector's
view of them, probes the host's walls, says hello, and then only forks, kills and reaps.  A
few children are forked ahead of demand and wait behind their walls.  The zygote runs no
session code and sees none: each child talks to the host over its own socket, whose other end
is passed to the host.

Requests and answers are single JSON datagrams.  It ends when the host closes the channel or
is no longer its parent, and its children end with it.
"""

from __future__ import annotations

import _socket
import array
import gc
import importlib
import json
import os
import select
import signal
import sys
import time
from typing import Any

from . import child
from .layers import Walls

# What session code may import: pure computation.  Nothing of files, processes or sockets;
# `os` and `io` are there because others need them, and find every door shut.
# fmt: off
MODULES = [
    "abc", "array", "ast", "base64", "binascii", "bisect", "calendar", "cmath", "codecs",
    "collections", "collections.abc", "colorsys", "contextlib", "copy", "copyreg", "csv",
    "dataclasses", "datetime", "decimal", "difflib", "enum", "fnmatch", "fractions",
    "functools", "gc", "graphlib", "hashlib", "heapq", "html", "inspect", "io", "itertools",
    "json", "keyword", "linecache", "locale", "math", "numbers", "operator", "os", "pathlib",
    "pprint", "random", "re", "reprlib", "secrets", "shlex", "signal", "statistics", "string",
    "struct", "sys", "textwrap", "time", "timeit", "token", "tokenize", "traceback", "types",
    "typing", "unicodedata", "urllib.parse", "uuid", "warnings", "weakref", "zlib", "zoneinfo",
]
# Loaded because the standard library asks for them late, when no file can be opened.
_LATE = [
    "_strptime", "importlib.resources", "encodings.ascii", "encodings.cp1252",
    "encodings.idna", "encodings.latin_1", "encodings.unicode_escape", "encodings.utf_16",
    "encodings.utf_8_sig", "encodings.raw_unicode_escape",
]
# Loaded for the zygote itself; a session has no business with them.
_HIDDEN = ["_ctypes", "_posixsubprocess", "_socket", "ctypes", "ctypes._endian", "mmap",
           "multiprocessing", "resource", "select", "socket", "subprocess", "threading"]
ZONES = [
    "UTC", "America/Chicago", "America/Denver", "America/Los_Angeles", "America/New_York",
    "America/Sao_Paulo", "America/Toronto", "Asia/Dubai", "Asia/Hong_Kong", "Asia/Kolkata",
    "Asia/Shanghai", "Asia/Singapore", "Asia/Tokyo", "Australia/Sydney", "Europe/Amsterdam",
    "Europe/Berlin", "Europe/London", "Europe/Madrid", "Europe/Paris", "Europe/Zurich",
]
# fmt: on
_MAX_DATAGRAM = 1 << 16
_FILES = 64  # more than the zygote and its spares hold, numbered from 0


class Zygote:
    """State of the one zygote process: its walls and the children it made."""

    def __init__(self, channel: int, host: int, settings: dict[str, Any]) -> None:
        # Moved to the lowest free number: then a child knows how far it has to close.
        self._channel = _socket.socket(fileno=os.dup(channel))
        os.close(channel)
        self._host, self._settings = host, settings
        self._walls = Walls(settings["memory_mb"], settings["cpu_seconds"])
        self._zones = _load()
        # key -> [pid, exit code or None, the host is done with it]
        self._children: dict[int, list[Any]] = {}
        # Ready and not yet handed out: (pid, the host's end of its socket).
        self._spares: list[tuple[int, _socket.socket]] = []

    def run(self) -> None:
        os.environ.clear()  # only Python's own start needed the hash seed in it
        self._walls.prepare()
        self._wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)
        gc.collect()
        gc.freeze()
        gc.disable()  # a collection here would copy pages that children share
        self._send({"hello": self._walls.states})
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while os.getppid() == self._host:
            missing = len(self._spares) < self._settings["spares"]
            events = poll.poll(0 if missing else 1000)
            if missing and not events:  # requests first
                self._make_spare()
            for number, _ in events:
                if number == self._wake:
                    os.read(self._wake, 4096)
                elif not self._serve():
                    return
            self._reap()

    def _send(self, message: dict[str, Any], channel: _socket.socket | None = None) -> None:
        ancillary = []
        if channel is not None:
            numbers = array.array("i", [channel.fileno()])
            ancillary = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers)]
        self._channel.sendmsg([json.dumps(message).encode()], ancillary)

    def _serve(self) -> bool:
        """Handle one request; False when the host has gone."""
        try:
            data = self._channel.recv(_MAX_DATAGRAM)
        except ConnectionError:
            return False
        if not data:
            return False
        request = json.loads(data)
        key = request["key"]
        if request["do"] == "spawn":
            self._hand_out(key)
        elif request["do"] == "pid":
            self._send({"key": key, "pid": self._children[key][0]})
        elif request["do"] == "end":
            self._end(key, request["wait"])
        return True

    def _hand_out(self, key: int) -> None:
        try:
            self._reap_spares()
            pid, channel = self._spares.pop(0) if self._spares else self._fork()
        except OSError as error:
            self._send({"key": key, "error": f"fork: {error.strerror}"})
            return
        self._children[key] = [pid, None, False]
        self._send({"key": key}, channel)
        channel.close()

    def _make_spare(self) -> None:
        try:
            self._spares.append(self._fork())
        except OSError:  # the host hears of it when it asks and a fork fails again
            time.sleep(0.01)

    def _fork(self) -> tuple[int, _socket.socket]:
        """A new child behind its walls: (pid, the host's end of its socket)."""
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if pid == 0:
            try:
                self._become_child(theirs.fileno())
            except Exception as error:  # ours, not the code's; believed before the first call
                os.write(child.CHANNEL, child.wire.pack({"fatal": repr(error)}))
            finally:
                os._exit(70)
        theirs.close()
        return pid, ours

    def _become_child(self, channel: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for number in (0, 1, 2):
            os.dup2(0, number)  # 0 is the null device
        os.dup2(channel, child.CHANNEL)
        os.closerange(child.CHANNEL + 1, _FILES)
        self._children.clear()
        self._spares.clear()
        self._walls.apply()
        for name in _HIDDEN:
            sys.modules.pop(name, None)
        child.serve(self._settings, self._walls.forbidden_acts)
        os._exit(0)

    def _end(self, key: int, wait: bool) -> None:
        """Kill a child that still lives.  It is ours and not reaped, so its pid is its own."""
        entry = self._children.get(key)
        if entry is None:
            if wait:
                self._send({"key": key, "ended": None})
            return
        entry[2] = True
        if entry[1] is None:
            os.kill(entry[0], signal.SIGKILL)
            if wait:
                entry[1] = os.waitstatus_to_exitcode(os.waitpid(entry[0], 0)[1])
        if wait:
            self._send({"key": key, "ended": entry[1]})
        if entry[1] is not None:
            del self._children[key]

    def _reap(self) -> None:
        self._reap_spares()
        for key, entry in list(self._children.items()):
            if entry[1] is None:
                pid, status = os.waitpid(entry[0], os.WNOHANG)
                if pid:
                    entry[1] = os.waitstatus_to_exitcode(status)
            if entry[2] and entry[1] is not None:
                del self._children[key]

    def _reap_spares(self) -> None:
        self._spares = [s for s in self._spares if not os.waitpid(s[0], os.WNOHANG)[0]]


def _ignore(signum: int, frame: Any) -> None:
    """A handler has to exist for the wake-up descriptor to be written."""


def _load() -> list[Any]:
    for name in [*MODULES, *_LATE]:
        importlib.import_module(name)
    import zoneinfo

    time.strptime("2024-01-31", "%Y-%m-%d")
    zones = []
    for name in ZONES:
        try:
            zones.append(zoneinfo.ZoneInfo(name))
        except zoneinfo.ZoneInfoNotFoundError:
            break  # this host has no time-zone data, so sessions have none either
    return zones
