"""The walls on this host and on poorer ones, simulated by taking system calls away."""

import ast
import os
import re
from pathlib import Path

import pytest

from envs.sandbox import SandboxUnavailable, available, probe_layers, seccomp
from envs.sandbox.host import Sandbox

USE = """
from envs.sandbox import Sandbox, SandboxConfig, SandboxUnavailable
import os
with Sandbox() as own, own.session() as session:
    first = session.run("x = 1\\nprint(x + 1)")
    second = session.run("open('/etc/passwd')")
    third = session.run("import os\\nprint(os.getuid())")
    print([os.getuid(), first.output, second.error, third.output,
           {layer.name: layer.state for layer in own.layers},
           {layer.name: layer.detail for layer in own.layers}])
"""
REFUSE = """
from envs.sandbox import Sandbox, SandboxConfig, SandboxUnavailable, available, probe_layers
try:
    Sandbox()
    refusal = None
except SandboxUnavailable as error:
    refusal = str(error)
layers = probe_layers()
with Sandbox(SandboxConfig(allow_unsafe_python=True)) as own, own.session() as session:
    unsafe = session.run("print(6 * 7)").output
print([refusal, available(layers), {layer.name: layer.state for layer in layers}, unsafe])
"""


def test_this_host():
    layers = probe_layers()
    states = {layer.name: layer.state for layer in layers}
    for name in ("exec", "limits", "seccomp", "uid", "self-test"):
        assert states[name] == "on", layers
    assert available(layers)
    assert {"landlock", "namespaces", "cgroup", "outer sandbox"} <= set(states)
    assert all(layer.detail for layer in layers if layer.state != "on")


def test_not_root(elsewhere):
    uid, first, second, inside, states, details = ast.literal_eval(elsewhere(USE, nobody=True))
    assert uid != 0
    assert first == "2\n" and "PermissionError" in second
    assert states["seccomp"] == states["limits"] == states["uid"] == states["self-test"] == "on"
    assert f"keep uid {uid}" in details["uid"]
    assert int(inside) != 0


def test_as_a_default_container_allows(elsewhere):
    output = elsewhere(USE, deny=["unshare", "landlock"])
    _, first, second, _, states, _ = ast.literal_eval(output)
    assert first == "2\n" and "PermissionError" in second
    assert states["namespaces"] == states["landlock"] == "off"
    assert states["seccomp"] == states["self-test"] == "on"


def test_without_seccomp_there_is_no_session(elsewhere):
    refusal, fit, states, unsafe = ast.literal_eval(elsewhere(REFUSE, deny=["seccomp"]))
    assert "not available on this host" in refusal and "seccomp" in refusal
    assert "allow_unsafe_python" in refusal
    assert not fit and states["seccomp"] == "missing" and states["limits"] == "on"
    assert unsafe == "42\n"


def test_without_any_filter_the_self_test_sees_it(elsewhere):
    output = elsewhere(REFUSE, deny=["seccomp", "landlock", "unshare"])
    _, fit, states, _ = ast.literal_eval(output)
    assert not fit and states["self-test"] == "missing"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has to change its uid")
def test_root_that_cannot_change_its_uid_has_no_session(elsewhere):
    refusal, fit, states, _ = ast.literal_eval(elsewhere(REFUSE, deny=["setresuid"]))
    assert "uid" in refusal and not fit and states["uid"] == "missing"


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(SandboxUnavailable, match="needs Linux"):
        Sandbox()
    (first, *_) = layers = probe_layers()
    assert first.state == "missing" and not available(layers)


def test_a_zygote_that_cannot_start_gives_its_reason(monkeypatch):
    monkeypatch.setattr("envs.sandbox.host._BOOT", "raise RuntimeError('no good')")
    with pytest.raises(SandboxUnavailable, match="did not start: RuntimeError: no good"):
        Sandbox()


# What one wall does alone, with no other in the way.
LANDLOCK_ALONE = """
import os
from envs.sandbox.layers import Walls
walls = Walls(1024, 60)
walls._prepare_landlock()
if walls.states["landlock"][0] != "on":
    print([None])
else:
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        os._exit(0)
    walls._no_new_privs()
    walls._no_files()
    acts = walls.forbidden_acts()
    print([walls.states["landlock"][1], acts], flush=True)
"""


def test_landlock_alone(elsewhere):
    detail, *acts = ast.literal_eval(elsewhere(LANDLOCK_ALONE))
    if detail is None:
        pytest.skip("this kernel has no Landlock")
    (acts,) = acts
    assert acts["list a directory"].startswith("denied")
    assert acts["read the parent's memory"].startswith("denied")
    if "signals" in detail:
        assert acts["signal the parent"].startswith("denied")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_call_numbers_are_the_kernels(machine):
    header = Path(
        {
            "x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h",
            "aarch64": "/usr/include/asm-generic/unistd.h",
        }[machine]
    )
    if not header.exists():
        pytest.skip(f"needs {header} (linux-libc-dev)")
    text = header.read_text().replace("__NR3264_", "__NR_")
    kernel = {name: int(n) for name, n in re.findall(r"#define __NR_(\w+) (\d+)\b", text)}
    table = {**seccomp.ALLOWED[machine], **seccomp.NOT_EXECUTABLE[machine]}
    assert {name: kernel[name] for name in table} == table


def test_filter_program_shape():
    for machine in seccomp.AUDIT_ARCH:
        code = seccomp.program(machine)
        assert len(code) % 8 == 0 and len(code) // 8 < 256
    with pytest.raises(ValueError, match="no table of system calls for riscv64"):
        seccomp.program("riscv64")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_filter_decisions(machine):
    """The program, run by a small interpreter of the few instructions it uses."""
    arch = seccomp.AUDIT_ARCH[machine]
    allow, kill, deny = 0x7FFF0000, 0x80000000, 0x00050001
    for number in range(0, 600):
        verdict = decide(seccomp.program(machine), number, arch)
        known = {*seccomp.ALLOWED[machine].values(), *seccomp.NOT_EXECUTABLE[machine].values()}
        assert verdict == (allow if number in known else deny)
    for number in seccomp.NOT_EXECUTABLE[machine].values():
        for protection, expected in ((0, allow), (3, allow), (4, deny), (7, deny)):
            assert decide(seccomp.program(machine), number, arch, protection) == expected
    assert decide(seccomp.program(machine), 0, 0x40000003) == kill  # i386
    if machine == "x86_64":
        assert decide(seccomp.program(machine), 0x40000000, arch) == kill
        assert decide(seccomp.program(machine), 0x40000000 + 39, arch) == kill


def decide(code: bytes, number: int, arch: int, protection: int = 0) -> int:
    import struct

    data = struct.pack("=IIQ6Q", number, arch, 0, 0, 0, protection, 0, 0, 0)
    steps = list(struct.iter_unpack("=HBBI", code))
    value = at = 0
    while True:
        kind, yes, no, k = steps[at]
        at += 1
        if kind == 0x20:
            (value,) = struct.unpack_from("=I", data, k)
        elif kind == 0x06:
            return k
        else:
            taken = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[kind]
            at += yes if taken else no
