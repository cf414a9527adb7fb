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


def _mix(weights: jax.Array, v: jax.Array) -> jax.Array:
    """`weights [B, G, Q, S]` float32, `v [B, G, S, K]` -> `[B, G, Q, K]` float32, by a product in
    the type of `v`."""
    return jnp.einsum(
        "bgqs,bgsk->bgqk", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )


def _weigh(q: jax.Array, k: jax.Array, visible: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The softmax of the scores before its division, and what it is to be divided by."""
    batch, groups, rows, width = q.shape
    scores = jnp.einsum("bgqk,bgsk->bgqs", q, k, preferred_element_type=jnp.float32)
    scores = (scores * width**-0.5).reshape(batch, groups, -1, *visible.shape[1:])
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    weights = weights.reshape(batch, groups, rows, -1)
    return weights, jnp.sum(weights, axis=-1, keepdims=True)


@jax.custom_vjp
def _attend(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    """`q [B, G, R * Q, K]`, `k, v [B, G, S, K]`, `visible [B, Q, S]` -> `[B, G, R * Q, K]` in the
    type of `q`."""
    weights, total = _weigh(q, k, visible)
    return (_mix(weights, v) / total).astype(q.dtype)


def _attend_forward(q, k, v, visible):
    return _attend(q, k, v, visible), (q, k, v, visible)


def _attend_backward(residuals, cotangent):
    """Works the weights out again.  Nothing between inputs and gradients is rounded to bf16: the
    softmax takes small differences of the weights' gradient."""
    q, k, v, visible = residuals
    weights, total = _weigh(q, k, visible)
    weights = weights / total

    d_weights = jnp.einsum("bgqk,bgsk->bgqs", cotangent, v, preferred_element_type=jnp.float32)
    mean = jnp.sum(weights * d_weights, axis=-1, keepdims=True)
    d_scores = weights * (d_weights - mean) * q.shape[-1] ** -0.5
    d_q = jnp.einsum("bgqs,bgsk->bgqk", d_scores, k.astype(jnp.float32))
    d_k = jnp.einsum("bgqs,bgqk->bgsk", d_scores, q.astype(jnp.float32))
    d_v = jnp.einsum("bgqs,bgqk->bgsk", weights, cotangent.astype(jnp.float32))
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


_attend.defvjp(_attend_forward, _attend_backward)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Shapes as in `kernels.attention.attention`."""
    batch, length, heads, width = q.shape
    groups = k.shape[2]
    grouped = q.reshape(batch, length, groups, heads // groups, width).transpose(0, 2, 3, 1, 4)
    k, v = (x.transpose(0, 2, 1, 3) for x in (k, v))
    outputs = []
    size = _QUERY_BLOCK * -(-length // (_QUERY_BLOCK * _MOST_BLOCKS))
    for start in range(0, length, size):
        stop = min(start + size, length)
        visible = segment_ids[:, start:stop, None] == segment_ids[:, None, :stop]
        visible &= jnp.arange(start, stop)[:, None] >= jnp.arange(stop)[None, :]
        block = grouped[:, :, :, start:stop].reshape(batch, groups, -1, width)
        out = _attend(block, k[:, :, :stop], v[:, :, :stop], visible)
        outputs.append(out.reshape(batch, groups, heads // groups, stop - start, width))
    out = jnp.concatenate(outputs, axis=3) if len(outputs) > 1 else outputs[0]
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)


def cached_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, length: jax.Array, counts: jax.Array
) -> jax.Array:
    """Shapes as in `kernels.attention.cached_attention`.

    Several new tokens go through the keys in blocks, as far as any of them sees.  A block that a
    row doesn't see changes no bit of the row.
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
        furthest = jnp.max(length + jnp.maximum(counts, 1)) - 1
        blocks = jnp.minimum(furthest // size + 1, -(-room // size))
        _, total, out = jax.lax.fori_loop(0, blocks, block, carry)
    out = (out / total).reshape(slots, groups, repeat, tokens, width)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)
