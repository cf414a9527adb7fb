"""The definitions of packed causal attention and of its cached form: one full masked softmax."""

from __future__ import annotations

import jax
from jax import numpy as jnp


def attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Shapes as in `kernels.attention.attention`."""
    length, groups = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k, preferred_element_type=wide)
    scores = scores * q.shape[-1] ** -0.5
    position = jnp.arange(length)
    visible = segment_ids[:, :, None] == segment_ids[:, None, :]
    visible = visible & (position[:, None] >= position[None, :])
    weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), axis=-1)
    out = jnp.einsum("bhqs,bshk->bqhk", weights, v.astype(wide))
    return out.astype(q.dtype)


def cached_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, length: jax.Array, counts: jax.Array
) -> jax.Array:
    """Shapes as in `kernels.attention.cached_attention`; padding is treated like any token."""
    del counts
    repeat = q.shape[2] // k.shape[1]
    k, v = (jnp.repeat(x, repeat, axis=1) for x in (k, v))
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("sqhk,shkl->shql", q, k, preferred_element_type=wide)
    scores = scores * q.shape[-1] ** -0.5
    last = length[:, None] + jnp.arange(q.shape[1])
    visible = jnp.arange(k.shape[-1]) <= last[..., None]
    weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("shql,shlk->sqhk", weights, v.astype(wide)).astype(q.dtype)
