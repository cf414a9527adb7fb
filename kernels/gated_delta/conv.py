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
      segment_ids: `[B, T]` or None for one segment a row; no id comes back in another run.
      state: `[B, W - 1, C]`, the inputs before the first token (only without segments).

    Returns:
      `[B, T, C]`.

    Raises:
      ValueError: both `segment_ids` and `state` given, or shapes that don't fit.
    """
    if segment_ids is not None and state is not None:
        raise ValueError("causal_conv takes segment_ids or a state, not both")
    if x.ndim != 3 or weight.ndim != 2 or not len(weight) or x.shape[2] != weight.shape[1]:
        raise ValueError(
            f"causal_conv needs x [B, T, C] and weight [W, C], got {x.shape} and {weight.shape}"
        )
    width, length = weight.shape[0], x.shape[1]
    held = (x.shape[0], width - 1, x.shape[2])
    if state is not None and state.shape != held:
        raise ValueError(f"the state must be {held}, got {state.shape}")
    if segment_ids is not None and segment_ids.shape != x.shape[:2]:
        raise ValueError(f"segment_ids must be {x.shape[:2]}, got {segment_ids.shape}")
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
