"""The walls of a session child, outermost rule first, each a direct call into the kernel.

`Walls.prepare` runs once in the zygote and decides what this host has; `Walls.apply` runs in
every child after its fork, in an order that matters: limits, other uid, no capabilities, not
dumpable, no new privileges, Landlock, and seccomp last, because the later ones forbid the
calls of the earlier ones.  A wall that `prepare` found and `apply` cannot raise is an error
in that child, never a child with one wall less.

Left out: cgroups (an address-space limit holds each child and the host limits how many
live) and anything that needs a helper program.  Linux only; imports nothing of ours but the
seccomp table and a list of names.
"""

from __future__ import annotations

import _socket
import ctypes
import errno
import mmap
import os
import resource
import signal
import struct
from collections.abc import Callable
from typing import Any

from . import seccomp
from .config import MANDATORY

NOBODY = 65534

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2
_NEW_NAMESPACES = 0x40000000 | 0x08000000 | 0x04000000  # net, ipc, uts
_NEW_USER = 0x10000000
_LANDLOCK_CREATE, _LANDLOCK_RESTRICT = 444, 446  # the same numbers on both machines
_CAPSET = {"x86_64": 126, "aarch64": 91}
_OPENAT = {"x86_64": 257, "aarch64": 56}
_CAP_VERSION_3 = 0x20080522


class WallError(Exception):
    """A wall could not be raised; the text names it and the kernel's answer."""


class Kernel:
    """The few C library functions that the walls need, with errno turned into OSError."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.syscall.restype = ctypes.c_long

    def _check(self, result: int) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result

    def prctl(self, option: int, *arguments: Any) -> None:
        padded = [*arguments, 0, 0, 0, 0][:4]
        self._check(self._libc.prctl(ctypes.c_int(option), *map(_word, padded)))

    def syscall(self, number: int, *arguments: Any) -> int:
        return self._check(self._libc.syscall(ctypes.c_long(number), *map(_word, arguments)))

    def unshare(self, flags: int) -> None:
        self._check(self._libc.unshare(ctypes.c_int(flags)))


def _word(value: Any) -> Any:
    return ctypes.c_ulong(value) if isinstance(value, int) else value


class _FilterProgram(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


class Walls:
    """What this host has, and how to raise it in a child.

    `states` maps each wall to (state, detail): "on", "off" (optional and not to be had here)
    or "missing" (mandatory and not to be had here).
    """

    def __init__(self, memory_mb: int, cpu_seconds: int) -> None:
        self._kernel = Kernel()
        self._machine = os.uname().machine
        self._memory = memory_mb << 20
        self._cpu = cpu_seconds
        self._uid = os.geteuid()  # asked now: a user namespace of our own would hide it
        self._root = self._uid == 0
        self._zygote = os.getpid()
        self._landlock = b""
        self.states: dict[str, tuple[str, str]] = {}

    # In the zygote, once.

    def prepare(self) -> None:
        """Probe the host and raise what children inherit (namespaces, out-of-memory score)."""
        self._prepare_limits()
        self._prepare_namespaces()
        self._prepare_landlock()
        try:
            code = seccomp.program(self._machine)
        except ValueError as error:
            self.states["seccomp"] = ("missing", str(error))
        else:
            self._code = ctypes.create_string_buffer(code, len(code))
            self._filter = _FilterProgram(len(code) // 8, ctypes.addressof(self._code))
            self._probe("seccomp", self._no_new_privs, self._seccomp)
        if self._root:
            self._probe("uid", self._other_uid, self._no_capabilities)
            if self.states["uid"][0] == "on":
                self.states["uid"] = ("on", f"root: children change to uid {NOBODY}")
        else:
            self._probe("uid", self._no_capabilities)
            if self.states["uid"][0] == "on":
                self.states["uid"] = ("on", f"not root: children keep uid {self._uid}")

    def _prepare_limits(self) -> None:
        try:
            # Inherited by fork; it must be written while this process is still dumpable.
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")
            self._kernel.prctl(_PR_SET_DUMPABLE, 0)
        except OSError as error:
            self.states["limits"] = ("missing", f"out-of-memory score, not dumpable: {error}")
            return
        self._probe("limits", self._limits)

    def _prepare_namespaces(self) -> None:
        # Without root only a new user namespace may make the others.  As root that would
        # leave no second uid to change to, so root without the capability goes without.
        flags = _NEW_NAMESPACES | (0 if self._root else _NEW_USER)
        try:
            self._kernel.unshare(flags)
        except OSError as error:
            self.states["namespaces"] = ("off", f"unshare: {error.strerror}")
        else:
            with_user = "" if self._root else ", user"
            self.states["namespaces"] = ("on", f"net, ipc, uts{with_user}; one set per sandbox")

    def _prepare_landlock(self) -> None:
        try:
            abi = self._kernel.syscall(_LANDLOCK_CREATE, 0, 0, 1)
        except OSError as error:
            self.states["landlock"] = ("off", f"landlock_create_ruleset: {error.strerror}")
            return
        files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
        ports = 3 if abi >= 4 else 0
        scopes = 3 if abi >= 6 else 0
        fields = 3 if abi >= 6 else 2 if abi >= 4 else 1
        self._landlock = struct.pack("=3Q", files, ports, scopes)[: 8 * fields]
        self._probe("landlock", self._no_new_privs, self._no_files)
        if self.states["landlock"][0] == "on":
            what = ["no files"] + ["no TCP"] * (abi >= 4) + ["signals scoped"] * (abi >= 6)
            self.states["landlock"] = ("on", f"ABI {abi}: {', '.join(what)}")

    def _probe(self, wall: str, *steps: Any) -> None:
        """Try `steps` in a throw-away child, so that a refusal costs the zygote nothing."""
        pid = os.fork()
        if pid == 0:
            code = 255
            try:
                for step in steps:
                    step()
                code = 0
            except OSError as error:
                code = error.errno or 255
            finally:
                os._exit(min(code, 255))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code == 0:
            self.states[wall] = ("on", "")
        else:
            reason = os.strerror(code) if code in errno.errorcode else f"probe ended with {code}"
            self.states[wall] = ("missing" if wall in MANDATORY else "off", reason)

    # In a child, after its fork.

    def apply(self) -> None:
        """Raise every wall that `prepare` found.  Raises WallError, naming the first that
        fails; the caller must then end the process."""
        # A change of uid makes the kernel forget the death signal, so that comes after it.
        steps = {
            "limits": [self._limits],
            "uid": [*([self._other_uid] if self._root else []), self._no_capabilities],
            "dumpable": [self._not_dumpable, self._die_with_zygote],
            "landlock": [self._no_new_privs, self._no_files],
            "seccomp": [self._no_new_privs, self._seccomp],
        }
        for wall, calls in steps.items():
            if self.states.get(wall, ("on", ""))[0] == "on":
                try:
                    for call in calls:
                        call()
                except OSError as error:
                    raise WallError(f"{wall}: {error}") from None

    def _limits(self) -> None:
        for kind, limit in (
            (resource.RLIMIT_AS, self._memory),
            (resource.RLIMIT_CPU, self._cpu),
            (resource.RLIMIT_FSIZE, 0),
            (resource.RLIMIT_NOFILE, 16),
            (resource.RLIMIT_NPROC, 0),
            (resource.RLIMIT_CORE, 0),
        ):
            hard = resource.getrlimit(kind)[1]
            if hard != resource.RLIM_INFINITY:
                limit = min(limit, hard)
            resource.setrlimit(kind, (limit, limit))

    def _other_uid(self) -> None:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)

    def _no_capabilities(self) -> None:
        if self._machine in _CAPSET:
            header = ctypes.create_string_buffer(struct.pack("=Ii", _CAP_VERSION_3, 0), 8)
            nothing = ctypes.create_string_buffer(24)
            self._kernel.syscall(_CAPSET[self._machine], header, nothing)

    def _not_dumpable(self) -> None:
        self._kernel.prctl(_PR_SET_DUMPABLE, 0)

    def _die_with_zygote(self) -> None:
        self._kernel.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != self._zygote:  # it died before the call above
            os._exit(1)

    def _no_new_privs(self) -> None:
        self._kernel.prctl(_PR_SET_NO_NEW_PRIVS, 1)

    def _no_files(self) -> None:
        attributes = ctypes.create_string_buffer(self._landlock, len(self._landlock))
        rules = self._kernel.syscall(_LANDLOCK_CREATE, attributes, len(self._landlock), 0)
        self._kernel.syscall(_LANDLOCK_RESTRICT, rules, 0)
        os.close(rules)

    def _seccomp(self) -> None:
        # prctl and not the newer seccomp call: containers and gVisor both let it through.
        pointer = ctypes.addressof(self._filter)
        self._kernel.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, pointer)

    def forbidden_acts(self) -> dict[str, str]:
        """Try, in a child, what a session must not do: act -> "denied: why" or "ALLOWED".

        Harmless where an act succeeds: nothing is written, the only new process exits at
        once, and the signal to the parent is the null signal.
        """

        def fork() -> None:
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            os.waitpid(pid, 0)

        def raw_open() -> None:
            at_cwd = 2**64 - 100
            self._kernel.syscall(_OPENAT[self._machine], at_cwd, ctypes.c_char_p(b"/dev/null"), 0)

        parent = os.getppid()
        acts: dict[str, Callable[[], Any]] = {
            "open a file": lambda: os.open("/dev/null", os.O_RDONLY),
            "open a file by a raw call": raw_open,
            "list a directory": lambda: os.listdir("/"),
            "make a socket": lambda: _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM),
            "fork": fork,
            "run a program": lambda: os.execv("/nonexistent", ["x"]),
            "signal the parent": lambda: os.kill(parent, 0),
            "read the parent's memory": lambda: os.open(f"/proc/{parent}/mem", os.O_RDONLY),
            "map executable memory": lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_EXEC),
            "set a limit": lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
        }
        results = {}
        for name, act in acts.items():
            try:
                act()
            except FileNotFoundError:
                results[name] = "ALLOWED"  # the kernel looked for the file: no wall stopped it
            except (OSError, ValueError) as error:  # setrlimit's refusal is a ValueError
                results[name] = f"denied: {error}"
            else:
                results[name] = "ALLOWED"
        return results
