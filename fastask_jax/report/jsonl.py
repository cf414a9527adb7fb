"""Append-only files of one JSON object a line, cut back to a step when a run resumes.

A line is flushed as it is written, so a killed process loses at most the line in progress; that
torn line is dropped at the next opening.  One process writes a file: it holds a lock on it, which
ends with the process, so a run that is resumed while it still runs is refused.
"""

from __future__ import annotations

import dataclasses
import datetime
import fcntl
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self


class JsonLines:
    """Writer of one `.jsonl` file whose objects carry a `step`.

    after_step: None starts a new file; a number keeps the lines with `step` up to it and drops
    later ones, which the resumed run will write again (-1 keeps none).
    Raises FileExistsError when a new file would replace lines of an earlier run, and
    BlockingIOError while another process writes the file.
    """

    def __init__(self, path: str | Path, after_step: int | None = None) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.last_step: int | None = None
        if after_step is None and self.path.exists() and self.path.stat().st_size:
            raise FileExistsError(
                f"{self.path} holds an earlier run: continue it with --resume true, or give "
                "another --run-dir"
            )
        self._file = self.path.open("a", encoding="utf-8")
        try:
            self._lock()
            if after_step is not None:
                self.cut(after_step)
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"{self.path} is being written by a run that hasn't ended: wait for it, or give "
                "another --run-dir"
            ) from None

    def cut(self, after_step: int) -> None:
        """Drops the lines behind `after_step`, and one that a kill tore."""
        self.last_step = _cut(self.path, after_step)

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one object and flushes it."""
        self._file.write(json.dumps(plain(record), ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()
        step = record.get("step")
        self.last_step = step if isinstance(step, int) else self.last_step

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a file, without a torn last line.

    Raises ValueError that names the line when an earlier one is damaged.
    """
    return [record for record, _ in lines(Path(path))]


def lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Objects with the byte offset after each, without a torn last line; raises as `read_jsonl`."""
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # torn by a kill in mid-write
            end += len(line)
            try:
                record = json.loads(line)
            except ValueError:
                raise ValueError(f"{path}, line {number} is not JSON") from None
            if not isinstance(record, dict):
                raise ValueError(f"{path}, line {number} is not a JSON object")
            yield record, end


def _cut(path: Path, after_step: int) -> int | None:
    """Truncates after the last line to keep; its step, or None when nothing is kept."""
    keep, last = 0, None
    for record, end in lines(path):
        step = record.get("step", -1)
        if step > after_step:
            break
        keep, last = end, step
    with path.open("r+b") as file:
        file.truncate(keep)
    return last


def plain(value: Any) -> Any:
    """A value as JSON can hold it: array scalars as numbers, NaN and infinities as null,
    dataclasses as objects, dates as ISO text.  Raises TypeError on anything else."""
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted(plain(v) for v in value)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (datetime.timedelta, Path)):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if hasattr(value, "tolist"):  # NumPy and JAX arrays and scalars
        return plain(value.tolist())
    raise TypeError(f"{type(value).__name__} has no place in a JSON line")
