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

from kernels.choice import target_platform
from kernels.gated_delta import scan
from kernels.gated_delta.chunk import (
    einsum,
    masked_exp,
    matmul,
    relative_runs,
    unit_lower_inverse,
)

# Tokens of a block.
_BLOCK = 1024
# Elements of a state from which on a CPU does better to walk over the chunks: products of smaller
# heads take less time than starting them does, so they are better done for many chunks at once.
WIDE_CPU = 1024


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
    if length > 1 and target_platform() == "cpu" and q.shape[-1] * width >= WIDE_CPU:
        return scan.gated_delta(
            q, k, v, log_decay, beta, segment_ids, initial_state, chunk=chunk
        )
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
    between = matmul(single, jnp.tril(jnp.ones((chunk, chunk), jnp.float32), -1))
    cumulative = jnp.sum(single, axis=-1)
    decay = masked_exp(between, related)
    into = masked_exp(cumulative, reads_state)
    out_of = masked_exp(between[..., -1, :], feeds_state)
    across = masked_exp(cumulative[..., -1], keeps_state)

    product = einsum("bhnck,bhndk->bhncd", k, k)
    system = jnp.where(jnp.tril(lower, -1), product * decay * beta[..., None], 0.0)
    inverse = unit_lower_inverse(system)
    # Both right-hand sides share the inverse: corrected values, and what they owe to the state.
    owed = (beta * into)[..., None] * k
    solved = matmul(inverse, jnp.concatenate([beta[..., None] * v, owed], axis=-1))
    fed = einsum("bhnck,bhncv->bhnkv", k * out_of[..., None], solved)
    value, owed = solved[..., :width], solved[..., width:]
    drive, removal = fed[..., :width], fed[..., width:]

    def step(state, coefficients):
        drive, removal, across = coefficients
        after = across[..., None, None] * state + drive - matmul(removal, state)
        return after, state

    coefficients = (jnp.moveaxis(x, 2, 0) for x in (drive, removal, across))
    final, states = jax.lax.scan(step, state, tuple(coefficients))
    states = jnp.moveaxis(states, 0, 2)
    scores = einsum("bhnck,bhndk->bhncd", q, k) * decay
    corrected = value - matmul(owed, states)
    return matmul(scores, corrected) + matmul(q * into[..., None], states), final


def _one_token(state, q, k, v, log_decay, beta):
    """The recurrence itself for one token per row, `[B, H, ...]` -> `[B, 1, H, V]` and state."""
    decay = jnp.exp(log_decay)[..., None, None]
    state = state * decay
    error = (v - jnp.sum(state * k[..., :, None], axis=-2)) * beta[..., None]
    state = state + k[..., :, None] * error[..., None, :]
    return jnp.sum(state * q[..., :, None], axis=-2)[:, None], state
