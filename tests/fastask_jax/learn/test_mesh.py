"""The train step over meshes of fake devices, and over two processes, against one device."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from fastask_jax.model.mesh import MeshConfig, make_mesh, put

HERE = Path(__file__).parent


@pytest.fixture
def start():
    """start(script, *arguments, devices=N): a process with N fake devices, gone with the test."""
    processes = []

    def begin(script, *arguments, devices):
        flags = f"--xla_force_host_platform_device_count={devices}"
        process = subprocess.Popen(
            [sys.executable, HERE / script, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"{flags} {os.environ['XLA_FLAGS']}",
                "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
            },
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.wait()


def finish(process):
    output, errors = process.communicate(timeout=800)
    assert process.returncode == 0, errors[-4000:]
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_every_mesh_takes_the_step_of_one_device(start):
    """Loss, parameters, their updates and the optimizer's first moments (a tenth of the clipped
    gradient), by norm per leaf; the partition of every leaf is checked over there."""
    lines = finish(start("mesh_steps.py", "train_steps", devices=8))
    meshes = [tuple(line["mesh"]) for line in lines]
    assert meshes == [(8, 1, 1, 1), (2, 2, 2, 1), (1, 2, 2, 2), (1, 4, 1, 2)]
    for line in lines:
        print(line)
        assert line["loss"] < 1e-5 and line["metrics"] < 1e-4
        for name in ("parameters", "updates", "first_moments"):
            assert line[name][0] < 1e-5, line
    # Where activations move, the layers said so: the partitioner adds nothing but sums, and
    # nothing that moves is as large as the micro-batch of 8 rows, 32 tokens and 32 channels.
    for line in lines:
        for name, (_, elements) in line["collectives"].items():
            kind, source = name.split(" of ")
            assert kind == "all-reduce" or source in ("all_gather", "reduce_scatter"), name
            assert elements < 8 * 32 * 32, name
    explicit = {"all-gather of all_gather", "reduce-scatter of reduce_scatter"}
    assert explicit <= set(lines[2]["collectives"])


@pytest.mark.slow
def test_other_forms_on_a_mesh(start):
    checks = (
        "rows_that_do_not_divide", "split_experts", "forced_experts", "decoding",
        "bfloat16_gathers", "adapters", "toy_models",
    )  # fmt: skip
    lines = finish(start("mesh_steps.py", *checks, devices=8))
    assert [line["what"] for line in lines] == [
        "rows that don't divide",
        "experts over 4",
        "experts over 8",
        "forced experts",
        "decoding",
        "bfloat16 gathers",
        "adapters",
        *["toy model"] * 3,
        "toy scorer",
    ]
    for line in lines:
        print(line)
        if "error" in line:
            assert line["error"][0] < 1e-5, line
    by_name = {line["what"]: line for line in lines}
    # In float32: router, decay and step projections, convolution and routing weights.
    operands = by_name["bfloat16 gathers"]["operands"]
    wide = {shape for shape, kind in operands if kind == "f32"}
    assert wide == {"16x4x", "16x2x", "4x32x", "2x16x2x", "64x2x"}
    low = {shape for shape, kind in operands if kind == "bf16"}
    assert {"32x16x", "2x16x32x", "2x8x16x", "16x8x"} <= low


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(start, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    files = tmp_path / "one.npz", tmp_path / "two.npz"
    finish(start("mesh_processes.py", 0, 1, port, files[0], devices=4))
    pair = [start("mesh_processes.py", n, 2, port, files[1], devices=2) for n in range(2)]
    for process in pair:
        finish(process)
    one, two = (dict(np.load(file)) for file in files)
    assert one.keys() == two.keys() and len(one) > 15
    for name, expected in one.items():
        error = np.linalg.norm(two[name] - expected)
        assert error <= 1e-5 * np.linalg.norm(expected), (name, error)


def test_meshes_that_do_not_fit_are_refused():
    assert make_mesh().size == 1
    assert MeshConfig().make().shape == {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}
    with pytest.raises(ValueError, match="1 x 9 x 1 x 1 .* needs 9 devices, there are 1"):
        MeshConfig(fsdp=9).make()
    with pytest.raises(ValueError, match="mesh tensor must be at least 1, not 0"):
        MeshConfig(tensor=0)


def test_put_copies():
    mesh = make_mesh()
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    given = {"a": np.arange(6.0, dtype=np.float32)}
    placed = put(given, whole)
    given["a"][0] = 9.0
    assert placed["a"][0] == 0.0 and placed["a"].sharding == whole
    again = put(placed, {"a": whole})
    placed["a"].delete()
    assert again["a"][1] == 1.0
