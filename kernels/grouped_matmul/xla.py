"""Grouped product in blocks of rows, portable and without work on the wrong experts.

Every group is padded to whole blocks, so a block of rows belongs to one group and costs one
dense product.  There are at most `N / block + E` blocks whatever the sizes are, which keeps
shapes static.
"""

from __future__ import annotations

import jax
from jax import numpy as jnp

_BLOCK = 64


def _layout(
    rows: int, groups: int, sizes: jax.Array
) -> tuple[int, int, jax.Array, jax.Array]:
    """Where each row goes among the padded blocks, and which group each block belongs to."""
    block = min(_BLOCK, max(8, rows // groups // 8 * 8))
    blocks = -(-rows // block) + groups
    padded = (sizes + block - 1) // block * block
    ends, padded_ends = jnp.cumsum(sizes), jnp.cumsum(padded)
    row = jnp.arange(rows)
    group = jnp.searchsorted(ends, row, side="right")
    place = row - (ends - sizes)[group] + (padded_ends - padded)[group]
    owner = jnp.searchsorted(padded_ends, jnp.arange(blocks) * block, side="right")
    return block, blocks, place, jnp.minimum(owner, groups - 1)


def _spread(x: jax.Array, place: jax.Array, blocks: int, block: int) -> jax.Array:
    out = jnp.zeros((blocks * block, x.shape[1]), x.dtype)
    return out.at[place].set(x, unique_indices=True).reshape(blocks, block, -1)


@jax.custom_vjp
def grouped_matmul(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """Shapes as in `kernels.grouped_matmul.grouped_matmul`."""
    block, blocks, place, owner = _layout(x.shape[0], weights.shape[0], sizes)

    def step(_, operands):
        rows, group = operands
        return None, jnp.matmul(rows, weights[group])

    _, out = jax.lax.scan(step, None, (_spread(x, place, blocks, block), owner))
    return out.reshape(blocks * block, -1)[place]


def _forward(x, weights, sizes):
    return grouped_matmul(x, weights, sizes), (x, weights, sizes)


def _backward(residuals, cotangent):
    x, weights, sizes = residuals
    block, blocks, place, owner = _layout(x.shape[0], weights.shape[0], sizes)

    def step(d_weights, operands):
        rows, d_out, group = operands
        update = jnp.matmul(rows.T, d_out, preferred_element_type=jnp.float32)
        d_weights = d_weights.at[group].add(update)
        return d_weights, jnp.matmul(d_out, weights[group].T)

    operands = (
        _spread(x, place, blocks, block),
        _spread(cotangent, place, blocks, block),
        owner,
    )
    d_weights, d_x = jax.lax.scan(step, jnp.zeros(weights.shape, jnp.float32), operands)
    d_x = d_x.reshape(blocks * block, -1)[place]
    return d_x.astype(x.dtype), d_weights.astype(weights.dtype), None


grouped_matmul.defvjp(_forward, _backward)
