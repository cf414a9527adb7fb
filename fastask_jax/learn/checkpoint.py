"""Checkpoints from which a run resumes exactly.

    RUN/checkpoints/step_00000040/
        state/          the training state, written by Orbax
        host.json       what the host must remember: RNG keys, data cursor, consumed ids, queues
        host_1.json     the same of process 1, where it differs from that of process 0
        COMMITTED       the last file written: size and digest of every other file, and the
                        shape and dtype of every array

A checkpoint is written into a directory with another name and renamed when its marker is on
disk.  So whatever stops a save, SIGKILL and a full disk included, the checkpoints that were
committed before it stay whole, and a partial one is never mistaken for one of them.  Older
checkpoints are deleted only after a newer one is committed.

Several processes write one checkpoint together, in a directory that all of them see: each the
shards of its devices, process 0 the rest, and the marker when all have said that theirs are on
disk.  Who reads it may have other processes, devices and mesh: each reads its own shards.  An
error of one process is raised on all, and none waits beyond a deadline.

Left out: weights alone for shipping (`fastask_jax.model.save_params`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath  # the paths that Orbax's handlers take

from fastask_jax._exit import uninterrupted
from fastask_jax.distributed import Channel, PeerError, is_main
from fastask_jax.learn.checkpoint_arrays import (
    abstract_leaf,
    array_bytes,
    key_from_json,
    key_to_json,
    own_copy,
    signature,
)
from fastask_jax.learn.checkpoint_files import (
    MARKER,
    PARTIAL,
    Marker,
    committed_steps,
    damage,
    digests,
    exact_json,
    sizes,
    step_path,
    sync,
    worth_a_digest,
    write_text,
)

__all__ = [
    "MARKER",
    "PARTIAL",
    "CheckpointError",
    "Checkpointer",
    "Restored",
    "key_from_json",
    "key_to_json",
]


class CheckpointError(RuntimeError):
    """A checkpoint couldn't be written or read; the message says what to do."""


class Restored(NamedTuple):
    state: Any
    host_state: dict[str, Any]


class Checkpointer:
    """Saves and restores one run's checkpoints; one writer at a time.

    run_dir: the run directory; checkpoints lie in its folder `checkpoints`.
    keep_last: how many committed checkpoints to keep (None keeps all).
    keep_every: checkpoints of steps that this divides are kept for ever (None: none are).
    deadline: seconds that a process waits for the others at one point of a save.

    With several processes all of them make one and call its methods in the same order; `steps`
    and `latest` only look.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike,
        keep_last: int | None = 2,
        keep_every: int | None = None,
        deadline: float = 1200.0,
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last must be at least 1 (or None for all), not {keep_last}")
        if keep_every is not None and keep_every < 1:
            raise ValueError(f"keep_every must be at least 1 (or None for none), not {keep_every}")
        self.directory = Path(run_dir).absolute() / "checkpoints"
        self.keep_last, self.keep_every = keep_last, keep_every
        self._channel = Channel("checkpoint", deadline)
        # The handler and not Orbax's Checkpointer: its barriers don't tell of another's error.
        self._orbax = ocp.StandardCheckpointHandler()
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None

    def save(
        self, step: int, state: Any, host_state: dict[str, Any], *, wait: bool = False
    ) -> None:
        """Saves `state` (a pytree of arrays) and `host_state` (JSON) as the checkpoint of `step`.

        Returns once the arrays are copied, so the state may be donated at once; the writing goes
        on in the background, or is over on return with `wait`.  A failure of a background save
        is raised by the next `save`, `wait` or `close`.

        Raises CheckpointError when it can't write or when this step or a later one is already
        committed, ValueError for a negative step and when host_state isn't exactly what JSON
        gives back (tuples, integer keys, NaN).
        """
        self.wait()
        if step < 0:
            raise ValueError(f"a checkpoint's step must be 0 or more, not {step}")
        partial = step_path(self.directory, step).with_suffix(PARTIAL)
        with _for_all(f"the checkpoint of step {step} was not saved in {self.directory}"):
            text = self._channel.run("host state", lambda: exact_json(host_state))
        try:
            texts = self._channel.exchange("host states", hashlib.sha256(text.encode()).hexdigest())
            self._channel.on_main("preparing", lambda: self._prepare(step, partial, state, text))
            own = None if texts[jax.process_index()] == texts[0] else text
            # What Orbax has begun, somebody has to wait for.
            with uninterrupted():
                futures = self._channel.run("copying", lambda: self._begin(partial, state, own))
                self._thread = threading.Thread(
                    target=self._commit_in_background,
                    args=(step, partial, futures, signature(state)),
                    name=f"checkpoint-{step}",
                )
                self._thread.start()
        except CheckpointError:
            raise
        except Exception as error:
            raise self._failed(step, partial, error) from error
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
        return committed_steps(self.directory)

    def latest(self) -> int | None:
        """Step of the newest committed checkpoint, or None."""
        steps = self.steps()
        return steps[-1] if steps else None

    def restore_latest(self, abstract: Any) -> Restored | None:
        """What `restore` gives of the newest checkpoint, or None where there is none yet."""
        self.wait()
        with _for_all(f"no checkpoint was restored from {self.directory}"):
            step = self._channel.on_main("latest", self.latest)
        return None if step is None else self.restore(abstract, step)

    def restore(self, abstract: Any, step: int | None = None) -> Restored:
        """The state and host state of `step` (default: the latest).

        abstract: the state's tree with `jax.ShapeDtypeStruct` leaves (or arrays, or what
        `jax.typeof` gives); arrays go where its shardings say, on any mesh, else to the first
        device of the process.  A device reads what its shard needs, no more.
        Raises CheckpointError when there is no such checkpoint, when its files are damaged, when
        it was saved from other shapes, or by other processes with host states of their own.
        """
        self.wait()
        with _for_all(f"no checkpoint was restored from {self.directory}"):
            step = self._channel.on_main("finding", lambda: self._find(step))
            path = step_path(self.directory, step)
            marker = self._channel.run("checking", lambda: self._checked(path, abstract))
            target = jax.tree.map(abstract_leaf, abstract)
            state = self._channel.run("reading", lambda: self._read(path, target))
            return Restored(state, _host_state(path, marker))

    def _find(self, step: int | None) -> int:
        known = self.steps()
        if step is None and not known:
            raise CheckpointError(f"no committed checkpoint in {self.directory}")
        step = known[-1] if step is None else step
        if step not in known:
            listed = ", ".join(map(str, known)) or "none"
            raise CheckpointError(
                f"no checkpoint of step {step} in {self.directory}; has: {listed}"
            )
        return step

    def _checked(self, path: Path, abstract: Any) -> Marker:
        """The marker of a checkpoint that fits; each process looks at its part of the files."""
        try:
            marker = Marker.read(path)
            wrong = damage(path, dict(_share(list(marker.files.items()))))
        except ValueError as error:
            wrong = str(error)
        if wrong:
            older = [other for other in self.steps() if step_path(self.directory, other) < path]
            advice = f"resume from step {older[-1]}" if older else "start the run anew"
            raise CheckpointError(f"checkpoint {path} is damaged ({wrong}): delete it and {advice}")
        _check_fits(path, marker.arrays, signature(abstract))
        return marker

    def _read(self, path: Path, target: Any) -> Any:
        # Arrays are read side by side, each of them twice in memory meanwhile: so not all at once.
        largest = max(array_bytes(leaf) for leaf in jax.tree.leaves(target))
        reader = ocp.StandardCheckpointHandler(restore_concurrent_gb=1 + 2 * largest // 10**9)
        try:
            return reader.restore(epath.Path(path / "state"), args=ocp.args.StandardRestore(target))
        except Exception as error:
            raise CheckpointError(f"checkpoint {path} can't be read: {error}") from error
        finally:
            reader.close()

    def _prepare(self, step: int, partial: Path, state: Any, host_text: str) -> None:
        """Makes the directory that all processes are about to write into."""
        latest = self.latest()
        if latest is not None and latest >= step:
            raise CheckpointError(
                f"{self.directory} already has step {latest}, so step {step} can't be saved: "
                "delete what is to be replaced or choose another run directory"
            )
        self.directory.mkdir(parents=True, exist_ok=True)
        self._clean()
        _check_space(self.directory, state)
        (partial / "state").mkdir(parents=True)
        write_text(partial / "host.json", host_text)

    def _begin(self, partial: Path, state: Any, host_text: str | None) -> list[Any]:
        """Copies this process's shards and starts to write them."""
        if not partial.is_dir():
            raise OSError(
                f"process {jax.process_index()} doesn't see {partial} of process 0: the run "
                "directory must lie on a file system that all processes share"
            )
        if host_text is not None:
            write_text(partial / _host_file(jax.process_index()), host_text)
        snapshot = jax.block_until_ready(jax.tree.map(own_copy, state))
        saving = self._orbax.async_save(
            epath.Path(partial / "state"), args=ocp.args.StandardSave(snapshot)
        )
        # In a thread: the caller may live in an event loop, as notebooks do.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, saving).result() or []

    def _commit_in_background(
        self, step: int, partial: Path, futures: list[Any], arrays: dict[str, str]
    ) -> None:
        try:
            self._channel.run("writing", lambda: _finish(futures))
            found = self._channel.on_main("indexing", lambda: self._index(partial))
            mine = _share(worth_a_digest(found))
            parts = self._channel.exchange(
                "digests", self._channel.run("digesting", lambda: digests(partial, mine))
            )
            known = {name: digest for part in parts for name, digest in part.items()}
            files = {name: (size, known.get(name)) for name, size in found.items()}
            marker = Marker(step, files, arrays, jax.process_count())
            self._channel.on_main("committing", lambda: self._commit(partial, marker))
        except Exception as error:
            self._failure = self._failed(step, partial, error)
            self._failure.__cause__ = error

    def _index(self, partial: Path) -> dict[str, int]:
        """Joins what the processes have written into one tree; the sizes of all files."""
        self._orbax.finalize(epath.Path(partial / "state"))
        return sizes(partial)

    def _commit(self, partial: Path, marker: Marker) -> None:
        marker.write(partial)
        final = step_path(self.directory, marker.step)
        if final.exists():
            # Not a whole checkpoint, or it would have been refused; it can't be renamed over.
            final.rename(final.with_suffix(f".replaced{PARTIAL}"))
        partial.rename(final)
        sync(self.directory)
        for old in self._superseded():
            shutil.rmtree(step_path(self.directory, old))
        self._clean()

    def _superseded(self) -> list[int]:
        """Steps that neither `keep_last` nor `keep_every` keeps."""
        if self.keep_last is None:
            return []
        older = self.steps()[: -self.keep_last]
        return [step for step in older if not self.keep_every or step % self.keep_every]

    def _clean(self) -> None:
        """Removes what saves that were stopped have left."""
        for leftover in self.directory.glob(f"*{PARTIAL}"):
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()

    def _failed(self, step: int, partial: Path, error: Exception) -> CheckpointError:
        if is_main():
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
        if latest == step:
            return CheckpointError(
                f"checkpoint of step {step} in {self.directory} is saved, but clearing away older "
                f"ones failed: {cause}"
            )
        return CheckpointError(
            f"checkpoint of step {step} in {self.directory} was not saved, {cause} ({intact})"
        )


@contextmanager
def _for_all(outcome: str) -> Iterator[None]:
    """What another process reports is an error of the checkpoint here too."""
    try:
        yield
    except PeerError as error:
        raise CheckpointError(f"{outcome}: {error}") from error


def _share(items: list[Any]) -> list[Any]:
    """This process's part of a list that all have."""
    return items[jax.process_index() :: jax.process_count()]


def _finish(futures: list[Any]) -> None:
    """Waits for all, so that nothing is still being written when the first error is raised."""
    errors = []
    for future in futures:
        try:
            future.result()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _host_file(index: int) -> str:
    return f"host_{index}.json" if index else "host.json"


def _host_state(path: Path, marker: Marker) -> dict[str, Any]:
    """This process's host state, which is that of process 0 where it has none of its own."""
    own = [name for name in marker.files if name.startswith("host_")]
    if own and marker.processes != jax.process_count():
        raise CheckpointError(
            f"checkpoint {path} was saved by {marker.processes} processes, each with a host state "
            f"of its own: resume with that many, not {jax.process_count()}"
        )
    name = _host_file(jax.process_index())
    return json.loads((path / (name if name in own else "host.json")).read_text("utf-8"))


def _check_fits(path: Path, saved: dict[str, str], wanted: dict[str, str]) -> None:
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            raise CheckpointError(
                f"checkpoint {path} doesn't fit this configuration: {name} is "
                f"{saved.get(name, 'absent')} there and {wanted.get(name, 'absent')} here; resume "
                "with the configuration that it was saved with"
            )


def _check_space(directory: Path, state: Any) -> None:
    """A full disk is cheaper to notice before the first byte is written."""
    needed = sum(array_bytes(leaf) for leaf in jax.tree.leaves(state))
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(f"No space left: {needed / 1e6:.1f} MB needed, {free / 1e6:.1f} MB free")
