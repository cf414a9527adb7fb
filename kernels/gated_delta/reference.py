"""The definition of the gated delta rule: one token after another, in float32 (float64 for
float64 inputs)."""

from __future__ import annotations

import jax
from jax import numpy as jnp


def gated_delta(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    segment_ids: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    *,
    chunk: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Shapes as in `kernels.gated_delta.gated_delta`; `chunk` has no meaning here."""
    del chunk
    batch, length, heads, width = v.shape
    wide = jnp.promote_types(v.dtype, jnp.float32)
    repeat = heads // q.shape[2]
    q, k = (jnp.repeat(x, repeat, axis=2) for x in (q, k))
    if segment_ids is None:
        fresh = jnp.zeros((batch, length), bool)
    else:
        fresh = segment_ids != jnp.pad(segment_ids, ((0, 0), (1, 0)), mode="edge")[:, :-1]
    if initial_state is None:
        initial_state = jnp.zeros((batch, heads, q.shape[-1], width), wide)

    def step(state, token):
        q, k, v, log_decay, beta, fresh = token
        state = jnp.where(fresh[:, None, None, None], 0.0, state)
        state = state * jnp.exp(log_decay)[..., None, None]
        error = (v - jnp.einsum("bhkv,bhk->bhv", state, k)) * beta[..., None]
        state = state + k[..., :, None] * error[..., None, :]
        return state, jnp.einsum("bhkv,bhk->bhv", state, q)

    tokens = [x.astype(wide).swapaxes(0, 1) for x in (q, k, v, log_decay, beta)]
    state, out = jax.lax.scan(
        step, initial_state.astype(wide), (*tokens, fresh.swapaxes(0, 1))
    )
    return out.swapaxes(0, 1), state
