"""Chunked gated delta rule as one walk over the chunks, in plain matrix products.

The backward pass keeps the inputs and the states between chunks, and works each chunk out again.
Fewest operations, and the working set of one chunk: the faster form on CPUs where heads are wide.
"""

from __future__ import annotations

import functools

import jax
from jax import numpy as jnp

from kernels.gated_delta.chunk import advance, relative_runs, unit_lower_inverse


def gated_delta(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    segment_ids: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    *,
    chunk: int = 32,
) -> tuple[jax.Array, jax.Array]:
    """Shapes as in `kernels.gated_delta.gated_delta`."""
    batch, length, heads, width = v.shape
    groups, keys = q.shape[2:]
    repeat = heads // groups
    if initial_state is None:
        initial_state = jnp.zeros((batch, heads, keys, width), jnp.float32)
    initial_state = initial_state.astype(jnp.float32)
    # In float32, so that the gradients of a key head's value heads are added in it.
    q, k, v, log_decay, beta = (x.astype(jnp.float32) for x in (q, k, v, log_decay, beta))

    pad = -length % chunk
    chunks = (length + pad) // chunk

    def fold(x: jax.Array, *shape: int) -> jax.Array:
        """`[B, T, H, ...]` -> `[chunks, B, *shape]`; padding keeps the state."""
        x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
        x = x.reshape(batch, chunks, chunk, *x.shape[2:])
        return jnp.moveaxis(x, (1, 3), (0, 2)).reshape(chunks, batch, *shape)

    folded = (
        *(fold(x, groups, chunk, keys) for x in (q, k)),
        fold(v, groups, repeat, chunk, width),
        *(fold(x, groups, repeat, 1, chunk) for x in (log_decay, beta)),
    )
    if segment_ids is None:
        segment_ids = jnp.zeros((batch, length), jnp.int32)
    run = jnp.moveaxis(relative_runs(segment_ids, pad, chunk), 1, 0)

    alone = functools.partial(advance, unit_lower_inverse)
    value_heads = jax.vmap(alone, (None, 0, None, None, 0, 0, 0))
    key_heads = jax.vmap(value_heads, (None, 0, 0, 0, 0, 0, 0))
    rows = jax.checkpoint(jax.vmap(key_heads), prevent_cse=False)

    def step(state, inputs):
        run, *tokens = inputs
        out, state = rows(run, state, *tokens)
        return state, out

    state = initial_state.reshape(batch, groups, repeat, keys, width)
    final, out = jax.lax.scan(step, state, (run, *folded))
    out = jnp.moveaxis(out.reshape(chunks, batch, heads, chunk, width), (0, 2), (1, 3))
    out = out.reshape(batch, length + pad, heads, width)[:, :length]
    return out, final.reshape(initial_state.shape)
