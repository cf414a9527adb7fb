"""Chunked gated delta rule in plain matrix products, and the one-token step.

Within a chunk of C tokens the updates are a unit lower triangular system (the "UT transform" of
the DeltaNet papers); across chunks the state obeys an affine recurrence `S <- M S + N`, whose
coefficients are computed for a block of chunks at once, so that the inner scan does one small
product a chunk.  Rows longer than a block are scanned block by block: the backward pass keeps the
states between blocks and works each block out again, so memory beyond inputs, outputs and those
states is one block's.  Segment boundaries may fall anywhere: they cut the decay matrix, what a
token reads of the incoming state, and what reaches the outgoing state.
"""

from __future__ import annotations

import jax
from jax import numpy as jnp

# Tokens of a block.
_BLOCK = 1024


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
        # In float32, so that the gradients of a key head's value heads are added in it.
        q, k = (jnp.repeat(x.astype(jnp.float32), repeat, axis=2) for x in (q, k))
    if initial_state is None:
        initial_state = jnp.zeros((batch, heads, q.shape[-1], width), jnp.float32)
    initial_state = initial_state.astype(jnp.float32)
    if length == 1:
        tokens = [x[:, 0].astype(jnp.float32) for x in (q, k, v, log_decay, beta)]
        return _one_token(initial_state, *tokens)

    chunks = -(-length // chunk)
    blocks = -(-chunks // max(1, _BLOCK // chunk))
    per_block = -(-chunks // blocks)
    pad = blocks * per_block * chunk - length

    def fold(x):
        """`[B, T, H, ...]` -> `[blocks, B, H, chunks, C, ...]`; padding keeps the state."""
        x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
        x = x.reshape(batch, blocks, per_block, chunk, *x.shape[2:])
        return jnp.moveaxis(x, (1, 4), (0, 2))

    inputs = [fold(x) for x in (q, k, v, log_decay, beta)]
    if segment_ids is not None:
        run = relative_runs(segment_ids, pad, chunk).reshape(batch, blocks, 1, per_block, chunk)
        inputs.append(jnp.moveaxis(run, 1, 0))
    if blocks == 1:
        out, final = _block(initial_state, *(x[0] for x in inputs))
        out = out[None]
    else:
        final, out = jax.lax.scan(
            jax.checkpoint(lambda state, block: _block(state, *block)[::-1], prevent_cse=False),
            initial_state,
            tuple(inputs),
        )
    out = jnp.moveaxis(out, (0, 2), (1, 4)).reshape(batch, length + pad, heads, width)
    return out[:, :length], final


def _block(
    state: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    run: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`state [B, H, K, V]`, then `[B, H, chunks, C, ...]`, `run [B, 1, chunks, C]` from
    `relative_runs`, None where all is one segment -> output and state after the block."""
    q, k, v, log_decay, beta = (x.astype(jnp.float32) for x in (q, k, v, log_decay, beta))
    chunk, width = v.shape[-2:]
    lower = jnp.tril(jnp.ones((chunk, chunk), bool))
    if run is None:
        related = lower
        reads_state = feeds_state = keeps_state = jnp.array(True)
    else:
        related = lower & (run[..., :, None] == run[..., None, :])
        reads_state = run == 0
        feeds_state = run == run[..., -1:]
        keeps_state = run[..., -1] == 0
    # Decays between two tokens are summed, not taken as differences of running sums: neither the
    # values nor their gradients then cancel.
    single = jnp.where(lower, log_decay[..., None, :], 0.0)
    between = jnp.matmul(single, jnp.tril(jnp.ones((chunk, chunk)), -1))
    cumulative = jnp.sum(single, axis=-1)
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
    final, states = jax.lax.scan(step, state, tuple(coefficients))
    states = jnp.moveaxis(states, 0, 2)
    scores = jnp.einsum("bhnck,bhndk->bhncd", q, k) * decay
    corrected = value - jnp.matmul(owed, states)
    return jnp.matmul(scores, corrected) + jnp.matmul(q * into[..., None], states), final


def masked_exp(x: jax.Array, mask: jax.Array) -> jax.Array:
    """exp where `mask`, else 0, with no overflow (and so no NaN gradient) behind the mask."""
    return jnp.where(mask, jnp.exp(jnp.where(mask, x, 0.0)), 0.0)


def relative_runs(segment_ids: jax.Array, pad: int, chunk: int) -> jax.Array:
    """How many segment boundaries lie between the end of the chunk before and each token.

    `[B, T]` -> `[B, chunks, C]`: 0 reads the incoming state, and equal numbers within a chunk are
    one segment.  `pad` tokens more continue the last segment.  The first token owns the state
    that enters the first chunk.
    """
    ids = jnp.pad(segment_ids, ((0, 0), (0, pad)), mode="edge")
    changed = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))
    return jnp.cumsum(changed.reshape(ids.shape[0], -1, chunk).astype(jnp.int32), axis=-1)


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
