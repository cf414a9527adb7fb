"""`fastask ask`: questions about one workbook file, answered on the terminal.

Of one question the answer is the first line of what is printed, so a script can take it with
`head -1`; then come the ranges it was read from and what it took.  Several questions make one such
block each, with an empty line between.  With `--json` each answer is one JSON object on a line of
its own.  Nothing of what the model read or said on its way is printed: `--trace` keeps that.
Stderr has what is wrong, and a warning where the model couldn't see all of the workbook.

Exit codes: 0 all questions were answered, 3 the model gave no answer to at least one of them, and
1 where one couldn't be asked, or nothing could.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

from envs.workbook import BlockStore, Workbook, read_workbook
from fastask_jax import _exit
from fastask_jax._exit import printable
from fastask_jax.ask.answer import Answer, AskError, Unreachable
from fastask_jax.ask.asker import Asker
from fastask_jax.ask.choice import PolicyChoice
from fastask_jax.ask.trace import Trace
from fastask_jax.policies.remote import Refused

_WHY = {
    "no_answer": "the model ended without one",
    "answered": "the model's answer was empty",
    "max_turns": "the model used up all its turns",
    "length": "the model's reply ran too long",
    "token_budget": "the model said too much",
    "context": "what the model read filled all the room it has",
    "deadline": "the model took too long",
}


def main(
    book: str,
    questions: Iterable[str],
    choice: PolicyChoice,
    *,
    as_json: bool = False,
    trace: str | None = None,
    several: bool = False,
) -> int:
    """Asks, and prints the answers as they come; returns the exit code.

    several: whether to number the questions in messages, and go on behind one that can't be
    asked; with a single one that is raised, as all that stops every question is.
    """
    session = Session(book, as_json, several)
    workbook = read_workbook(book, store=block_store())  # a bad file shows before the model loads
    with ExitStack() as stack:
        stack.enter_context(closing(workbook))
        warn_of(book, workbook)
        asker = stack.enter_context(choice.open(compile_cache=compile_cache()))
        if trace is not None:
            session.trace = stack.enter_context(Trace(trace))
            session.trace.begin(book, asker.policy)
        for question in questions:
            session.ask(asker, workbook, question, shipped=choice == PolicyChoice())
    if not session.asked:
        raise AskError("there is no question: each line of --questions is one")
    return session.code


def read_questions(place: str) -> Iterator[str]:
    """The lines of a file that aren't empty; "-" is stdin, whose lines are taken as they come.

    Raises OSError, and AskError for text that isn't UTF-8.
    """
    stdin = place == "-"
    try:
        # Some editors begin a text with a mark that is no part of its first line.
        with open(0 if stdin else place, encoding="utf-8-sig", closefd=not stdin) as lines:
            for line in lines:
                if line.strip():
                    yield line
    except UnicodeDecodeError:
        name = "stdin" if stdin else place
        raise AskError(f"{name} isn't text in UTF-8: save it so") from None


class Session:
    """What is told of one question after the other.  code: of the whole, so far."""

    def __init__(self, book: str, as_json: bool, several: bool) -> None:
        self.asked, self.code = 0, _exit.DONE
        self.trace: Trace | None = None
        self._as_json, self._several = as_json, several

    def ask(self, asker: Asker, book: Workbook, question: str, *, shipped: bool) -> None:
        self.asked += 1
        try:
            if self.trace is None:
                answer = asker.ask(book, question)
            else:
                self.trace.ask(question)
                answer = asker.ask(book, question, heard=self.trace.hear)
                self.trace.end(answer)
        except (AskError, Refused) as error:
            if self.trace is not None:
                self.trace.fail(error)
            every = not error.own if isinstance(error, Refused) else isinstance(error, Unreachable)
            if every or not self._several:
                raise
            self._fail(question, error)
            return
        if doubt := unsupported(answer):
            self._say(f"warning: {doubt}")
        self._print(answer.to_json() if self._as_json else as_text(answer, self._several))
        if answer.answer is None:
            self._say(f"error: {why_none(answer, self.trace is None, shipped)}")
            self.code = self.code or _exit.NO_ANSWER

    def _fail(self, question: str, error: Exception) -> None:
        self.code = _exit.FAILED
        line = " ".join(str(error).split())
        self._say(f"error: {line}")
        failed = {"question": " ".join(question.split()), "answer": None, "error": line}
        self._print(json.dumps(failed) if self._as_json else "(not asked)")

    def _say(self, text: str) -> None:
        if self._several:
            kind, _, rest = text.partition(": ")
            text = f"{kind}: question {self.asked}: {rest}"
        print(printable(text), file=sys.stderr, flush=True)

    def _print(self, text: str) -> None:
        if text:
            gap = "\n" * (self.asked > 1 and not self._as_json)
            print(gap + text, flush=True)


def warn_of(book: str, workbook: Workbook) -> None:
    """Tells on stderr what the model won't see."""
    for note in workbook.notes:
        print(f"warning: {printable(book)}: {printable(note)}", file=sys.stderr)
    if missing := workbook.uncalculated():
        print(f"warning: {_uncalculated(book, missing)}", file=sys.stderr)


def why_none(answer: Answer, hint: bool, shipped: bool) -> str:
    """Why there is no answer, and what to do."""
    more = "; --trace FILE keeps what it did" if hint else ""
    if shipped:
        more += "; the shipped policy knows the question types of generated workbooks alone"
    return (
        f"no answer after {counted(answer.turns, 'turn')}: "
        f"{_WHY.get(answer.stop_reason, answer.stop_reason)}{more}"
    )


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


def as_text(answer: Answer, several: bool = False) -> str:
    """The answer for a person; the first line is the value alone.  Without one, nothing, or where
    there are several a line that says so in its place."""
    if answer.answer is None and not several:
        return ""
    kind = f" ({answer.type})" if answer.type is not None else ""
    lines = ["(no answer)" if answer.answer is None else printable(answer.answer)]
    lines += [f"  {'read' if i == 0 else '    '}  {printable(r)}"
              for i, r in enumerate(answer.evidence or ("nothing",))]  # fmt: skip
    lines.append(
        f"  {counted(answer.turns, 'turn')}, {counted(answer.tool_calls, 'tool call')}, "
        f"{counted(answer.cells, 'cell')}, {answer.seconds:.1f} s{kind}"
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
    more = f", {counted(len(missing) - 5, 'more sheet')}" if len(missing) > 5 else ""
    return (
        f"{printable(book)} holds {counted(sum(missing.values()), 'formula')} without a stored "
        f"result that can't be calculated here ({', '.join(few)}{more}), read as empty; open it in "
        "a spreadsheet program and save it again"
    )


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
