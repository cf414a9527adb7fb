"""The seccomp allowlist of a session child, built by hand: no libseccomp, no wheels.

A running CPython that has all its modules needs some thirty system calls: memory that is not
executable, its one socket (plain read and write), timers, clocks, signals to itself by timer
only, and exit.  Everything else, every form of open, socket, clone, exec and kill included,
fails with EPERM, so code sees a PermissionError and goes on.  A call through a foreign
architecture (int 0x80 on x86_64) or through x32 kills the process.

Numbers are for x86_64 and aarch64; on other machines `program` raises and the sandbox is
not available.  Installing the program is in `layers`.
"""

from __future__ import annotations

import struct

ERRNO_PERM = 1

# struct seccomp_data: int nr; u32 arch; u64 instruction_pointer; u64 args[6].
_OFFSET_NR, _OFFSET_ARCH, _OFFSET_ARGS = 0, 4, 16
_LD_ABS, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_RET_KILL, _RET_ERRNO, _RET_ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_PROT_EXEC = 4
_X32_BIT = 0x40000000

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# fmt: off
ALLOWED: dict[str, dict[str, int]] = {
    "x86_64": {
        "read": 0, "write": 1, "munmap": 11, "brk": 12, "mremap": 25, "madvise": 28,
        "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "sigaltstack": 131,
        "setitimer": 38, "getitimer": 36, "restart_syscall": 219, "nanosleep": 35,
        "clock_nanosleep": 230, "clock_gettime": 228, "clock_getres": 229,
        "gettimeofday": 96, "time": 201, "getrandom": 318, "futex": 202, "sched_yield": 24,
        "getpid": 39, "getppid": 110, "gettid": 186, "getuid": 102, "geteuid": 107,
        "getgid": 104, "getegid": 108, "exit": 60, "exit_group": 231,
    },
    "aarch64": {
        "read": 63, "write": 64, "munmap": 215, "brk": 214, "mremap": 216, "madvise": 233,
        "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139, "sigaltstack": 132,
        "setitimer": 103, "getitimer": 102, "restart_syscall": 128, "nanosleep": 101,
        "clock_nanosleep": 115, "clock_gettime": 113, "clock_getres": 114,
        "gettimeofday": 169, "getrandom": 278, "futex": 98, "sched_yield": 124,
        "getpid": 172, "getppid": 173, "gettid": 178, "getuid": 174, "geteuid": 175,
        "getgid": 176, "getegid": 177, "exit": 93, "exit_group": 94,
    },
}
# Allowed as long as argument 2, the protection, asks for no execution.
NOT_EXECUTABLE: dict[str, dict[str, int]] = {
    "x86_64": {"mmap": 9, "mprotect": 10},
    "aarch64": {"mmap": 222, "mprotect": 226},
}
# fmt: on


def program(machine: str) -> bytes:
    """The filter for `machine` (as `os.uname().machine`): an array of struct sock_filter.

    Raises ValueError for a machine without a table.
    """
    if machine not in AUDIT_ARCH:
        raise ValueError(
            f"no table of system calls for {machine}; there are {', '.join(AUDIT_ARCH)}"
        )
    deny = _RET_ERRNO | ERRNO_PERM
    code = [
        _step(_LD_ABS, _OFFSET_ARCH),
        _step(_JEQ, AUDIT_ARCH[machine], 1, 0),
        _step(_RET, _RET_KILL),
        _step(_LD_ABS, _OFFSET_NR),
    ]
    if machine == "x86_64":
        code += [_step(_JGE, _X32_BIT, 0, 1), _step(_RET, _RET_KILL)]
    for number in ALLOWED[machine].values():
        code += [_step(_JEQ, number, 0, 1), _step(_RET, _RET_ALLOW)]
    for number in NOT_EXECUTABLE[machine].values():
        code += [
            _step(_JEQ, number, 0, 4),
            _step(_LD_ABS, _OFFSET_ARGS + 8 * 2),  # low half: both machines are little-endian
            _step(_JSET, _PROT_EXEC, 0, 1),
            _step(_RET, deny),
            _step(_RET, _RET_ALLOW),
        ]
    code.append(_step(_RET, deny))
    return b"".join(code)


def _step(code: int, k: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, jump_true, jump_false, k)
