"""One chunk of the gated delta rule, of one head, and the parts of it: what the forms share.

Within a chunk of C tokens the updates are a unit lower triangular system (the "UT transform" of
the DeltaNet papers), solved by its inverse.  Segment boundaries may fall anywhere: they cut the
decay matrix, what a token reads of the incoming state, and what reaches the outgoing state.
Every product is float32 at full precision: the inverse loses digits otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from jax import numpy as jnp

# As `jnp` has them, at full precision.
matmul = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def places(size: int) -> tuple[jax.Array, jax.Array]:
    """Row and column numbers of a `[C, C]` array."""
    return tuple(jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))  # type: ignore[return-value]


def _column(row: jax.Array) -> jax.Array:
    """`[1, C]` -> `[C, 1]`."""
    i, j = places(row.shape[1])
    return jnp.sum(jnp.where(i == j, row, 0.0), axis=1, keepdims=True)


def masked_exp(x: jax.Array, mask: jax.Array) -> jax.Array:
    """exp where `mask`, else 0, with no overflow (and so no NaN gradient) behind the mask."""
    return jnp.where(mask, jnp.exp(jnp.where(mask, x, 0.0)), 0.0)


@jax.custom_vjp
def _scaled(rate: jax.Array, rows: jax.Array) -> jax.Array:
    """`[C, 1] * [C, W]`.  The gradient of the rate is a product with ones: XLA's sums over short
    rows take several times as long on CPUs."""
    return rate * rows


def _scaled_backward(residuals, cotangent):
    rate, rows = residuals
    return dot(rows * cotangent, jnp.ones((rows.shape[1], 1))), rate * cotangent


_scaled.defvjp(lambda rate, rows: (rate * rows, (rate, rows)), _scaled_backward)


def relative_runs(segment_ids: jax.Array, pad: int, chunk: int) -> jax.Array:
    """How many segment boundaries lie between the end of the chunk before and each token.

    `[B, T]` -> `[B, chunks, 1, C]` float32 (small whole numbers, which every vector unit can
    reduce): 0 reads the incoming state, and equal numbers within a chunk are one segment.  `pad`
    tokens more continue the last segment.  The first token owns the state that enters the first
    chunk.
    """
    ids = jnp.pad(segment_ids, ((0, 0), (0, pad)), mode="edge")
    changed = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))
    run = jnp.cumsum(changed.reshape(ids.shape[0], -1, 1, chunk), axis=-1, dtype=jnp.int32)
    return run.astype(jnp.float32)


@jax.custom_vjp
def unit_lower_inverse(system: jax.Array) -> jax.Array:
    """`inv(I + system)` for strictly lower triangular `system [..., C, C]`.

    Inverses of diagonal blocks are merged pair by pair (sizes 1, 2, 4, ...), each merge two
    products.  Unlike the doubling product `(I - A)(I + A^2)(I + A^4)...` this never forms high
    powers of A, whose entries grow like binomial coefficients when keys repeat.
    """
    return _unit_lower_inverse(system)


def _unit_lower_inverse(system: jax.Array) -> jax.Array:
    size = system.shape[-1]
    half = size // 2
    if size % 2 == 0 and size > 16:
        first = _unit_lower_inverse(system[..., :half, :half])
        second = _unit_lower_inverse(system[..., half:, half:])
        corner = -matmul(matmul(second, system[..., half:, :half]), first)
        top = jnp.pad(first, [(0, 0)] * (system.ndim - 1) + [(0, size - half)])
        return jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)
    index = jnp.arange(size)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=system.dtype), system.shape)
    block = 1
    while block < size:
        pair, odd = index // (2 * block), (index // block) % 2
        joins = (pair[:, None] == pair[None, :]) & (odd[:, None] == 1) & (odd[None, :] == 0)
        link = jnp.where(joins, system, 0.0)
        if block == 1:
            inverse = inverse - link
        else:
            inverse = inverse - matmul(matmul(inverse, link), inverse)
        block *= 2
    return inverse


def _inverse_forward(system):
    inverse = _unit_lower_inverse(system)
    return inverse, inverse


def _inverse_backward(inverse, cotangent):
    transposed = jnp.swapaxes(inverse, -1, -2)
    gradient = -matmul(matmul(transposed, cotangent), transposed)
    return (jnp.tril(gradient, -1),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)


def advance(
    inverse_of: Callable[[jax.Array], jax.Array],
    run: jax.Array,
    state: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`state [K, V]`, `q, k [C, K]`, `v [C, V]`, the rest `[1, C]`, all float32 -> outputs
    `[C, V]` and the state after the chunk.

    Args:
      inverse_of: strictly lower triangular `A [C, C]` -> `inv(I + A)`.
      run: from `relative_runs`.
    """
    size = run.shape[1]
    i, j = places(size)
    token_run, last_run = _column(run), jnp.max(run, axis=1, keepdims=True)
    # Decays between two tokens are summed, not taken as differences of running sums: neither the
    # values nor their gradients then cancel.
    single = jnp.where(j <= i, log_decay, 0.0)
    between = dot(single, jnp.where(j < i, 1.0, 0.0))
    decay = masked_exp(between, (j <= i) & (token_run == run))
    into = masked_exp(jnp.sum(single, axis=1, keepdims=True), token_run == 0.0)
    after = jnp.sum(jnp.where(j > i, log_decay, 0.0), axis=1, keepdims=True)
    out_of = masked_exp(after, token_run == last_run)
    across = masked_exp(jnp.sum(log_decay, axis=1, keepdims=True), last_run == 0.0)

    rate = _column(beta)
    # Keys and queries meet the state, and the keys, in one product each.
    both = jnp.concatenate([k, q], axis=0)
    read, alike = dot(both, state), dot(both, k, (1, 1))
    system = jnp.where(j < i, _scaled(rate, alike[:size] * decay), 0.0)
    corrected = dot(inverse_of(system), _scaled(rate, v - _scaled(into, read[:size])))
    out = dot(alike[size:] * decay, corrected) + _scaled(into, read[size:])
    return out, across * state + dot(_scaled(out_of, k), corrected, (0, 0))
