"""The device mesh: its axes, and the collectives that layers call inside it.

    mesh = MeshConfig(fsdp=4, tensor=2).make()
    hidden, load = forward(cfg, params, tokens, positions, segment_ids, mesh=mesh)

`data` copies the weights, `fsdp` splits them along the model width, `expert` by expert and
`tensor` by head, feed-forward channel and token id.  Rows of a batch are split over `data`,
`fsdp` and `expert`; between layers the tokens of a row are split over `tensor`, where their
number divides (so that what a device keeps for the backward pass shrinks with every axis).

There is one way in which a layer learns of the mesh: `forward` runs it under `jax.shard_map` over
all axes, and the functions here look at the mesh that is then in context.  A layer therefore sees
its device's part of every array and takes sizes from shapes, not from the config.  Without a mesh
in context, hence on one device, every function here returns its argument as it is.

Left out: the partition of each parameter (`sharding.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "expert", "tensor")
ROW_AXES = ("data", "fsdp", "expert")

# Which mesh axis each logical axis of a parameter is split over.
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

AnyMesh = Mesh | AbstractMesh


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis of the mesh; their product is the number of devices, or 1.

    data: copies of the weights.  fsdp: parts of the model width.  expert: parts of the experts.
    tensor: parts of the heads, feed-forward channels and vocabulary.
    """

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in MESH_AXES:
            if getattr(self, axis) < 1:
                raise ValueError(f"mesh {axis} must be at least 1, not {getattr(self, axis)}")

    @property
    def size(self) -> int:
        """Devices of the mesh."""
        return self.data * self.fsdp * self.expert * self.tensor

    def make(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """The mesh; raises as `make_mesh` does."""
        return make_mesh(self.data, self.fsdp, self.expert, self.tensor, devices)


def make_mesh(
    data: int = 1,
    fsdp: int = 1,
    expert: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh over the axes of `MESH_AXES`.

    devices: default all, of all processes; a mesh of one device takes the first.

    Raises:
      ValueError: the sizes don't multiply to the number of devices.
    """
    shape = (data, fsdp, expert, tensor)
    size = math.prod(shape)
    if devices is None:
        devices = jax.devices()
        if size == 1 and jax.process_count() == 1:
            devices = devices[:1]
    if size != len(devices):
        raise ValueError(
            f"a mesh of {' x '.join(map(str, shape))} ({' x '.join(MESH_AXES)}) needs {size} "
            f"devices, there are {len(devices)} (docs/several_hosts.md tells of fake ones)"
        )
    types = (AxisType.Auto,) * 4
    try:
        return jax.make_mesh(shape, MESH_AXES, axis_types=types, devices=devices)
    except NotImplementedError:
        # Two axes have to share a side of the TPU slice, as 8 x 2 x 4 does on 8 x 8.
        grid = create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(grid, MESH_AXES, axis_types=types)


def row_devices(mesh: AnyMesh) -> int:
    """Parts into which the rows of a batch are split."""
    return math.prod(mesh.shape[axis] for axis in ROW_AXES)


def row_spec(leading: int = 0) -> PartitionSpec:
    """Partition of an array whose row axis follows `leading` unsplit axes."""
    return PartitionSpec(*[None] * leading, ROW_AXES)


def token_axis(mesh: AnyMesh, length: int) -> str | None:
    """The axis over which the tokens of rows of this length are split between layers."""
    return "tensor" if length % mesh.shape["tensor"] == 0 else None


def put(tree: Any, shardings: Any) -> Any:
    """Arrays that every process holds whole (host or own device), copied to where they belong.

    shardings: like `tree`, or one for all.  Arrays that span processes already are moved.
    """

    def place(leaf: Any, sharding: NamedSharding) -> jax.Array:
        spans = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        if isinstance(leaf, np.ndarray):
            leaf = leaf.copy()  # a device of the host would go on using the caller's memory
        if sharding.is_fully_addressable or spans:
            return jax.device_put(leaf, sharding, may_alias=False)
        host = jax.device_get(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    if isinstance(shardings, NamedSharding):
        return jax.tree.map(lambda leaf: place(leaf, shardings), tree)
    return jax.tree.map(place, tree, shardings)


def parts(axis: str) -> int:
    """Devices along a mesh axis, inside `shard_map`; 1 outside."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[axis] if axis in mesh.manual_axes else 1


def _inside() -> bool:
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def gather_weights(
    leaf: jax.Array, axes: Sequence[str | None], blocks: Sequence[int], dtype: Any
) -> jax.Array:
    """A parameter as this device works with it: whole along what is split over `fsdp`.

    axes: its logical axes.  blocks: widths of the matrices that lie side by side along its last
    axis, if several do; the device gets its part of each.  dtype: what it is used in; it is cast
    first, so that the smaller type travels, there and (as a gradient) back.
    """
    if not _inside():
        return leaf
    gathered = [i for i, axis in enumerate(axes) if axis is not None and RULES[axis] == "fsdp"]
    if gathered:
        leaf = leaf.astype(dtype)
    if blocks:
        leaf = _own_blocks(leaf, blocks)
    if parts("fsdp") > 1:
        for place in gathered:
            leaf = jax.lax.all_gather(leaf, "fsdp", axis=place, tiled=True)
    return leaf


def _own_blocks(kernel: jax.Array, blocks: Sequence[int]) -> jax.Array:
    """`[..., C]`, the C consecutive columns that this device of `tensor` stores -> as many that
    it works on: its share of the first block, then of the second, ..."""
    count, last = parts("tensor"), kernel.ndim - 1
    if count == 1:
        return kernel
    whole = jax.lax.all_gather(kernel, "tensor", axis=last, tiled=True)
    index, start, own = jax.lax.axis_index("tensor"), 0, []
    for size in blocks:
        first = start + index * (size // count)
        own.append(jax.lax.dynamic_slice_in_dim(whole, first, size // count, axis=last))
        start += size
    return jnp.concatenate(own, axis=last)


def look_up(table: jax.Array, ids: jax.Array, tokens: int) -> jax.Array:
    """Rows `ids [B, T]` of a table `[V, D]`, of which a device of `tensor` holds V consecutive
    ones -> `[B, tokens, D]`, this device's tokens."""
    if parts("tensor") == 1:
        return table[ids]
    place = ids - jax.lax.axis_index("tensor") * table.shape[0]
    mine = (place >= 0) & (place < table.shape[0])
    rows = jnp.where(mine[..., None], table[jnp.where(mine, place, 0)], 0)
    return sum_parts(rows, tokens)


def own_length(length: int) -> int:
    """How many tokens of a row of `length` a device keeps between layers."""
    count = parts("tensor")
    return length if length % count else length // count


def whole_rows(x: jax.Array, length: int) -> jax.Array:
    """`x [B, t, ...]`, this device's tokens of rows of `length` -> all of them."""
    if x.shape[1] == length:
        return x
    return jax.lax.all_gather(x, "tensor", axis=1, tiled=True)


def own_tokens(x: jax.Array, tokens: int) -> jax.Array:
    """`x [B, T, ...]`, whole rows -> this device's `tokens` of each."""
    if x.shape[1] == tokens:
        return x
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index("tensor") * tokens, tokens, axis=1)


def sum_parts(x: jax.Array, tokens: int) -> jax.Array:
    """Whole rows `[B, T, ...]` of which every device of `tensor` holds a summand -> the sum at
    this device's `tokens`."""
    if parts("tensor") == 1:
        return x
    if x.shape[1] == tokens:
        return jax.lax.psum(x, "tensor")
    return jax.lax.psum_scatter(x, "tensor", scatter_dimension=1, tiled=True)


def sum_over_tokens(x: jax.Array, split: bool) -> jax.Array:
    """A sum over this device's tokens -> over the whole batch; `split`: whether devices of
    `tensor` hold different tokens."""
    axes = (*ROW_AXES, "tensor") if split else ROW_AXES
    present = tuple(axis for axis in axes if parts(axis) > 1)
    return jax.lax.psum(x, present) if present else x


def own_groups(kernel: jax.Array, heads: int, groups: int) -> jax.Array:
    """The key or value heads that this device's query heads read.

    kernel: `[D, G, K]`; G is all `groups` where they don't divide over `tensor`, else this
      device's share already.
    heads: query heads of the whole model; head h reads group `h // (heads // groups)`.
    """
    if parts("tensor") == 1 or kernel.shape[1] < groups:
        return kernel
    own, repeat = heads // parts("tensor"), heads // groups
    head = jax.lax.axis_index("tensor") * own + jnp.arange(own)
    # One group for all of them, or else one each.
    return jnp.take(kernel, head[: group_count(heads, groups)] // repeat, axis=1)


def group_count(heads: int, groups: int) -> int:
    """How many key/value heads a device works with, of a model's `heads` and `groups`."""
    count = parts("tensor")
    if groups % count == 0:
        return groups // count
    return 1 if (heads // groups) % (heads // count) == 0 else heads // count
