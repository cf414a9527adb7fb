"""What crosses between the host and a sandboxed child: frames and cell values.

A frame is a four-byte big-endian length and one JSON object.  JSON and not pickle, because
the host must be able to read bytes that hostile code wrote.  Cell values that JSON lacks
are typed one-entry objects: {"date": "2024-01-31"}, {"error": "#N/A"} and so on; a plain
object never is a value, so the two cannot be confused.

Used by both sides; the child loads it outside the package, so it imports nothing of ours.
"""

from __future__ import annotations

import datetime
import json
import struct
from collections.abc import Callable, Sequence
from typing import Any

_LENGTH = struct.Struct(">I")
_PLAIN = frozenset({type(None), bool, int, float, str})


class MalformedFrame(Exception):
    """The peer sent something that is no frame: too long, no JSON, or no object."""


class CellError(str):
    """An error cell inside the sandbox; its text is the code, such as "#N/A".

    Equal to another error of the same code and to nothing else, so that an error is never
    taken for a text cell of the same letters (the workbook's own class behaves alike).
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CellError) and str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:  # str brings its own, which must not win
        return not self == other

    def __hash__(self) -> int:
        return hash((CellError, str(self)))


def pack(message: dict[str, Any]) -> bytes:
    """One frame.  Raises TypeError or ValueError for what JSON cannot hold."""
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    return _LENGTH.pack(len(body)) + body


def receive(read: Callable[[int], bytes], limit: int) -> dict[str, Any] | None:
    """The next frame's object; None when the peer closed before a frame began.

    read(n) returns between 1 and n bytes, or b"" at the end.  Raises MalformedFrame for a
    body above `limit` bytes, a cut frame, or a body that is no JSON object.
    """
    head = _exactly(read, _LENGTH.size)
    if not head:
        return None
    if len(head) < _LENGTH.size:
        raise MalformedFrame("the stream ended inside a frame")
    (size,) = _LENGTH.unpack(head)
    if size > limit:
        raise MalformedFrame(f"a frame of {size} bytes, the limit is {limit}")
    body = _exactly(read, size)
    if len(body) < size:
        raise MalformedFrame("the stream ended inside a frame")
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedFrame(f"not JSON: {type(error).__name__}") from None
    if not isinstance(message, dict):
        raise MalformedFrame("not a JSON object")
    return message


def _exactly(read: Callable[[int], bytes], size: int) -> bytes:
    first = read(size) if size else b""
    if len(first) == size or not first:
        return first
    data = bytearray(first)
    while len(data) < size:
        part = read(min(size - len(data), 1 << 20))
        if not part:
            break
        data += part
    return bytes(data)


def encode_rows(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Rows of cell values in JSON's types.  Raises TypeError for a value that no cell holds."""
    return [[v if type(v) in _PLAIN else _encode(v) for v in row] for row in rows]


def _encode(value: Any) -> dict[str, Any]:
    if isinstance(value, datetime.datetime):  # before date, its base class
        return {"datetime": value.isoformat()}
    if isinstance(value, datetime.date):
        return {"date": value.isoformat()}
    if isinstance(value, datetime.time):
        return {"time": value.isoformat()}
    if isinstance(value, datetime.timedelta):
        return {"timedelta": [value.days, value.seconds, value.microseconds]}
    if type(value).__name__ == "CellError":  # by name: the reader's class is not known here
        return {"error": str(value)}
    raise TypeError(
        f"a cell value of type {type(value).__name__} cannot be bound in the sandbox; "
        "cells hold None, bool, int, float, str, date, datetime, time, timedelta or CellError"
    )


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "timedelta": lambda parts: datetime.timedelta(*parts),
    "error": CellError,
}


def decode_rows(rows: list[list[Any]]) -> list[list[Any]]:
    """The inverse of `encode_rows`, with error cells as this module's `CellError`."""
    return [[v if type(v) is not dict else _decode(v) for v in row] for row in rows]


def _decode(value: dict[str, Any]) -> Any:
    ((kind, content),) = value.items()
    return _DECODERS[kind](content)
