"""Attention by loops over blocks of queries and keys, for CPUs.

Only pairs of blocks that share a segment are visited, each small enough for a core's cache, so
both memory and (for short segments) work grow linearly with the row.  The backward pass
recomputes the weights from the saved log-sum-exp.  The loops run row by row, which suits a CPU
and would serialise an accelerator; rows sharded over devices want `shard_map` around this.
"""

from __future__ import annotations

import jax
from jax import numpy as jnp

_BLOCK = 64
# Stands for minus infinity where a difference of two such must not be NaN.
_LOW = -1e30


def attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Shapes as in `kernels.attention.attention`."""
    batch, length, heads, width = q.shape
    groups, kind = k.shape[2], q.dtype
    pad = -length % _BLOCK
    # Padding is a segment of its own: no real id is negative.
    first = _first_tokens(jnp.pad(segment_ids, ((0, 0), (0, pad)), constant_values=-1))
    first = jnp.tile(first.reshape(batch, -1, _BLOCK), heads // groups)
    wide = ((0, 0), (0, pad), (0, 0), (0, 0))
    q, k, v = (jnp.pad(x, wide).astype(jnp.float32) for x in (q, k, v))
    q = q.reshape(batch, -1, _BLOCK, groups, heads // groups, width) * width**-0.5
    q = q.transpose(0, 1, 3, 5, 4, 2).reshape(batch, -1, groups, width, heads // groups * _BLOCK)
    k, v = (
        x.reshape(batch, -1, _BLOCK, groups, width).transpose(0, 1, 3, 2, 4) for x in (k, v)
    )
    out = _attention(q, k, v, first)
    out = out.reshape(batch, -1, groups, width, heads // groups, _BLOCK)
    out = out.transpose(0, 1, 5, 2, 4, 3).reshape(batch, -1, heads, width)
    return out[:, :length].astype(kind)


def _first_tokens(segment_ids: jax.Array) -> jax.Array:
    """Where in its row the run of equal ids begins that each token is in."""
    place = jnp.arange(segment_ids.shape[1])
    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    return jax.lax.cummax(jnp.where(begins, place, 0), axis=1)


def _scores(
    q: jax.Array, k: jax.Array, first: jax.Array, index: jax.Array, j: jax.Array
) -> jax.Array:
    """Block `index` of queries `[G, K, R * Q]` and block `j` of keys `[G, S, K]` -> masked scores
    `[G, S, R * Q]`.  Queries lie along the lanes, where their bounds are plain vectors."""
    place = j * _BLOCK + jnp.arange(_BLOCK)[:, None]
    last = index * _BLOCK + jnp.tile(jnp.arange(_BLOCK), q.shape[-1] // _BLOCK)
    visible = (first <= place) & (place <= last)
    return jnp.where(visible, jnp.einsum("gsk,gkq->gsq", k, q), _LOW)


def _nothing(q: jax.Array) -> tuple[jax.Array, ...]:
    """Peak, total and weighted values of queries `[G, K, Q]` that have seen no key."""
    each = q.shape[0], q.shape[2]
    return jnp.full(each, _LOW), jnp.zeros(each), jnp.zeros(q.shape)


def _take_in(
    carry: tuple[jax.Array, ...], scores: jax.Array, values: jax.Array
) -> tuple[jax.Array, ...]:
    """The same after a block of keys with these scores `[G, S, Q]` and values `[G, K, S]`."""
    peak, total, out = carry
    higher = jnp.maximum(peak, jnp.max(scores, axis=1))
    weights = jnp.exp(scores - higher[:, None])
    decay = jnp.exp(peak - higher)
    total = total * decay + jnp.sum(weights, axis=1)
    return higher, total, out * decay[:, None] + jnp.einsum("gks,gsq->gkq", values, weights)


@jax.custom_vjp
def _attention(q, k, v, first):
    """`q [B, N, G, K, R * Q]`, `k, v [B, N, G, S, K]`, `first [B, N, R * Q]` -> like `q`."""
    return _forward(q, k, v, first)[0]


def _forward(q, k, v, first):
    blocks = q.shape[1]

    def one_row(_, row):
        q, k, v, first = row

        def one_block(_, block):
            q, first, index = block

            def visit(j, carry):
                return _take_in(carry, _scores(q, k[j], first, index, j), v[j])

            # What a wholly masked block adds is wiped by the decay of the first real score, and
            # the diagonal block, which comes last, always has one.
            begin, end = first[0] // _BLOCK, index + 1
            peak, total, out = jax.lax.fori_loop(begin, end, visit, _nothing(q))
            return None, (out / total[:, None], peak + jnp.log(total))

        _, outputs = jax.lax.scan(
            one_block, None, (q, first, jnp.arange(blocks))
        )
        return None, outputs

    _, (out, lse) = jax.lax.scan(one_row, None, (q, k, v.swapaxes(-1, -2), first))
    return out, (q, k, v, first, out, lse)


def _add(array: jax.Array, index: jax.Array, block: jax.Array) -> jax.Array:
    return array.at[index].add(block, mode="promise_in_bounds")


def _backward(residuals, cotangent):
    q, k, v, first, out, lse = residuals
    blocks = q.shape[1]

    def one_row(_, row):
        q, k, turned, v, first, lse, out, cotangent = row

        def one_block(carry, block):
            q, first, lse, out, cotangent, index = block
            inner = jnp.sum(cotangent * out, axis=1)

            def visit(j, carry):
                d_q, d_k, d_v = carry
                scores = _scores(q, k[j], first, index, j)
                weights = jnp.exp(scores - lse[:, None])
                d_v = _add(d_v, j, jnp.einsum("gsq,gkq->gsk", weights, cotangent))
                d_weights = jnp.einsum("gsk,gkq->gsq", v[j], cotangent)
                d_scores = weights * (d_weights - inner[:, None])
                d_k = _add(d_k, j, jnp.einsum("gsq,gkq->gsk", d_scores, q))
                return d_q + jnp.einsum("gks,gsq->gkq", turned[j], d_scores), d_k, d_v

            d_q, d_k, d_v = jax.lax.fori_loop(
                first[0] // _BLOCK, index + 1, visit, (jnp.zeros_like(q), *carry)
            )
            return (d_k, d_v), d_q

        (d_k, d_v), d_q = jax.lax.scan(
            one_block,
            (jnp.zeros_like(k), jnp.zeros_like(v)),
            (q, first, lse, out, cotangent, jnp.arange(blocks)),
        )
        return None, (d_q, d_k, d_v)

    rows = (q, k, k.swapaxes(-1, -2), v, first, lse, out, cotangent)
    _, (d_q, d_k, d_v) = jax.lax.scan(one_row, None, rows)
    return d_q, d_k, d_v, None


_attention.defvjp(_forward, _backward)


# Queries of the cached form that go through the keys together: about so many with all the heads
# of a group.
_LANES = 160


def cached_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, length: jax.Array, counts: jax.Array
) -> jax.Array:
    """Shapes as in `kernels.attention.cached_attention`.

    Slot by slot: each visits what it sees and no more, so its bits don't depend on the others.
    """
    slots, tokens, heads, width = q.shape
    groups, room = v.shape[1:3]
    repeat = heads // groups
    rows = min(tokens, max(16, min(_BLOCK, _LANES // repeat // 16 * 16)))
    size, pad = min(_BLOCK, room), -tokens % rows
    wide = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0))).astype(jnp.float32) * width**-0.5
    wide = wide.reshape(slots, -1, rows, groups, repeat, width).transpose(0, 1, 3, 5, 4, 2)
    wide = wide.reshape(slots, -1, groups, width, repeat * rows)

    def one_slot(_, slot):
        q, k, v, length, count = slot

        def one_block(_, block):
            q, at = block
            last = length + at + jnp.tile(jnp.arange(rows), repeat)

            def visit(j, carry):
                # The last block may reach back into the one before it, whose keys it leaves out.
                begin = jnp.minimum(j * size, room - size)
                keys = jax.lax.dynamic_slice_in_dim(k, begin, size, axis=2).astype(jnp.float32)
                values = jax.lax.dynamic_slice_in_dim(v, begin, size, axis=1).astype(jnp.float32)
                place = begin + jnp.arange(size)[:, None]
                visible = (j * size <= place) & (place <= last)
                scores = jnp.where(visible, jnp.einsum("gks,gkq->gsq", keys, q), _LOW)
                return _take_in(carry, scores, values.swapaxes(1, 2))

            # Every query sees the first block, so none divides by zero; padding stops there.
            end = jnp.where(at < count, (length + at + rows - 1) // size + 1, 1)
            end = jnp.minimum(end, -(-room // size))
            _, total, out = jax.lax.fori_loop(0, end, visit, _nothing(q))
            return None, out / total[:, None]

        return None, jax.lax.scan(one_block, None, (q, jnp.arange(q.shape[0]) * rows))[1]

    _, out = jax.lax.scan(one_slot, None, (wide, k, v, length, counts))
    out = out.reshape(slots, -1, groups, width, repeat, rows).transpose(0, 1, 5, 2, 4, 3)
    return out.reshape(slots, -1, heads, width)[:, :tokens].astype(q.dtype)
