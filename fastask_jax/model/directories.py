"""Directories that are replaced whole or not at all, for models and adapters that are written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced_directory(directory: str | Path, ours: Sequence[str]) -> Iterator[Path]:
    """A new directory beside `directory`, which takes its place when the block ends well.

    An error in the block, or a kill, leaves what was there before.  Files there that match none
    of the patterns `ours` and that the block doesn't write are carried over (a tokenizer beside
    the weights).  One process writes to a directory at a time.

    Raises:
      NotADirectoryError: `directory` is a file.
      FileExistsError: it holds directories, so it is more than a model.
    """
    directory = Path(directory).resolve()
    new = directory.with_name(f".{directory.name}.partial")
    old = directory.with_name(f".{directory.name}.old")
    if old.exists() and not directory.exists():
        old.rename(directory)  # a kill came between the two renames below
    carried = _others(directory, ours)
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new
        for path in carried:
            if not (new / path.name).exists():
                shutil.copy2(path, new)
        _sync(new)
        if directory.exists():
            directory.rename(old)
        new.rename(directory)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _others(directory: Path, ours: Sequence[str]) -> list[Path]:
    if not directory.exists():
        return []
    if not directory.is_dir():
        raise NotADirectoryError(f"{directory} is a file; give a directory to write to")
    found = sorted(directory.iterdir())
    for path in found:
        if path.is_dir():
            raise FileExistsError(
                f"{directory} holds the directory {path.name}, so it isn't one that a model alone "
                "fills; give another one to write to"
            )
    return [path for path in found if not any(path.match(pattern) for pattern in ours)]


def _sync(directory: Path) -> None:
    """Has the files on disk before the name that vouches for them."""
    for path in (*directory.rglob("*"), directory):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
