"""Ahead-of-time plans: a real compile for a TPU slice where the compiler is installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.aot import Config, abstract_weights, out_of_memory, report
from experiments.aot_buffers import Buffer, largest_buffers
from fastask_jax.model.mesh import MeshConfig

MESSAGE = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
    "required for HLO temporaries (27.03G) exceeds available HBM (15.75G). HLO module: jit__update."
)


def test_the_compilers_complaint_is_read() -> None:
    assert out_of_memory(MESSAGE) == {"used_gib": 27.03, "usable_gib": 15.75}
    assert out_of_memory("another way to say it") == {"message": "another way to say it"}


@pytest.mark.parametrize(
    "fields, match",
    [
        ({"topology": "v2:2x2"}, "generation of v5e"),
        ({"model": "llama"}, "model is one of"),
        ({"sequence": 0}, "sequence must be at least 2"),
        ({"rows": -4}, "rows must be at least 0"),
        ({"micro_batches": 0}, "micro_batches must be at least 1"),
        ({"out": Path("no/such/folder/plan.json")}, "folder of out doesn't exist"),
    ],
)
def test_settings_that_can_t_be_are_refused(fields, match) -> None:
    with pytest.raises(ValueError, match=match):
        Config(**fields)


def test_a_plan_that_does_not_fit_names_its_buffers() -> None:
    buffer = {"gib": 16.0, "count": 2, "shape": "f32[65536,65536]", "name": "backward/sort"}
    plan = {
        "fits": False,
        "capacity_gib": 16,
        "used_gib": 32.25,
        "usable_gib": 15.75,
        "compile_seconds": 61.2,
        "compile_cpu_seconds": 40.0,
        "largest": [buffer],
    }
    text = report(plan)
    assert "needed, GiB per device" in text and "32.25" in text
    assert text.splitlines()[-1].split() == ["2", "x", "16.00", "f32[65536,65536]", "backward/sort"]


# Cut from what XLA writes for a program: two layers' moments, what a loop carries, a fusion
# without a name of its own, two values in one place, and one in fast memory.
RANGES = """\
HloLiveRange (max 8):
  BufferLiveRange:
    param.1{}:0-8
  Live ranges at 4 (peak):
    param.1{}: 2147483648 bytes (cumulative: 2147483648 bytes)
    param.2{}: 2147483648 bytes (cumulative: 4294967296 bytes)
    wide.param.5{13}: 3221225472 bytes (cumulative: 7516192768 bytes)
    fusion.7{}: 1073741824 bytes (cumulative: 8589934592 bytes)
    copy.8{}: 1073741824 bytes (cumulative: 9663676416 bytes)
    fast.9{}: 1073741824 bytes (cumulative: 9663676416 bytes)
  Stack trace breakdown for peak usage: 8 589 934 592 bytes
    main (100.0%)
"""
ASSIGNMENT = """\
allocation 0: size 2147483648, page 0, parameter 0, shape |f32[512,1048576]| at ShapeIndex {}:
 value: <1 param.1 @0> (size=2147483648,offset=0): f32[512,1048576]{1,0:T(8,128)}
allocation 1: size 2147483648, page 0, parameter 1, shape |f32[512,1048576]| at ShapeIndex {}:
 value: <2 param.2 @0> (size=2147483648,offset=0): f32[512,1048576]{1,0:T(8,128)}
allocation 2: size 4294967296, page 0, preallocated-temp:
 value: <3 wide.param.5{13} (phi) @0> (size=3221225472,offset=0): f32[768,1048576]{1,0:T(8,128)}
 value: <4 add.6 @0> (size=3221225472,offset=0): f32[768,1048576]{1,0:T(8,128)}
 value: <5 fusion.7 @0> (size=1073741824,offset=3221225472): bf16[512,1048576]{1,0:T(8,128)}
 value: <6 copy.8 @0> (size=1073741824,offset=3221225472): bf16[512,1048576]{1,0:T(8,128)}
allocation 3: size 1073741824, color 1, page 0, preallocated-temp:
 value: <7 fast.9 @1> (size=1073741824,offset=0): bf16[512,1048576]{1,0:T(8,128)S(1)}
"""
PROGRAM = """\
%fused_computation.7 (param_0: f32[512,1048576]) -> bf16[512,1048576] {
  ROOT %convert.1 = bf16[512,1048576] convert(%param_0), metadata={op_name="jit(f)/while/body/transpose(jvp())/checkpoint/Attention/mul" stack_frame_id=3}
}

ENTRY %main.3 (param.1: f32[512,1048576]) -> f32[] {
  %param.1 = f32[512,1048576]{1,0} parameter(0), metadata={op_name="mu[\\'layer_0\\']"}
  %param.2 = f32[512,1048576]{1,0} parameter(1), metadata={op_name="mu[\\'layer_1\\']"}
  %add.6 = f32[768,1048576]{1,0} add(%x, %y), metadata={op_name="jit(f)/while/body/add"}
  %fusion.7 = bf16[512,1048576]{1,0} fusion(%param.1), kind=kLoop, calls=%fused_computation.7
}
"""  # noqa: E501


def test_the_largest_buffers_are_read_from_the_compilers_files(tmp_path) -> None:
    start = "module_0000.jit_f.after_optimizations"
    for ending, text in (
        ("-live-range", RANGES), ("-buffer-assignment", ASSIGNMENT), ("", PROGRAM),
    ):  # fmt: skip
        (tmp_path / f"{start}{ending}.txt").write_text(text)
    expected = [
        Buffer(2.0, 2, "f32[512,1048576]", "mu['layer_*']"),
        Buffer(3.0, 1, "f32[768,1048576]", "add"),
        Buffer(1.0, 1, "bf16[512,1048576]", "backward/Attention/mul"),
    ]
    assert largest_buffers(tmp_path, 10) == expected
    assert largest_buffers(tmp_path, 1) == expected[:1]


def test_without_files_there_are_no_buffers(tmp_path) -> None:
    assert largest_buffers(tmp_path, 10) == []


def test_frozen_weights_are_matrices_in_the_models_type() -> None:
    model = Config(model="qwen3.5-35b-a3b").decoder
    weights = abstract_weights(model, MeshConfig().make())
    layer = weights["blocks"]["layer_0"]
    assert weights["embedding"].dtype == layer["moe"]["gate_up"].dtype == "bfloat16"
    assert layer["mixer"]["a_log"].dtype == weights["final_norm"].dtype == "float32"


DECODE = """
import jax
from experiments.aot import Config, MeshConfig, compile_plan, decode_program, report
config = Config(model="tiny", mesh=MeshConfig(expert=2, tensor=2), slots=4, sequence=64)
mesh = config.mesh.make(jax.devices())
plan = compile_plan(lambda: decode_program(config, mesh), 16)
print(report(plan))
assert plan["fits"] and plan["largest"]
lowered = decode_program(config, mesh)
donated = [leaf.donated for leaf in jax.tree.leaves(lowered.args_info[0][1])]
assert donated and all(donated), donated
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""} | environment,
    )


def test_the_decode_step_compiles_over_a_mesh_and_gives_its_cache_away() -> None:
    flags = f"--xla_force_host_platform_device_count=4 {os.environ['XLA_FLAGS']}"
    done = run("-c", DECODE, XLA_FLAGS=flags)
    assert done.returncode == 0, done.stderr[-2000:]


MESH = """
from experiments.aot import MeshConfig, topology_devices
mesh = MeshConfig(fsdp=8, expert=2, tensor=4).make(topology_devices("v6e:8x8"))
assert len({device.id for device in mesh.devices.flat}) == 64
"""


def test_two_axes_of_a_mesh_may_share_a_side_of_the_slice() -> None:
    pytest.importorskip("libtpu", reason="the TPU compiler (extra aot) isn't installed")
    done = run("-c", MESH)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_both_steps_compile_for_a_slice_and_a_large_one_does_not_fit(tmp_path) -> None:
    pytest.importorskip("libtpu", reason="the TPU compiler (extra aot) isn't installed")
    out = tmp_path / "plan.json"
    common = ("-m", "experiments.aot", "--preset", "tiny", "--topology", "v5e:2x2")
    common = (*common, "--mesh.data", "4", "--sequence", "512", "--slots", "8")
    fits = run(*common, "--out", str(out))
    assert fits.returncode == 0, fits.stderr[-2000:]
    assert not fits.stderr.strip(), "libtpu is to be quiet"
    plans = json.loads(out.read_text())["programs"]
    for plan in plans.values():
        assert plan["fits"] and plan["flops"] > 0 and plan["largest"]
        assert plan["gib"]["arguments"] < plan["gib"]["total"] < 16
    # Weights and two moments in float32: the arguments can't be smaller.
    assert plans["train"]["gib"]["arguments"] > 12 * 0.6e6 / 2**30
    lora = run(*common, "--program", "train", "--lora.rank", "4", "--out", str(out))
    assert lora.returncode == 0, lora.stderr[-2000:]
    adapters = json.loads(out.read_text())["programs"]["train"]
    assert adapters["gib"]["arguments"] < plans["train"]["gib"]["arguments"]
    too_large = run(*common, "--program", "train", "--rows", "8192")
    assert too_large.returncode == 1, too_large.stderr[-2000:]
    assert "NO" in too_large.stdout and "usable, GiB" in too_large.stdout
    # The logits' rows, or what a layer keeps: named by where they come from.
    assert "largest buffers" in too_large.stdout
    assert "GatedDeltaNet" in too_large.stdout or "MixtureOfExperts" in too_large.stdout
