"""Where each parameter lives on a device mesh: one table from logical axes to mesh axes.

Logical axes stand beside the shapes in the modules; the mesh has the axes `data`, `fsdp`,
`expert` and `tensor` (any of them may have size 1).  A logical axis without a rule, two axes of
one parameter on the same mesh axis, or a dimension that doesn't divide is an error, never a
silent replication; the one exception is named in `REPLICATED_WHEN_UNEVEN`.  Activations are left
to the compiler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fastask_jax.model.config import ModelConfig
from fastask_jax.model.decoder import abstract_decoder

MESH_AXES = ("data", "fsdp", "expert", "tensor")

RULES: dict[str, str | None] = {
    "layers": None,
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "delta_qkv": "tensor",
    "delta_value": "tensor",
    "delta_heads": "tensor",
    "experts": "expert",
    "ffn": "tensor",
}

# With more tensor shards than key/value heads, every shard keeps all of them.
REPLICATED_WHEN_UNEVEN = frozenset({"kv_heads"})


def make_mesh(
    data: int = 1,
    fsdp: int = 1,
    expert: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh over the axes of `MESH_AXES`.

    Raises:
      ValueError: the sizes don't multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = (data, fsdp, expert, tensor)
    if np.prod(shape) != len(devices):
        raise ValueError(
            f"a mesh of {' x '.join(map(str, shape))} needs {np.prod(shape)} devices, "
            f"there are {len(devices)}"
        )
    return Mesh(np.asarray(devices).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * 4)


def logical_axes(cfg: ModelConfig) -> dict[str, Any]:
    """The tree of parameters with a tuple of logical axes (or None) in place of each array."""
    state = nnx.split(abstract_decoder(cfg))[1]
    flat = {
        path: variable.get_metadata()["logical_axes"] for path, variable in state.flat_state()
    }
    return nnx.traversals.unflatten_mapping(flat)


def partition_spec(
    axes: Sequence[str | None],
    shape: Sequence[int],
    mesh_shape: Mapping[str, int],
    rules: Mapping[str, str | None] = RULES,
) -> PartitionSpec:
    """The partition of one array.

    Raises:
      ValueError: a logical axis without a rule, a rule for a mesh axis that doesn't exist, two
        dimensions on one mesh axis, or a dimension that doesn't divide.
    """
    spec: list[str | None] = []
    for axis, size in zip(axes, shape, strict=True):
        if axis is not None and axis not in rules:
            raise ValueError(f"logical axis {axis!r} has no sharding rule")
        target = None if axis is None else rules[axis]
        if target is not None:
            if target not in mesh_shape:
                raise ValueError(
                    f"logical axis {axis!r} is to be split over mesh axis {target!r}, but the mesh "
                    f"has only {tuple(mesh_shape)}"
                )
            if target in spec:
                raise ValueError(f"axes {tuple(axes)} put two dimensions on mesh axis {target!r}")
            if size % mesh_shape[target]:
                if axis not in REPLICATED_WHEN_UNEVEN:
                    raise ValueError(
                        f"logical axis {axis!r} of size {size} doesn't divide over mesh axis "
                        f"{target!r} of size {mesh_shape[target]}"
                    )
                target = None
        spec.append(target)
    return PartitionSpec(*spec)


def param_specs(
    cfg: ModelConfig, mesh: Mesh, rules: Mapping[str, str | None] = RULES
) -> dict[str, Any]:
    """The tree of parameters with a `PartitionSpec` in place of each array."""
    shapes = nnx.to_pure_dict(nnx.split(abstract_decoder(cfg))[1])
    return jax.tree.map(
        lambda leaf, axes: partition_spec(axes, leaf.shape, mesh.shape, rules),
        shapes,
        logical_axes(cfg),
        is_leaf=lambda x: isinstance(x, jax.ShapeDtypeStruct),
    )


def param_shardings(
    cfg: ModelConfig, mesh: Mesh, rules: Mapping[str, str | None] = RULES
) -> dict[str, Any]:
    """The tree of parameters with a `NamedSharding` in place of each array."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        param_specs(cfg, mesh, rules),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch are split over `data` and `fsdp` together."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
