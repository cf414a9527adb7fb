"""What an evaluation keeps: its setup, and one record an episode, appended as it ends.

    RUN/setup.json      the frozen tasks, the settings that records depend on, each policy's own
    RUN/records.jsonl   one line a record: policy, task, rollout, and what became of it

The record file is also the cache: an episode that is in it is not played again, whatever ended
the process that wrote it (a line that a kill tore is dropped).  So the records under one name
must all be made alike: a setup that differs from the kept one is refused.  More policies, more
rollouts and fewer of either are no difference.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from fastask_jax.report.jsonl import JsonLines, plain, read_jsonl

SETUP, RECORDS = "setup.json", "records.jsonl"
Record = dict[str, Any]
Key = tuple[str, str, int]  # policy, task, rollout


class RecordStore:
    """The records of one run directory; ends with its `with` block, which leaves no file of a
    new evaluation that an error has ended before its first record.

    tasks: what `evaluation.tasks.freeze` says of the set.  settings: for all policies.
    policies: by name, each one's own.

    Raises ValueError where the directory holds records of another setup, and BlockingIOError
    while another process writes there.
    """

    def __init__(
        self,
        run_dir: str | Path,
        tasks: Mapping[str, Any],
        settings: Mapping[str, Any],
        policies: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self.run_dir = Path(run_dir)
        path = self.run_dir / RECORDS
        wanted = plain({"tasks": tasks, "settings": settings, "policies": policies})
        held = read_setup(self.run_dir)
        if held is not None:  # before the lock, which would make a file
            _check_same(self.run_dir, held, wanted)
        self._new = held is None
        self._lines = JsonLines(path, sys.maxsize)
        try:
            held = read_setup(self.run_dir)  # whoever had the lock may have begun it
            if held is not None:
                _check_same(self.run_dir, held, wanted)
                wanted["policies"] = held["policies"] | wanted["policies"]
            self.records: dict[Key, Record] = {}
            for record in read_jsonl(path):
                self.records[key_of(record)] = record
            if held is None and self.records:
                raise ValueError(
                    f"{path} has records, but {SETUP} is missing: give another --run-dir"
                )
            _write(self.run_dir / SETUP, wanted)
        except BaseException:
            self._lines.close()
            raise

    def add(self, policy: str, task: str, rollout: int, record: Mapping[str, Any]) -> None:
        """Keeps the record of an episode that has ended; on the disk when this returns."""
        line = plain({"policy": policy, "rollout": rollout, **record, "task": task})
        self._lines.write(line)
        self.records[key_of(line)] = line

    def of(self, policy: str, tasks: Sequence[str], rollouts: int) -> list[Record]:
        """The policy's records of these tasks, in their order, as far as there are any."""
        keys = ((policy, task, rollout) for task in tasks for rollout in range(rollouts))
        return [self.records[key] for key in keys if key in self.records]

    def missing(self, policy: str, tasks: Sequence[str], rollouts: int) -> list[tuple[int, int]]:
        """(place of the task, rollout) of those without a record; all first rollouts come
        first."""
        return [
            (place, rollout)
            for rollout in range(rollouts)
            for place, task in enumerate(tasks)
            if (policy, task, rollout) not in self.records
        ]

    def close(self) -> None:
        self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None and self._new and not self.records:
            for name in (SETUP, "config.json", RECORDS):
                (self.run_dir / name).unlink(missing_ok=True)
            if not any(self.run_dir.iterdir()):
                self.run_dir.rmdir()
        self.close()


def key_of(record: Mapping[str, Any]) -> Key:
    """Raises ValueError for a line that no evaluation wrote."""
    policy, task, rollout = (record.get(name) for name in ("policy", "task", "rollout"))
    if isinstance(policy, str) and isinstance(task, str) and isinstance(rollout, int):
        return policy, task, rollout
    raise ValueError(f"a record needs policy, task and rollout, not {policy}, {task}, {rollout}")


def read_setup(run_dir: Path) -> dict[str, Any] | None:
    """The kept setup; None where there is none.  Raises ValueError where it is damaged."""
    path = run_dir / SETUP
    try:
        setup = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        raise ValueError(f"{path} is not JSON: give another --run-dir") from None
    if not isinstance(setup, dict) or {"tasks", "settings", "policies"} - set(setup):
        raise ValueError(f"{path} is no setup of an evaluation: give another --run-dir")
    return setup


def _check_same(run_dir: Path, held: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    found: list[str] = []
    for part in ("tasks", "settings"):
        found += _differences("", held[part], wanted[part])
    for name in held["policies"]:
        if name in wanted["policies"]:
            own = held["policies"][name], wanted["policies"][name]
            found += _differences(f"{name}'s ", *own)
    if found:
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        raise ValueError(
            f"the evaluation in {run_dir} was begun with {', '.join(found[:4])}{more}: go on with "
            "that, or give another --run-dir"
        )


def _differences(of: str, held: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    names = [name for name in {**held, **wanted} if held.get(name) != wanted.get(name)]
    # A long list of tasks says less than the digest over it.
    shown = [name for name in names if name != "ids"] or names
    return [f"{of}{name}={held.get(name)} (now {wanted.get(name)})" for name in shown]


def _write(path: Path, value: Any) -> None:
    scratch = path.with_name(path.name + ".part")
    scratch.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
    os.replace(scratch, path)
