"""Frames between the pool and its workers: a length, then a pickled tuple.

Own framing over a socket pair instead of `multiprocessing.connection`, because the parent
must never block on a full pipe while a worker blocks on its own: both would wait for ever.
So the parent writes what fits and keeps the rest, and one read takes in many small frames.
Pickle is safe here: both ends are our own processes.  Tasks, replies and answers travel as
bytes inside the tuple, so that one that can't be unpickled spoils its own episode only.

Parent to worker, (op, key, seq, payload): `key` names one life of an episode in a worker,
`seq` one call.  Worker to parent, (op, seq, started, finished, payload): times are
`time.monotonic`, which all processes of one machine share.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any

RESET, STEP, DROP, STOP = "reset", "step", "drop", "stop"
INIT, READY, FATAL, BEAT, RESULT, ERROR = "init", "ready", "fatal", "beat", "result", "error"

_LENGTH = struct.Struct("<I")
_LIMIT = 1 << 30


def dumps(value: Any) -> bytes:
    """The payload form of a value."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def frame(message: tuple) -> bytes:
    """A message as bytes for the socket.

    Raises ValueError when it would be above 1 GiB."""
    body = dumps(message)
    if len(body) > _LIMIT:
        raise ValueError(f"a pool message of {len(body):,} bytes is above the limit of {_LIMIT:,}")
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Turns what arrives on a socket, cut anywhere, back into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple]:
        """The messages that are complete with `data`, in order."""
        buffer = self._buffer
        buffer += data
        messages = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(buffer, start)
            end = start + _LENGTH.size + size
            if len(buffer) < end:
                break
            with memoryview(buffer) as view:
                messages.append(pickle.loads(view[start + _LENGTH.size : end]))
            start = end
        del buffer[:start]
        return messages
