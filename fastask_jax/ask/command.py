"""`fastask ask`: one question about one workbook file, answered on the terminal.

The answer is the first line of what is printed, so a script can take it with `head -1`; then
come the ranges it was read from and what it took.  With `--json` everything is one JSON object.
Stderr has a warning where the model couldn't see all of the workbook.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from pathlib import Path

from envs.workbook import BlockStore, read_workbook
from fastask_jax.ask.answer import Answer, AskError
from fastask_jax.ask.asker import Asker

_WHY = {
    "no_answer": "the model ended without one",
    "answered": "the model's answer was empty",
    "max_turns": "the model used up all its turns",
    "length": "the model's reply ran too long",
    "token_budget": "the model said too much",
    "context": "what the model read filled all the room it has",
}


def main(book: str, question: str, *, checkpoint: str | None, as_json: bool) -> int | None:
    """Asks, and prints the answer; raises one of the errors of `Asker` where that fails.

    A question without an answer raises AskError too, in JSON after the object was printed.
    """
    workbook = read_workbook(book, store=block_store())  # a bad file shows before the model loads
    for note in workbook.notes:
        print(f"warning: {printable(book)}: {printable(note)}", file=sys.stderr)
    if missing := workbook.uncalculated():
        print(f"warning: {_uncalculated(book, missing)}", file=sys.stderr)
    with Asker(checkpoint, compile_cache=compile_cache()) as asker:
        answer = asker.ask(workbook, question)
    if doubt := unsupported(answer):
        print(f"warning: {doubt}", file=sys.stderr)
    if as_json:
        print(answer.to_json())
    elif answer.answer is not None:
        print(as_text(answer))
    if answer.answer is None:
        more = "" if as_json else "; --json shows what it did"
        if checkpoint is None:
            more += "; the shipped policy knows the question types of generated workbooks alone"
        raise AskError(
            f"no answer after {_count(answer.turns, 'turn')}: "
            f"{_WHY.get(answer.stop_reason, answer.stop_reason)}{more}"
        )
    return None


def block_store() -> BlockStore | None:
    """Where large workbooks are kept once they were read, or None where nothing can be kept."""
    try:
        return BlockStore(Path.home() / ".cache" / "fastask" / "books")
    except (RuntimeError, ValueError):
        return None


def compile_cache() -> Path | None:
    """A private folder of this user for compiled functions, one per kind of processor: home
    folders are shared between machines, machine code is not.  None where none can be had."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        kind = next((line for line in lines if line.startswith("flags")), platform.machine())
        name = hashlib.blake2b(kind.encode(), digest_size=8).hexdigest()
        folder = Path.home() / ".cache" / "fastask" / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except (OSError, RuntimeError):
        return None
    private = found.st_uid == os.getuid() and not found.st_mode & 0o022
    return folder if private and os.access(folder, os.W_OK) else None


def as_text(answer: Answer) -> str:
    """The answer for a person; the first line is the value alone."""
    lines = [printable(answer.answer or "")]
    lines += [f"  {'read' if i == 0 else '    '}  {printable(r)}"
              for i, r in enumerate(answer.evidence or ("nothing",))]  # fmt: skip
    lines.append(
        f"  {_count(answer.turns, 'turn')}, {_count(answer.tool_calls, 'tool call')}, "
        f"{_count(answer.cells, 'cell')}, {answer.seconds:.1f} s"
    )
    return "\n".join(lines)


def unsupported(answer: Answer) -> str | None:
    """What to say of an answer for which the model has read nothing."""
    if answer.answer is None or answer.evidence:
        return None
    return "no cell was read for it: a guess, unless it is about sheets' names or sizes"


def _uncalculated(book: str, missing: dict[str, int]) -> str:
    """What to say of formulas without results, by sheet."""
    few = [f"{printable(name)}: {count:,}" for name, count in missing.items()][:5]
    more = f", {_count(len(missing) - 5, 'more sheet')}" if len(missing) > 5 else ""
    return (
        f"{printable(book)} holds {_count(sum(missing.values()), 'formula')} without a stored "
        f"result that can't be calculated here ({', '.join(few)}{more}), read as empty; open it in "
        "a spreadsheet program and save it again"
    )


def printable(text: str) -> str:
    """`text` with control characters spelled out: it comes from a model that read a stranger's
    workbook, and may hold terminal escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
