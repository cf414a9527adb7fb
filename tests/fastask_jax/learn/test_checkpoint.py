"""Checkpoints resume exactly, and nothing that stops a save harms those committed before."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastask_jax._exit import uninterrupted
from fastask_jax.learn import checkpoint as checkpoint_module
from fastask_jax.learn import checkpoint_files
from fastask_jax.learn.checkpoint import (
    MARKER,
    PARTIAL,
    Checkpointer,
    CheckpointError,
    key_from_json,
    key_to_json,
)

HOST = {"cursor": 7, "seen": ["a", "b"], "big": 2**80, "rate": 0.1, "nested": {"x": [1, None]}}


def state(fill):
    return {
        "params": {"w": jnp.full((64, 32), fill, jnp.float32), "b": jnp.arange(5.0) * fill},
        "step": jnp.array(int(fill), jnp.int32),
    }


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


@pytest.fixture
def checkpointer(tmp_path):
    with Checkpointer(tmp_path, keep_last=2) as checkpointer:
        yield checkpointer


def test_round_trip_is_exact_and_old_ones_go_only_after_a_newer_commit(checkpointer):
    assert checkpointer.latest() is None
    for step in (20, 40, 60):
        checkpointer.save(step, state(step + 0.1), HOST | {"cursor": step}, wait=True)
        assert checkpointer.latest() == step
    assert checkpointer.steps() == [40, 60]
    restored = checkpointer.restore(abstract(state(0.0)))
    assert restored.host_state == HOST | {"cursor": 60}
    jax.tree.map(np.testing.assert_array_equal, restored.state, state(60.1))
    np.testing.assert_array_equal(
        checkpointer.restore(abstract(state(0.0)), 40).state["params"]["b"],
        state(40.1)["params"]["b"],
    )


def test_some_checkpoints_are_kept_for_ever(tmp_path):
    with Checkpointer(tmp_path, keep_last=1, keep_every=20) as checkpointer:
        for step in (0, 10, 20, 30, 40, 50):
            checkpointer.save(step, state(float(step)), {})
        checkpointer.wait()
        assert checkpointer.steps() == [0, 20, 40, 50]
        assert int(checkpointer.restore(abstract(state(0.0)), 20).state["step"]) == 20
    for bad in ({"keep_every": 0}, {"keep_last": 0}, {"deadline": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))} must be"):
            Checkpointer(tmp_path, **bad)


def test_there_may_be_nothing_to_resume_from(checkpointer):
    assert checkpointer.restore_latest(abstract(state(0.0))) is None
    checkpointer.save(3, state(3.0), HOST)
    assert int(checkpointer.restore_latest(abstract(state(0.0))).state["step"]) == 3


def test_the_state_may_be_donated_while_the_save_goes_on(checkpointer):
    donate = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    live = {"w": jnp.arange(1_000_000.0)}
    checkpointer.save(1, live, {})
    for _ in range(5):
        live = donate(live)
    checkpointer.wait()
    restored = checkpointer.restore(abstract(live)).state
    np.testing.assert_array_equal(restored["w"], np.arange(1_000_000.0, dtype=np.float32))


def test_partial_and_unmarked_directories_are_not_checkpoints(checkpointer):
    checkpointer.save(20, state(1.0), HOST, wait=True)
    directory = checkpointer.directory
    shutil.copytree(directory / "step_00000020", directory / f"step_00000040{PARTIAL}")
    shutil.copytree(directory / "step_00000020", directory / "step_00000060")
    (directory / "step_00000060" / MARKER).unlink()
    shutil.copytree(directory / "step_00000020", directory / "step_00000080")
    (directory / "step_00000080" / MARKER).write_text('{"files": ')
    (directory / "notes.txt").write_text("not a checkpoint")
    assert checkpointer.steps() == [20]
    assert int(checkpointer.restore(abstract(state(20.0))).state["step"]) == 1
    with pytest.raises(CheckpointError, match="no checkpoint of step 60 .* has: 20"):
        checkpointer.restore(abstract(state(0.0)), 60)


@pytest.mark.parametrize("victim", ["host.json", "array", "missing"])
def test_a_damaged_checkpoint_is_one_clear_error_and_the_one_before_is_intact(checkpointer, victim):
    for step in (20, 40):
        checkpointer.save(step, state(float(step)), HOST, wait=True)
    path = checkpointer.directory / "step_00000040"
    files = [p for p in path.rglob("*") if p.is_file() and p.name not in (MARKER, "host.json")]
    target = (
        path / "host.json" if victim == "host.json" else max(files, key=lambda p: p.stat().st_size)
    )
    if victim == "missing":
        target.unlink()
    else:
        content = bytearray(target.read_bytes())
        content[len(content) // 2] ^= 0xFF
        target.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged .*delete it and resume from step 20"):
        checkpointer.restore(abstract(state(0.0)))
    jax.tree.map(
        np.testing.assert_array_equal,
        checkpointer.restore(abstract(state(0.0)), 20).state,
        state(20.0),
    )


@pytest.mark.parametrize(
    ("marker", "said"),
    [
        ("[1, 2]", "COMMITTED is not a JSON object"),
        ('{"step": 40, "files": {}}', "COMMITTED has no 'arrays'"),
        ('{"step": 40, "arrays": {}, "files": {"host.json": 3}}', "no size and digest of host"),
    ],
)
def test_a_marker_that_says_nothing_is_damage(checkpointer, marker, said):
    for step in (20, 40):
        checkpointer.save(step, state(float(step)), HOST, wait=True)
    (checkpointer.directory / "step_00000040" / MARKER).write_text(marker)
    with pytest.raises(CheckpointError, match=f"{said}.*delete it and resume from step 20"):
        checkpointer.restore(abstract(state(0.0)))


def test_digests_are_bounded_and_go_to_the_small_files_first(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "DIGEST_BYTES", 4096)
    chosen = checkpoint_files.worth_a_digest({"a": 5000, "b": 1000, "c": 3000, "d": 4000})
    assert chosen == ["b", "c"]
    tree = {"w": jax.random.normal(jax.random.key(0), (65_536,))}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, tree, HOST, wait=True)
        files = json.loads((checkpointer.directory / "step_00000001" / MARKER).read_text())["files"]
        assert files["host.json"][1] is not None
        size, digest, name = max(
            (size, digest or "", name) for name, (size, digest) in files.items()
        )
        assert size > 4096 and not digest
        checkpointer.restore(abstract(tree))
        with (checkpointer.directory / "step_00000001" / name).open("ab") as file:
            file.write(b"more")
        with pytest.raises(CheckpointError, match="is damaged .*has changed"):
            checkpointer.restore(abstract(tree))


def test_another_configuration_is_refused_by_name(checkpointer):
    checkpointer.save(20, state(1.0), HOST, wait=True)
    wanted = state(1.0)
    wanted["params"]["w"] = jnp.zeros((64, 16))
    with pytest.raises(
        CheckpointError, match=r"\['w'\] is float32\[64, 32\] there and float32\[64, 16\]"
    ):
        checkpointer.restore(abstract(wanted))
    wanted = state(1.0) | {"extra": jnp.zeros(2)}
    with pytest.raises(CheckpointError, match=r"\['extra'\] is absent there"):
        checkpointer.restore(abstract(wanted))


@pytest.mark.parametrize(
    "describe", [jax.typeof, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), lambda x: x]
)
def test_any_description_of_the_arrays_will_do(checkpointer, describe):
    checkpointer.save(20, state(3.0), {}, wait=True)
    restored, host = checkpointer.restore(jax.tree.map(describe, state(0.0)), 20)
    jax.tree.map(np.testing.assert_array_equal, restored, state(3.0))
    assert host == {} and restored["params"]["w"].devices() == {jax.devices()[0]}


def test_nothing_to_restore(checkpointer):
    with pytest.raises(CheckpointError, match="no committed checkpoint in"):
        checkpointer.restore(abstract(state(0.0)))


@pytest.mark.parametrize("host", [{"a": (1, 2)}, {1: "a"}, {"a": float("nan")}, {"a": object()}])
def test_host_state_that_would_not_come_back_is_refused(checkpointer, host):
    with pytest.raises(ValueError, match="host_state must be"):
        checkpointer.save(1, state(1.0), host)
    assert checkpointer.latest() is None


@pytest.mark.parametrize("step", [20, 10])
def test_a_committed_step_is_never_replaced(checkpointer, step):
    checkpointer.save(20, state(1.0), HOST, wait=True)
    with pytest.raises(CheckpointError, match=f"already has step 20, so step {step} can't"):
        checkpointer.save(step, state(2.0), HOST)
    assert float(checkpointer.restore(abstract(state(0.0))).state["params"]["w"][0, 0]) == 1.0
    assert [p.name for p in checkpointer.directory.iterdir()] == ["step_00000020"]
    with pytest.raises(ValueError, match="must be 0 or more, not -1"):
        checkpointer.save(-1, state(1.0), HOST)


def test_what_lies_in_the_way_of_a_save_is_cleared(checkpointer):
    """Files under the names of saves, and a checkpoint without its marker."""
    checkpointer.directory.mkdir(parents=True)
    (checkpointer.directory / "step_00000001").write_text("a file")
    (checkpointer.directory / "left.partial").write_text("a file")
    (checkpointer.directory / "link.partial").symlink_to(checkpointer.directory.parent)
    (checkpointer.directory / "step_00000002" / MARKER).mkdir(parents=True)
    assert checkpointer.steps() == []
    for step in (1, 2):
        checkpointer.save(step, state(float(step)), HOST, wait=True)
    assert float(checkpointer.restore(abstract(state(0.0)), 1).state["params"]["w"][0, 0]) == 1.0
    names = sorted(p.name for p in checkpointer.directory.iterdir())
    assert names == ["step_00000001", "step_00000002"] and checkpointer.directory.parent.is_dir()


def test_a_save_that_can_t_clear_up_is_told_as_saved(checkpointer, monkeypatch):
    def refuse():
        raise OSError("busy")

    monkeypatch.setattr(checkpointer, "_superseded", refuse)
    with pytest.raises(CheckpointError, match="step 20 .* is saved, but clearing .* busy"):
        checkpointer.save(20, state(1.0), HOST, wait=True)
    checkpointer.restore(abstract(state(0.0)), 20)


def test_rng_keys_come_back_exactly():
    key = jax.random.fold_in(jax.random.key(3), 9)
    again = key_from_json(json.loads(json.dumps(key_to_json(key))))
    np.testing.assert_array_equal(jax.random.normal(again, (4,)), jax.random.normal(key, (4,)))


def test_an_unwritable_place_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        Checkpointer(tmp_path / "file") as checkpointer,
        pytest.raises(CheckpointError, match="step 1 .* was not saved"),
    ):
        checkpointer.save(1, state(1.0), {})


# Saves steps 1, 2, 3, ... whose arrays hold the step number, until it is killed.
WRITER = """
import sys, jax.numpy as jnp
from fastask_jax.learn.checkpoint import Checkpointer
checkpointer = Checkpointer(sys.argv[1], keep_last=2)
step = checkpointer.latest() or 0
while True:
    step += 1
    tree = {f"w{i}": jnp.full((256, 512), step, jnp.float32) for i in range(8)}
    checkpointer.save(step, tree, {"step": step, "filler": ["x" * 50] * 1000})
"""


def run(code, *arguments, prefix=(), devices=1):
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": " ".join(
                (f"--xla_force_host_platform_device_count={devices}", os.environ["XLA_FLAGS"])
            ),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
    )


def test_ctrl_c_while_a_save_begins_lets_it_end(checkpointer, monkeypatch, capfd):
    monkeypatch.setattr(checkpoint_module, "signature", lambda state: os.kill(os.getpid(), 2))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save(1, state(1.0), {})
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    checkpointer.close()
    assert checkpointer.latest() == 1
    assert not capfd.readouterr().err


def test_a_second_ctrl_c_does_not_wait():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    done = []
    try:
        with pytest.raises(KeyboardInterrupt), uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("first")
            os.kill(os.getpid(), signal.SIGINT)
            done.append("second")
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == ["first"]


@pytest.mark.slow
def test_kill_minus_nine_during_saves_leaves_a_usable_checkpoint(tmp_path):
    rng = random.Random(0)
    reached = 0
    shapes = {f"w{i}": jax.ShapeDtypeStruct((256, 512), jnp.float32) for i in range(8)}
    for _ in range(4):
        writer = run(WRITER, tmp_path)
        try:
            deadline = time.monotonic() + 120
            reader = Checkpointer(tmp_path)
            while (reader.latest() or 0) < reached + 2:
                assert writer.poll() is None, writer.stderr.read()
                assert time.monotonic() < deadline, "the writer made no checkpoint"
                time.sleep(0.02)
            # Strike while a partial directory exists, at a random point of its writing.
            while not list(reader.directory.glob(f"*{PARTIAL}")):
                assert time.monotonic() < deadline
            time.sleep(rng.random() * 0.1)
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
        step = reader.latest()
        restored = reader.restore(shapes)
        reader.close()
        assert step >= reached + 2 and restored.host_state["step"] == step
        for leaf in restored.state.values():
            assert (np.asarray(leaf) == step).all()
        reached = step


# A state saved on one mesh and restored on others.
MESHES = """
import sys, jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from fastask_jax.learn.checkpoint import Checkpointer
specs = {"up": P("fsdp", "tensor"), "down": P("tensor", "fsdp"),
         "experts": P("expert", "fsdp", "tensor"), "norm": P("fsdp"), "bias": P()}
shapes = {"up": (64, 32), "down": (32, 64), "experts": (4, 16, 8), "norm": (64,), "bias": (8,)}
rng = np.random.default_rng(0)
values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
values |= {"half": values["up"].astype(jax.numpy.bfloat16), "step": np.int32(7)}
specs |= {"half": P(("data", "fsdp")), "step": P()}

def on(*sizes):
    if sizes == (1,):
        place = SingleDeviceSharding(jax.devices()[-1])
        return {name: place for name in values}
    mesh = Mesh(np.array(jax.devices()).reshape(sizes), ("data", "fsdp", "expert", "tensor"))
    return {name: NamedSharding(mesh, spec) for name, spec in specs.items()}

saved = jax.device_put(values, on(2, 2, 2, 1))
with Checkpointer(sys.argv[1]) as checkpointer:
    checkpointer.save(7, saved, {"cursor": 3}, wait=True)
    for sizes in ((1, 4, 1, 2), (8, 1, 1, 1), (2, 2, 2, 1), (1,)):
        wanted = on(*sizes)
        abstract = {name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=wanted[name])
                    for name, value in values.items()}
        state, host = checkpointer.restore(abstract)
        assert host == {"cursor": 3}
        for name, value in values.items():
            assert state[name].sharding == wanted[name], (name, state[name].sharding)
            for shard in state[name].addressable_shards:
                np.testing.assert_array_equal(
                    np.asarray(shard.data), value[shard.index], strict=True
                )
        print("MESH", *sizes)
"""


@pytest.mark.slow
def test_a_state_is_restored_on_another_mesh_bit_for_bit(tmp_path):
    child = run(MESHES, tmp_path, devices=8)
    output, errors = child.communicate(timeout=300)
    assert child.returncode == 0, errors
    assert output.splitlines() == ["MESH 1 4 1 2", "MESH 8 1 1 1", "MESH 2 2 2 1", "MESH 1"]


# Fills a small disk up to what the arrays of the next save need plus a margin, then saves.
FILLER = """
import os, shutil, sys, jax, jax.numpy as jnp
from fastask_jax.learn.checkpoint import CheckpointError, Checkpointer
run_dir, margin = sys.argv[1], int(sys.argv[2])
tree = lambda seed: {"w": jax.random.normal(jax.random.key(seed), (1 << 19,))}
checkpointer = Checkpointer(run_dir, keep_last=2)
checkpointer.save(1, tree(1), {"step": 1}, wait=True)
spare = shutil.disk_usage(run_dir).free - (1 << 21) - margin
with open(os.path.join(run_dir, "filler"), "wb") as file:
    file.write(os.urandom(spare))
try:
    checkpointer.save(2, tree(2), {"step": 2, "filler": ["y" * 100] * 5000})
    checkpointer.wait()
except CheckpointError as error:
    print("ERROR", error)
restored = checkpointer.restore(tree(0))
assert restored.host_state == {"step": 1} and (restored.state["w"] == tree(1)["w"]).all()
os.unlink(os.path.join(run_dir, "filler"))
checkpointer.save(3, tree(3), {"step": 3}, wait=True)
print("LATEST", checkpointer.latest(), *sorted(os.listdir(checkpointer.directory)))
"""


def small_disk(directory):
    """A command prefix that mounts an 8 MB disk at the directory, or None where that's refused."""
    script = f'mount -t tmpfs -o size=8m tmpfs {directory} && exec "$@"'
    prefix = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    if shutil.which("unshare") is None:
        return None
    return (
        prefix if subprocess.run([*prefix, "true"], capture_output=True).returncode == 0 else None
    )


@pytest.mark.slow
# Too little for the arrays; room for them but not for Orbax's own files; not for the host state.
@pytest.mark.parametrize("margin", [-100_000, 4_096, 200_000])
def test_a_full_disk_is_one_clear_error_and_leaves_the_last_checkpoint(tmp_path, margin):
    prefix = small_disk(tmp_path)
    if prefix is None:
        pytest.skip("this host doesn't let us mount a small disk (unshare)")
    child = run(FILLER, tmp_path, margin, prefix=prefix)
    output, errors = child.communicate(timeout=300)
    assert child.returncode == 0, errors
    assert "checkpoint of step 2" in output and "the disk is full: free some space" in output
    assert "the last committed one, step 1, is intact" in output
    assert output.rstrip().endswith("LATEST 3 step_00000001 step_00000003")
    assert not list(Path(tmp_path).iterdir())  # the disk went with the child
