"""Packed attention for TPUs: JAX's splash attention kernel behind our shapes.

Splash never holds a row of scores, forward or backward, and skips the blocks of keys behind the
causal diagonal.  It scales nothing and wants heads first and whole blocks; this module does that.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash

# Lanes of a vector register: blocks are multiples of it.
_LANES = 128
BLOCK = 512


@functools.lru_cache(maxsize=64)
def _kernel(length: int, heads: int) -> Any:
    block = next(size for size in (BLOCK, 256, _LANES) if length % size == 0)
    mask = splash.MultiHeadMask([splash.CausalMask((length, length))] * heads)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    with jax.ensure_compile_time_eval():
        return splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Shapes as in `kernels.attention.attention`."""
    length, width = q.shape[1], q.shape[-1]
    pad = -length % _LANES
    # Padding is a segment of its own: no real id is negative.
    ids = jnp.pad(segment_ids, ((0, 0), (0, pad)), constant_values=-1)
    q, k, v = (
        jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))).transpose(0, 2, 1, 3)
        for x in (q * width**-0.5, k, v)
    )
    kernel = _kernel(length + pad, q.shape[1])
    out = jax.vmap(kernel)(q, k, v, segment_ids=splash.SegmentIds(q=ids, kv=ids))
    return out.transpose(0, 2, 1, 3)[:, :length].astype(v.dtype)
