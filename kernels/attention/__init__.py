"""Causal attention with grouped heads, over packed rows and over a decoding cache.

In packed rows (`attention`) a query sees the tokens of its own segment that are not after it; over
a cache of ragged lengths (`cached_attention`) those that its slot holds.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import numpy as jnp

from kernels.attention import blocks, reference, splash, xla
from kernels.choice import pick

__all__ = ["attention", "cached_attention"]

_IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "reference": reference.attention,
    "xla": xla.attention,
    "blocks": blocks.attention,
    "splash": splash.attention,
}
_CACHED: dict[str, Callable[..., jax.Array]] = {
    "reference": reference.cached_attention,
    "xla": xla.cached_attention,
    "blocks": blocks.cached_attention,
    "splash": xla.cached_attention,  # splash has no cached form
}


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Packed causal attention, scores scaled by `head_dim ** -0.5`, softmax in float32.

    Args:
      q: `[B, T, H, K]`.
      k, v: `[B, T, G, K]`; query head h reads key/value head `h // (H // G)`.
      segment_ids: `[B, T]` int32; a run of equal ids is a segment, and no id comes back in another
        run.  Padding (0) is a segment of its own; it must be finite like all else.
      implementation: "reference", "xla" (few large products), "blocks" (loops over small ones)
        or "splash" (the TPU kernel); the default, "auto", is "blocks" on CPU, "splash" on TPU,
        else "xla".

    Returns:
      `[B, T, H, K]` in the type of `q`.

    Raises:
      ValueError: shapes that don't fit, or an unknown implementation.
    """
    if (
        q.ndim != 4
        or k.shape != v.shape
        or k.ndim != 4
        or (*k.shape[:2], k.shape[3]) != (*q.shape[:2], q.shape[3])
        or 0 in (*q.shape[2:], k.shape[2])
        or q.shape[2] % k.shape[2]
    ):
        raise ValueError(f"attention shapes don't fit: q {q.shape}, k {k.shape}, v {v.shape}")
    if segment_ids.shape != q.shape[:2]:
        raise ValueError(f"segment_ids must be {q.shape[:2]}, got {segment_ids.shape}")
    if not q.size:
        return q
    return pick("attention", _IMPLEMENTATIONS, implementation)(q, k, v, segment_ids)


def cached_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    length: jax.Array,
    counts: jax.Array | None = None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Attention of new tokens over a cache that already contains them; scores and softmax as in
    `attention`.

    What is computed for several new tokens grows with what the cache holds, not with its size.

    Args:
      q: `[S, T, H, K]`, the new tokens of each slot, the first at position `length[s]`.
      k: `[S, G, K, L]`, the cache's keys, tokens last: so the scores of one query are products
        along contiguous rows.
      v: `[S, G, L, K]`, its values.
      length: `[S]` int32, tokens held before the new ones; query t sees positions
        `<= length + t`.
      counts: `[S]` int32, how many of the new tokens are real; what the others get is of no
        meaning.  None: all.
      implementation: as in `attention`; a single token, and "splash", take the form of "xla".

    Returns:
      `[S, T, H, K]` in the type of `q`.

    Raises:
      ValueError: shapes that don't fit, or an unknown implementation.
    """
    slots, tokens, heads, width = q.shape
    groups, room = v.shape[1:3]
    fits = v.shape == (slots, groups, room, width) and k.shape == (slots, groups, width, room)
    fits = fits and length.shape == (slots,) and (counts is None or counts.shape == (slots,))
    if not fits or not room or heads % max(1, groups):
        raise ValueError(
            f"cached_attention shapes don't fit: q {q.shape}, k {k.shape}, v {v.shape}, length "
            f"{length.shape}, counts {None if counts is None else counts.shape}"
        )
    if counts is None:
        counts = jnp.full(slots, tokens, jnp.int32)
    chosen = pick("attention", _CACHED, implementation)
    if tokens == 1 and chosen is blocks.cached_attention:
        chosen = xla.cached_attention  # one row of scores a head: nothing to cut into blocks
    return chosen(q, k, v, length, counts)
