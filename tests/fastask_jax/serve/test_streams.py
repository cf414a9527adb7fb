"""Streams whose reader doesn't read."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from fastask_jax.serve.streams import EventStream, expire, timed


@pytest.mark.parametrize("hurried", [False, True])
def test_a_reader_that_never_reads_keeps_no_place(hurried):
    ended = []

    async def lines():
        while True:
            yield "data: 1\n\n"

    async def run():
        loop, limits, stack = asyncio.get_running_loop(), set(), AsyncExitStack()
        stack.callback(ended.append, True)
        sent, full = [], asyncio.Event()

        async def send(message):
            sent.append(message)
            if len(sent) == 4:
                full.set()
                await asyncio.Event().wait()  # no more fits into the connection

        until = loop.time() + (600 if hurried else 0.2)
        stream = EventStream(lines(), stack, lambda: timed(until, limits))
        scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
        task = asyncio.create_task(stream(scope, asyncio.Event().wait, send))
        await asyncio.wait_for(full.wait(), 5)
        assert not ended and len(limits) == 1
        if hurried:
            expire(limits)
        await asyncio.wait_for(task, 5)
        assert ended and not limits
        expire(limits)

    asyncio.run(run())
