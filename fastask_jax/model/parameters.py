"""Declaring parameters: shape, logical axes and initialiser of each, in one place.

A module makes its parameters with `declare(shape, axes, init)`.  Everything else follows from
that: initial values, the abstract tree (`jax.eval_shape` over the same code) and shardings
(`fastask_jax.model.sharding` reads the `logical_axes` metadata).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax import numpy as jnp

Initializer = Callable[[jax.Array, tuple[int, ...]], jax.Array]


@dataclass(frozen=True)
class Declare:
    """Makes `nnx.Param`s; with `stack`, as many copies with different keys on a leading axis."""

    rngs: nnx.Rngs
    stack: int | None = None

    def stacked(self, size: int) -> Declare:
        """The same declarations, repeated `size` times along a new leading "layers" axis."""
        return dataclasses.replace(self, stack=size)

    def __call__(
        self,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        init: Initializer,
        *,
        blocks: tuple[int, ...] = (),
        wide: bool = False,
    ) -> nnx.Param:
        """A parameter.

        blocks: widths of matrices that lie side by side along the last axis; a device has its
          part of each.
        wide: used in float32 whatever type the model computes in.
        """
        if len(shape) != len(axes):
            raise ValueError(f"shape {shape} and logical axes {axes} differ in length")
        key = self.rngs.params()
        if self.stack is None:
            return nnx.Param(init(key, shape), logical_axes=axes, blocks=blocks, wide=wide)
        value = jax.vmap(lambda k: init(k, shape))(jax.random.split(key, self.stack))
        return nnx.Param(value, logical_axes=("layers", *axes), blocks=blocks, wide=wide)


def normal(deviation: float) -> Initializer:
    """Independent normal values."""
    return lambda key, shape: deviation * jax.random.normal(key, shape, jnp.float32)


def fan_in(size: int, gain: float = 1.0) -> Initializer:
    """Normal values of deviation `gain / sqrt(size)`."""
    return normal(gain / math.sqrt(size))


def constant(value: float) -> Initializer:
    return lambda key, shape: jnp.full(shape, value, jnp.float32)


def log_uniform(low: float, high: float) -> Initializer:
    """The logarithm of a uniform variable in `[low, high]` (decay rates, as in Mamba 2)."""
    return lambda key, shape: jnp.log(jax.random.uniform(key, shape, jnp.float32, low, high))


def inverse_softplus_time_step(low: float, high: float) -> Initializer:
    """Biases whose softplus is log-uniform in `[low, high]` (time steps, as in Mamba 2)."""

    def init(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        bounds = math.log(low), math.log(high)
        step = jnp.exp(jax.random.uniform(key, shape, jnp.float32, *bounds))
        return step + jnp.log(-jnp.expm1(-step))

    return init


def is_matrix(path: tuple[Any, ...], leaf: Any) -> bool:
    """Whether a parameter is more than a vector, layers apart: leaves under "blocks" are stacked.
    The rest (norms, biases, decays) stays float32 and knows no weight decay."""
    stacked = any(getattr(key, "key", None) == "blocks" for key in path)
    return leaf.ndim - stacked > 1
