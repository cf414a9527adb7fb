"""Checkpoints from which a run resumes exactly.

    RUN/checkpoints/step_00000040/
        state/          the training state, written by Orbax
        host.json       what the host must remember: RNG keys, data cursor, consumed ids, queues
        COMMITTED       the last file written: size and digest of every other file, and the
                        shape and dtype of every array

A checkpoint is written into a directory with another name and renamed when its marker is on
disk.  So whatever stops a save, SIGKILL and a full disk included, the checkpoints that were
committed before it stay whole, and a partial one is never mistaken for one of them.  Older
checkpoints are deleted only after a newer one is committed.

Left out: weights alone for shipping (`fastask_jax.model.save_params`), and the commit protocol of
several processes that write one checkpoint (one process only, any number of its devices).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AbstractMesh, SingleDeviceSharding
from jaxtyping import Array

MARKER = "COMMITTED"
PARTIAL = ".partial"
_STEP = re.compile(r"step_(\d{8,})")


class CheckpointError(RuntimeError):
    """A checkpoint couldn't be written or read; the message says what to do."""


class Restored(NamedTuple):
    state: Any
    host_state: dict[str, Any]


class Checkpointer:
    """Saves and restores one run's checkpoints; one writer at a time.

    run_dir: the run directory; checkpoints lie in its folder `checkpoints`.
    keep_last: how many committed checkpoints to keep (None keeps all).
    """

    def __init__(self, run_dir: str | os.PathLike, keep_last: int | None = 2) -> None:
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last must be at least 1 (or None for all), not {keep_last}")
        self.directory = Path(run_dir).absolute() / "checkpoints"
        self.keep_last = keep_last
        self._orbax = ocp.StandardCheckpointer()
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None

    def save(
        self, step: int, state: Any, host_state: dict[str, Any], *, wait: bool = False
    ) -> None:
        """Saves `state` (a pytree of arrays) and `host_state` (JSON) as the checkpoint of `step`.

        Returns once the arrays are copied, so the state may be donated at once; the writing goes
        on in the background, or is over on return with `wait`.  A failure of a background save
        is raised by the next `save`, `wait` or `close`.

        Saving the latest step again replaces it.

        Raises CheckpointError when it can't write or when a later step is already committed,
        ValueError when host_state isn't exactly what JSON gives back (tuples, integer keys, NaN).
        """
        text = _exact_json(host_state)
        self.wait()
        latest = self.latest()
        if latest is not None and latest > step:
            raise CheckpointError(
                f"{self.directory} already has step {latest}, so step {step} would be lost behind "
                f"it: delete the later checkpoints or choose another run directory"
            )
        partial = self.directory / f"step_{step:08d}{PARTIAL}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for leftover in self.directory.glob(f"*{PARTIAL}"):
                shutil.rmtree(leftover)
            _check_space(self.directory, state)
            partial.mkdir()
            # Orbax copies lazily where host and device memory are the same; the caller is about
            # to donate these buffers, so the copy must be real and over before we return.
            snapshot = jax.block_until_ready(jax.tree.map(_copy, state))
            self._orbax.save(partial / "state", snapshot)
        except Exception as error:
            raise self._failed(step, partial, error) from error
        arguments = (step, partial, text, _signature(state))
        self._thread = threading.Thread(
            target=self._commit_in_background, args=arguments, name=f"checkpoint-{step}"
        )
        self._thread.start()
        if wait:
            self.wait()

    def wait(self) -> None:
        """Waits for the save in progress; raises the CheckpointError of one that failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """Waits, then frees what Orbax holds."""
        try:
            self.wait()
        finally:
            self._orbax.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, oldest first; partial ones don't count."""
        return _committed_steps(self.directory)

    def latest(self) -> int | None:
        """Step of the newest committed checkpoint, or None."""
        steps = self.steps()
        return steps[-1] if steps else None

    def restore(self, abstract: Any, step: int | None = None) -> Restored:
        """The state and host state of `step` (default: the latest).

        abstract: the state's tree with `jax.ShapeDtypeStruct` leaves (or arrays, or what
        `jax.typeof` gives); arrays go where its shardings say, else to the first device.
        Raises CheckpointError when there is no such checkpoint, when its files are damaged, or
        when it was saved from other shapes.
        """
        self.wait()
        known = self.steps()
        if step is None and not known:
            raise CheckpointError(f"no committed checkpoint in {self.directory}")
        step = known[-1] if step is None else step
        if step not in known:
            listed = ", ".join(map(str, known)) or "none"
            raise CheckpointError(
                f"no checkpoint of step {step} in {self.directory}; has: {listed}"
            )
        path = self.directory / f"step_{step:08d}"
        marker = _read_marker(path)
        assert marker is not None, "a committed step has a marker"
        damage = _damage(path, marker["files"])
        if damage:
            older = [other for other in known if other < step]
            advice = f"resume from step {older[-1]}" if older else "start the run anew"
            raise CheckpointError(
                f"checkpoint {path} is damaged ({damage}): delete it and {advice}"
            )
        _check_signature(path, marker["arrays"], _signature(abstract))
        target = jax.tree.map(_abstract_leaf, abstract)
        try:
            state = self._orbax.restore(path / "state", target)
        except Exception as error:
            raise CheckpointError(f"checkpoint {path} can't be read: {error}") from error
        return Restored(state, json.loads((path / "host.json").read_text()))

    def _commit_in_background(
        self, step: int, partial: Path, host_text: str, arrays: dict[str, str]
    ) -> None:
        try:
            self._orbax.wait_until_finished()
            _write(partial / "host.json", host_text)
            marker = {"step": step, "files": _digests(partial), "arrays": arrays}
            _write(partial / MARKER, json.dumps(marker, indent=1))
            final = self.directory / f"step_{step:08d}"
            if final.exists():
                # The same step again.  Its directory isn't empty, so it can't be renamed over.
                final.rename(self.directory / f"step_{step:08d}.replaced{PARTIAL}")
            partial.rename(final)
            _sync(self.directory)
            for old in [] if self.keep_last is None else self.steps()[: -self.keep_last]:
                shutil.rmtree(self.directory / f"step_{old:08d}")
            for leftover in self.directory.glob(f"*{PARTIAL}"):
                shutil.rmtree(leftover)
        except Exception as error:
            self._failure = self._failed(step, partial, error)
            self._failure.__cause__ = error

    def _failed(self, step: int, partial: Path, error: Exception) -> CheckpointError:
        shutil.rmtree(partial, ignore_errors=True)
        latest = self.latest()
        intact = (
            "no checkpoint is committed yet"
            if latest is None
            else (f"the last committed one, step {latest}, is intact")
        )
        text = " ".join(str(error).split())
        if "No space left" in text or "RESOURCE_EXHAUSTED" in text:
            cause = "the disk is full: free some space or choose another run directory"
        else:
            cause = text[:300] or type(error).__name__
        return CheckpointError(
            f"checkpoint of step {step} in {self.directory} was not saved, {cause} ({intact})"
        )


def key_to_json(key: Array) -> dict[str, Any]:
    """A typed JAX RNG key as JSON, for the host state."""
    return {
        "impl": str(jax.random.key_impl(key)),
        "data": np.asarray(jax.random.key_data(key)).tolist(),
    }


def key_from_json(value: dict[str, Any]) -> Array:
    """The RNG key that `key_to_json` wrote."""
    data = jax.numpy.asarray(np.array(value["data"], np.uint32))
    return jax.random.wrap_key_data(data, impl=value["impl"])


def _committed_steps(directory: Path) -> list[int]:
    if not directory.is_dir():
        return []
    found = [(_STEP.fullmatch(path.name), path) for path in directory.iterdir()]
    return sorted(int(match[1]) for match, path in found if match and _read_marker(path))


def _read_marker(path: Path) -> dict[str, Any] | None:
    """The marker of a committed checkpoint, or None where it is absent or cut short."""
    try:
        return json.loads((path / MARKER).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None


def _exact_json(host_state: dict[str, Any]) -> str:
    try:
        text = json.dumps(host_state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"host_state must be plain JSON: {error}") from error
    if json.loads(text) != host_state:
        raise ValueError(
            "host_state must be what JSON gives back: lists (no tuples) and string keys only"
        )
    return text


def _copy(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, jax.Array) else np.array(leaf)


def _abstract_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    # What `jax.typeof` gives has a sharding over an abstract mesh, which names no devices.
    abstract = isinstance(getattr(sharding, "mesh", None), AbstractMesh)
    if sharding is None or abstract:
        sharding = SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _signature(tree: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path): f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
        for path, leaf in leaves
    }


def _check_signature(path: Path, saved: dict[str, str], wanted: dict[str, str]) -> None:
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            raise CheckpointError(
                f"checkpoint {path} doesn't fit this configuration: {name} is "
                f"{saved.get(name, 'absent')} there and {wanted.get(name, 'absent')} here; resume "
                "with the configuration that it was saved with"
            )


def _check_space(directory: Path, state: Any) -> None:
    """A full disk is cheaper to notice before the first byte is written."""
    needed = sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(state))
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(f"No space left: {needed / 1e6:.1f} MB needed, {free / 1e6:.1f} MB free")


def _files(path: Path) -> list[Path]:
    return sorted(item for item in path.rglob("*") if item.is_file() and item.name != MARKER)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digests(path: Path) -> dict[str, list[Any]]:
    return {
        item.relative_to(path).as_posix(): [item.stat().st_size, _digest(item)]
        for item in _files(path)
    }


def _damage(path: Path, files: dict[str, list[Any]]) -> str | None:
    for name, (size, digest) in files.items():
        item = path / name
        if not item.is_file():
            return f"{name} is missing"
        if item.stat().st_size != size or _digest(item) != digest:
            return f"{name} has changed"
    return None


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    _sync(path.parent)


def _sync(directory: Path) -> None:
    """A rename or a new name survives a power cut only once its directory is on disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
