"""Settings of a server, and the key that its clients show.  Imports no JAX."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ServeConfig:
    """What `fastask serve` is started with; see its --help.

    checkpoint: as `fastask_jax.ask.checkpoint.find_policy` takes it.  dtype: of activations and of
    matrices.  weights_from: the folder below which /inference/v1/weights may read; None: none.
    asks and so on: of /v1/ask; without asks it isn't there.
    """

    checkpoint: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    slots: int = 64
    queue: int = 256
    max_len: int = 2048
    dtype: str = "float32"
    api_key_file: str | None = None
    weights_from: str | None = None
    deadline: float = 600.0
    grace: float = 30.0
    asks: int = 64
    ask_megabytes: float = 32.0
    ask_turns: int = 15
    ask_seconds: float = 120.0

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"--port is from 0 to 65535, not {self.port}")
        for name, least in (
            ("slots", 1), ("queue", 0), ("max_len", 2), ("asks", 0), ("ask_turns", 1)
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ValueError(
                    f"--{name.replace('_', '-')} must be at least {least}, "
                    f"not {getattr(self, name)}"
                )
        for name in ("deadline", "grace", "ask_seconds"):
            value = getattr(self, name)
            if not 0 <= value < math.inf or (value == 0 and name != "grace"):
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} must be a number of seconds, not {value}")
        if not 0 < self.ask_megabytes <= 1024:
            raise ValueError(
                f"--ask-megabytes must be above 0 and at most 1024, not {self.ask_megabytes}"
            )
        if self.api_key_file is None and not is_loopback(self.host):
            raise ValueError(
                f"others than this machine can reach {self.host}: give --api-key-file, so that "
                "not everyone can use the server"
            )
        if self.weights_from is not None and not Path(self.weights_from).is_dir():
            raise ValueError(f"--weights-from {self.weights_from} isn't a folder: make it first")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_key(file: str | Path) -> str:
    """The key in a file.  Raises ValueError where there isn't one line of printable ASCII."""
    try:
        text = Path(file).read_text("ascii").strip()
    except UnicodeDecodeError:
        text = ""
    if not text.isascii() or not text.isprintable() or not text or " " in text:
        raise ValueError(f"{file} must hold the key alone: one line of letters, digits and signs")
    return text
