"""Compiles the real programs for a TPU slice on a machine without TPUs, and says whether they fit.

    python -m experiments.aot --topology v5p:4x4x4 --mesh.fsdp 16 --mesh.expert 4
    python -m experiments.aot --program decode --topology v5p:2x2x1 --mesh.expert 4 --slots 64
    python -m experiments.aot --lora.rank 32 --topology v6e:4x8 --mesh.fsdp 8 --mesh.tensor 4

Needs the TPU compiler (`pip install '.[aot]'`), no TPU.  What is compiled is what a run
executes: the train step of `fastask_jax.learn` with its optimizer, and one decode step of a
rollout over all slots.  Weights, batches and caches are shapes only, so a plan for a large model
takes minutes and little memory.  The largest buffers are those of the compiler's own assignment,
at the moment when most memory is in use.  Exit code 1: a program doesn't fit.

Left out: speed.  Operations and bytes are the compiler's own counts, in which the body of a loop
(over layers, micro-batches, experts) counts once, however often it runs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding

from experiments.aot_buffers import largest_buffers
from experiments.config import format_config, option, parse, run_main, to_dict
from fastask_jax.learn import Objective, OptimizerConfig, make_train_step
from fastask_jax.model import PRESETS, ModelConfig, init_params, unembedding
from fastask_jax.model.lora import LoraConfig, init_adapters
from fastask_jax.model.mesh import MeshConfig, row_devices, row_spec
from fastask_jax.model.parameters import is_matrix
from fastask_jax.model.sharding import cache_specs, init_cache, param_shardings, shardings
from fastask_jax.rollout.programs import next_tokens

GIB = 2**30
# High-bandwidth memory of one JAX device, as the TPU documentation gives it per chip (a tpu7x
# chip is two devices).
MEMORY_GIB = {"v5e": 16, "v5p": 95, "v6e": 32, "tpu7x": 96}


@dataclass(frozen=True)
class Config:
    model: str = option("qwen3.5-35b-a3b", "model preset")
    topology: str = option("v5p:4x4x4", "TPU slice, generation:shape in chips")
    mesh: MeshConfig = option(MeshConfig(), "")
    program: Literal["both", "train", "decode"] = option(
        "both", "the train step, one decode step of a rollout, or both"
    )
    sequence: int = option(32_768, "tokens of a packed row, and of a slot")
    rows: int = option(0, "rows of a micro-batch; 0 takes one per part of the rows")
    micro_batches: int = option(2, "micro-batches of a step")
    slots: int = option(64, "episodes that are decoded at a time")
    optimizer: OptimizerConfig = option(OptimizerConfig(), "")
    lora: LoraConfig = option(LoraConfig(), "")
    remat: str = option("block", "none, dots or block: what the backward pass computes anew")
    out: Path | None = option(None, "also write the plans as JSON into this file")

    def __post_init__(self) -> None:
        if self.model not in PRESETS:
            raise ValueError(f"model is one of {', '.join(PRESETS)}, not {self.model!r}")
        if self.generation not in MEMORY_GIB:
            raise ValueError(
                f"topology is generation:shape with a generation of {', '.join(MEMORY_GIB)}, for "
                f"example v5p:2x2x1; not {self.topology!r}"
            )
        for name, least in (("sequence", 2), ("rows", 0), ("micro_batches", 1), ("slots", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.out and not self.out.absolute().parent.is_dir():
            raise ValueError(f"the folder of out doesn't exist: {self.out.absolute().parent}")

    @property
    def generation(self) -> str:
        return self.topology.partition(":")[0]

    @property
    def decoder(self) -> ModelConfig:
        return replace(PRESETS[self.model], remat=self.remat)


class NoCompiler(ValueError):
    """The TPU compiler isn't there, or refuses the topology."""


def topology_devices(name: str) -> list[jax.Device]:
    """The devices of a slice that needn't exist.

    Raises:
      NoCompiler: libtpu isn't installed, or knows no such topology.
    """
    settings = {
        # libtpu would otherwise ask the cloud's metadata server what machine this is, and complain
        # at length where it gets no answer.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5p-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_STDERR_LOG_LEVEL": "3",
        "TPU_LOG_DIR": "disabled",
        # No device is taken, so other processes may use the compiler, and devices, meanwhile.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    for variable, value in settings.items():
        os.environ.setdefault(variable, value)
    from jax.experimental import topologies

    if importlib.util.find_spec("libtpu") is None:
        raise NoCompiler("the TPU compiler isn't installed: pip install '.[aot]'")
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    except Exception as error:  # the plugin raises its own types
        raise NoCompiler(f"the TPU compiler refuses topology {name!r}: {error}") from None


def abstract_weights(model: ModelConfig, mesh: Mesh) -> Any:
    """Shapes of the weights where the mesh wants them, in the types in which `load_params` reads
    weights that no optimizer moves: matrices in the model's, the rest float32."""
    shapes = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))

    def leaf(path: tuple[Any, ...], shape: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        kind = model.dtype if is_matrix(path, shape) else "float32"
        return jax.ShapeDtypeStruct(shape.shape, kind, sharding=sharding)

    return jax.tree_util.tree_map_with_path(leaf, shapes, param_shardings(model, mesh))


def train_program(config: Config, mesh: Mesh) -> jax.stages.Lowered:
    """The train step, lowered for the mesh."""
    model, rows = config.decoder, config.rows or row_devices(mesh)
    make = partial(
        make_train_step, model, Objective(), config.optimizer, micro_batch_rows=rows, mesh=mesh
    )
    if config.lora.rank:
        step = make(lora=config.lora, frozen=abstract_weights(model, mesh))
        start = partial(init_adapters, model, config.lora)
    else:
        step, start = make(), partial(init_params, model)
    params = jax.eval_shape(start, jax.random.key(0))
    return step.lower(step.abstract(params), rows * config.micro_batches, config.sequence)


def decode_program(config: Config, mesh: Mesh) -> jax.stages.Lowered:
    """One decode step as a rollout runs it, a token for every slot, lowered for the mesh; the
    cache is donated."""
    model, rows = config.decoder, NamedSharding(mesh, row_spec())

    def step(params: Any, cache: Any, pending: Any, keys: Any, temperature: Any) -> tuple:
        head, active = unembedding(params).astype(model.dtype), jnp.ones_like(pending, bool)
        cache, *sampled = next_tokens(
            model, mesh, params, head, cache, pending, active, keys, temperature
        )
        return cache, tuple(sampled)

    def abstract(shape: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    where = shardings(mesh, cache_specs(model))
    shapes = jax.eval_shape(
        partial(init_cache, model, config.slots, config.sequence, mesh=mesh)
    )
    cache = jax.tree.map(abstract, shapes, where)
    pending = jax.ShapeDtypeStruct((config.slots,), jnp.int32, sharding=rows)
    keys = jax.ShapeDtypeStruct((config.slots, 2), jnp.uint32, sharding=rows)
    jitted = jax.jit(step, donate_argnums=1, out_shardings=(where, rows))
    return jitted.lower(abstract_weights(model, mesh), cache, pending, keys, jnp.float32(1))


PROGRAMS: dict[str, Callable[[Config, Mesh], jax.stages.Lowered]] = {
    "train": train_program,
    "decode": decode_program,
}


def compile_plan(lower: Callable[[], jax.stages.Lowered], capacity: float) -> dict[str, Any]:
    """Compiles and returns the plan: memory per device in GiB by kind, the largest buffers,
    operations, bytes, seconds.

    A program that doesn't fit has `fits` false and what `out_of_memory` finds.
    """
    start = time.perf_counter()
    lowered = lower()
    traced, worked = time.perf_counter(), time.process_time()
    compiled, complaint = None, ""
    with tempfile.TemporaryDirectory(prefix="aot-") as folder:
        # The compiler writes its buffers before it looks whether they fit.
        dump: Any = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        try:
            compiled = lowered.compile(compiler_options=dump)
        except jax.errors.JaxRuntimeError as error:
            complaint = str(error)
            if "RESOURCE_EXHAUSTED" not in complaint:
                raise
        seconds = {
            "trace_seconds": round(traced - start, 1),
            "compile_seconds": round(time.perf_counter() - traced, 1),
            "compile_cpu_seconds": round(time.process_time() - worked, 1),
        }
        largest = [asdict(buffer) for buffer in largest_buffers(Path(folder), 10)]
    plan = {"fits": False, "capacity_gib": capacity, "largest": largest, **seconds}
    if compiled is None:
        return plan | out_of_memory(complaint)
    memory: Any = compiled.memory_analysis()
    cost = compiled.cost_analysis() or {}
    gib = {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
    }
    gib["total"] = sum(gib.values())
    return plan | {
        "fits": gib["total"] <= capacity * GIB,
        "gib": {kind: round(size / GIB, 3) for kind, size in gib.items()},
        "flops": cost.get("flops"),
        "bytes_accessed": cost.get("bytes accessed"),
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
        rows.append(("needed, GiB per device", f"{plan['used_gib']:.2f}"))
        rows.append(("usable, GiB per device", f"{plan['usable_gib']:.2f}"))
    for key, label in (("flops", "operations per device"), ("bytes_accessed", "bytes per device")):
        if plan.get(key):
            rows.append((f"{label}, loops once", f"{plan[key]:.3e}"))
    rows.append(("compile seconds", f"{plan['compile_seconds']:.0f}"))
    rows.append(("compile seconds of CPU", f"{plan['compile_cpu_seconds']:.0f}"))
    rows.append(("fits", "yes" if plan["fits"] else "NO"))
    lines = [f"{label:<34}{value:>12}" for label, value in rows]
    lines += filter(None, [plan.get("message")])
    if plan["largest"]:
        lines.append("largest buffers when most memory is in use, GiB per device")
    for buffer in plan["largest"]:
        each = f"{buffer['count']} x {buffer['gib']:.2f}"
        lines.append(f"  {each:<12}{buffer['shape']:<28}{buffer['name']}")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    presets = {name: Config(model=name) for name in PRESETS}
    config = parse(Config, argv, presets=presets, prog="python -m experiments.aot")
    print(format_config(config), flush=True)
    # The host only traces; the program is compiled for the slice.
    jax.config.update("jax_platforms", "cpu")
    mesh = config.mesh.make(topology_devices(config.topology))
    plans = {}
    for name in PROGRAMS if config.program == "both" else (config.program,):
        print(f"\n{name} step, compiling (minutes for a large model)", flush=True)
        lower = partial(PROGRAMS[name], config, mesh)
        plans[name] = compile_plan(lower, MEMORY_GIB[config.generation])
        print(report(plans[name]), flush=True)
    if config.out:
        settings = to_dict(replace(config, out=None))
        result = {"config": settings, "devices": mesh.size, "programs": plans}
        config.out.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    return 0 if all(plan["fits"] for plan in plans.values()) else 1


if __name__ == "__main__":
    run_main(main)
