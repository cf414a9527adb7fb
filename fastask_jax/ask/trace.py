"""`fastask ask --trace FILE`: whole conversations as JSON lines, for people and programs.

Lines are of four kinds, told apart by `kind`: `session` (book, policy, time), then for each
question its `message`s (role, content, and calls with their arguments) and its `answer`, or the
`error` that it ended with.  `question` counts from 1.  Lines are written as they come, so that
an interrupted session leaves what it has said.  The file holds parts of the workbook: a new one
is readable by its owner alone, and lines are appended to one that is there, but to no other file:
not to the workbook, nor to the questions that are still being read.
"""

from __future__ import annotations

import datetime as dt
import json
import os
from pathlib import Path
from typing import Any, Self

from envs.core import Message, Reply
from fastask_jax.ask.answer import Answer

_LONGEST = 1 << 20  # bytes of a session's line


class Trace:
    """Close it, or use `with`.  Raises OSError where the file can't be written, and ValueError
    where it holds something else."""

    def __init__(self, path: str | Path) -> None:
        if os.path.isfile(path) and not _is_trace(path):
            raise ValueError(f"{path} is no trace, and isn't changed: give --trace another FILE")
        number = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._file = os.fdopen(number, "a", encoding="utf-8", errors="backslashreplace")
        self._question = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def begin(self, book: str, policy: str) -> None:
        now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        self._write("session", book=book, policy=policy, time=now)

    def ask(self, question: str) -> None:
        """All that follows belongs to this question."""
        self._question += 1

    def hear(self, entry: Message | Reply) -> None:
        role = "assistant" if isinstance(entry, Reply) else entry.role
        line: dict[str, Any] = {"role": role, "content": entry.content}
        if entry.tool_calls:
            line["tool_calls"] = [
                {"name": call.name, "arguments": call.arguments}
                | ({"error": call.error} if call.error else {})
                for call in entry.tool_calls
            ]
        if isinstance(entry, Reply):
            line |= {"tokens": entry.tokens, "stop_reason": entry.stop_reason}
        self._write("message", question=self._question, **line)

    def end(self, answer: Answer) -> None:
        self._write("answer", **(answer.as_dict() | {"question": self._question}))

    def fail(self, error: Exception) -> None:
        self._write("error", question=self._question, error=str(error))

    def _write(self, kind: str, **fields: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **fields}, ensure_ascii=False) + "\n")
        self._file.flush()


def _is_trace(path: str | Path) -> bool:
    """Whether the file is empty, or begins with a line of a trace."""
    with open(path, "rb") as file:
        first = file.readline(_LONGEST)
    try:
        line = json.loads(first or b'{"kind": "session"}')
    except ValueError:
        return False
    return isinstance(line, dict) and line.get("kind") == "session"
