"""Settings, results and errors of the sandbox: plain data, cheap to import anywhere."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Walls without which there is no session.
MANDATORY = frozenset({"exec", "limits", "seccomp", "uid", "self-test"})


class SandboxUnavailable(RuntimeError):
    """This host cannot run session code safely (or at all); the text says what is missing."""


class SandboxBusy(RuntimeError):
    """More sessions hold a live process than `SandboxConfig.max_live` allows."""


@dataclass(frozen=True)
class SandboxConfig:
    """Limits of the sandbox.

    soft_seconds: wall time of one call; then an exception ends it and state survives.
    hard_seconds: the same, by SIGKILL from outside, for code that outlives the exception;
        the session's variables are lost.  Must exceed soft_seconds.
    start_seconds: added to the hard limit of a call that has to fork its process first.
    memory_mb: address space of one session.  cpu_seconds: CPU time of one session's process.
    output_chars: what a call may print before the rest is cut.
    code_chars: the longest code that a call accepts.
    max_live: sessions that may hold a live process at one time.
    spares: processes kept ready behind their walls, so that a new session need not wait for
        a fork; 0 forks on request.
    allow_unsafe_python: go on where a mandatory wall is missing.  For a person's own machine
        only, never in training: session code may then read and change whatever that person
        can.
    """

    soft_seconds: float = 2.0
    hard_seconds: float = 4.0
    start_seconds: float = 10.0
    memory_mb: int = 1024
    cpu_seconds: int = 60
    output_chars: int = 10_000
    code_chars: int = 100_000
    max_live: int = 256
    spares: int = 2
    allow_unsafe_python: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.soft_seconds < self.hard_seconds < math.inf:
            raise ValueError(
                "0 < soft_seconds < hard_seconds, both finite, must hold, got "
                f"{self.soft_seconds} and {self.hard_seconds}"
            )
        if not 0 <= self.start_seconds < math.inf:
            raise ValueError(
                f"start_seconds must be 0 or more and finite, got {self.start_seconds}"
            )
        if self.memory_mb < 128:
            raise ValueError(f"memory_mb must be at least 128, got {self.memory_mb}")
        if not 0 <= self.spares <= 16:
            raise ValueError(f"spares must lie between 0 and 16, got {self.spares}")
        for name in ("cpu_seconds", "output_chars", "code_chars", "max_live"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class Result:
    """The answer to one call.

    output: what the code printed, cut at the limit.  error: None, or a short traceback or
    the reason why the code was stopped.  timed_out: a time limit stopped it.  state_lost:
    variables of earlier calls are gone (cells that were read are bound again).
    """

    output: str
    error: str | None = None
    timed_out: bool = False
    state_lost: bool = False

    @property
    def text(self) -> str:
        """Output and error as one text, for a tool message."""
        if self.error is None:
            return self.output
        if not self.output:
            return self.error
        return f"{self.output.rstrip()}\n{self.error}"


@dataclass(frozen=True)
class Layer:
    """One wall as this host has it; state is "on", "off" or "missing" (mandatory, absent)."""

    name: str
    state: str
    detail: str
    mandatory: bool
