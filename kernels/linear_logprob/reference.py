"""The definition of `linear_logprob`: plain softmax over full logits, in float32 (float64 for
float64 inputs)."""

from __future__ import annotations

import jax
from jax import numpy as jnp


def linear_logprob(
    hidden: jax.Array,
    head: jax.Array,
    ids: jax.Array,
    temperature: jax.Array,
    mask: jax.Array | None,
    axis_name: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`hidden [N, D]`, `head [D, V]`, `ids [N]`, `temperature [N]`, `mask [N]` bool or None ->
    three `[N]` float32; V is this device's part where `axis_name` is."""
    if axis_name is not None:
        head = jax.lax.all_gather(head, axis_name, axis=1, tiled=True)
    if mask is not None:  # what isn't wanted may hold anything, NaN too
        hidden = jnp.where(mask[:, None], hidden, 0)
    wide = jnp.promote_types(jnp.result_type(hidden, head), jnp.float32)
    logits = jnp.matmul(hidden, head, preferred_element_type=wide)
    logits = logits.astype(wide) / jax.lax.stop_gradient(temperature)[:, None]
    lse = jax.nn.logsumexp(logits, axis=-1)
    logprobs = logits - lse[:, None]
    entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
    chosen = jnp.take_along_axis(logprobs, ids[:, None], axis=-1)[:, 0]
    if mask is None:
        return chosen, entropy, lse
    return tuple(jnp.where(mask, x, 0.0) for x in (chosen, entropy, lse))  # type: ignore[return-value]
