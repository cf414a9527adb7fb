"""A frozen task set: which tasks, in which order, and a digest over all that a policy meets.

The digest covers question, truth and every cell of every workbook: with another version of the
generator the same seed may make other tasks, whose records don't belong together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from envs.fast_ask import StreamConfig, Task, TaskStream
from envs.fast_ask.tasks import build_workbook


def freeze(stream: StreamConfig, count: int) -> tuple[list[Task], dict[str, Any]]:
    """The first `count` tasks of a stream, and what names the set in files: `digest`, the
    stream's settings, and the tasks' ids."""
    tasks = TaskStream(stream).take(count)
    return tasks, {
        "digest": digest(tasks),
        "split": stream.split,
        "scale": stream.scale,
        "difficulties": list(stream.difficulties),
        "seed": stream.seed,
        "count": count,
        "ids": [task.id for task in tasks],
    }


def digest(tasks: Sequence[Task]) -> str:
    """Sixteen hexadecimal digits."""
    found = hashlib.sha256()
    for task in tasks:
        said = (task.id, task.question, task.answer_type, task.truth)
        found.update(repr(said).encode("utf-8", "surrogatepass"))
        for sheet in build_workbook(task).sheets:
            cells = (sheet.name, sheet.tab_color, sorted(sheet.rows.items()))
            found.update(repr(cells).encode("utf-8", "surrogatepass"))
    return found.hexdigest()[:16]
