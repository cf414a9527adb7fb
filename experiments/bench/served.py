"""A `fastask serve` of its own for a benchmark: started, waited for, ended in order.

Leaves out what is asked of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO


@dataclass
class Running:
    """url: where it listens.  said: its stderr; ready: how much of it came before it was."""

    process: subprocess.Popen[str]
    url: str
    said: IO[str]
    ready: int

    def end(self, seconds: float = 120.0) -> tuple[int, str]:
        """Its exit code after SIGTERM, and what it has said on stderr since it was ready."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(seconds)
        self.said.seek(self.ready)
        return code, self.said.read()


@contextmanager
def served(*flags: object) -> Iterator[Running]:
    """Raises OSError where it doesn't start; killed at the end of the block if it still runs."""
    command = [sys.executable, "-m", "fastask_jax.cli", "serve", "--port", "0", *map(str, flags)]
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("serving on "):
                said.seek(0)
                raise OSError(f"fastask serve didn't start: {said.read().strip() or line!r}")
            # Where the server writes, as both have the file open in common.
            ready = os.lseek(said.fileno(), 0, os.SEEK_CUR)
            yield Running(process, line.split()[-1], said, ready)
        finally:
            process.kill()
