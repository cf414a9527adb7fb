"""Packed attention by loops over blocks of queries and keys, for CPUs.

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
    # Padding is a segment of its own that no query of the row looks at.
    run = jnp.pad(_runs(segment_ids), ((0, 0), (0, pad)), constant_values=length)
    wide = ((0, 0), (0, pad), (0, 0), (0, 0))
    q, k, v = (jnp.pad(x, wide).astype(jnp.float32) for x in (q, k, v))
    q = q.reshape(batch, -1, _BLOCK, groups, heads // groups, width) * width**-0.5
    q = q.transpose(0, 1, 3, 4, 2, 5).reshape(batch, -1, groups, heads // groups * _BLOCK, width)
    k, v = (
        x.reshape(batch, -1, _BLOCK, groups, width).transpose(0, 1, 3, 2, 4) for x in (k, v)
    )
    out = _attention(q, k, v, run.reshape(batch, -1, _BLOCK))
    out = out.reshape(batch, -1, groups, heads // groups, _BLOCK, width)
    out = out.transpose(0, 1, 4, 2, 3, 5).reshape(batch, -1, heads, width)
    return out[:, :length].astype(kind)


def _runs(segment_ids: jax.Array) -> jax.Array:
    """Number of the run of equal ids that each token is in; ascending along the row."""
    changed = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.cumsum(jnp.pad(changed, ((0, 0), (1, 0))).astype(jnp.int32), axis=1)


def _first_blocks(run: jax.Array) -> jax.Array:
    """`[blocks, Q]` runs of one row -> the first block that each block of queries reads."""
    return jnp.argmax(run[None, :, -1] >= run[:, None, 0], axis=1)


def _scores(
    q: jax.Array, k: jax.Array, run_q: jax.Array, run_k: jax.Array, distance: jax.Array
) -> jax.Array:
    """`q [G, R * Q, K]`, `k [G, S, K]` -> masked scores; `distance`: blocks from keys to queries.
    """
    scores = jnp.einsum("gqk,gsk->gqs", q, k)
    place = jnp.arange(_BLOCK)
    visible = run_q[:, None] == run_k[None, :]
    visible &= place[:, None] + distance * _BLOCK >= place[None, :]
    shape = (q.shape[0], -1, _BLOCK, _BLOCK)
    return jnp.where(visible, scores.reshape(shape), _LOW).reshape(scores.shape)


@jax.custom_vjp
def _attention(q, k, v, run):
    """`q [B, N, G, R * Q, K]`, `k, v [B, N, G, Q, K]`, `run [B, N, Q]` -> like `q`."""
    return _forward(q, k, v, run)[0]


def _forward(q, k, v, run):
    blocks = q.shape[1]

    def one_row(_, row):
        q, k, v, run = row

        def one_block(_, block):
            q, run_q, index, first = block

            def visit(j, carry):
                peak, total, out = carry
                scores = _scores(q, k[j], run_q, run[j], index - j)
                higher = jnp.maximum(peak, jnp.max(scores, axis=-1))
                weights = jnp.exp(scores - higher[..., None])
                decay = jnp.exp(peak - higher)
                total = total * decay + jnp.sum(weights, axis=-1)
                out = out * decay[..., None] + jnp.einsum("gqs,gsk->gqk", weights, v[j])
                return higher, total, out

            # What a wholly masked block adds is wiped by the decay of the first real score, and
            # the diagonal block, which comes last, always has one.
            start = (jnp.full(q.shape[:-1], _LOW), jnp.zeros(q.shape[:-1]), jnp.zeros_like(q))
            peak, total, out = jax.lax.fori_loop(first, index + 1, visit, start)
            return None, (out / total[..., None], peak + jnp.log(total))

        _, outputs = jax.lax.scan(
            one_block, None, (q, run, jnp.arange(blocks), _first_blocks(run))
        )
        return None, outputs

    _, (out, lse) = jax.lax.scan(one_row, None, (q, k, v, run))
    return out, (q, k, v, run, out, lse)


def _backward(residuals, cotangent):
    q, k, v, run, out, lse = residuals
    blocks = q.shape[1]
    inner = jnp.sum(cotangent * out, axis=-1)

    def one_row(_, row):
        q, k, v, run, lse, inner, cotangent = row

        def one_block(carry, block):
            q, run_q, lse, inner, cotangent, index, first = block

            def visit(j, carry):
                d_q, d_k, d_v = carry
                scores = _scores(q, k[j], run_q, run[j], index - j)
                weights = jnp.exp(scores - lse[..., None])
                d_v = d_v.at[j].add(jnp.einsum("gqs,gqk->gsk", weights, cotangent))
                d_weights = jnp.einsum("gqk,gsk->gqs", cotangent, v[j])
                d_scores = weights * (d_weights - inner[..., None])
                d_k = d_k.at[j].add(jnp.einsum("gqs,gqk->gsk", d_scores, q))
                return d_q + jnp.einsum("gqs,gsk->gqk", d_scores, k[j]), d_k, d_v

            d_q, d_k, d_v = jax.lax.fori_loop(
                first, index + 1, visit, (jnp.zeros_like(q), *carry)
            )
            return (d_k, d_v), d_q

        (d_k, d_v), d_q = jax.lax.scan(
            one_block,
            (jnp.zeros_like(k), jnp.zeros_like(v)),
            (q, run, lse, inner, cotangent, jnp.arange(blocks), _first_blocks(run)),
        )
        return None, (d_q, d_k, d_v)

    _, (d_q, d_k, d_v) = jax.lax.scan(one_row, None, (q, k, v, run, lse, inner, cotangent))
    return d_q, d_k, d_v, None


_attention.defvjp(_forward, _backward)
