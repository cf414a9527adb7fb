"""Portable attention: packed causal rows in blocks of queries, and a cached form for decoding.

A block of queries reads only the keys that can be before it, so nearly half of the full square
is never computed.  The backward pass computes each block's weights anew, so memory is one block of
them, whatever the number of blocks.
"""

from __future__ import annotations

import jax
from jax import numpy as jnp

_QUERY_BLOCK = 128
# Of the cached form.
_KEY_BLOCK = 256
# Blocks are unrolled, so long rows have larger ones instead of more.
_MOST_BLOCKS = 32


@jax.custom_vjp
def _mix(weights: jax.Array, v: jax.Array) -> jax.Array:
    """`weights [B, G, Q, S]` float32, `v [B, G, S, K]` -> `[B, G, Q, K]` float32, by a product in
    the type of `v`.  The gradient of the weights stays float32: what the softmax takes from it is
    a small difference."""
    return jnp.einsum(
        "bgqs,bgsk->bgqk", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )


def _mix_forward(weights, v):
    return _mix(weights, v), (weights, v)


def _mix_backward(residuals, cotangent):
    weights, v = residuals
    low = cotangent.astype(v.dtype)
    d_weights = jnp.einsum("bgqk,bgsk->bgqs", low, v, preferred_element_type=jnp.float32)
    d_v = jnp.einsum(
        "bgqs,bgqk->bgsk", weights.astype(v.dtype), low, preferred_element_type=jnp.float32
    )
    return d_weights, d_v.astype(v.dtype)


_mix.defvjp(_mix_forward, _mix_backward)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    """`q [B, G, R, Q, K]`, `k, v [B, G, S, K]`, `visible [B, Q, S]` -> `[B, G, R, Q, K]`."""
    batch, heads, repeat, queries, width = q.shape
    q = q.reshape(batch, heads, repeat * queries, width)
    scores = jnp.einsum("bgqk,bgsk->bgqs", q, k, preferred_element_type=jnp.float32)
    scores = (scores * width**-0.5).reshape(batch, heads, repeat, queries, -1)
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    peak = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = _mix(weights.reshape(batch, heads, repeat * queries, -1), v)
    return out.reshape(batch, heads, repeat, queries, width) / total


def attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Shapes as in `kernels.attention.attention`."""
    batch, length, heads, width = q.shape
    groups = k.shape[2]
    grouped = q.reshape(batch, length, groups, heads // groups, width).transpose(0, 2, 3, 1, 4)
    k, v = (x.transpose(0, 2, 1, 3) for x in (k, v))
    outputs = []
    attend = jax.checkpoint(_attend) if length > _QUERY_BLOCK else _attend
    size = _QUERY_BLOCK * -(-length // (_QUERY_BLOCK * _MOST_BLOCKS))
    for start in range(0, length, size):
        stop = min(start + size, length)
        visible = segment_ids[:, start:stop, None] == segment_ids[:, None, :stop]
        visible &= jnp.arange(start, stop)[:, None] >= jnp.arange(stop)[None, :]
        block = grouped[:, :, :, start:stop]
        outputs.append(attend(block, k[:, :, :stop], v[:, :, :stop], visible))
    out = jnp.concatenate(outputs, axis=3) if len(outputs) > 1 else outputs[0]
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)


def cached_attention(q: jax.Array, k: jax.Array, v: jax.Array, length: jax.Array) -> jax.Array:
    """Attention of new tokens over a cache that already contains them.

    Several new tokens go through the keys in blocks, as far as any of them sees: what is computed
    grows with what the cache holds, not with its size.  A block that a row doesn't see changes
    no bit of the row.

    Args:
      q: `[S, T, H, K]`, the new tokens of each slot, the first at position `length[s]`.
      k: `[S, G, K, L]`, the cache's keys, tokens last: so the scores of one query are products
        along contiguous rows.
      v: `[S, G, L, K]`, its values.
      length: `[S]` int32, tokens held before the new ones; query t sees positions
        `<= length + t`.

    Returns:
      `[S, T, H, K]` in the type of `q`.
    """
    slots, tokens, heads, width = q.shape
    groups, room = v.shape[1:3]
    repeat = heads // groups
    grouped = q.reshape(slots, tokens, groups, repeat, width).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(slots, groups, repeat * tokens, width)
    last = length[:, None] + jnp.arange(tokens)[None, :]
    size = room if tokens == 1 else min(_KEY_BLOCK, room)

    def block(index: jax.Array | int, carry: tuple) -> tuple:
        peak, total, out = carry
        # The last block may reach back into the one before it, whose keys it then leaves out.
        first = index * size
        start = jnp.minimum(first, room - size)
        keys = jax.lax.dynamic_slice_in_dim(k, start, size, axis=3)
        values = jax.lax.dynamic_slice_in_dim(v, start, size, axis=2)
        place = start + jnp.arange(size)
        seen = (place >= first) & (place <= last[:, :, None])
        bias = jnp.where(seen, 0.0, -jnp.inf)[:, None]
        bias = jnp.broadcast_to(bias[:, :, None], (slots, 1, repeat, tokens, size))
        scores = jnp.einsum("sgqk,sgkl->sgql", grouped, keys, preferred_element_type=jnp.float32)
        scores = scores * width**-0.5 + bias.reshape(slots, 1, repeat * tokens, size)
        top = jnp.maximum(peak, jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.exp(scores - top)
        # A product with ones: CPUs add up short rows slowly.
        ones = jnp.ones((size, 1), jnp.float32)
        added = jnp.matmul(weights, ones, precision=jax.lax.Precision.HIGHEST)
        mixed = _mix(weights, values)
        if isinstance(index, int):  # the only block
            return top, added, mixed
        shrink = jnp.exp(peak - top)
        return top, total * shrink + added, out * shrink + mixed

    rows = (slots, groups, repeat * tokens)
    if size == room:
        _, total, out = block(0, (-jnp.inf, None, None))
    else:
        carry = (
            jnp.full((*rows, 1), -jnp.inf), jnp.zeros((*rows, 1)), jnp.zeros((*rows, width)),
        )  # fmt: skip
        blocks = jnp.minimum(jnp.max(last) // size + 1, -(-room // size))
        _, total, out = jax.lax.fori_loop(0, blocks, block, carry)
    out = (out / total).reshape(slots, groups, repeat, tokens, width)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)
