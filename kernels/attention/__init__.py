"""Causal attention over packed rows, with grouped heads.

`attention` sees only the tokens of a query's own segment that are not after it.  Attention over
a decoding cache of ragged lengths is `cached_attention`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax

from kernels.attention import blocks, reference, splash, xla
from kernels.attention.xla import cached_attention
from kernels.choice import pick

__all__ = ["attention", "cached_attention"]

_IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "reference": reference.attention,
    "xla": xla.attention,
    "blocks": blocks.attention,
    "splash": splash.attention,
}


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Packed causal attention, scores scaled by `head_dim ** -0.5`, softmax in float32.

    Args:
      q: `[B, T, H, K]`.
      k, v: `[B, T, G, K]`; query head h reads key/value head `h // (H // G)`.
      segment_ids: `[B, T]` int32; a run of equal ids is a segment, and no id comes back in another
        run.  Padding (0) is a segment of its own; it must be finite like all else.
      implementation: "reference", "xla" (few large products), "blocks" (loops over small ones)
        or "splash" (the TPU kernel); the default, "auto", is "blocks" on CPU, "splash" on TPU,
        else "xla".

    Returns:
      `[B, T, H, K]` in the type of `q`.

    Raises:
      ValueError: shapes that don't fit, or an unknown implementation.
    """
    if (
        q.ndim != 4
        or k.shape != v.shape
        or k.ndim != 4
        or (*k.shape[:2], k.shape[3]) != (*q.shape[:2], q.shape[3])
        or 0 in (*q.shape[2:], k.shape[2])
        or q.shape[2] % k.shape[2]
    ):
        raise ValueError(f"attention shapes don't fit: q {q.shape}, k {k.shape}, v {v.shape}")
    if segment_ids.shape != q.shape[:2]:
        raise ValueError(f"segment_ids must be {q.shape[:2]}, got {segment_ids.shape}")
    if not q.size:
        return q
    return pick("attention", _IMPLEMENTATIONS, implementation)(q, k, v, segment_ids)
