"""Memory, bytes and operations of the kernels, from programs compiled for a TPU v5p.

Nothing runs: forward and backward are compiled ahead of time at the shapes of Qwen3.5-35B-A3B and
32,768 tokens.  Temporaries are the compiler's, and so are bytes where no loop hides them.
Operations are those of the matrix products in the traced program, each loop counted as often as
it runs.  The least bytes are inputs, outputs and their gradients, each moved once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.aot import out_of_memory, topology_devices
from kernels.attention import attention
from kernels.attention.splash import BLOCK
from kernels.gated_delta import gated_delta
from kernels.linear_logprob import linear_logprob
from kernels.linear_logprob.xla import layout

TOKENS, WIDTH, VOCAB = 32_768, 2_048, 248_320
KEY_HEADS, VALUE_HEADS, DELTA_WIDTH = 16, 32, 128
HEADS, GROUPS, HEAD_WIDTH = 16, 2, 256
CHUNK = 64
LOW, WIDE, WHOLE = jnp.bfloat16, jnp.float32, jnp.int32
Shape = tuple[tuple[int, ...], Any]


@dataclass(frozen=True)
class Program:
    """arguments: those differentiated, then `rest`.  least_operations: forward and backward.
    loops: how often a loop with a run-time bound runs.  operations: where the trace can't tell,
    as a kernel skips parts of its grid."""

    name: str
    form: str
    function: Callable[..., Any]
    arguments: tuple[Shape, ...]
    rest: tuple[Shape, ...]
    least_operations: float
    loops: int = 1
    operations: float | None = None


def _plain(hidden: jax.Array, head: jax.Array, ids: jax.Array) -> tuple[jax.Array, ...]:
    return linear_logprob(hidden, head, ids, implementation="reference")


def _chunked(hidden: jax.Array, head: jax.Array, ids: jax.Array) -> tuple[jax.Array, ...]:
    return linear_logprob(hidden, head, ids, implementation="xla")


def _delta(implementation: str) -> Callable[..., Any]:
    def run(q, k, v, log_decay, beta, ids):
        return gated_delta(
            q, k, v, log_decay, beta, ids, chunk=CHUNK, implementation=implementation
        )[0]

    return run


def _packed(q, k, v, ids):
    return attention(q, k, v, ids, implementation="splash")


def programs() -> list[Program]:
    head = ((TOKENS, WIDTH), LOW), ((WIDTH, VOCAB), LOW)
    keys, values = (TOKENS, KEY_HEADS, DELTA_WIDTH), (TOKENS, VALUE_HEADS, DELTA_WIDTH)
    delta = (
        *[((1, *keys), LOW)] * 2,
        ((1, *values), LOW),
        *[((1, *values[:2]), WIDE)] * 2,
    )
    heads = (
        ((1, TOKENS, HEADS, HEAD_WIDTH), LOW),
        *[((1, TOKENS, GROUPS, HEAD_WIDTH), LOW)] * 2,
    )
    ids, row = ((TOKENS,), WHOLE), ((1, TOKENS), WHOLE)
    product = TOKENS * WIDTH * VOCAB
    # Token by token: decay, read, write and query of a state of K x V, and twice that backwards.
    recurrence = 3 * 6 * TOKENS * VALUE_HEADS * DELTA_WIDTH**2
    # Pairs of a causal row: two products forward, five backward.
    pairs = TOKENS * (TOKENS + 1) / 2
    blocks = TOKENS // BLOCK
    computed = blocks * (blocks + 1) / 2 * BLOCK**2
    per_pair = 2 * HEADS * HEAD_WIDTH
    return [
        Program("linear_logprob", "plain", _plain, head, (ids,), 6 * product),
        Program(
            "linear_logprob", "xla", _chunked, head, (ids,), 6 * product,
            loops=-(-TOKENS // layout(TOKENS, VOCAB, None, "tpu").tokens),
        ),
        Program("gated_delta", "pallas", _delta("pallas"), delta, (row,), recurrence),
        Program("gated_delta", "xla", _delta("xla"), delta, (row,), recurrence),
        # The kernels for the gradients of queries and of keys each compute the weights anew.
        Program(
            "attention", "splash", _packed, heads, (row,), 7 * pairs * per_pair,
            operations=9 * computed * per_pair,
        ),
    ]  # fmt: skip


def operations(jaxpr: Any, loops: int) -> float:
    """Operations of the matrix products of a jaxpr, those of kernels and loops included."""
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            depth = math.prod(equation.invars[0].aval.shape[i] for i in contracted)
            total += 2 * depth * math.prod(equation.outvars[0].aval.shape)
            continue
        times = 1
        if equation.primitive.name == "pallas_call":
            times = math.prod(equation.params["grid_mapping"].grid)
        elif equation.primitive.name == "scan":
            times = equation.params["length"]
        elif equation.primitive.name == "while":
            times = loops
        total += times * sum(operations(inner, loops) for inner in _inner(equation.params))
    return total


def _inner(parameters: dict[str, Any]) -> list[Any]:
    """The jaxprs among an equation's parameters."""
    values = jax.tree.leaves(list(parameters.values()), is_leaf=lambda x: hasattr(x, "jaxpr"))
    return [x for x in (getattr(x, "jaxpr", x) for x in values) if hasattr(x, "eqns")]


def measure(program: Program) -> dict[str, Any]:
    """GiB of temporaries, bytes and operations of forward and backward, and the least of them."""
    mesh = Mesh(np.array(topology_devices("v5p:2x2x1")[:1]), ("all",))
    place = NamedSharding(mesh, PartitionSpec())
    arguments, rest = (
        [jax.ShapeDtypeStruct(*shape, sharding=place) for shape in shapes]
        for shapes in (program.arguments, program.rest)
    )

    def step(cotangents, arguments, rest):
        out, pull = jax.vjp(lambda *x: program.function(*x, *rest), *arguments)
        return out, pull(cotangents)

    outputs = jax.eval_shape(program.function, *arguments, *rest)
    cotangents = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), outputs
    )
    with jax.set_mesh(mesh):  # implementations and block sizes go by its platform
        traced = jax.jit(step).trace(cotangents, arguments, rest)
    counted = program.operations or operations(traced.jaxpr.jaxpr, program.loops)
    moved = [*arguments, *arguments, *rest, *jax.tree.leaves((outputs, cotangents))]
    least = sum(x.size * x.dtype.itemsize for x in moved)
    result = {
        "operations": counted,
        "least_operations": program.least_operations,
        "least_bytes": least,
        "bytes": None,
    }
    try:
        compiled = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        # A program that needs more than the device has; the compiler says how much.
        needed = out_of_memory(str(error)).get("used_gib")
        if needed is None:
            raise
        return result | {"temporaries_gib": needed, "too_large": True}
    text = compiled.memory_analysis()
    if program.form in ("pallas", "splash"):
        result["bytes"] = compiled.cost_analysis()["bytes accessed"]
    return result | {"temporaries_gib": text.temp_size_in_bytes / 2**30, "too_large": False}


def table(progress: Callable[[str], None], only: str | None = None) -> list[str]:
    """The Markdown rows."""
    lines = [
        "| operation | form | temporaries, GiB | bytes / least | operations / least |",
        "|---|---|---|---|---|",
    ]
    for program in programs():
        if only not in (None, program.name):
            continue
        found = measure(program)
        progress(f"{program.name} {program.form}: {found}")
        size = f"{found['temporaries_gib']:.2f}" + (" (doesn't fit)" if found["too_large"] else "")
        moved = "-"
        if found["bytes"]:
            ratio = found["bytes"] / found["least_bytes"]
            moved = f"{found['bytes']:.2e} / {found['least_bytes']:.2e} = {ratio:.2f}"
        ratio = found["operations"] / found["least_operations"]
        done = f"{found['operations']:.2e} / {found['least_operations']:.2e} = {ratio:.2f}"
        lines.append(f"| {program.name} | {program.form} | {size} | {moved} | {done} |")
    return lines
