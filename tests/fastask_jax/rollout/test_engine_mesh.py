"""Engines over meshes of fake devices against one device, and runs that sample with them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments.config import UsageError, parse, to_json
from experiments.fast_ask import PRESET_CONFIGS, Config
from fastask_jax.report.metrics import read_metrics
from tests.fastask_jax.test_loop import ROOT, flat, small

HERE = Path(__file__).parent


def run(devices, *command):
    flags = f"--xla_force_host_platform_device_count={devices} {os.environ['XLA_FLAGS']}"
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_every_mesh_samples_what_one_device_samples():
    """The logprobs are apart by the rounding of sums in another order."""
    output = run(8, HERE / "mesh_engine.py").splitlines()
    one, *others, refused = [json.loads(line) for line in output if line.startswith("{")]
    meshes = [tuple(line["mesh"]) for line in others]
    assert meshes == [(8, 1, 1, 1), (1, 2, 2, 2), (1, 4, 1, 2), (2, 2, 2, 1)]
    assert one["held"] == 1 and len({tuple(ids) for ids, _ in one["found"]}) > 20
    for line in others:
        assert line["held"] == 1 / np.prod(line["mesh"]), "slots and heads are split"
        for (ids, logprobs), (same, near) in zip(line["found"], one["found"], strict=True):
            assert ids == same
            np.testing.assert_allclose(logprobs, near, atol=1e-4)
    assert "EngineConfig.slots (12) doesn't divide over the 8 parts" in refused["said"]


@pytest.mark.slow
@pytest.mark.parametrize("mode, devices", [("sync", 2), ("async", 4)])
def test_a_run_samples_over_a_mesh(tmp_path, mode, devices):
    config = small(tmp_path / "run", steps=2, eval_tasks=0)
    flags = flat(json.loads(to_json(config))) | {
        "mode": mode, "mesh.fsdp": 2, "rollout_mesh.fsdp": 2, "pack.micro_batch_rows": 4,
    }  # fmt: skip
    command = [f"--{name}={value}" for name, value in flags.items()]
    run(devices, "-m", "experiments.fast_ask", "--preset", "tiny", *command)
    lines = read_metrics(config.run_dir)
    assert [line["step"] for line in lines] == [0, 1, 2]
    # What the engine sampled is what the learner scores, at the first step in any case.
    assert lines[1]["policy/mismatch_k3_max"] < 1e-6


def test_several_processes_sample_on_one_device_each():
    flags = ["--rollout-mesh.fsdp", "2", "--distributed.auto", "true"]
    with pytest.raises(UsageError, match="rollout_mesh is for one learner process"):
        parse(Config, flags, presets=PRESET_CONFIGS)
