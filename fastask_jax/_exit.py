"""Exit codes, and one clear line for an error, shared by every command.

0 done, 1 failed, 2 wrong usage, 3 a question got no answer, 130 interrupted, 141 who reads the
output has gone (`| head -1`; nothing is said of it, as by other commands).  Leaves out logging: a
command prints one line on stderr, or the full traceback where the person asked for it.
"""

from __future__ import annotations

import errno
import io
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

DONE, FAILED, USAGE, NO_ANSWER, INTERRUPTED, UNREAD = 0, 1, 2, 3, 130, 141

_FULL = {errno.ENOSPC, errno.EDQUOT}
# Libraries below Orbax report a full disk as text inside an error of their own.
_FULL_TEXT = ("no space left on device", "disk quota exceeded")


class UsageError(Exception):
    """What the person typed can't be carried out; the text says what to type instead."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C at a point where the work can go on later; the text says how."""


@contextmanager
def resumable(run_dir: object) -> Iterator[None]:
    """Inside, Ctrl-C becomes an `Interrupted` that tells how to go on with `run_dir`."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted(f"resume with --run-dir {run_dir} --resume true") from error


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside, a first Ctrl-C waits for the end of the block; a second one doesn't.  For short
    work that others couldn't finish; in the main thread only, as Ctrl-C is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    held: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            raise KeyboardInterrupt
        held.append((number, frame))

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held and callable(before):
            before(*held[0])


def explain(error: BaseException) -> tuple[int, str]:
    """The exit code and the single line for an error that ended a command."""
    if isinstance(error, UsageError):
        return USAGE, f"error: {_one_line(error)}"
    if isinstance(error, KeyboardInterrupt):
        hint = _one_line(error)
        return INTERRUPTED, f"interrupted; {hint}" if hint else "interrupted"
    full = _disk_full(error)
    if full is not None:
        return FAILED, f"error: disk full: {full}; free some space and run the same command again"
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return FAILED, f"error: no such file or directory: {error.filename}"
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return FAILED, f"error: {error.strerror.lower()}: {error.filename}"
    text = _one_line(error)
    missing_extra = isinstance(error, ModuleNotFoundError) and "pip install" in text
    if (isinstance(error, (OSError, ValueError)) or missing_extra) and text:
        return FAILED, f"error: {text}"
    name = type(error).__name__
    return FAILED, f"error: {name}: {text} (--debug true shows where)".replace(":  (", " (")


def take_debug(argv: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether `--debug` (or `--debug true`) is among the words, and the words without it.

    Read ahead of any parsing, so that errors of parsing can be debugged too.
    """
    wanted, rest = False, list(argv)
    while (i := next((i for i, w in enumerate(rest) if _is_debug(w)), None)) is not None:
        _, equals, value = rest.pop(i).partition("=")
        if not equals and i < len(rest) and rest[i].lower() in ("true", "false"):
            value = rest.pop(i)
        wanted = value.lower() != "false"
    return wanted, rest


def _is_debug(word: str) -> bool:
    return word == "--debug" or word.startswith("--debug=")


def run(command: Callable[[], int | None], debug: bool = False) -> int:
    """Calls `command` and returns its exit code; errors become one line on stderr.

    debug: print the full traceback as well.  SystemExit passes through.
    """
    # An answer that the terminal has no letters for is told with escapes, not lost.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = command()
        sys.stdout.flush()
        return DONE if code is None else code
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        if isinstance(error, BrokenPipeError) and _unread():
            return UNREAD
        code, line = explain(error)
        print(printable(line), file=sys.stderr, flush=True)
        return code


def _unread() -> bool:
    """Whether nobody reads stdout any more; from then on it leads nowhere, so that the
    interpreter's own flush at the end doesn't fail."""
    try:
        number = sys.stdout.fileno()
    except OSError:  # a text in memory
        return False
    out = select.poll()
    out.register(number, 0)  # errors are told unasked
    if not out.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    return True


def printable(text: str) -> str:
    """`text` with control characters spelled out: it may come from a stranger's workbook, or from
    a model that read one, and hold terminal escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _disk_full(error: BaseException) -> str | None:
    """The reason of a full disk anywhere in the chain of causes, else None."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, OSError) and link.errno in _FULL:
            return f"{link.strerror}: {link.filename}" if link.filename else str(link.strerror)
        if any(mark in str(link).lower() for mark in _FULL_TEXT):
            return _one_line(link)[:200]
        link = link.__cause__ or link.__context__
    return None
