"""Fixtures: a sandbox with short limits, and Python processes on poorer hosts than this one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from envs.sandbox import Sandbox, SandboxConfig

ROOT = Path(__file__).parents[3]

# Runs before the code under test: takes system calls away (as a container would), then root.
_POORER = """
import ctypes, json, os, platform, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
wanted = json.loads(sys.argv[1])
arm = platform.machine() == "aarch64"

def check(result):
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def prctl(*arguments):
    padded = [ctypes.c_ulong(a) for a in [*arguments, 0, 0, 0, 0][:5]]
    check(libc.prctl(ctypes.c_int(arguments[0]), *padded[1:]))

numbers = {
    "unshare": 97 if arm else 272, "landlock": 444, "setresuid": 147 if arm else 117,
    "seccomp": 277 if arm else 317,
}
deny = [numbers[name] for name in wanted["deny"]]
if deny:
    step = lambda code, k, yes=0, no=0: struct.pack("=HBBI", code, yes, no, k)
    refuse = step(0x06, 0x00050001)
    code = step(0x20, 0)
    for number in deny:
        code += step(0x15, number, 0, 1) + refuse
    if "seccomp" in wanted["deny"]:  # and its older form, prctl(PR_SET_SECCOMP)
        code += step(0x15, 167 if arm else 157, 0, 3) + step(0x20, 16) + step(0x15, 22, 0, 1)
        code += refuse
    code += step(0x06, 0x7FFF0000)
    buffer = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    program = Program(len(code) // 8, ctypes.addressof(buffer))
    prctl(38, 1)
    prctl(22, 2, ctypes.addressof(program))
if wanted["nobody"] and os.geteuid() == 0:
    # The interpreter may lie in root's home: keep the one capability to read it, no other.
    read = 1 << 2
    os.setgroups([])
    prctl(8, 1)  # keep capabilities over the change of uid
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    header = struct.pack("=Ii", 0x20080522, 0)
    check(libc.syscall(ctypes.c_long(91 if arm else 126), ctypes.c_char_p(header),
                       ctypes.c_char_p(struct.pack("=6I", read, read, read, 0, 0, 0))))
    prctl(47, 2, 2)  # ambient, so that it survives exec
    prctl(4, 1)
sys.path.insert(0, wanted["root"])
exec(wanted["code"])
"""


@pytest.fixture(scope="module")
def sandbox():
    config = SandboxConfig(soft_seconds=0.5, hard_seconds=1.5, memory_mb=256)
    with Sandbox(config) as sandbox:
        yield sandbox


@pytest.fixture()
def session(sandbox):
    with sandbox.session(seed=1) as session:
        yield session


@pytest.fixture()
def elsewhere():
    """elsewhere(code, deny=[...], nobody=False): stdout of `code` in a fresh process that
    lacks some system calls ("seccomp", "landlock", "unshare", "setresuid") or root."""

    def run(code: str, deny=(), nobody=False) -> str:
        wanted = {"deny": list(deny), "nobody": nobody, "root": str(ROOT), "code": code}
        done = subprocess.run(
            [sys.executable, "-c", _POORER, json.dumps(wanted)],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
