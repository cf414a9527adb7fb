"""Sandboxed Python for tools: a warm CPython zygote whose children run behind walls.

    with Sandbox() as sandbox:
        session = sandbox.session(seed=7)
        session.bind("Orders", 1, 1, rows)
        result = session.run("print(sum(row.Amount for row in Orders))")

`host` and `session` are the caller's side, `zygote` and `child` the other one, `layers` and
`seccomp` the walls, `prelude` what code sees of the cells, `wire` what crosses.  CPython
itself is no boundary: what holds is the kernel's part.  On a host without the mandatory walls
there is no session (SandboxUnavailable), unless a person opts out for their own machine.
"""

from .config import Layer, Result, SandboxBusy, SandboxConfig, SandboxUnavailable
from .doctor import available, probe_layers
from .host import Sandbox
from .session import Session

__all__ = [
    "Layer",
    "Result",
    "Sandbox",
    "SandboxBusy",
    "SandboxConfig",
    "SandboxUnavailable",
    "Session",
    "available",
    "probe_layers",
]
