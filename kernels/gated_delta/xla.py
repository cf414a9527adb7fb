"""Chunked gated delta rule in plain matrix products, and the one-token step.

Within a chunk of C tokens the updates are a unit lower triangular system (the "UT transform" of
the DeltaNet papers); across chunks the state obeys an affine recurrence `S <- M S + N`, whose
coefficients are computed for all chunks at once, so that the scan does one small product a
chunk.  Segment boundaries may fall anywhere: they cut the decay matrix, what a token reads of
the incoming state, and what reaches the outgoing state.
"""

from __future__ import annotations

import jax
from jax import numpy as jnp


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
    repeat = heads // q.shape[2]
    if repeat > 1:
        q, k = (jnp.repeat(x, repeat, axis=2) for x in (q, k))
    if initial_state is None:
        initial_state = jnp.zeros((batch, heads, q.shape[-1], width), jnp.float32)
    initial_state = initial_state.astype(jnp.float32)
    q, k, v, log_decay, beta = (x.astype(jnp.float32) for x in (q, k, v, log_decay, beta))
    if length == 1:
        return _one_token(q, k, v, log_decay, beta, initial_state)

    pad = -length % chunk
    chunks = (length + pad) // chunk

    def fold(x):
        """`[B, T, H, ...]` -> `[B, H, chunks, C, ...]`; padding keeps the state."""
        x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
        x = x.reshape(batch, chunks, chunk, *x.shape[2:])
        return jnp.moveaxis(x, 3, 1)

    q, k, v, log_decay, beta = (fold(x) for x in (q, k, v, log_decay, beta))
    lower = jnp.tril(jnp.ones((chunk, chunk), bool))
    if segment_ids is None:
        related = lower
        reads_state = feeds_state = keeps_state = jnp.array(True)
    else:
        run, before = _runs(segment_ids, pad, chunk)
        related = lower & (run[..., :, None] == run[..., None, :])
        related = related[:, None]
        reads_state = (run == before[..., None])[:, None]
        feeds_state = (run == run[..., -1:])[:, None]
        keeps_state = (run[..., -1] == before)[:, None]
    # Decays between two tokens are summed, not taken as differences of running sums: neither the
    # values nor their gradients then cancel.
    single = jnp.where(lower, log_decay[..., None, :], 0.0)
    between = jnp.matmul(single, jnp.tril(jnp.ones((chunk, chunk)), -1))
    cumulative = jnp.sum(single, axis=-1)

    def masked_exp(x, mask):
        """exp where `mask`, else 0, with no overflow (and so no NaN gradient) behind the mask."""
        return jnp.where(mask, jnp.exp(jnp.where(mask, x, 0.0)), 0.0)

    decay = masked_exp(between, related)
    into = masked_exp(cumulative, reads_state)
    out_of = masked_exp(between[..., -1, :], feeds_state)
    across = masked_exp(cumulative[..., -1], keeps_state)

    product = jnp.einsum("bhnck,bhndk->bhncd", k, k)
    system = jnp.where(jnp.tril(lower, -1), product * decay * beta[..., None], 0.0)
    inverse = unit_lower_inverse(system)
    # Both right-hand sides share the inverse: corrected values, and what they owe to the state.
    owed = (beta * into)[..., None] * k
    solved = jnp.matmul(inverse, jnp.concatenate([beta[..., None] * v, owed], axis=-1))
    fed = jnp.einsum("bhnck,bhncv->bhnkv", k * out_of[..., None], solved)
    value, owed = solved[..., :width], solved[..., width:]
    drive, removal = fed[..., :width], fed[..., width:]

    def step(state, coefficients):
        drive, removal, across = coefficients
        after = across[..., None, None] * state + drive - jnp.matmul(removal, state)
        return after, state

    coefficients = (jnp.moveaxis(x, 2, 0) for x in (drive, removal, across))
    final, states = jax.lax.scan(step, initial_state, tuple(coefficients))
    states = jnp.moveaxis(states, 0, 2)
    scores = jnp.einsum("bhnck,bhndk->bhncd", q, k) * decay
    corrected = value - jnp.matmul(owed, states)
    out = jnp.matmul(scores, corrected) + jnp.matmul(q * into[..., None], states)
    out = jnp.moveaxis(out, 1, 3).reshape(batch, chunks * chunk, heads, width)
    return out[:, :length], final


def _runs(segment_ids: jax.Array, pad: int, chunk: int) -> tuple[jax.Array, jax.Array]:
    """Number of the run of equal ids that each token is in, and the run that enters each chunk.

    Returns `(run [B, chunks, C], before [B, chunks])`.  The padding continues the last run, and
    the run that enters the first chunk is the first token's own (it owns the initial state).
    """
    batch = segment_ids.shape[0]
    ids = jnp.pad(segment_ids, ((0, 0), (0, pad)), mode="edge")
    changed = ids[:, 1:] != ids[:, :-1]
    run = jnp.cumsum(jnp.pad(changed, ((0, 0), (1, 0))).astype(jnp.int32), axis=1)
    run = run.reshape(batch, -1, chunk)
    before = jnp.pad(run[:, :-1, -1], ((0, 0), (1, 0)))
    return run, before


def _one_token(q, k, v, log_decay, beta, state):
    """The recurrence itself for one token per row; `[B, 1, H, ...]` in and out."""
    q, k, v, log_decay, beta = (x[:, 0] for x in (q, k, v, log_decay, beta))
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
