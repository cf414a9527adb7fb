"""The gated delta rule as Pallas kernels for TPUs.

One program walks over a head's chunks in order with the state in fast memory: only tokens are
read and outputs written, and for training the state at the start of each chunk.  The backward
kernel walks the other way, works each chunk out again from that state and pulls the gradients
back through it; both kernels run the same `advance`.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.gated_delta import xla
from kernels.gated_delta.chunk import advance, dot, places, relative_runs


def gated_delta(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    segment_ids: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    *,
    chunk: int = 64,
) -> tuple[jax.Array, jax.Array]:
    """Shapes as in `kernels.gated_delta.gated_delta`; `chunk` must be a power of two."""
    if chunk & (chunk - 1):
        raise ValueError(f"the Pallas gated_delta needs chunks of a power of two, not {chunk}")
    batch, length, heads, width = v.shape
    if length == 1:
        # Reading and writing the states is all the work of a decode step.
        return xla.gated_delta(q, k, v, log_decay, beta, segment_ids, initial_state)
    pad = -length % chunk
    chunks = (length + pad) // chunk

    def rows(x):
        """`[B, T, H, K]` -> `[B, H, T, K]`, padded to whole chunks of tokens that do nothing."""
        return jnp.moveaxis(jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))), 2, 1)

    def lanes(x):
        """`[B, T, H]` -> `[B, H, chunks, 1, C]`, a chunk's tokens along the lanes."""
        x = jnp.moveaxis(jnp.pad(x, ((0, 0), (0, pad), (0, 0))), 2, 1)
        return x.astype(jnp.float32).reshape(batch, heads, chunks, 1, chunk)

    if segment_ids is None:
        segment_ids = jnp.zeros((batch, length), jnp.int32)
    run = relative_runs(segment_ids, pad, chunk)
    if initial_state is None:
        initial_state = jnp.zeros((batch, heads, q.shape[-1], width), jnp.float32)
    out, final = _gated_delta(
        initial_state.astype(jnp.float32),
        rows(q),
        rows(k),
        rows(v),
        lanes(log_decay),
        lanes(beta),
        run,
    )
    return jnp.moveaxis(out, 1, 2)[:, :length], final


def _inverse(system: jax.Array) -> jax.Array:
    """`inv(I + system)`, strictly lower triangular `[C, C]`: inverses of diagonal blocks merged
    pair by pair, as in `kernels.gated_delta.chunk.unit_lower_inverse`."""
    i, j = places(system.shape[0])
    inverse = jnp.where(i == j, 1.0, 0.0)
    for level in range(system.shape[0].bit_length() - 1):
        pair = (i >> (level + 1)) == (j >> (level + 1))
        joins = pair & (((i >> level) & 1) == 1) & (((j >> level) & 1) == 0)
        link = jnp.where(joins, system, 0.0)
        inverse -= link if level == 0 else dot(dot(inverse, link), inverse)
    return inverse


@jax.custom_vjp
def _differentiable_inverse(system: jax.Array) -> jax.Array:
    return _inverse(system)


def _inverse_forward(system):
    inverse = _inverse(system)
    return inverse, inverse


def _inverse_backward(inverse, cotangent):
    gradient = dot(dot(inverse, cotangent, (0, 0)), inverse, (1, 1))
    i, j = places(inverse.shape[0])
    return (jnp.where(j < i, -gradient, 0.0),)


_differentiable_inverse.defvjp(_inverse_forward, _inverse_backward)


def _forward_kernel(initial, q, k, v, log_decay, beta, run, out, final, *states_and_state):
    *states, state = states_and_state

    @pl.when(pl.program_id(2) == 0)
    def _():
        state[...] = initial[...]

    if states:
        states[0][...] = state[...]
    tokens = (x[...].astype(jnp.float32) for x in (q, k, v, log_decay, beta))
    out[...], state[...] = advance(_inverse, run[...], state[...], *tokens)
    final[...] = state[...]


def _backward_kernel(
    states, q, k, v, log_decay, beta, run, d_out, d_final,
    d_initial, d_q, d_k, d_v, d_log_decay, d_beta, d_state,
):  # fmt: skip
    @pl.when(pl.program_id(2) == 0)
    def _():
        d_state[...] = d_final[...]

    tokens = (x[...].astype(jnp.float32) for x in (q, k, v, log_decay, beta))
    segment = run[...]

    def one(*x):
        return advance(_differentiable_inverse, segment, *x)

    _, pull = jax.vjp(one, states[...], *tokens)
    gradients = pull((d_out[...], d_state[...]))
    d_state[...], d_q[...], d_k[...], d_v[...], d_log_decay[...], d_beta[...] = gradients
    d_initial[...] = d_state[...]


class _Specs:
    """Block specs over the grid (row, value head, chunk), the chunks in order or backwards."""

    def __init__(self, q: jax.Array, v: jax.Array, chunk: int, backwards: bool):
        batch, key_heads, length, self.key = q.shape
        heads, self.width = v.shape[1], v.shape[3]
        chunks = length // chunk
        self.grid = batch, heads, chunks
        self.chunk = chunk
        self._repeat = heads // key_heads
        self._at = (lambda c: chunks - 1 - c) if backwards else lambda c: c

    def tokens(self, width: int, shared: bool = False) -> pl.BlockSpec:
        """`[B, H, T, width]`, by the key head of a value head where `shared`."""
        repeat = self._repeat if shared else 1
        return pl.BlockSpec(
            (None, None, self.chunk, width),
            lambda b, h, c: (b, jax.lax.div(h, repeat), self._at(c), 0),
        )

    def lanes(self) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, None, None, 1, self.chunk), lambda b, h, c: (b, h, self._at(c), 0, 0)
        )

    def runs(self) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, 1, self.chunk), lambda b, h, c: (b, self._at(c), 0, 0))

    def state(self) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, self.key, self.width), lambda b, h, c: (b, h, 0, 0))

    def states(self) -> pl.BlockSpec:
        """`[B, H, chunks, K, V]`."""
        return pl.BlockSpec(
            (None, None, None, self.key, self.width), lambda b, h, c: (b, h, self._at(c), 0, 0)
        )

    def inputs(self) -> list[pl.BlockSpec]:
        key = self.tokens(self.key, shared=True)
        return [key, key, self.tokens(self.width), self.lanes(), self.lanes(), self.runs()]

    def scratch(self) -> list[Any]:
        return [pltpu.VMEM((self.key, self.width), jnp.float32)]


_PARAMETERS = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"))


def _run_forward(keep_states, initial, *inputs):
    q, _, v, log_decay = inputs[:4]
    specs = _Specs(q, v, log_decay.shape[-1], backwards=False)
    batch, heads, chunks = specs.grid
    state = (batch, heads, specs.key, specs.width)
    shapes: list[tuple[int, ...]] = [(batch, heads, q.shape[2], specs.width), state]
    out_specs = [specs.tokens(specs.width), specs.state()]
    if keep_states:
        shapes.append((batch, heads, chunks, specs.key, specs.width))
        out_specs.append(specs.states())
    return pl.pallas_call(
        _forward_kernel,
        grid=specs.grid,
        in_specs=[specs.state(), *specs.inputs()],
        out_specs=out_specs,
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        scratch_shapes=specs.scratch(),
        compiler_params=_PARAMETERS,
        name="gated_delta_forward",
    )(initial, *inputs)


@jax.custom_vjp
def _gated_delta(*arguments: jax.Array) -> tuple[jax.Array, jax.Array]:
    return tuple(_run_forward(False, *arguments))


def _forward(*arguments):
    out, final, states = _run_forward(True, *arguments)
    return (out, final), (states, *arguments[1:])


def _backward(residuals, cotangents):
    _, q, k, v, log_decay, beta, run = residuals
    specs = _Specs(q, v, log_decay.shape[-1], backwards=True)
    batch, heads, _ = specs.grid
    key, width = specs.tokens(specs.key), specs.tokens(specs.width)
    shapes = [
        (batch, heads, specs.key, specs.width),
        *[(batch, heads, *q.shape[2:])] * 2,
        v.shape,
        *[log_decay.shape] * 2,
    ]
    d_initial, d_q, d_k, d_v, d_log_decay, d_beta = pl.pallas_call(
        _backward_kernel,
        grid=specs.grid,
        in_specs=[specs.states(), *specs.inputs(), width, specs.state()],
        out_specs=[specs.state(), key, key, width, specs.lanes(), specs.lanes()],
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        scratch_shapes=specs.scratch(),
        compiler_params=_PARAMETERS,
        name="gated_delta_backward",
    )(*residuals, *cotangents)
    # A key head serves several value heads.
    d_q, d_k = (x.reshape(batch, q.shape[1], -1, *q.shape[2:]).sum(2) for x in (d_q, d_k))
    return (
        d_initial,
        d_q.astype(q.dtype),
        d_k.astype(k.dtype),
        d_v.astype(v.dtype),
        d_log_decay,
        d_beta,
        jnp.zeros_like(run),
    )


_gated_delta.defvjp(_forward, _backward)
