"""Where a learner's arrays live: a device mesh and one rule for parameters.

Rows of a batch are split over both axes; parameters and optimizer state are split over `fsdp`
and copied over `data`.  One device is a mesh of 1 x 1, so there is one code path.

Left out: expert and tensor parallelism and per-layer logical axes (the model's sharding table).
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

ROW_AXES = ("data", "fsdp")


def make_mesh(data: int | None = None, fsdp: int = 1) -> Mesh:
    """A mesh of data x fsdp devices; `data` defaults to all devices that fsdp leaves over.

    Raises ValueError when the devices don't divide that way.
    """
    devices = jax.devices()
    if data is None:
        data = len(devices) // fsdp
    if data < 1 or fsdp < 1 or data * fsdp > len(devices):
        raise ValueError(
            f"a mesh of data={data} x fsdp={fsdp} doesn't fit {len(devices)} device(s)"
        )
    grid = np.array(devices[: data * fsdp]).reshape(data, fsdp)
    return Mesh(grid, ROW_AXES, axis_types=(AxisType.Auto, AxisType.Auto))


def row_devices(mesh: Mesh) -> int:
    """Devices over which the rows of a micro-batch are split."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def row_sharding(mesh: Mesh, leading: int = 0) -> NamedSharding:
    """Sharding of a batch array whose row axis follows `leading` unsplit axes."""
    return NamedSharding(mesh, PartitionSpec(*[None] * leading, ROW_AXES))


def leaf_spec(shape: tuple[int, ...], fsdp: int) -> PartitionSpec:
    """The largest axis that divides evenly goes over fsdp (the first of equals); else a copy."""
    fitting = [axis for axis, size in enumerate(shape) if size % fsdp == 0 and size >= fsdp]
    if fsdp == 1 or not fitting:
        return PartitionSpec()
    axis = max(fitting, key=lambda axis: shape[axis])
    return PartitionSpec(*[None] * axis, "fsdp")


def state_shardings(tree: Any, mesh: Mesh) -> Any:
    """Sharding of every leaf of parameters, optimizer state or a whole training state."""
    return jax.tree.map(
        lambda leaf: NamedSharding(mesh, leaf_spec(leaf.shape, mesh.shape["fsdp"])), tree
    )
