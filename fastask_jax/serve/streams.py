"""Server-sent events, and time limits that can be brought forward when a server ends.

Left out: what the events hold (`app.py`, `chat.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


class EventStream(StreamingResponse):
    """Server-sent events; what `stack` holds ends with them, also where nobody has read any.

    timed: the limit under which they are sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        lines: AsyncIterator[str],
        stack: AsyncExitStack,
        timed: Callable[[], AbstractAsyncContextManager[None]],
    ) -> None:
        super().__init__(lines, headers={"Cache-Control": "no-store"})
        self._stack, self._timed = stack, timed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A client that doesn't read would keep its place for ever.
        with suppress(TimeoutError):
            async with self._stack, self._timed():
                await super().__call__(scope, receive, send)


@asynccontextmanager
async def timed(until: float, limits: set[asyncio.Timeout]) -> AsyncIterator[None]:
    """`asyncio.timeout_at(until)`, among `limits` meanwhile."""
    async with asyncio.timeout_at(until) as limit:
        limits.add(limit)
        try:
            yield
        finally:
            limits.discard(limit)


def expire(limits: set[asyncio.Timeout]) -> None:
    """Ends all that runs under these limits with TimeoutError."""
    now = asyncio.get_running_loop().time()
    for limit in list(limits):
        if not limit.expired():
            limit.reschedule(now)
