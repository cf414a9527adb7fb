"""What `fastask doctor` shows of the sandbox: every wall, as this host has it."""

from __future__ import annotations

from .config import Layer, SandboxConfig, SandboxUnavailable
from .host import Sandbox

_OPTIONAL = (
    Layer("cgroup", "off", "not used: an address-space limit holds each session", False),
    Layer("outer sandbox", "off", "not used: start the whole program in one if you want", False),
)


def probe_layers(config: SandboxConfig | None = None) -> list[Layer]:
    """Start a sandbox, look, and stop it.  Never raises for a host that lacks a wall: the
    list then says which, and `run_python` is refused if a mandatory one is missing."""
    settings = config or SandboxConfig()
    # Unsafe only in that it gets far enough to report; no session code is run.
    look = SandboxConfig(
        memory_mb=settings.memory_mb,
        cpu_seconds=settings.cpu_seconds,
        allow_unsafe_python=True,
    )
    try:
        with Sandbox(look) as sandbox:
            return [*sandbox.layers, *_OPTIONAL]
    except SandboxUnavailable as error:
        return [Layer("exec", "missing", str(error), True), *_OPTIONAL]


def available(layers: list[Layer]) -> bool:
    """True when no mandatory wall is missing."""
    return not any(layer.mandatory and layer.state == "missing" for layer in layers)
