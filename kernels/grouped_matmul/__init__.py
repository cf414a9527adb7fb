"""Products of consecutive groups of rows with one matrix each, for dropless experts."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import numpy as jnp

from kernels.choice import pick
from kernels.grouped_matmul import megablox, reference, xla

__all__ = ["grouped_matmul"]

_IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "reference": reference.grouped_matmul,
    "xla": xla.grouped_matmul,
    "megablox": megablox.grouped_matmul,
}


def grouped_matmul(
    x: jax.Array, weights: jax.Array, sizes: jax.Array, *, implementation: str | None = None
) -> jax.Array:
    """Rows `[sum(sizes[:e]), sum(sizes[:e + 1]))` of `x` times `weights[e]`.

    Args:
      x: `[N, D]`, rows sorted by group.
      weights: `[E, D, F]`.
      sizes: `[E]` integers; groups may be empty.  Rows beyond their sum belong to no group: they
        cost no products, and their results and gradients are zero.
      implementation: "reference", "xla" or "megablox" (the TPU kernels); the default, "auto", is
        "megablox" on TPU, else "xla".

    Returns:
      `[N, F]` in the type of `x`; differentiable in `x` and `weights` (zero for empty groups).

    Raises:
      ValueError: shapes that don't fit, or an unknown implementation.
    """
    if x.ndim != 2 or weights.ndim != 3 or x.shape[1] != weights.shape[1] or not len(weights):
        raise ValueError(f"grouped_matmul needs x [N, D], weights [E, D, F]; got {x.shape}, "
                         f"{weights.shape}")
    if sizes.shape != weights.shape[:1]:
        raise ValueError(f"sizes must be {weights.shape[:1]}, got {sizes.shape}")
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise ValueError(f"sizes must be integers, not {sizes.dtype}")
    multiply = pick("grouped_matmul", _IMPLEMENTATIONS, implementation)
    # Sums of sizes may be more than the sizes' own type can hold.
    return multiply(x, weights, sizes.astype(jnp.int32)).astype(x.dtype)
