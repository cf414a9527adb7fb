"""One session, from the host's side: its socket, its deadlines, its lives and deaths.

The process is forked when the first call needs it.  Requests go to the session's own socket
and nothing that comes back is believed: replies that do not fit the request's random id are
dropped, a malformed one ends the process, and every wait has a deadline.  A process that
died, by its code or by the host's hand, is replaced at the next call, with the cells that
were read bound again.  A call that was lost because the zygote died is run once more, for
that was not the code's fault.

A `Session` is for one thread at a time.
"""

from __future__ import annotations

import re
import secrets
import select
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import wire
from .config import Result, SandboxUnavailable

if TYPE_CHECKING:
    from .host import Sandbox

NO_OUTPUT = "(no output; use print)"
RESTARTED = "(Python was restarted: earlier variables are gone, cells read so far are bound again)"
_MAX_STRAY_BYTES = 1 << 20
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")


class ZygoteDied(Exception):
    """The zygote went away in the middle of something; its children are gone with it."""


class _ChildDied(Exception):
    """A session's process ended; the text says how."""


class _DeadlinePassed(Exception):
    """A session's process did not answer in time."""


class Session:
    """One isolated Python whose variables live from call to call."""

    def __init__(self, sandbox: Sandbox, seed: int) -> None:
        self._sandbox, self._seed = sandbox, seed
        self._blocks: list[list[Any]] = []
        self._sent = 0
        self._calls = 0
        self._closed = False
        self._child: tuple[int, int, socket.socket] | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The process id of the session's child, None while it has none."""
        if self._child is None:
            return None
        try:
            return self._sandbox._child_pid(*self._child[:2])
        except ZygoteDied:
            return None

    def bind(self, sheet: str, top_row: int, first_col: int, rows: Sequence[Sequence[Any]]) -> None:
        """Make a block of read cells known to the code (see `prelude.Bindings.bind`).

        Raises TypeError for a value that no cell holds, ValueError for a place below 1.
        """
        if top_row < 1 or first_col < 1:
            raise ValueError(f"rows and columns start at 1, got row {top_row}, col {first_col}")
        self._blocks.append([sheet, top_row, first_col, wire.encode_rows(rows)])

    def run(self, code: str) -> Result:
        """Run code in the session.  Whatever the code does becomes a Result.

        Raises SandboxUnavailable or SandboxBusy when the host's side fails, TypeError for
        code that is no text.
        """
        self._check_open()
        if not isinstance(code, str):
            raise TypeError(f"code must be a text, not {type(code).__name__}")
        limit = self._sandbox.config.code_chars
        if len(code) > limit:
            return Result("", f"the code has {len(code):,} characters, the limit is {limit:,}")
        if self._child is not None and _gone(self._child[2]):
            self._drop(wait=False)  # it died while idle, which is not this call's fault
        lost = False
        for attempt in range(3):
            lost = lost or (self._child is None and self._calls > 0)
            try:
                answer = self._exchange({"code": code})
                result = self._checked(answer)
            except ZygoteDied:
                if attempt == 2:
                    raise SandboxUnavailable(
                        "the Python zygote died or gave no session process three times running"
                    ) from None
                continue  # not the code's doing: once more, in a new process
            except _DeadlinePassed:
                result = self._stopped(
                    f"time limit: the code did not stop by itself after "
                    f"{self._sandbox.config.soft_seconds:g} s and was killed",
                    timed_out=True,
                )
            except _ChildDied as error:
                result = self._stopped(str(error))
            except wire.MalformedFrame as error:
                result = self._stopped(f"Python sent a malformed reply ({error}) and was killed")
            break
        self._calls += 1
        if lost:
            output = f"{RESTARTED}\n{result.output}"
            result = Result(output, result.error, result.timed_out, state_lost=True)
        return result

    def close(self) -> None:
        """Kill the session's process, if there is one."""
        self._closed = True
        self._drop(wait=False)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the session is closed")

    def _probe(self) -> dict[str, str]:
        try:
            acts = self._exchange({"probe": True})["acts"]
        except (ZygoteDied, _DeadlinePassed, _ChildDied, wire.MalformedFrame) as error:
            raise SandboxUnavailable(f"the self-test got no answer: {error!r}") from None
        return {str(name): str(outcome) for name, outcome in acts.items()}

    def _stopped(self, reason: str, timed_out: bool = False) -> Result:
        self._drop(wait=False)
        error = f"{reason}; variables are lost, cells read so far will be bound again"
        return Result("", error, timed_out, state_lost=True)

    def _checked(self, answer: dict[str, Any]) -> Result:
        """The child's answer as a Result; it may have been written by hostile code."""
        output, error = answer.get("output"), answer.get("error")
        timed_out = answer.get("timed_out")
        if not isinstance(output, str) or not isinstance(error, str | None):
            raise wire.MalformedFrame("fields of a wrong type")
        cut = self._sandbox.config.output_chars + 200  # the child's own note comes on top
        output = _printable(output[:cut])
        if not output and error is None:
            output = NO_OUTPUT
        return Result(output, None if error is None else _printable(error[:cut]), timed_out is True)

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request and wait for the answer with its id."""
        config = self._sandbox.config
        fresh = self._child is None
        if self._child is None:
            self._child = self._sandbox._spawn()
            self._sent = 0
        channel = self._child[2]
        deadline = time.monotonic() + (config.start_seconds if fresh else config.hard_seconds)
        # A character may take twelve bytes in JSON, as two escaped surrogates.
        reply_limit = 12 * (config.output_chars + 200) + 65_536
        received = 0

        def read(size: int) -> bytes:
            nonlocal received
            _set_deadline(channel, deadline)
            data = channel.recv(size)
            received += len(data)
            if received > reply_limit + _MAX_STRAY_BYTES:
                raise wire.MalformedFrame("too much that fits no request")
            return data

        identity = secrets.token_hex(8)
        pending = len(self._blocks)
        request |= {"id": identity, "bind": self._blocks[self._sent :]}
        frame = wire.pack(request | {"seed": self._seed} if fresh else request)
        try:
            _set_deadline(channel, deadline)
            channel.sendall(frame)
            self._sent = pending
            if fresh:
                # The first frame is written before any code can run, so it can be believed.
                hello = wire.receive(read, reply_limit)
                if hello is None:
                    raise ConnectionError
                if "fatal" in hello:
                    raise SandboxUnavailable(f"no walls for a new session: {hello['fatal']}")
                fresh = False
                deadline = time.monotonic() + config.hard_seconds
            while (answer := wire.receive(read, reply_limit)) is not None:
                if answer.get("id") == identity:
                    return answer
            raise _ChildDied(self._how_it_ended())
        except OSError as error:
            if fresh:  # no code ran yet: a crowded host, or the kernel took the process
                self._drop(wait=True)
                raise ZygoteDied from None
            if isinstance(error, TimeoutError):
                raise _DeadlinePassed from None
            raise _ChildDied(self._how_it_ended()) from None  # a reset or broken pipe

    def _how_it_ended(self) -> str:
        """Reap the dead child and say why it ended.  Raises ZygoteDied if that is why."""
        code = self._drop(wait=True)
        if code is None or code >= 0:
            return f"the code ended the Python process (exit status {code})"
        return f"the Python process died (signal {-code}; out of memory, stack or CPU time?)"

    def _drop(self, wait: bool) -> int | None:
        if self._child is None:
            return None
        generation, key, channel = self._child
        self._child = None
        channel.close()
        try:
            return self._sandbox._end(generation, key, wait)
        except ZygoteDied:
            if wait:
                raise
            return None


def _set_deadline(channel: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    channel.settimeout(left)


def _gone(channel: socket.socket) -> bool:
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLHUP)
    return bool(poll.poll(0))


def _printable(text: str) -> str:
    """Lone surrogates escaped: the text goes on to tokenizers and files, as UTF-8.  Addresses
    (`<generator object f at 0x7f...>`) all made one: they differ from process to process, and
    equal programs must print equal texts, in a replayed episode as in a resumed run."""
    text = _ADDRESS.sub("at 0x7f0000000000", text)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
