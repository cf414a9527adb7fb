"""The definition of `linear_logprob`: plain softmax over full logits, float32."""

from __future__ import annotations

import jax
from jax import numpy as jnp


def linear_logprob(
    hidden: jax.Array, head: jax.Array, ids: jax.Array, temperature: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`hidden [N, D]`, `head [D, V]`, `ids [N]`, `temperature [N]` -> three `[N]` float32."""
    logits = jnp.matmul(hidden, head, preferred_element_type=jnp.float32)
    logits = logits.astype(jnp.float32) / jax.lax.stop_gradient(temperature)[:, None]
    lse = jax.nn.logsumexp(logits, axis=-1)
    logprobs = logits - lse[:, None]
    entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
    return jnp.take_along_axis(logprobs, ids[:, None], axis=-1)[:, 0], entropy, lse
