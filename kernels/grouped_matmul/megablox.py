"""Grouped products for TPUs: JAX's megablox kernels behind our shapes.

The kernels walk over tiles of rows and load the matrix of the group that a tile belongs to, so no
row is moved or padded per group.  They leave the results of rows without a group as they find
them and want whole tiles of rows; this module sees to both.
"""

from __future__ import annotations

import jax
from jax import numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

# Rows, inner and outer width of a tile: with double buffering they fill most of the fast memory.
_TILES = {2: (512, 1024, 1024), 4: (256, 512, 512)}
_FEW_ROWS = 128


def _tiles(rows: int, inner: int, outer: int, itemsize: int) -> tuple[int, int, int]:
    most, *widths = _TILES[itemsize]
    few = rows < 8 * most
    return (
        _FEW_ROWS if few else most,
        min(widths[0], inner),
        min(widths[1], outer),
    )


def _whole_tiles(x: jax.Array, tile: int) -> jax.Array:
    return jnp.pad(x, ((0, -x.shape[0] % tile), (0, 0)))


def _product(
    x: jax.Array, weights: jax.Array, sizes: jax.Array, transposed: bool
) -> jax.Array:
    """`x [N, D]` times each group's `[D, F]` (or the transpose of its `[F, D]`)."""
    rows, outer = x.shape[0], weights.shape[1 if transposed else 2]
    tiles = _tiles(rows, x.shape[1], outer, x.dtype.itemsize)
    out = gmm(
        _whole_tiles(x, tiles[0]),
        weights,
        sizes,
        x.dtype,
        tiles,
        transpose_rhs=transposed,
    )[:rows]
    return jnp.where((jnp.arange(rows) < jnp.sum(sizes))[:, None], out, 0)


def grouped_matmul(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """Shapes as in `kernels.grouped_matmul.grouped_matmul`."""
    dtype = jnp.result_type(x, weights)
    return _grouped_matmul(x.astype(dtype), weights.astype(dtype), sizes.astype(jnp.int32))


@jax.custom_vjp
def _grouped_matmul(x, weights, sizes):
    return _product(x, weights, sizes, False)


def _forward(x, weights, sizes):
    return _product(x, weights, sizes, False), (x, weights, sizes)


def _backward(residuals, cotangent):
    x, weights, sizes = residuals
    d_x = _product(cotangent, weights, sizes, True)
    tiles = _tiles(x.shape[0], x.shape[1], cotangent.shape[1], x.dtype.itemsize)
    d_weights = tgmm(
        _whole_tiles(x, tiles[0]).T,
        _whole_tiles(cotangent, tiles[0]),
        sizes,
        weights.dtype,
        tiles,
    )
    return d_x, d_weights, None


_grouped_matmul.defvjp(_forward, _backward)
