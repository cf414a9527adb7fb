"""The gated delta rule (Yang et al., "Gated Delta Networks", 2024) over packed rows.

`gated_delta` runs the recurrence of one layer, `causal_conv` is the short depth-wise convolution
in front of it.  Both restart wherever the segment id changes and can start from a saved state.
Gates, l2 norms and projections belong to the model.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import numpy as jnp

from kernels.choice import pick
from kernels.gated_delta import reference, tpu, xla
from kernels.gated_delta.conv import causal_conv

__all__ = ["causal_conv", "gated_delta"]

_IMPLEMENTATIONS: dict[str, Callable[..., tuple[jax.Array, jax.Array]]] = {
    "reference": reference.gated_delta,
    "xla": xla.gated_delta,
    "pallas": tpu.gated_delta,
}


def gated_delta(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    segment_ids: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    *,
    chunk: int = 32,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Per value head, with state `S [K, V]` and every token t in order:

        S <- exp(log_decay_t) S;  S <- S + beta_t k_t (v_t - S^T k_t)^T;  out_t = S^T q_t

    A token with `beta = 0` and `log_decay = 0` leaves the state as it is.

    Args:
      q, k: `[B, T, N, K]`; value head h uses key head `h // (H // N)`.
      v: `[B, T, H, V]`.
      log_decay, beta: `[B, T, H]`, `log_decay <= 0` (minus infinity too).
      segment_ids: `[B, T]` int32, or None for one segment a row.  Where the id differs from the
        token before, the state restarts from zero (from NaN where the segment before has NaN).
      initial_state: `[B, H, K, V]` float32, the state before the first token; default zeros.
      chunk: tokens worked on at once by the chunked form.
      implementation: "reference", "xla" or "pallas" (the TPU kernels); the default, "auto", is
        "pallas" on TPU, else "xla".

    Returns:
      `(out [B, T, H, V] float32, state [B, H, K, V] float32 after the last token)`.

    Raises:
      ValueError: shapes that don't fit, or an unknown implementation.
    """
    if (
        q.shape != k.shape
        or not q.ndim == v.ndim == 4
        or v.shape[:2] != q.shape[:2]
        or 0 in (*q.shape[2:], *v.shape[2:])
        or v.shape[2] % q.shape[2]
    ):
        raise ValueError(f"gated_delta shapes don't fit: q {q.shape}, k {k.shape}, v {v.shape}")
    if log_decay.shape != v.shape[:3] or beta.shape != v.shape[:3]:
        raise ValueError(
            f"log_decay and beta must be {v.shape[:3]}, got {log_decay.shape} and {beta.shape}"
        )
    if segment_ids is not None and segment_ids.shape != q.shape[:2]:
        raise ValueError(f"segment_ids must be {q.shape[:2]}, got {segment_ids.shape}")
    held = (q.shape[0], v.shape[2], q.shape[3], v.shape[3])
    if initial_state is not None and initial_state.shape != held:
        raise ValueError(f"initial_state must be {held}, got {initial_state.shape}")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, not {chunk}")
    if not q.size:  # no token
        state = jnp.zeros(held) if initial_state is None else initial_state
        return jnp.zeros(v.shape, jnp.float32), state.astype(jnp.float32)
    # Sums of decays are products with zeros and ones, which infinity wouldn't survive; e ** -1e4
    # is 0 in float32.
    log_decay = jnp.maximum(log_decay, -1e4)
    return pick("gated_delta", _IMPLEMENTATIONS, implementation)(
        q, k, v, log_decay, beta, segment_ids, initial_state, chunk=chunk
    )
