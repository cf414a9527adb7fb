"""Safetensors files: one, or several behind an index; read where they lie, written in one pass.

A tensor is read as a view of the mapped file, so the caller decides which part of it is ever
copied.  Tensors are written one after another, none kept.  The format is that of the
`safetensors` package (eight bytes of header length, a JSON header, the data), and the index that
of `transformers`.  What the tensors mean is left to `hugging_face.py`.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fastask_jax.model.streaming import fill

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The limit of the `safetensors` package.
_LONGEST_HEADER = 100_000_000


class _Entry(NamedTuple):
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int


class SafetensorsFiles:
    """The tensors of a directory, from `model.safetensors` or from the shards that
    `model.safetensors.index.json` lists; the single file goes first, as in `transformers`.

    Raises:
      FileNotFoundError: neither is there, or the index points to a file that isn't.
      ValueError: a file or the index can't be read, or they contradict each other.
    """

    def __init__(self, directory: Path):
        self._entries: dict[str, _Entry] = {}
        if (directory / WEIGHTS_FILE).is_file():
            self._add(directory / WEIGHTS_FILE)
            return
        index = directory / INDEX_FILE
        if not index.is_file():
            raise FileNotFoundError(
                f"{directory} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}; a model directory "
                "has config.json and one of them"
            )
        weight_map = _weight_map(index)
        for name in sorted(set(weight_map.values())):
            if not (directory / name).is_file():
                raise FileNotFoundError(
                    f"{index} points to {name}, which is missing; fetch that file too"
                )
            self._add(directory / name)
        for tensor, name in weight_map.items():
            entry = self._entries.get(tensor)
            if entry is None or entry.file.name != name:
                raise ValueError(f"{index} says that {name} holds {tensor}, but it doesn't")

    def _add(self, file: Path) -> None:
        for name, entry in _read_header(file).items():
            if name in self._entries:
                raise ValueError(
                    f"tensor {name} is in both {self._entries[name].file.name} and {file.name}"
                )
            self._entries[name] = entry

    @property
    def names(self) -> set[str]:
        return set(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def read(self, name: str) -> np.ndarray:
        """The tensor, in its own type, as a read-only view of the file.

        Raises:
          ValueError: it isn't F32, F16 or BF16.
        """
        file, dtype, shape, start = self._entries[name]
        if dtype not in DTYPES:
            raise ValueError(
                f"tensor {name} in {file} has type {dtype}; supported are {', '.join(DTYPES)}"
            )
        # A mapping of its own, so that its pages are given back as soon as it is dropped.
        return np.asarray(np.memmap(file, DTYPES[dtype], "r", offset=start, shape=shape))


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = parse_json(index.read_bytes())["weight_map"]
        files = set(weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} isn't an index of safetensors files: {error!r}") from None
    for name in files:
        if not isinstance(name, str) or name != Path(name).name:
            raise ValueError(f"{index} points to {name!r}, which isn't the name of a file there")
    return weight_map


def _read_header(file: Path) -> dict[str, _Entry]:
    size = os.path.getsize(file)
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise ValueError(
                f"{file} can't be read as safetensors: its header is cut short or isn't one"
            )
        try:
            header = parse_json(stream.read(length))
            header.pop("__metadata__", None)
            entries = {name: _entry(file, 8 + length, **fields) for name, fields in header.items()}
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"{file} can't be read as safetensors: {error}") from None
    end = 8 + length + max((header[name]["data_offsets"][1] for name in entries), default=0)
    if end > size:
        raise ValueError(
            f"{file} is cut short: it has {size:,} bytes and its header speaks of {end:,}; "
            "fetch the file again"
        )
    # Every byte of the data belongs to one tensor, as the `safetensors` package demands.
    at = 0
    for start, stop, name in sorted((*header[name]["data_offsets"], name) for name in entries):
        if start != at or stop < start:
            raise ValueError(
                f"{file} is corrupt: data_offsets of {name} are {start:,} to {stop:,}, but the "
                f"tensor before it ends at {at:,}; fetch the file again"
            )
        at = stop
    if end < size:
        raise ValueError(
            f"{file} is corrupt: it has {size:,} bytes and its tensors end at {end:,}; fetch the "
            "file again"
        )
    return entries


def parse_json(text: bytes) -> Any:
    """The JSON in `text`; ValueError where it isn't JSON, has a key twice or is nested deeply."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise ValueError(f"it has {twice} twice")
        return found

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=once)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def _entry(file: Path, data: int, dtype: str, shape: list[int], data_offsets: list[int]) -> _Entry:
    start, end = data_offsets
    if not all(type(n) is int and n >= 0 for n in (start, end, *shape)):
        raise ValueError(f"shape {shape} at {data_offsets} isn't one")
    if dtype in DTYPES and end - start != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{dtype} of shape {shape} doesn't fill the bytes {start} to {end}")
    return _Entry(file, dtype, tuple(shape), data + start)


class Planned(NamedTuple):
    """A tensor that is going to be written."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(
    directory: Path,
    plan: Sequence[Planned],
    arrays: Iterable[np.ndarray],
    max_shard_bytes: int | None = None,
    metadata: dict[str, str] | None = None,
    file: str = WEIGHTS_FILE,
) -> None:
    """Writes the planned tensors; `arrays` gives them in the same order, in any float type.

    One file, `file`, where they fit into `max_shard_bytes`, else shards of at most that size
    (more only for a single tensor that is larger) and their index.  One tensor is held at a time.
    """
    shards = list(_shards(plan, max_shard_bytes))
    if len(shards) == 1:
        files = [file]
    else:
        files = [
            f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
        ]
        index = {
            "metadata": {"total_size": sum(planned.nbytes for planned in plan)},
            "weight_map": {
                planned.name: name
                for name, shard in zip(files, shards, strict=True)
                for planned in shard
            },
        }
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    arrays = iter(arrays)
    for name, shard in zip(files, shards, strict=True):
        with open(directory / name, "wb") as stream:
            stream.write(_header(shard, metadata or {}))
            for planned in shard:
                stream.write(_contiguous(planned, next(arrays)))


def _shards(plan: Sequence[Planned], limit: int | None) -> Iterator[list[Planned]]:
    shard: list[Planned] = []
    size = 0
    for planned in plan:
        if limit is not None and shard and size + planned.nbytes > limit:
            yield shard
            shard, size = [], 0
        shard.append(planned)
        size += planned.nbytes
    yield shard


def _header(shard: Sequence[Planned], metadata: dict[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    start = 0
    for planned in shard:
        end = start + planned.nbytes
        header[planned.name] = {
            "dtype": _NAMES[planned.dtype],
            "shape": list(planned.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # Padded, so that the data starts at a whole number of words.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _contiguous(planned: Planned, array: np.ndarray) -> memoryview:
    if array.shape != planned.shape:
        raise ValueError(f"tensor {planned.name} has shape {array.shape}, not {planned.shape}")
    out = np.empty(planned.shape, planned.dtype)
    fill(out, array)
    if out.itemsize < array.itemsize and not np.isfinite(out).all():
        raise ValueError(f"tensor {planned.name} has weights too large for {planned.dtype}")
    return out.reshape(-1).view(np.uint8).data
