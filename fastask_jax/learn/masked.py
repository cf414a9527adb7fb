"""Masked reductions, in one place.

Every sum, mean and maximum over tokens in the learner goes through here, so that "which tokens
count" and "what an empty mask gives" are decided once.  Values under a false mask are replaced
before they are used, so NaN or infinity there never reaches a result or a gradient.

Left out: anything that spans micro-batches or devices.  Global denominators belong to
`objective.py`, merging of metrics to `metrics.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def masked_sum(values: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Float[Array, ""]:
    """Sum of the values whose mask is true; 0 where none is."""
    return jnp.sum(jnp.where(mask, values, 0))


def masked_mean(values: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Float[Array, ""]:
    """Mean of the values whose mask is true; 0 where none is."""
    return masked_sum(values, mask) / jnp.maximum(jnp.sum(mask), 1)


def masked_max(values: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Float[Array, ""]:
    """Largest value whose mask is true; minus infinity where none is."""
    return jnp.max(jnp.where(mask, values, -jnp.inf), initial=-jnp.inf)


def segment_totals(
    values: Float[Array, "*rows length"],
    mask: Bool[Array, "*rows length"],
    segment_ids: Int[Array, "*rows length"],
) -> Float[Array, "*rows length"]:
    """Masked sum over each token's own segment, handed back to every token of that segment.

    Segment ids count from 1 inside a row (0 is padding), so no id exceeds the row length.
    """
    slots = values.shape[-1] + 1

    def one_row(row: Array, ids: Array) -> Array:
        return jax.ops.segment_sum(row, ids, num_segments=slots)[ids]

    rows = jnp.vectorize(one_row, signature="(t),(t)->(t)")
    return rows(jnp.where(mask, values, 0), segment_ids)
