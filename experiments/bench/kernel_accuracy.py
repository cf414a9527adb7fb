"""Errors of the operations in `kernels` against their definitions in float64.

Inputs are random and adversarial; those of bfloat16 are rounded first, and the definition gets
what they were rounded to.  An error is the norm of the difference over the norm of the right
array, which is rounded to the type of the result: rounding alone is no error of an operation.  It
is taken for each output and each gradient, of which a case keeps the worst.  Arrays with less than
a tenth of the norm of the largest one count with that tenth: some gradients are zero but for
rounding.  TPU kernels run in interpret mode, on the small cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from kernels.attention import attention
from kernels.choice import NAMES
from kernels.gated_delta import gated_delta
from kernels.grouped_matmul import grouped_matmul
from kernels.linear_logprob import linear_logprob

LENGTHS = (1, 7, 63, 64, 65, 4097)
DTYPES = ("float32", "bfloat16")
TPU_KERNELS = ("pallas", "splash", "megablox")
# Tokens up to which a TPU kernel is interpreted.
_INTERPRETED = 65
Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Case:
    """inputs: float arrays, differentiated; those after the first `low` stay float32.  rest:
    further arguments."""

    operation: str
    name: str
    inputs: Arrays
    rest: tuple[Any, ...]
    tokens: int
    low: int | None = None


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _segments(length: int, kind: str) -> np.ndarray:
    if kind == "every token its own segment":
        return np.arange(length, dtype=np.int32)[None]
    starts = np.random.default_rng(length).random(length) < 0.02
    return np.cumsum(starts, dtype=np.int32)[None] + 1


def _logprob_cases() -> Iterator[Case]:
    def case(name: str, tokens: int, vocab: int, heat: float = 1.0, change: Any = None) -> Case:
        hidden, head = _normal(1, tokens, 64), 0.2 * _normal(2, 64, vocab)
        if change is not None:
            hidden, head = change(hidden, head)
        ids = np.random.default_rng(3).integers(0, vocab, tokens).astype(np.int32)
        name = f"{name}, {tokens} tokens, vocabulary {vocab:,}"
        return Case("linear_logprob", name, (hidden, head), (ids, np.float32(heat)), tokens)

    def huge(hidden: np.ndarray, head: np.ndarray) -> Arrays:
        head = head.copy()
        head[:, 5] *= 500
        return hidden, head

    for tokens in LENGTHS:
        yield case("random", tokens, 300)
    yield case("random", 4097, 1000)
    yield case("random", 65, 248_320)
    yield case("temperature 0.1", 65, 1000, 0.1)
    yield case("temperature 2", 65, 1000, 2.0)
    yield case("all logits equal", 64, 1000, change=lambda x, w: (x, np.repeat(w[:, :1], 1000, 1)))
    yield case("one huge logit", 64, 1000, change=huge)
    yield case("one huge logit", 7, 248_320, change=huge)


def _delta_cases() -> Iterator[Case]:
    def case(name: str, length: int, segments: str = "", **changes: float) -> Case:
        q, k = (_normal(seed, 1, length, 2, 16) for seed in (1, 2))
        q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        if changes.get("same_keys"):
            k = np.broadcast_to(k[:, :1], k.shape).copy()
        decay = -np.exp(_normal(4, 1, length, 4) - 1) * np.float32(changes.get("decay", 1.0))
        beta = 1 / (1 + np.exp(-_normal(5, 1, length, 4) - np.float32(changes.get("gate", 0.0))))
        state = _normal(6, 1, 4, 16, 16)
        inputs = (q, k, _normal(3, 1, length, 4, 16), decay, beta, state)
        name = f"{name}, {length} tokens"
        # Gates and states are float32 in every model.
        return Case("gated_delta", name, inputs, (_segments(length, segments),), length, low=3)

    for length in LENGTHS:
        yield case("random", length)
    own = "every token its own segment"
    yield case(own, 65, own)
    yield case("no decay, one key", 64, decay=0.0, same_keys=1.0, gate=9.0)
    yield case("strong decay", 65, decay=300.0)


def _attention_cases() -> Iterator[Case]:
    def case(name: str, length: int, width: int = 16, scale: float = 1.0, kind: str = "") -> Case:
        q = scale * _normal(1, 1, length, 2, width)
        k, v = (_normal(seed, 1, length, 1, width) for seed in (2, 3))
        name = f"{name}, {length} tokens"
        return Case("attention", name, (q, k, v), (_segments(length, kind),), length)

    for length in LENGTHS:
        yield case("random", length)
    own = "every token its own segment"
    yield case(own, 65, kind=own)
    yield case("heads of 256", 65, width=256)
    yield case("scores of 100", 64, scale=30.0)


def _grouped_cases() -> Iterator[Case]:
    def case(name: str, sizes: list[int]) -> Case:
        tokens = sum(sizes)
        inputs = _normal(1, tokens, 48), _normal(2, len(sizes), 48, 32)
        name = f"{name}, {tokens} rows"
        return Case("grouped_matmul", name, inputs, (np.asarray(sizes, np.int32),), tokens)

    for tokens in LENGTHS:
        groups = np.random.default_rng(tokens).integers(0, 8, tokens)
        yield case("random groups", np.bincount(groups, minlength=8).tolist())
    yield case("all in one group", [0, 0, 64, 0])
    yield case("every other group empty", [30, 0, 35, 0])


def cases() -> Iterator[Case]:
    for make in (_logprob_cases, _delta_cases, _attention_cases, _grouped_cases):
        yield from make()


def _apply(operation: str, implementation: str, rest: tuple, *inputs: jax.Array) -> Any:
    if operation == "linear_logprob":
        return linear_logprob(*inputs, *rest, implementation=implementation)
    if operation == "gated_delta":
        q, k, v, log_decay, beta, state = inputs
        return gated_delta(
            q, k, v, log_decay, beta, rest[0], state, implementation=implementation
        )
    function: Any = {"attention": attention, "grouped_matmul": grouped_matmul}[operation]
    return (function(*inputs, *rest, implementation=implementation),)


def _evaluated(case: Case, implementation: str, inputs: tuple) -> tuple[list, list]:
    """Outputs, and gradients of their products with fixed random numbers."""

    def objective(rest: tuple, *inputs: jax.Array) -> tuple[jax.Array, Any]:
        outputs = _apply(case.operation, implementation, rest, *inputs)
        # Numbers that bfloat16 holds, or rounding them would count as an error of the operation.
        weights = [
            jnp.asarray(_normal(9 + i, *x.shape), jnp.bfloat16).astype(x.dtype)
            for i, x in enumerate(outputs)
        ]
        terms = [jnp.vdot(w, x) for w, x in zip(weights, outputs, strict=True)]
        return jnp.sum(jnp.stack(terms)), outputs

    numbers = tuple(range(1, 1 + len(inputs)))
    run = jax.jit(
        jax.grad(objective, numbers, has_aux=True),
        compiler_options={"xla_backend_optimization_level": 0},
    )
    interpreting = implementation in TPU_KERNELS
    with pltpu.force_tpu_interpret_mode() if interpreting else nullcontext():
        gradients, outputs = jax.block_until_ready(run(case.rest, *inputs))
    return [np.asarray(x) for x in outputs], [np.asarray(x) for x in gradients]


def _worst(got: list[np.ndarray], right: list[np.ndarray]) -> float:
    norms = [float(np.linalg.norm(x)) for x in right]
    floor = max(max(norms) / 10, 1e-30)
    errors = (
        float(np.linalg.norm(a.astype(np.float64) - b.astype(a.dtype).astype(np.float64)))
        for a, b in zip(got, right, strict=True)
    )
    return max(error / max(norm, floor) for error, norm in zip(errors, norms, strict=True))


def errors(case: Case) -> Iterator[tuple[str, str, float, float]]:
    """Implementation, type, error of the outputs and of the gradients."""
    for dtype in DTYPES:
        rounded = [jnp.asarray(x, dtype) for x in case.inputs[: case.low]]
        rounded += [jnp.asarray(x) for x in case.inputs[len(rounded) :]]
        with jax.enable_x64(True):
            exact = tuple(jnp.asarray(np.asarray(x, np.float64)) for x in rounded)
            right = _evaluated(case, "reference", exact)
        for name in NAMES[case.operation][1:]:
            if name in TPU_KERNELS and case.tokens > _INTERPRETED:
                continue
            got = _evaluated(case, name, tuple(rounded))
            yield name, dtype, _worst(got[0], right[0]), _worst(got[1], right[1])


def table(progress: Callable[[str], None], only: str | None = None) -> list[str]:
    """The Markdown rows: for each implementation and type the worst cases."""
    worst: dict[tuple[str, str, str], list[tuple[float, str]]] = {}
    for case in cases():
        if only not in (None, case.operation):
            continue
        for name, dtype, *figures in errors(case):
            shown = " ".join(f"{figure:.1e}" for figure in figures)
            progress(f"{case.operation} {name} {dtype} {case.name}: {shown}")
            row = worst.setdefault((case.operation, name, dtype), [(0.0, ""), (0.0, "")])
            for part, figure in enumerate(figures):
                row[part] = max(row[part], (figure, case.name))
    lines = [
        "| operation | implementation | inputs | outputs | worst case | gradients | worst case |",
        "|---|---|---|---|---|---|---|",
    ]
    for (operation, name, dtype), row in worst.items():
        cells = [f"{figure:.1e} | {where}" for figure, where in row]
        lines.append(f"| {operation} | {name} | {dtype} | {' | '.join(cells)} |")
    return lines
