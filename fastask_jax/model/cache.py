"""Decoding state of many slots: keys and values, convolution and recurrent states.

A cache is a pytree: `blocks` (leaves `[num_blocks, slots, ...]`) and `length` `[slots]`, the
tokens that each slot holds.  `extend` appends ragged pieces; one token to each is the decode
step.  All functions are pure and may be jitted with the config static.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fastask_jax.model.config import ModelConfig
from fastask_jax.model.decoder import Params, abstract_decoder, merge

Cache = dict[str, Any]


def init_cache(cfg: ModelConfig, slots: int, max_len: int) -> Cache:
    """Empty slots that can hold `max_len` tokens each."""
    one = jax.eval_shape(lambda: abstract_decoder(cfg).blocks.init_cache(slots, max_len))
    blocks = jax.tree.map(lambda x: jnp.zeros((cfg.num_blocks, *x.shape), x.dtype), one)
    return {"blocks": blocks, "length": jnp.zeros(slots, jnp.int32)}


def extend(
    cfg: ModelConfig, params: Params, cache: Cache, tokens: jax.Array, counts: jax.Array
) -> tuple[jax.Array, Cache]:
    """Appends the first `counts[s]` (0 to T) of `tokens[s]` to each slot s.

    Args:
      tokens: `[slots, T]` int32.
      counts: `[slots]` int32; a slot with 0 stays as it is.

    Returns:
      `hidden [slots, T, D]` after the final norm, valid at `[s, :counts[s]]`, and the new cache.
      The caller keeps `length + counts` within `max_len`: what lies beyond is dropped.
    """
    decoder = merge(cfg, params)
    length = cache["length"]
    rotary = decoder.rotary(length[:, None] + jnp.arange(tokens.shape[1]))
    rebuild, stacked = decoder.stacked_blocks()

    def body(x, layer):
        leaves, state = layer
        return rebuild(leaves).extend(x, rotary, state, length, counts)

    x, blocks = jax.lax.scan(
        body,
        decoder.embed(tokens),
        (stacked, cache["blocks"]),
        unroll=min(cfg.scan_unroll, cfg.num_blocks),
    )
    return decoder.norm(x), {"blocks": blocks, "length": length + counts}


def reset_slots(cache: Cache, mask: jax.Array) -> Cache:
    """Zeroes the slots where `mask [slots]` is true: nothing of an earlier episode is left."""

    def zero(leaf):
        return jnp.where(mask.reshape(1, -1, *[1] * (leaf.ndim - 2)), 0, leaf)

    return {
        "blocks": jax.tree.map(zero, cache["blocks"]),
        "length": jnp.where(mask, 0, cache["length"]),
    }


def copy_slots(cache: Cache, source: jax.Array) -> Cache:
    """Slot s takes the state of slot `source[s]`."""
    return {
        "blocks": jax.tree.map(lambda leaf: leaf[:, source], cache["blocks"]),
        "length": cache["length"][source],
    }
