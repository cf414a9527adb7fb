"""Chunked gated delta rule in plain matrix products, and the one-token step.

A scan walks over the chunks in order.  Its backward pass keeps the inputs and the states between
chunks, and works each chunk out again.
"""

from __future__ import annotations

import functools

import jax
from jax import numpy as jnp

from kernels.gated_delta.chunk import advance, relative_runs


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
    inputs = [x.astype(jnp.float32) for x in (q, k, v, log_decay, beta)]
    if length == 1:
        q, k, v, log_decay, beta = (x[:, 0] for x in inputs)
        q, k = (jnp.repeat(x, repeat, axis=1) for x in (q, k))
        return _one_token(initial_state, q, k, v, log_decay, beta)

    pad = -length % chunk
    chunks = (length + pad) // chunk

    def fold(x: jax.Array, *shape: int) -> jax.Array:
        """`[B, T, H, ...]` -> `[chunks, B, *shape]`; padding keeps the state."""
        x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
        x = x.reshape(batch, chunks, chunk, *x.shape[2:])
        return jnp.moveaxis(x, (1, 3), (0, 2)).reshape(chunks, batch, *shape)

    q, k, v, log_decay, beta = inputs
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


def _one_token(state, q, k, v, log_decay, beta):
    """The recurrence itself for one token per row, `[B, H, ...]` -> `[B, 1, H, V]` and state."""
    decay = jnp.exp(log_decay)[..., None, None]
    state = state * decay
    error = (v - jnp.sum(state * k[..., :, None], axis=-2)) * beta[..., None]
    state = state + k[..., :, None] * error[..., None, :]
    return jnp.sum(state * q[..., :, None], axis=-2)[:, None], state


@jax.custom_vjp
def unit_lower_inverse(system: jax.Array) -> jax.Array:
    """`inv(I + system)` for strictly lower triangular `system [..., C, C]`.

    Inverses of diagonal blocks are merged pair by pair (sizes 1, 2, 4, ...), each merge two
    products.  Unlike the doubling product `(I - A)(I + A^2)(I + A^4)...` this never forms high
    powers of A, whose entries grow like binomial coefficients when keys repeat.
    """
    return _unit_lower_inverse(system)


def _unit_lower_inverse(system: jax.Array) -> jax.Array:
    size = system.shape[-1]
    half = size // 2
    if size % 2 == 0 and size > 16:
        first = _unit_lower_inverse(system[..., :half, :half])
        second = _unit_lower_inverse(system[..., half:, half:])
        corner = -jnp.matmul(jnp.matmul(second, system[..., half:, :half]), first)
        top = jnp.pad(first, [(0, 0)] * (system.ndim - 1) + [(0, size - half)])
        return jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)
    index = jnp.arange(size)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=system.dtype), system.shape)
    block = 1
    while block < size:
        pair, odd = index // (2 * block), (index // block) % 2
        joins = (pair[:, None] == pair[None, :]) & (odd[:, None] == 1) & (odd[None, :] == 0)
        link = jnp.where(joins, system, 0.0)
        if block == 1:
            inverse = inverse - link
        else:
            inverse = inverse - jnp.matmul(jnp.matmul(inverse, link), inverse)
        block *= 2
    return inverse


def _inverse_forward(system):
    inverse = _unit_lower_inverse(system)
    return inverse, inverse


def _inverse_backward(inverse, cotangent):
    transposed = jnp.swapaxes(inverse, -1, -2)
    gradient = -jnp.matmul(jnp.matmul(transposed, cotangent), transposed)
    return (jnp.tril(gradient, -1),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)
