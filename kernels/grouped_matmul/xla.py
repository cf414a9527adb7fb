"""Grouped product in blocks of rows, portable and without work on the wrong experts.

Every group is padded to whole blocks, so a block of rows belongs to one group and costs one
dense product.  There are at most `N / block + E` blocks whatever the sizes are, which keeps
shapes static; the loop ends after the blocks that hold rows of a group.
"""

from __future__ import annotations

import jax
from jax import numpy as jnp

_BLOCK = 64


def _layout(
    rows: int, groups: int, sizes: jax.Array
) -> tuple[int, int, jax.Array, jax.Array, jax.Array]:
    """Where each row goes among the padded blocks (past the end if it has no group), which group
    each block belongs to, and how many blocks are used."""
    block = min(_BLOCK, max(8, rows // groups // 8 * 8))
    blocks = -(-rows // block) + groups
    padded = (sizes + block - 1) // block * block
    ends, padded_ends = jnp.cumsum(sizes), jnp.cumsum(padded)
    row = jnp.arange(rows)
    group = jnp.searchsorted(ends, row, side="right")
    place = row - (ends - sizes)[group] + (padded_ends - padded)[group]
    place = jnp.where(group < groups, place, blocks * block + row)
    owner = jnp.searchsorted(padded_ends, jnp.arange(blocks) * block, side="right")
    return block, blocks, place, jnp.minimum(owner, groups - 1), padded_ends[-1] // block


def _spread(x: jax.Array, place: jax.Array, blocks: int, block: int) -> jax.Array:
    out = jnp.zeros((blocks * block, x.shape[1]), x.dtype)
    return out.at[place].set(x, mode="drop", unique_indices=True).reshape(blocks, block, -1)


def _collect(out: jax.Array, place: jax.Array) -> jax.Array:
    """The inverse of `_spread`, zero for rows without a group."""
    return out.reshape(-1, out.shape[-1]).at[place].get(
        mode="fill", fill_value=0, unique_indices=True
    )


@jax.custom_vjp
def grouped_matmul(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """Shapes as in `kernels.grouped_matmul.grouped_matmul`."""
    block, blocks, place, owner, used = _layout(x.shape[0], weights.shape[0], sizes)
    rows = _spread(x, place, blocks, block)

    def step(index, out):
        return out.at[index].set(jnp.matmul(rows[index], weights[owner[index]]))

    out = jnp.zeros((blocks, block, weights.shape[2]), jnp.result_type(x, weights))
    return _collect(jax.lax.fori_loop(0, used, step, out), place)


def _forward(x, weights, sizes):
    return grouped_matmul(x, weights, sizes), (x, weights, sizes)


def _backward(residuals, cotangent):
    x, weights, sizes = residuals
    block, blocks, place, owner, used = _layout(x.shape[0], weights.shape[0], sizes)
    rows, d_out = (_spread(array, place, blocks, block) for array in (x, cotangent))

    def step(index, carry):
        d_weights, d_rows = carry
        group = owner[index]
        update = jnp.matmul(rows[index].T, d_out[index], preferred_element_type=jnp.float32)
        d_weights = d_weights.at[group].add(update)
        return d_weights, d_rows.at[index].set(jnp.matmul(d_out[index], weights[group].T))

    d_rows = jnp.zeros((blocks, block, x.shape[1]), jnp.result_type(cotangent, weights))
    d_weights, d_rows = jax.lax.fori_loop(
        0, used, step, (jnp.zeros(weights.shape, jnp.float32), d_rows)
    )
    return _collect(d_rows, place).astype(x.dtype), d_weights.astype(weights.dtype), None


grouped_matmul.defvjp(_forward, _backward)
