"""The arrays of a checkpoint: their description, their copy while they are written, RNG keys.

Left out: reading and writing them (`checkpoint.py`).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, SingleDeviceSharding
from jaxtyping import Array


def key_to_json(key: Array) -> dict[str, Any]:
    """A typed JAX RNG key as JSON, for the host state."""
    return {
        "impl": str(jax.random.key_impl(key)),
        "data": np.asarray(jax.random.key_data(key)).tolist(),
    }


def key_from_json(value: dict[str, Any]) -> Array:
    """The RNG key that `key_to_json` wrote."""
    data = jax.numpy.asarray(np.array(value["data"], np.uint32))
    return jax.random.wrap_key_data(data, impl=value["impl"])


def own_copy(leaf: Any) -> Any:
    """A leaf that stays when the caller donates the state.

    Orbax waits for the copy to the host, but makes none where the device's memory is the host's.
    """
    if not isinstance(leaf, jax.Array):
        return np.array(leaf)
    on_host = any(device.platform == "cpu" for device in leaf.devices())
    return leaf.copy() if on_host else leaf


def abstract_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    # What `jax.typeof` gives has a sharding over an abstract mesh, which names no devices.
    abstract = isinstance(getattr(sharding, "mesh", None), AbstractMesh)
    if sharding is None or abstract:
        sharding = SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def signature(tree: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path): f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
        for path, leaf in leaves
    }


def array_bytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
