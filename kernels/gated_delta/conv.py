"""The causal depth-wise convolution in front of the gated delta rule."""

from __future__ import annotations

import jax
from jax import numpy as jnp


def causal_conv(
    x: jax.Array,
    weight: jax.Array,
    segment_ids: jax.Array | None = None,
    state: jax.Array | None = None,
) -> jax.Array:
    """`out_t = sum_j weight[j] * x_{t - (W - 1) + j}`, taps outside the segment being zero.

    Args:
      x: `[B, T, C]`.
      weight: `[W, C]`; the last tap is the token itself.
      segment_ids: `[B, T]` or None for one segment a row.
      state: `[B, W - 1, C]`, the inputs before the first token (only without segments).

    Returns:
      `[B, T, C]`.

    Raises:
      ValueError: both `segment_ids` and `state` given.
    """
    if segment_ids is not None and state is not None:
        raise ValueError("causal_conv takes segment_ids or a state, not both")
    width, length = weight.shape[0], x.shape[1]
    if state is not None:
        padded = jnp.concatenate([state.astype(x.dtype), x], axis=1)
    else:
        padded = jnp.pad(x, ((0, 0), (width - 1, 0), (0, 0)))
    out = x * weight[-1]
    for back in range(1, width):
        tap = padded[:, width - 1 - back : width - 1 - back + length] * weight[-1 - back]
        if segment_ids is not None:
            before = jnp.pad(segment_ids, ((0, 0), (back, 0)), constant_values=-1)[:, :length]
            # Segments are contiguous, so equal ends mean that everything between is equal.
            tap = jnp.where((segment_ids == before)[..., None], tap, 0)
        out = out + tap
    return out
