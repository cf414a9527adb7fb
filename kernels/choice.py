"""Which implementation of an operation runs: asked for by name, or chosen by platform."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import jax

Implementation = TypeVar("Implementation")

AUTO = "auto"
# Names of the implementations of each operation, the definition first; and of those, what "auto"
# takes on a platform, or on any other.
NAMES = {
    "attention": ("reference", "xla", "blocks", "splash"),
    "gated_delta": ("reference", "xla", "pallas"),
    "grouped_matmul": ("reference", "xla", "megablox"),
    "linear_logprob": ("reference", "xla"),
}
_BY_PLATFORM = {
    "attention": {"cpu": "blocks", "tpu": "splash"},
    "gated_delta": {"tpu": "pallas"},
    "grouped_matmul": {"tpu": "megablox"},
}
_ELSEWHERE = "xla"


@dataclass(frozen=True)
class Kernels:
    """The implementation of each operation of this package, by the names in `NAMES`; "auto" goes
    by the platform that a program is traced for.

    attention: auto, reference, xla, blocks or splash.
    gated_delta: auto, reference, xla or pallas.
    grouped_matmul: auto, reference, xla or megablox.
    linear_logprob: auto, reference or xla.

    Raises:
      ValueError: an unknown name.
    """

    attention: str = AUTO
    gated_delta: str = AUTO
    grouped_matmul: str = AUTO
    linear_logprob: str = AUTO

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field.name, getattr(self, field.name))

    def resolved(self) -> Kernels:
        """With what "auto" stands for here."""
        names = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Kernels(**{operation: _chosen(operation, name) for operation, name in names.items()})


def pick(
    operation: str, implementations: Mapping[str, Implementation], name: str | None
) -> Implementation:
    """The implementation of that name; "auto" and None go by the platform.

    Raises:
      ValueError: an unknown name.
    """
    name = name or AUTO
    _check(operation, name)
    return implementations[_chosen(operation, name)]


def _check(operation: str, name: str) -> None:
    if name not in (AUTO, *NAMES[operation]):
        raise ValueError(
            f"unknown implementation {name!r} of {operation}; choose from "
            f"{', '.join((AUTO, *NAMES[operation]))}"
        )


def _chosen(operation: str, name: str) -> str:
    if name != AUTO:
        return name
    return _BY_PLATFORM.get(operation, {}).get(target_platform(), _ELSEWHERE)


def target_platform() -> str:
    """The name ("cpu", "gpu", "tpu") of the platform of the mesh in context, or else of the
    default backend.

    A mesh may be of devices that aren't here: programs are compiled ahead of time.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
