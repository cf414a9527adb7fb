"""Log-probability, entropy and log-sum-exp of token ids under a linear head.

`linear_logprob` is the one way in which the learner scores tokens; it never holds a
`[tokens, vocab]` array for the whole batch in its chunked form.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import numpy as jnp

from kernels.choice import pick
from kernels.linear_logprob import reference, xla

__all__ = ["linear_logprob"]

_IMPLEMENTATIONS: dict[str, Callable[..., tuple[jax.Array, jax.Array, jax.Array]]] = {
    "reference": reference.linear_logprob,
    "xla": xla.linear_logprob,
}


def linear_logprob(
    hidden: jax.Array,
    head: jax.Array,
    ids: jax.Array,
    temperature: jax.Array | float = 1.0,
    mask: jax.Array | None = None,
    *,
    axis_name: str | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Scores `ids` under `softmax(hidden @ head / temperature)`.

    Args:
      hidden: `[..., D]`, any float type.
      head: `[D, V]`, any float type.
      ids: `[...]` int32 in `[0, V)`; the logprob of any other is NaN.
      temperature: a positive scalar, or an array broadcastable to `ids`.  Not differentiated.
      mask: `[...]` bool, the tokens that are wanted; all when None.  The work is in proportion
        to their number, so masking the rest here is cheaper than ignoring it afterwards.
      axis_name: within `jax.shard_map(..., check_vma=False)`, the mesh axis over which the
        vocabulary is split: `head` is then this device's consecutive part of the columns, while
        the other arguments are the same on all peers of that axis, and so are the results.  The
        gradient of `hidden` is this device's part of a sum over the peers.
      implementation: "reference", "xla" or "auto" (default).

    Returns:
      `(logprob, entropy, logsumexp)`, each `[...]` float32, in nats, zero (with zero gradients)
      where `mask` is false.  `logsumexp` is of the temperature-scaled logits.
      Differentiable in `hidden` and `head` through all three.

    Raises:
      ValueError: shapes that don't fit, or an unknown implementation.
    """
    ids = jnp.asarray(ids)
    if (
        not hidden.ndim
        or hidden.shape[:-1] != ids.shape
        or head.ndim != 2
        or hidden.shape[-1] != head.shape[0]
        or 0 in head.shape
    ):
        raise ValueError(
            "linear_logprob needs hidden [..., D], head [D, V] and ids [...]; got "
            f"{hidden.shape}, {head.shape} and {ids.shape}"
        )
    if mask is not None and mask.shape != ids.shape:
        raise ValueError(f"mask must be {ids.shape} like ids, got {mask.shape}")
    if not ids.size:
        return (jnp.zeros(ids.shape),) * 3
    temperature = jnp.asarray(temperature, jnp.float32)
    if mask is not None:
        # Tokens that aren't wanted may hold anything, NaN too.
        mask = mask.astype(bool)
        temperature, ids = jnp.where(mask, temperature, 1.0), jnp.where(mask, ids, 0)
    words = head.shape[1] if axis_name is None else jax.lax.axis_size(axis_name) * head.shape[1]
    known = (ids >= 0) & (ids < words)
    score = pick("linear_logprob", _IMPLEMENTATIONS, implementation)
    lead = ids.shape
    logprob, entropy, lse = score(
        hidden.reshape(-1, hidden.shape[-1]),
        head,
        ids.reshape(-1),
        jnp.broadcast_to(temperature, lead).reshape(-1),
        None if mask is None else mask.reshape(-1),
        axis_name,
    )
    logprob = jnp.where(known, logprob.reshape(lead), jnp.nan)
    return logprob, entropy.reshape(lead), lse.reshape(lead)
