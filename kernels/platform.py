"""The platform that a kernel is traced for, by which its implementation is chosen."""

from __future__ import annotations

import jax


def target_platform() -> str:
    """The name ("cpu", "gpu", "tpu") of the platform of the mesh in context, or else of the
    default backend.

    A mesh may be of devices that aren't here: programs are compiled ahead of time.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
