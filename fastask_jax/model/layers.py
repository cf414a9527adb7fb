"""Small pieces shared by the layers: norms, linear maps, rotary positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import EllipsisType

import jax
from jax import numpy as jnp

from fastask_jax.model.config import Llama3Rope


def rms_norm(
    x: jax.Array, weight: jax.Array, eps: float, zero_centered: bool = True
) -> jax.Array:
    """`x / rms(x) * weight` in float32, or times `1 + weight` where the weight is zero-centred."""
    return _scaled_rms(x, 1.0 + weight if zero_centered else weight, eps)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _scaled_rms(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    return _scaled_rms_forward(x, weight, eps)[0]


def _scaled_rms_forward(
    x: jax.Array, weight: jax.Array, eps: float
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight).astype(x.dtype), (x, weight, scale)


def _scaled_rms_backward(
    eps: float, residuals: tuple[jax.Array, ...], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # Left to itself, XLA's CPU backend fuses a product into each of the two sums of the gradient
    # and then takes ten times as long for them.
    x, weight, scale = residuals
    wide = cotangent.astype(jnp.float32)
    normed = x.astype(jnp.float32) * scale
    along = (wide * normed).reshape(-1, x.shape[-1])
    mean = jax.lax.platform_dependent(
        along,
        weight.astype(jnp.float32),
        cpu=jnp.matmul,
        default=lambda along, weight: jnp.sum(along * weight, axis=-1),
    ).reshape(scale.shape) / x.shape[-1]
    d_weight = jax.lax.platform_dependent(
        along,
        cpu=lambda along: jnp.ones(along.shape[0]) @ along,
        default=lambda along: jnp.sum(along, axis=0),
    )
    d_x = scale * (wide * weight - normed * mean)
    return d_x.astype(x.dtype), d_weight.astype(weight.dtype)


_scaled_rms.defvjp(_scaled_rms_forward, _scaled_rms_backward)


def gated_rms_norm(x: jax.Array, gate: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`x / rms(x) * weight * silu(gate)`, in float32; the weight is not zero-centred here."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide * scale * weight * jax.nn.silu(gate.astype(jnp.float32))


@jax.custom_vjp
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """`silu(gate) * up`.  The backward pass computes the sigmoid again, so that nothing but the
    two inputs is kept for it."""
    return jax.nn.silu(gate) * up


def _swiglu_backward(
    inputs: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # Without the barrier XLA finds that the forward pass had it, and keeps it all the same.
    gate, up = jax.lax.optimization_barrier(inputs)
    open_ = jax.nn.sigmoid(gate)
    return cotangent * up * open_ * (1 + gate * (1 - open_)), cotangent * gate * open_


swiglu.defvjp(lambda gate, up: (swiglu(gate, up), (gate, up)), _swiglu_backward)


def l2_norm(x: jax.Array, eps: float = 1e-6) -> jax.Array:
    """`x / sqrt(sum(x^2) + eps)` over the last axis, in float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + eps)


@partial(
    jax.tree_util.register_dataclass, data_fields=["base", "a", "b"], meta_fields=[]
)
@dataclass(frozen=True)
class Adapted:
    """A kernel with a low-rank update beside it, `base + a b`; stands where a kernel does.

    base: `[*batch, *inputs, *outputs]`.  a: `[*batch, *inputs, R]`.  b: `[*batch, R, *outputs]`,
    scaled already.
    """

    base: jax.Array
    a: jax.Array
    b: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def ndim(self) -> int:
        return self.base.ndim

    def __getitem__(self, key: EllipsisType) -> Adapted:
        return self

    def reshape(self, inputs: int, outputs: int) -> Adapted:
        """As a matrix, where there is no batch axis; one size may be -1."""
        rank = self.a.shape[-1]
        return Adapted(
            self.base.reshape(inputs, outputs),
            self.a.reshape(-1, rank),
            self.b.reshape(rank, -1),
        )


Kernel = jax.Array | Adapted


def split_axes(axes: Sequence[str | None]) -> tuple[int, int]:
    """How many of a linear map's logical axes are batch axes (layers, experts), and how many of
    the rest are inputs: it either leaves the residual stream ("embed") or comes back to it."""
    batch = sum(axis in ("layers", "experts") for axis in axes)
    return batch, 1 if axes[batch] == "embed" else len(axes) - batch - 1


def low_rank_axes(
    axes: Sequence[str | None],
) -> tuple[tuple[str | None, ...], tuple[str | None, ...]]:
    """Logical axes of the a and b of `Adapted`, from those of its base; the rank has none."""
    batch, inputs = split_axes(axes)
    stop = batch + inputs
    return (*axes[:stop], None), (*axes[:batch], None, *axes[stop:])


def linear(x: jax.Array, kernel: Kernel) -> jax.Array:
    """`x [..., D] @ kernel [D, F]` in the type of `x`."""
    if isinstance(kernel, Adapted):
        return linear(x, kernel.base) + linear(linear(x, kernel.a), kernel.b)
    # One axis of tokens: over two, XLA's CPU backend transposes them for the kernel's gradient.
    rows = jnp.matmul(x.reshape(-1, x.shape[-1]), kernel.astype(x.dtype))
    return rows.reshape(*x.shape[:-1], -1)


def rotary_table(
    positions: jax.Array, rotary_dim: int, theta: float, scaling: Llama3Rope | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[..., rotary_dim // 2]` float32 for integer positions `[...]`."""
    exponent = jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim
    frequency = 1.0 / theta**exponent
    if scaling is not None:
        frequency = _stretch(frequency, scaling)
    angle = positions.astype(jnp.float32)[..., None] * frequency
    return _computed_once(jnp.cos(angle)), _computed_once(jnp.sin(angle))


def _computed_once(x: jax.Array) -> jax.Array:
    """`x [..., D]`.  XLA's CPU backend fuses cheap operations into all that use them, and takes
    cosines for cheap; it fuses nothing through a matrix product."""
    return jax.lax.platform_dependent(
        x, cpu=lambda x: jnp.matmul(x, jnp.eye(x.shape[-1])), default=lambda x: x
    )


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
