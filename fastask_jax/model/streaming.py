"""Parameters from the tensors of a checkpoint, each part copied straight to where it belongs.

A leaf may be cut over devices and may be made of many tensors (one per layer, or one per expert).
Tensors are read one at a time, and of each only the parts that fall to this process's devices
are copied, into one buffer per shard.  Where host and device share memory (CPU) that buffer
becomes the array; elsewhere a leaf travels in stages of `STAGE_BYTES`, written into an array
that lies on the device already.  So beyond the weights, memory holds one stage (none on CPU)
and what the source needs to read one tensor.  Which tensors there are is left to `tensors.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Protocol

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import Sharding

from fastask_jax.model.tensors import Tensor

STAGE_BYTES = 1 << 28
# What `fill` converts at a time: stays within a core's cache.
_CHUNK_BYTES = 1 << 20
# JAX takes over host memory without a copy where it is aligned so.
_ALIGNMENT = 64


class Source(Protocol):
    """Tensors by name, in the layout of `transformers`."""

    @property
    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> np.ndarray:
        """The tensor, in any float type; best a view, of which only parts are then copied."""
        ...


# First and last (exclusive) entry along each axis.
Region = tuple[tuple[int, int], ...]


def fill(out: np.ndarray, source: np.ndarray) -> None:
    """`out[...] = source` for arrays of one shape and any strides and float types.

    Goes through `source` in the order in which it lies in memory: for a transposed one that is
    several times as fast as NumPy's assignment.
    """
    if source.ndim < 2 or source.flags.c_contiguous or source.size == 0:
        out[...] = source
        return
    slowest = int(np.argmax(source.strides))
    out, source = np.moveaxis(out, slowest, 0), np.moveaxis(source, slowest, 0)
    count = len(source)
    step = _CHUNK_BYTES * count // (source.size * out.itemsize)
    if step == 0:
        for i in range(count):
            fill(out[i], source[i])
        return
    for start in range(0, count, step):
        chunk = slice(start, start + step)
        out[chunk] = source[chunk].astype(out.dtype, order="K")


def load_leaf(
    source: Source,
    tensors: Sequence[Tensor],
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: Sharding | None = None,
    stage_bytes: int | None = None,
) -> jax.Array:
    """One leaf of the parameters, from the tensors that make it up.

    sharding: where it goes; None is JAX's default device.
    stage_bytes: host memory that its shards may take at a time; None is no limit on CPU and
    `STAGE_BYTES` elsewhere.

    Raises:
      ValueError: a tensor has another shape (named).
    """
    parts = [(tensor, _region(tensor, shape)) for tensor in tensors]
    for tensor, _ in parts:
        expected = tensor.out(np.broadcast_to(np.float32(0), shape)[_index(tensor)]).shape
        if source.shape(tensor.name) != expected:
            raise ValueError(
                f"tensor {tensor.name} has shape {source.shape(tensor.name)}, expected {expected}"
            )
    if sum(_size(region) for _, region in parts) != math.prod(shape):
        raise ValueError(f"{', '.join(t.name for t in tensors)} don't fill an array of {shape}")

    devices = _devices_by_region(shape, sharding)
    first, last = next(iter(devices))[0]
    rows = last - first
    step = _stage_rows(rows, devices, dtype, stage_bytes)
    arrays: dict[jax.Device | None, jax.Array] = {}
    for start in range(0, rows, step):
        stage = [_rows(region, start, start + step) for region in devices]
        buffers = _read(source, parts, stage, dtype)
        for (region, group), buffer in zip(devices.items(), buffers, strict=True):
            for device in group:
                staged = jax.device_put(buffer, device)
                if step < rows:
                    if start == 0:
                        arrays[device] = jnp.zeros(_shape(region), dtype, device=device)
                    staged = _put(arrays[device], staged, start)
                arrays[device] = staged
        # The buffers of this stage must be on the device before the next ones are made.
        jax.block_until_ready(list(arrays.values()))
    if sharding is None:
        return arrays[None]
    return jax.make_array_from_single_device_arrays(shape, sharding, list(arrays.values()))


def _devices_by_region(
    shape: tuple[int, ...], sharding: Sharding | None
) -> dict[Region, list[jax.Device | None]]:
    """This process's devices, grouped by the region of the leaf that they hold."""
    if sharding is None:
        return {tuple((0, size) for size in shape): [None]}
    groups: dict[Region, list[jax.Device | None]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None, "JAX gives slices for every device of this process"
        region = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        groups.setdefault(region, []).append(device)
    return groups


def _stage_rows(
    rows: int,
    devices: dict[Region, list[jax.Device | None]],
    dtype: np.dtype,
    stage_bytes: int | None,
) -> int:
    """How many of the leading rows of every shard make one stage."""
    if stage_bytes is None:
        device = next(iter(devices.values()))[0]
        if (jax.default_backend() if device is None else device.platform) == "cpu":
            return rows
        stage_bytes = STAGE_BYTES
    row_bytes = sum(_size(region[1:]) for region in devices) * dtype.itemsize
    return min(rows, max(1, stage_bytes // row_bytes))


def _read(
    source: Source,
    parts: Sequence[tuple[Tensor, Region]],
    regions: Sequence[Region],
    dtype: np.dtype,
) -> list[np.ndarray]:
    """The contents of `regions` of the leaf; a tensor outside all of them isn't read."""
    buffers = [_aligned(_shape(region), dtype) for region in regions]
    for tensor, filled in parts:
        overlaps = [_overlap(filled, region) for region in regions]
        if not any(overlaps):
            continue
        value = tensor.into(source.read(tensor.name))
        # The axes that the tensor's place in the leaf picks one entry of.
        value = value[tuple(None if isinstance(i, int) else slice(None) for i in _index(tensor))]
        for region, overlap, buffer in zip(regions, overlaps, buffers, strict=True):
            if overlap is not None:
                fill(buffer[_within(overlap, region)], value[_within(overlap, filled)])
    return buffers


def _index(tensor: Tensor) -> tuple[int | slice, ...]:
    if tensor.block is None:
        return ()
    return tensor.block if isinstance(tensor.block, tuple) else (tensor.block,)


def _region(tensor: Tensor, shape: tuple[int, ...]) -> Region:
    """What a tensor fills of its leaf."""
    index = _index(tensor)
    index += (slice(None),) * (len(shape) - len(index))
    return tuple(
        (part, part + 1) if isinstance(part, int) else part.indices(size)[:2]
        for part, size in zip(index, shape, strict=True)
    )


def _rows(region: Region, start: int, stop: int) -> Region:
    first, last = region[0]
    return ((first + start, min(first + stop, last)), *region[1:])


def _overlap(a: Region, b: Region) -> Region | None:
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return both if all(first < last for first, last in both) else None


def _within(region: Region, frame: Region) -> tuple[slice, ...]:
    """The slices that take `region` out of an array that holds `frame`."""
    return tuple(
        slice(first - edge, last - edge)
        for (first, last), (edge, _) in zip(region, frame, strict=True)
    )


def _shape(region: Region) -> tuple[int, ...]:
    return tuple(last - first for first, last in region)


def _size(region: Region) -> int:
    return math.prod(_shape(region))


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % _ALIGNMENT
    return memory[offset : offset + size].view(dtype).reshape(shape)


@functools.partial(jax.jit, donate_argnums=0)
def _put(target: jax.Array, rows: jax.Array, start: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(target, rows, start, axis=0)
