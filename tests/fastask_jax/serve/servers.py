"""Servers as processes of their own, for tests."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]
CLI = ("-m", "fastask_jax.cli", "serve")


@dataclass
class Server:
    """One process; `url` is where it says that it listens, `said` its stderr so far."""

    process: subprocess.Popen
    url: str
    said: list[str] = field(default_factory=list)

    def end(self, sig: int = signal.SIGTERM, seconds: float = 60.0) -> tuple[int, str]:
        """Its exit code after a signal, and what it has said on stderr since it was ready."""
        self.process.send_signal(sig)
        code = self.process.wait(seconds)
        self.reader.join(10)
        return code, "".join(self.said)


@contextmanager
def serving(*flags: object, command: tuple[str, ...] = CLI, port: int = 0):
    """A server that is ready; killed at the end of the block."""
    words = [sys.executable, *command, "--port", str(port), *map(str, flags)]
    process = subprocess.Popen(
        words, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        server = Server(process, "")
        server.reader = threading.Thread(target=lambda: server.said.extend(process.stderr))
        server.reader.start()
        line = process.stdout.readline()
        if not line.startswith("serving on http://127.0.0.1:"):
            process.kill()
            server.reader.join()
            raise AssertionError(f"it said {line!r} {''.join(server.said)}")
        server.url = line.split()[-1]
        deadline = time.monotonic() + 10  # it has said so, but through another pipe
        while not server.said and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "is loaded; its programs compile" in server.said.pop(0)
        yield server
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        server.reader.join(10)
        process.stderr.close()
