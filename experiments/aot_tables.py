"""Runs the plans of docs/aot.md and writes its tables.

    python -m experiments.aot_tables                 # plans that have no result yet, one at a time
    python -m experiments.aot_tables --only v6e      # of those, the ones with v6e in their name
    python -m experiments.aot_tables --run false     # only the tables, from the results that exist

A result is docs/aot/NAME.json, written by `python -m experiments.aot ... --out` in a process of
its own; delete it to have the plan compiled again.  Left out: the search for the meshes.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.config import option, parse, run_main

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "aot"
PAGE = ROOT / "docs" / "aot.md"
BEGIN, END = "<!-- tables: python -m experiments.aot_tables -->", "<!-- end of tables -->"

_35B, _122B = "--model qwen3.5-35b-a3b", "--model qwen3.5-122b-a10b"
_TRAIN, _DECODE = "--program train", "--program decode"
_LORA = "--lora.rank 32"


def _mesh(fsdp: int, expert: int, tensor: int) -> str:
    return f"--mesh.fsdp {fsdp} --mesh.expert {expert} --mesh.tensor {tensor}"


# Name of the result -> arguments of `experiments.aot`.  Meshes of plans without a result are
# guesses.
PLANS: dict[str, str] = {
    "35b-full-v5p-16": f"{_35B} {_TRAIN} --topology v5p:2x2x4 {_mesh(4, 2, 2)}",
    "35b-lora-v5p-4": f"{_35B} {_TRAIN} {_LORA} --topology v5p:2x2x1 {_mesh(1, 2, 2)}",
    "35b-decode-v5p-4": f"{_35B} {_DECODE} --slots 64 --topology v5p:2x2x1 {_mesh(1, 4, 1)}",
    "35b-full-v5p-8": f"{_35B} {_TRAIN} --topology v5p:2x2x2 {_mesh(2, 2, 2)}",
    "35b-full-v6e-64": f"{_35B} {_TRAIN} --topology v6e:8x8 {_mesh(8, 2, 4)}",
    "35b-lora-v6e-8": f"{_35B} {_TRAIN} {_LORA} --topology v6e:2x4 {_mesh(1, 2, 4)}",
    "35b-full-v6e-32": f"{_35B} {_TRAIN} --topology v6e:4x8 {_mesh(4, 2, 4)}",
    "35b-lora-v6e-4": f"{_35B} {_TRAIN} {_LORA} --topology v6e:2x2 {_mesh(1, 1, 4)}",
    "35b-full-tpu7x-16": f"{_35B} {_TRAIN} --topology tpu7x:2x2x2 {_mesh(4, 2, 2)}",
    "35b-lora-tpu7x-8": f"{_35B} {_TRAIN} {_LORA} --topology tpu7x:2x2x1 {_mesh(2, 2, 2)}",
    "122b-decode-v5p-8": f"{_122B} {_DECODE} --slots 64 --topology v5p:2x2x2 {_mesh(1, 8, 1)}",
    "122b-full-v5p-64": f"{_122B} {_TRAIN} --topology v5p:4x4x4 {_mesh(8, 2, 4)}",
    "122b-lora-v5p-8": f"{_122B} {_TRAIN} {_LORA} --topology v5p:2x2x2 {_mesh(1, 2, 4)}",
    "122b-full-v5p-32": f"{_122B} {_TRAIN} --topology v5p:2x4x4 {_mesh(4, 2, 4)}",
    "122b-lora-v5p-4": f"{_122B} {_TRAIN} {_LORA} --topology v5p:2x2x1 {_mesh(1, 1, 4)}",
    "122b-full-v6e-256": f"{_122B} {_TRAIN} --topology v6e:16x16 {_mesh(16, 4, 4)}",
    "122b-lora-v6e-32": f"{_122B} {_TRAIN} {_LORA} --topology v6e:4x8 {_mesh(2, 4, 4)}",
    "122b-full-v6e-128": f"{_122B} {_TRAIN} --topology v6e:8x16 {_mesh(8, 4, 4)}",
    "122b-lora-v6e-16": f"{_122B} {_TRAIN} {_LORA} --topology v6e:4x4 {_mesh(1, 4, 4)}",
    "122b-full-tpu7x-64": f"{_122B} {_TRAIN} --topology tpu7x:2x4x4 {_mesh(8, 2, 4)}",
    "122b-full-tpu7x-32": f"{_122B} {_TRAIN} --topology tpu7x:2x2x4 {_mesh(4, 2, 4)}",
    "122b-lora-tpu7x-8": f"{_122B} {_TRAIN} {_LORA} --topology tpu7x:2x2x1 {_mesh(1, 2, 4)}",
}


@dataclass(frozen=True)
class Config:
    run: bool = option(True, "compile the plans that have no result")
    only: str = option("", "only plans with this in their name")


def compile_missing(only: str) -> None:
    """Runs the command of each plan without a result; one that fails otherwise is named."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name, arguments in PLANS.items():
        out = RESULTS / f"{name}.json"
        if only not in name or out.exists():
            continue
        print(f"{name}: python -m experiments.aot {arguments}", flush=True)
        command = [sys.executable, "-m", "experiments.aot", *shlex.split(arguments)]
        # Written aside first: a plan that is interrupted leaves no half of a result.
        aside = out.with_suffix(".new")
        done = subprocess.run([*command, "--out", str(aside)], cwd=ROOT, check=False)
        if not aside.exists():
            raise RuntimeError(f"plan {name} failed with exit code {done.returncode}; see above")
        os.replace(aside, out)


def cells_of(result: dict[str, Any]) -> list[str]:
    """The cells of one program's plan."""
    config = result["config"]
    (program, plan), *_ = result["programs"].items()
    mesh = " ".join(f"{axis} {size}" for axis, size in config["mesh"].items() if size > 1)
    rank = config["lora"]["rank"]
    what = f"LoRA {rank}" if rank else "full"
    if program == "decode":
        what = f"decode, {config['slots']} slots"
    if "gib" in plan:
        gib = plan["gib"]
        memory = [f"{gib[kind]:.1f}" for kind in ("arguments", "temporaries", "total")]
    else:
        memory = ["", "", f"{plan['used_gib']:.1f}"]
    flops = f"{plan['flops']:.2e}" if plan.get("flops") else ""
    return [
        config["model"].removeprefix("qwen3.5-"),
        what,
        f"{config['topology']} ({result['devices']})",
        mesh,
        *memory,
        "yes" if plan["fits"] else f"**no**, {plan.get('usable_gib', plan['capacity_gib']):.1f}",
        flops,
        f"{plan['compile_seconds']:.0f} ({plan['compile_cpu_seconds']:.0f})",
    ]


HEADER = [
    "model", "program", "slice (devices)", "mesh", "arguments", "temporaries", "total", "fits",
    "operations", "compile s (of CPU)",
]  # fmt: skip


def tables(results: dict[str, dict[str, Any]]) -> str:
    """Markdown: a line per plan, then its command and, where it doesn't fit, its buffers."""
    lines = [f"| {' | '.join(HEADER)} |", f"|{' --- |' * len(HEADER)}"]
    lines += [f"| {' | '.join(cells_of(result))} |" for result in results.values()]
    lines += ["", "The commands, in the same order:", "", "```"]
    lines += [f"python -m experiments.aot {PLANS[name]}" for name in results]
    lines += ["```"]
    for name, result in results.items():
        for plan in result["programs"].values():
            if not plan["fits"]:
                lines += ["", f"Largest buffers of `{name}`, GiB per device:", "", "```"]
                lines += [
                    f"{buffer['count']} x {buffer['gib']:.2f}  {buffer['shape']:<26} "
                    f"{buffer['name']}"
                    for buffer in plan["largest"][:6]
                ]
                lines += ["```"]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    config = parse(Config, argv, prog="python -m experiments.aot_tables")
    if config.run:
        compile_missing(config.only)
    results = {
        name: json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
        for name in PLANS
        if (RESULTS / f"{name}.json").exists()
    }
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables(results)}\n\n{END}{after}", "utf-8")
    print(f"{len(results)} of {len(PLANS)} plans are in {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    run_main(main)
