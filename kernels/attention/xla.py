"""Portable attention: packed causal rows in blocks of queries, and a cached form for decoding.

A block of queries reads only the keys that can be before it, so nearly half of the full square
is never computed.  Memory is still quadratic in the row length (weights are kept for the
backward pass); rows here are short.
"""

from __future__ import annotations

import jax
from jax import numpy as jnp

_QUERY_BLOCK = 128


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    """`q [B, G, R, Q, K]`, `k, v [B, G, S, K]`, `visible [B, Q, S]` -> `[B, G, R, Q, K]`."""
    batch, heads, repeat, queries, width = q.shape
    q = (q * width**-0.5).reshape(batch, heads, repeat * queries, width)
    scores = jnp.einsum("bgqk,bgsk->bgqs", q, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, heads, repeat, queries, -1)
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    peak = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    flat = weights.reshape(batch, heads, repeat * queries, -1).astype(v.dtype)
    out = jnp.einsum("bgqs,bgsk->bgqk", flat, v, preferred_element_type=jnp.float32)
    return out.reshape(batch, heads, repeat, queries, width) / total


def attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Shapes as in `kernels.attention.attention`."""
    batch, length, heads, width = q.shape
    groups = k.shape[2]
    grouped = q.reshape(batch, length, groups, heads // groups, width).transpose(0, 2, 3, 1, 4)
    k, v = (x.transpose(0, 2, 1, 3) for x in (k, v))
    outputs = []
    for start in range(0, length, _QUERY_BLOCK):
        stop = min(start + _QUERY_BLOCK, length)
        visible = segment_ids[:, start:stop, None] == segment_ids[:, None, :stop]
        visible &= jnp.arange(start, stop)[:, None] >= jnp.arange(stop)[None, :]
        block = grouped[:, :, :, start:stop]
        outputs.append(_attend(block, k[:, :, :stop], v[:, :, :stop], visible))
    out = jnp.concatenate(outputs, axis=3) if len(outputs) > 1 else outputs[0]
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)


def cached_attention(q: jax.Array, k: jax.Array, v: jax.Array, length: jax.Array) -> jax.Array:
    """Attention of new tokens over a cache that already contains them.

    Args:
      q: `[S, T, H, K]`, the new tokens of each slot, the first at position `length[s]`.
      k, v: `[S, G, L, K]`, the cache.
      length: `[S]` int32, tokens held before the new ones; query t sees positions
        `<= length + t`.

    Returns:
      `[S, T, H, K]` in the type of `q`.
    """
    slots, tokens, heads, width = q.shape
    groups = k.shape[1]
    grouped = q.reshape(slots, tokens, groups, heads // groups, width).transpose(0, 2, 3, 1, 4)
    last = length[:, None] + jnp.arange(tokens)[None, :]
    visible = jnp.arange(k.shape[2])[None, None, :] <= last[:, :, None]
    out = _attend(grouped, k, v, visible)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)
