"""Messages between the host and the process that reads a file: JSON with its length before it.

JSON, and no format that makes objects: the host must be able to read what a process said that
a hostile file may have taken over.
"""

from __future__ import annotations

import json
import socket
from typing import Any

MOST = 1 << 28  # bytes of one message
_LENGTH = 8


def send(channel: socket.socket, message: Any) -> None:
    """Raises ValueError, with nothing sent, for a message of more than `MOST` bytes."""
    data = json.dumps(message, separators=(",", ":"), check_circular=False).encode()
    if len(data) > MOST:
        raise ValueError(f"a message of {len(data):,} bytes; the limit is {MOST:,}")
    channel.sendall(len(data).to_bytes(_LENGTH, "little") + data)


def receive(channel: socket.socket) -> Any:
    """The next message; EOFError when the other side has gone."""
    size = int.from_bytes(_exactly(channel, _LENGTH), "little")
    if size > MOST:
        raise EOFError("the answer is too long")
    return json.loads(_exactly(channel, size))


def _exactly(channel: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        count = channel.recv_into(view[got:])
        if not count:
            raise EOFError("the channel is closed")
        got += count
    return data
