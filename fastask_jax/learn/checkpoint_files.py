"""The files of a checkpoint: its marker, and digests by which damage is noticed.

Digests mean that files are read again, so they are bounded: the smallest files come first, up to
`DIGEST_BYTES` together.  A checkpoint of up to 4 GiB is covered whole; of a larger one the host
state and the indices of the arrays are, and of its large data files the sizes alone.  (Those
are written by TensorStore, which keeps checksums of its indices.)

Left out: what the files contain, and who writes them (`checkpoint.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MARKER = "COMMITTED"
PARTIAL = ".partial"
DIGEST_BYTES = 4 << 30
_STEP = re.compile(r"step_(\d{8,})")
_THREADS = 4


@dataclass(frozen=True)
class Marker:
    """What COMMITTED says.

    files: size and digest (None: size alone) by name.  arrays: dtype and shape by path.
    processes: how many wrote it.
    """

    step: int
    files: dict[str, tuple[int, str | None]]
    arrays: dict[str, str]
    processes: int = 1

    def write(self, path: Path) -> None:
        write_text(path / MARKER, json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> Marker:
        """Raises ValueError for one that isn't whole."""
        try:
            found = json.loads((path / MARKER).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{MARKER} can't be read: {error}") from error
        if not isinstance(found, dict):
            raise ValueError(f"{MARKER} is not a JSON object")
        wanted = {"step": int, "files": dict, "arrays": dict}
        for name, kind in wanted.items():
            if not isinstance(found.get(name), kind):
                raise ValueError(f"{MARKER} has no {name!r}")
        for name, entry in found["files"].items():
            if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], int)):
                raise ValueError(f"{MARKER} has no size and digest of {name}")
        files = {name: (size, digest) for name, (size, digest) in found["files"].items()}
        return cls(found["step"], files, found["arrays"], found.get("processes", 1))


def step_path(directory: Path, step: int) -> Path:
    return directory / f"step_{step:08d}"


def committed_steps(directory: Path) -> list[int]:
    """Steps whose directories hold a marker, oldest first; one that was cut short doesn't count."""
    if not directory.is_dir():
        return []
    found = [(_STEP.fullmatch(path.name), path) for path in directory.iterdir()]
    return sorted(int(match[1]) for match, path in found if match and _is_complete(path / MARKER))


def _is_complete(marker: Path) -> bool:
    try:
        json.loads(marker.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return False
    return True


def sizes(path: Path) -> dict[str, int]:
    """Bytes of every file under `path` by name, the marker left out."""
    found = (item for item in path.rglob("*") if item.is_file() and item.name != MARKER)
    return {item.relative_to(path).as_posix(): item.stat().st_size for item in sorted(found)}


def worth_a_digest(sizes: dict[str, int]) -> list[str]:
    """The smallest files, as many as `DIGEST_BYTES` hold."""
    chosen, total = [], 0
    for name in sorted(sizes, key=lambda name: (sizes[name], name)):
        total += sizes[name]
        if total > DIGEST_BYTES:
            break
        chosen.append(name)
    return chosen


def digests(path: Path, names: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of files under `path`, several read at a time."""
    names = list(names)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(_digest, (path / name for name in names)), strict=True))


def damage(path: Path, files: dict[str, tuple[int, str | None]]) -> str | None:
    """What is wrong with these files, or None; the cheap look at sizes comes first."""
    for name, (size, _) in files.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        if (path / name).stat().st_size != size:
            return f"{name} has changed"
    digested = {name: digest for name, (_, digest) in files.items() if digest is not None}
    for name, digest in digests(path, digested).items():
        if digest != digested[name]:
            return f"{name} has changed"
    return None


def exact_json(host_state: dict[str, Any]) -> str:
    """Raises ValueError where JSON wouldn't give the same back."""
    try:
        text = json.dumps(host_state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"host_state must be plain JSON: {error}") from error
    if json.loads(text) != host_state:
        raise ValueError(
            "host_state must be what JSON gives back: lists (no tuples) and string keys only"
        )
    return text


def write_text(path: Path, text: str) -> None:
    """Writes a file that is on disk when this returns."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync(path.parent)


def sync(directory: Path) -> None:
    """A rename or a new name survives a power cut only once its directory is on disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
