"""Low-rank adapters on linear maps (LoRA, arXiv:2106.09685): `x W` becomes `x W + s (x A) B`.

    lora = LoraConfig(rank=32)
    adapters = init_adapters(cfg, lora, key)          # a tree of the adapted leaves, {"a", "b"}
    params = attach(lora, weights, adapters)          # a tree like the weights, `Adapted` leaves

The product is never merged while training: in bfloat16 a small update would be rounded away.  A
leaf that is adapted is an `Adapted` wherever a kernel is expected, so the packed pass, the cached
pass and every mesh are the model's own code.  `merge_adapters` makes plain weights for export,
`peft.py` writes the adapters alone.

Left out: adapters on embeddings, norms, convolutions and routers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax import numpy as jnp

from fastask_jax.model.config import ModelConfig
from fastask_jax.model.decoder import Params, abstract_decoder
from fastask_jax.model.layers import Adapted, low_rank_axes, split_axes
from fastask_jax.model.mesh import AnyMesh
from fastask_jax.model.sharding import partition_spec

# The linear maps that an adapter may stand on, by their names within a layer.
ATTENTION = ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj", "mixer.o_proj")
DELTA_NET = ("mixer.in_proj_qkv", "mixer.in_proj_z", "mixer.out_proj")
FEED_FORWARD = ("mlp.gate", "mlp.up", "mlp.down")
SHARED_EXPERT = ("moe.shared_gate", "moe.shared_up", "moe.shared_down")
ROUTED_EXPERTS = ("moe.gate_up", "moe.down")
TARGETS = (*ATTENTION, *DELTA_NET, *FEED_FORWARD, *SHARED_EXPERT, *ROUTED_EXPERTS)
DEFAULT_TARGETS = (*ATTENTION, *DELTA_NET, *FEED_FORWARD, *SHARED_EXPERT)


@dataclass(frozen=True)
class LoraConfig:
    """rank: columns of A; 0 trains all weights instead.  alpha: the update is scaled by
    alpha / rank.  targets: the adapted maps, of `TARGETS`; those that a model lacks are skipped.

    Raises:
      ValueError: a negative rank, an alpha that isn't positive and finite, or an unknown target.
    """

    rank: int = 0
    alpha: float = 32.0
    targets: tuple[str, ...] = DEFAULT_TARGETS

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 0:
            raise ValueError(f"lora rank must be a whole number, 0 or more, not {self.rank!r}")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"lora alpha must be above 0 and finite, not {self.alpha}")
        unknown = sorted(set(self.targets) - set(TARGETS))
        if unknown or not self.targets:
            raise ValueError(f"lora targets are {', '.join(TARGETS)}; not {', '.join(unknown)}")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class _Map:
    """A linear map of the model: its leading batch axes (layers, experts), its input axes, and
    the rest, its output axes."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    batch: int
    inputs: int

    @property
    def a(self) -> tuple[tuple[int, ...], tuple[str | None, ...], int]:
        """Shape of A without the rank, its logical axes, and the size of the input."""
        stop = self.batch + self.inputs
        return self.shape[:stop], self.axes[:stop], math.prod(self.shape[self.batch : stop])

    @property
    def b(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of B before and after the rank."""
        return self.shape[: self.batch], self.shape[self.batch + self.inputs :]


def _maps(cfg: ModelConfig, lora: LoraConfig) -> Iterator[_Map]:
    for keys, variable in nnx.split(abstract_decoder(cfg))[1].flat_state():
        path = tuple(map(str, keys))
        if path[0] != "blocks" or ".".join(path[2:]) not in lora.targets:
            continue
        axes = tuple(variable.get_metadata()["logical_axes"])
        batch, inputs = split_axes(axes)
        yield _Map(path, variable.shape, axes, batch, inputs)


def _nested(flat: dict[tuple[str, ...], Any]) -> Params:
    return nnx.traversals.unflatten_mapping(flat)


def adapter_axes(cfg: ModelConfig, lora: LoraConfig) -> Params:
    """The tree of adapters with a tuple of logical axes in place of each array."""
    flat = {}
    for kernel in _maps(cfg, lora):
        flat[*kernel.path, "a"], flat[*kernel.path, "b"] = low_rank_axes(kernel.axes)
    return _nested(flat)


def adapter_specs(cfg: ModelConfig, lora: LoraConfig, mesh: AnyMesh) -> Params:
    """The tree of adapters with a `PartitionSpec` in place of each array: along inputs and outputs
    they lie as the map does that they stand on, the rank is never split."""
    shapes = jax.eval_shape(partial(init_adapters, cfg, lora), jax.random.key(0))
    return jax.tree.map(
        lambda leaf, axes: partition_spec(axes, leaf.shape, mesh.shape),
        shapes,
        adapter_axes(cfg, lora),
    )


def init_adapters(cfg: ModelConfig, lora: LoraConfig, key: jax.Array) -> Params:
    """Float32 adapters: A normal of variance 1 / inputs, B zero, so that nothing changes yet.

    Raises:
      ValueError: rank 0, or a model with none of the targets.
    """
    if not lora.rank:
        raise ValueError("lora.rank must be at least 1 for adapters")
    maps = list(_maps(cfg, lora))
    if not maps:
        raise ValueError(f"this model has none of the lora targets {', '.join(lora.targets)}")
    flat = {}
    for kernel, own in zip(maps, jax.random.split(key, len(maps)), strict=True):
        shape, _, inputs = kernel.a
        before, after = kernel.b
        a = jax.random.normal(own, (*shape, lora.rank), jnp.float32)
        flat[*kernel.path, "a"] = a / math.sqrt(inputs)
        flat[*kernel.path, "b"] = jnp.zeros((*before, lora.rank, *after), jnp.float32)
    return _nested(flat)


def attach(lora: LoraConfig, weights: Any, adapters: Params) -> Any:
    """`weights` with an `Adapted` in place of each adapted leaf; nothing is copied."""
    if set(adapters) == {"a", "b"}:
        return Adapted(weights, adapters["a"], lora.scale * adapters["b"])
    return {
        name: attach(lora, part, adapters[name]) if name in adapters else part
        for name, part in weights.items()
    }


@jax.jit
def fingerprint(weights: Params) -> jax.Array:
    """A number, uint32, that tells weights apart, whatever the mesh: the sum of their bits, each
    element's times an odd number that goes by its place, modulo 2^32."""

    def bits(leaf: jax.Array) -> jax.Array:
        unsigned = {2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
        words = jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)
        # Per axis, so that no axis that is split over devices is folded into another.
        for axis in range(leaf.ndim):
            place = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
            words *= 2 * (place * jnp.uint32(2654435761) + jnp.uint32(40503 * (axis + 1))) + 1
        return jnp.sum(words)

    sums = [bits(leaf) for leaf in jax.tree.leaves(weights)]
    return sum(((2 * i + 1) * part for i, part in enumerate(sums)), jnp.uint32(0))


@partial(jax.jit, static_argnums=(0, 1))
def merge_adapters(
    cfg: ModelConfig, lora: LoraConfig, weights: Params, adapters: Params
) -> Params:
    """Plain weights `W + s A B`, added in float32, in the types of `weights`."""
    flat, deltas = nnx.traversals.flatten_mapping(weights), {}
    low_rank = nnx.traversals.flatten_mapping(adapters)
    for kernel in _maps(cfg, lora):
        a, b = low_rank[*kernel.path, "a"], low_rank[*kernel.path, "b"]
        lead = kernel.shape[: kernel.batch]
        product = jnp.matmul(
            a.reshape(*lead, -1, lora.rank), b.reshape(*lead, lora.rank, -1)
        ).reshape(kernel.shape)
        base = flat[kernel.path]
        deltas[kernel.path] = (base.astype(jnp.float32) + lora.scale * product).astype(base.dtype)
    return _nested(flat | deltas)


__all__ = [
    "Adapted",
    "LoraConfig",
    "adapter_axes",
    "adapter_specs",
    "attach",
    "fingerprint",
    "init_adapters",
    "merge_adapters",
]
