"""Cached decoding: slots that keep their state and append tokens, a ragged number each.

The cache is a nested dict: `length [S]`, and per layer keys and values (full attention) or
convolution and recurrent state (gated delta rule).  A config that scans its blocks has leaves
stacked over blocks, `[blocks, S, ...]`; an unrolled one (`cfg.unrolled`) has a dict of blocks
with leaves `[S, ...]`, which spares copies.  Paging, and evicting under pressure, are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import numpy as jnp

from fastask_jax.model.config import ModelConfig
from fastask_jax.model.decoder import Params, abstract_decoder, merge

Cache = dict[str, Any]


def init_cache(cfg: ModelConfig, slots: int, max_len: int) -> Cache:
    """An empty cache of `slots` slots that hold up to `max_len` tokens each.

    Raises:
      ValueError: no slots or no room.
    """
    if slots < 1 or max_len < 1:
        raise ValueError(f"slots and max_len must be at least 1, got {slots} and {max_len}")
    block = abstract_decoder(cfg).blocks
    if cfg.unrolled:
        blocks = {
            "unrolled": {
                f"block_{i}": block.init_cache(slots, max_len) for i in range(cfg.num_blocks)
            }
        }
    else:
        blocks = {
            "stacked": jax.tree.map(
                lambda leaf: jnp.zeros((cfg.num_blocks, *leaf.shape), leaf.dtype),
                jax.eval_shape(lambda: block.init_cache(slots, max_len)),
            )
        }
    return {"length": jnp.zeros(slots, jnp.int32), **blocks}


def unstacked(cfg: ModelConfig, params: Params) -> Params:
    """Parameters whose "blocks" is a list, one block's by itself each: the form in which `extend`
    of an unrolled config reads them, so that those that are in it already aren't cut out of the
    stack at every call.  Such parameters come back as they are."""
    stacked = params["blocks"]
    if isinstance(stacked, list):
        return params
    blocks = [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(cfg.num_blocks)]
    return {**params, "blocks": blocks}


def extend(
    cfg: ModelConfig,
    params: Params,
    cache: Cache,
    tokens: jax.Array,
    counts: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Slot s appends its first `counts[s]` tokens after the ones that it holds.

    Args:
      cfg: static under jit.
      params: as for `forward`, or, where the config is unrolled, from `unstacked`.
      cache: from `init_cache`; donate it under jit to have it updated in place.
      tokens: `[S, T]` int32; those from `counts[s]` on are ignored.
      counts: `[S]` int32 in `[0, T]`; a slot with 0 keeps its state unchanged.

    Returns:
      `hidden [S, T, D]` after the final norm, of which `hidden[s, :counts[s]]` is meaningful,
      and the new cache.  A slot that would grow beyond the cache gets NaN hidden states: the
      caller must keep `length + counts <= max_len`.
    """
    blocks = unstacked(cfg, params)["blocks"] if "unrolled" in cache else []
    decoder = merge(cfg, params)
    length = cache["length"]
    room = max_len(cache)
    rotary = decoder.rotary(length[:, None] + jnp.arange(tokens.shape[1])[None, :])
    rebuild, stacked = decoder.stacked_blocks()
    x = decoder.embed(tokens)

    def apply(x, leaves, block_cache):
        return rebuild(leaves).extend(x, rotary, block_cache, length, counts)

    if "unrolled" in cache:
        after = {}
        for i, leaves in enumerate(blocks):
            name = f"block_{i}"
            x, after[name] = apply(x, leaves, cache["unrolled"][name])
        held = {"unrolled": after}
    else:

        def body(carry, operands):
            x, caches = carry
            index, leaves = operands
            x, block = apply(x, leaves, jax.tree.map(lambda leaf: leaf[index], caches))
            # The cache is carried, not stacked from outputs: so it is updated in place.
            caches = jax.tree.map(lambda leaf, new: leaf.at[index].set(new), caches, block)
            return (x, caches), None

        (x, caches), _ = jax.lax.scan(
            body, (x, cache["stacked"]), (jnp.arange(cfg.num_blocks), stacked)
        )
        held = {"stacked": caches}
    overflow = (counts > 0) & (length + counts > room)
    hidden = jnp.where(overflow[:, None, None], jnp.nan, decoder.norm(x))
    return hidden, {"length": length + counts, **held}


def max_len(cache: Cache) -> int:
    """Tokens that a slot can hold; without any full attention there is no limit."""
    sizes = [
        leaf.shape[-2]
        for path, leaf in jax.tree_util.tree_leaves_with_path(cache)
        if getattr(path[-1], "key", None) == "v"
    ]
    return sizes[0] if sizes else jnp.iinfo(jnp.int32).max


def _map_slots(cache: Cache, change: Callable[[jax.Array, int], jax.Array]) -> Cache:
    """Applies `change(leaf, slot axis)` to every leaf."""
    axes = {"length": 0, "unrolled": 0, "stacked": 1}
    return {
        part: jax.tree.map(lambda leaf, axis=axes[part]: change(leaf, axis), leaves)
        for part, leaves in cache.items()
    }


def reset_slots(cache: Cache, mask: jax.Array) -> Cache:
    """Empties and zeroes the slots where `mask [S]` is true."""

    def reset(leaf: jax.Array, axis: int) -> jax.Array:
        shape = (1,) * axis + mask.shape + (1,) * (leaf.ndim - axis - 1)
        return jnp.where(mask.reshape(shape), jnp.zeros((), leaf.dtype), leaf)

    return _map_slots(cache, reset)


def copy_slots(cache: Cache, source: jax.Array) -> Cache:
    """Slot s takes the state of slot `source[s]`, all at once; `source[s] = s` keeps it."""
    return _map_slots(cache, lambda leaf, axis: jnp.take(leaf, source, axis=axis, mode="clip"))
