"""Small pieces shared by the layers: norms, linear maps, rotary positions."""

from __future__ import annotations

import math

import jax
from jax import numpy as jnp

from fastask_jax.model.config import Llama3Rope


def rms_norm(
    x: jax.Array, weight: jax.Array, eps: float, zero_centered: bool = True
) -> jax.Array:
    """`x / rms(x) * weight` in float32, or times `1 + weight` where the weight is zero-centred."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * (1.0 + weight if zero_centered else weight)).astype(x.dtype)


def gated_rms_norm(x: jax.Array, gate: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`x / rms(x) * weight * silu(gate)`, in float32; the weight is not zero-centred here."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide * scale * weight * jax.nn.silu(gate.astype(jnp.float32))


def l2_norm(x: jax.Array, eps: float = 1e-6) -> jax.Array:
    """`x / sqrt(sum(x^2) + eps)` over the last axis, in float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + eps)


def linear(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`x [..., D] @ kernel [D, F]` in the type of `x`."""
    return jnp.matmul(x, kernel.astype(x.dtype))


def rotary_table(
    positions: jax.Array, rotary_dim: int, theta: float, scaling: Llama3Rope | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[..., rotary_dim // 2]` float32 for integer positions `[...]`."""
    exponent = jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim
    frequency = 1.0 / theta**exponent
    if scaling is not None:
        frequency = _stretch(frequency, scaling)
    angle = positions.astype(jnp.float32)[..., None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def _stretch(frequency: jax.Array, scaling: Llama3Rope) -> jax.Array:
    """Llama 3.1's frequencies, as `transformers` computes them for rope_type "llama3"."""
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequency * (kept + (1.0 - kept) / scaling.factor)


def rotate(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns the first `rotary_dim` channels of `x [B, T, H, K]` (halves, not pairs, interleave)."""
    cos, sin = (t[:, :, None, :].astype(x.dtype) for t in table)
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
