"""Compiles the real programs for a TPU slice on a machine without TPUs, and says whether they fit.

    python -m experiments.aot --topology v5p:4x4x4 --mesh.fsdp 16 --mesh.expert 4
    python -m experiments.aot --topology v6e:8x8 --mesh.fsdp 64 --out plan.json

Needs the TPU compiler (`pip install 'fastask-jax[aot]'`), no TPU.  What is compiled is what a run
executes: the train step of `fastask_jax.learn` with its optimizer.  Weights and batches are shapes
only, so a plan for a large model takes minutes and little memory.  Exit code 1: the program
doesn't fit.

Left out: the decode step, the names of the largest buffers, and speed (operations and bytes are
the compiler's own counts).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from experiments.config import format_config, option, parse, run_main
from fastask_jax.learn import Objective, OptimizerConfig, make_train_step
from fastask_jax.model import PRESETS, ModelConfig, init_params
from fastask_jax.model.mesh import MeshConfig, row_devices

GIB = 2**30
# High-bandwidth memory of one JAX device, as the TPU documentation gives it per chip (a tpu7x
# chip is two devices).
MEMORY_GIB = {"v5e": 16, "v5p": 95, "v6e": 32, "tpu7x": 96}


@dataclass(frozen=True)
class Config:
    model: str = option("qwen3.5-35b-a3b", "model preset")
    topology: str = option("v5p:4x4x4", "TPU slice, generation:shape in chips")
    mesh: MeshConfig = option(MeshConfig(), "")
    sequence: int = option(32_768, "tokens of a packed row")
    rows: int = option(0, "rows of a micro-batch; 0 takes one per part of the rows")
    micro_batches: int = option(2, "micro-batches of a step")
    optimizer: OptimizerConfig = option(OptimizerConfig(), "")
    remat: str = option("block", "none, dots or block: what the backward pass computes anew")
    out: Path | None = option(None, "also write the plan as JSON into this file")

    def __post_init__(self) -> None:
        if self.model not in PRESETS:
            raise ValueError(f"model is one of {', '.join(PRESETS)}, not {self.model!r}")
        if self.generation not in MEMORY_GIB:
            raise ValueError(
                f"topology is generation:shape with a generation of {', '.join(MEMORY_GIB)}, for "
                f"example v5p:2x2x1; not {self.topology!r}"
            )

    @property
    def generation(self) -> str:
        return self.topology.partition(":")[0]

    @property
    def decoder(self) -> ModelConfig:
        return replace(
            PRESETS[self.model], remat=self.remat, attention_implementation="splash"
        )


class NoCompiler(RuntimeError):
    """The TPU compiler isn't there, or refuses the topology."""


def topology_devices(name: str) -> list[jax.Device]:
    """The devices of a slice that needn't exist.

    Raises:
      NoCompiler: libtpu isn't installed, or knows no such topology.
    """
    # libtpu would otherwise ask the cloud's metadata server what machine this is.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # No device is taken, so other processes may use the compiler, and devices, at the same time.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    if importlib.util.find_spec("libtpu") is None:
        raise NoCompiler("the TPU compiler isn't installed: pip install 'fastask-jax[aot]'")
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    except Exception as error:  # the plugin raises its own types
        raise NoCompiler(f"the TPU compiler refuses topology {name!r}: {error}") from None


def train_program(config: Config, devices: list[jax.Device]) -> jax.stages.Lowered:
    """The train step, lowered for the slice."""
    mesh = config.mesh.make(devices)
    rows = config.rows or row_devices(mesh)
    step = make_train_step(
        config.decoder, Objective(), config.optimizer, micro_batch_rows=rows, mesh=mesh
    )
    params = jax.eval_shape(lambda: init_params(config.decoder, jax.random.key(0)))
    return step.lower(step.abstract(params), rows * config.micro_batches, config.sequence)


def compile_plan(lower: Callable[[], jax.stages.Lowered], capacity: float) -> dict[str, Any]:
    """Compiles and returns the plan: memory per device in GiB by kind, operations, bytes, seconds.

    A program that doesn't fit has `fits` false and what `out_of_memory` finds.
    """
    start = time.perf_counter()
    lowered = lower()
    traced = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if "RESOURCE_EXHAUSTED" not in text:
            raise
        seconds = round(time.perf_counter() - traced, 1)
        found = out_of_memory(text)
        return {"fits": False, "capacity_gib": capacity, "compile_seconds": seconds, **found}
    memory: Any = compiled.memory_analysis()
    cost = compiled.cost_analysis() or {}
    total = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.generated_code_size_in_bytes
    )
    gib = {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "total": total,
    }
    return {
        "fits": total <= capacity * GIB,
        "capacity_gib": capacity,
        "gib": {kind: round(size / GIB, 3) for kind, size in gib.items()},
        "flops": cost.get("flops"),
        "bytes_accessed": cost.get("bytes accessed"),
        "trace_seconds": round(traced - start, 1),
        "compile_seconds": round(time.perf_counter() - traced, 1),
    }


def out_of_memory(message: str) -> dict[str, Any]:
    """What XLA's error says: GiB needed and GiB that there are, or else its own words."""
    scale = {"K": 2**-20, "M": 2**-10, "G": 1.0, "T": 2**10}
    found = re.search(r"\(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)", message)
    if not found:
        return {"message": message[:2000]}
    return {
        "used_gib": float(found[1]) * scale[found[2]],
        "usable_gib": float(found[3]) * scale[found[4]],
    }


def report(plan: dict[str, Any]) -> str:
    """The plan in lines for people."""
    rows = [("capacity, GiB per device", f"{plan['capacity_gib']:.0f}")]
    for kind, size in plan.get("gib", {}).items():
        rows.append((f"{kind}, GiB per device", f"{size:.2f}"))
    if "used_gib" in plan:
        rows.append(("temporaries needed, GiB", f"{plan['used_gib']:.2f}"))
        rows.append(("usable, GiB", f"{plan['usable_gib']:.2f}"))
    for key, label in (("flops", "operations per device"), ("bytes_accessed", "bytes per device")):
        if plan.get(key):
            rows.append((label, f"{plan[key]:.3e}"))
    rows.append(("compile seconds", f"{plan['compile_seconds']:.0f}"))
    rows.append(("fits", "yes" if plan["fits"] else "NO"))
    lines = [f"{label:<28}{value:>12}" for label, value in rows]
    return "\n".join([*lines, *filter(None, [plan.get("message")])])


def main(argv: list[str]) -> int:
    presets = {name: Config(model=name) for name in PRESETS}
    config = parse(Config, argv, presets=presets, prog="python -m experiments.aot")
    print(format_config(config), flush=True)
    # The host only traces; the program is compiled for the slice.
    jax.config.update("jax_platforms", "cpu")
    devices = topology_devices(config.topology)
    plan = compile_plan(lambda: train_program(config, devices), MEMORY_GIB[config.generation])
    print(report(plan))
    if config.out:
        config.out.write_text(json.dumps(plan, indent=2) + "\n", "utf-8")
    return 0 if plan["fits"] else 1


if __name__ == "__main__":
    run_main(main)
