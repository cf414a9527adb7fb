"""/v1/ask: whole episodes over the server's one engine, many at a time.

Each ask is a coroutine.  Its turns are orders of the service, so that asks share the slots with
each other and with everything else; its tools run on threads, which mostly wait for processes: the
one that reads the file and the sandbox of `run_python`.  An ask that was begun before the server
ends goes on to its end, within the grace of that.

Decoding is greedy.  Files are kept no longer than it takes to open them, and not in the store of
large workbooks: they are strangers'.

Left out: HTTP (`app.py`), forms (`uploads.py`).
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from envs.core import Reply
from envs.fast_ask.env import FastAskConfig, FastAskEnv
from envs.sandbox import Sandbox, SandboxBusy, SandboxConfig, SandboxUnavailable
from envs.workbook import Limits, Workbook, WorkbookError, read_workbook
from fastask_jax.ask.answer import Answer, make_answer
from fastask_jax.rollout.chat import ChatFormat
from fastask_jax.serve.bodies import Refused
from fastask_jax.serve.service import Busy, Order, Piece, Service
from fastask_jax.serve.uploads import Upload

T = TypeVar("T")
_FOLDER = "fastask-ask-"
_KEY = np.zeros(2, np.uint32)  # greedy decoding draws nothing


@dataclass(frozen=True)
class AskLimits:
    """What an ask may cost.

    asks: at a time.  file: bytes.  question: characters.  turns: at most, where the policy's own
    training has more.  turn_tokens, tokens: sampled in a turn and in all.  seconds: from the first
    byte of the request.  reader: of the process that reads the file.
    """

    asks: int = 64
    file: int = 32 << 20
    question: int = 4000
    turns: int = 15
    turn_tokens: int = 256
    tokens: int = 2048
    seconds: float = 120.0
    reader: Limits = field(default_factory=lambda: Limits(memory=1 << 30, seconds=20))


class Asks:
    """Close it after the service has ended.

    config: how questions are put.  tools_in_prompt: as the policy was trained.  name: of the
    model.  Raises SandboxUnavailable.

    Attributes: `running`; `ended`, asks so far by how they ended; `turns` and `cells` so far.
    """

    def __init__(
        self,
        service: Service,
        chat: ChatFormat,
        config: FastAskConfig,
        tools_in_prompt: bool,
        name: str,
        limits: AskLimits,
    ) -> None:
        self.limits, self.name = limits, name
        self.running = self.turns = self.cells = 0
        self.ended: Counter[str] = Counter()
        self._lingering = 0  # asks that were broken off and still hold a session
        self._service, self._chat = service, chat
        self._config = replace(config, max_turns=min(config.max_turns, limits.turns))
        self._shown = FastAskEnv.tools if tools_in_prompt else None
        self._sandbox = Sandbox(SandboxConfig(max_live=limits.asks + 16))
        # As many as asks, and some for those that are being closed.
        self._threads = ThreadPoolExecutor(limits.asks + 8, thread_name_prefix="ask")
        # Opening takes a processor and much memory.
        self._opening = asyncio.Semaphore(max(2, os.cpu_count() or 1))

    def close(self) -> None:
        """Ends the sandbox and the threads."""
        self._sandbox.close()
        self._threads.shutdown(cancel_futures=True)

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Counts an ask; within it, those that are open.  Raises Busy or Stopping."""
        self._service.check_alive()
        if self.running + self._lingering >= self.limits.asks:
            self.ended["refused"] += 1
            raise Busy(f"{self.running} asks run already: ask again later")
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    async def answer(self, upload: Upload) -> Answer:
        """Plays an episode.  Raises Refused, and what `Service.submit` raises; cancelling it ends
        all that it has begun."""
        try:
            return await self._answer(upload)
        except WorkbookError as error:
            # Clients know the file's name, and have no business with where it lies.
            text = re.sub(rf"\S*/{_FOLDER}[^/]+/", "", str(error))
            raise Refused(400, " ".join(text.split()), "file") from None
        except (SandboxUnavailable, SandboxBusy) as error:
            raise Refused(503, " ".join(f"run_python has failed: {error}".split())) from None

    async def _answer(self, upload: Upload) -> Answer:
        began = time.perf_counter()
        tools = _Tools(self._threads)
        try:
            async with self._opening:
                book = await tools.call(self._open, upload, tools)
            env = FastAskEnv(self._config, self._sandbox)
            tools.closing.append(env.close)
            stop, sampled = await self._play(tools, env, book, upload.question)
            score = await tools.call(env.score)
            found = make_answer(
                upload.question,
                score,
                stop_reason=stop,
                tokens=sampled,
                seconds=time.perf_counter() - began,
                policy=self.name,
                uncalculated=await tools.call(book.uncalculated),
            )
        except BaseException:
            # Its thread may be busy for seconds: nobody waits for that, but its place stays taken.
            self._lingering += 1
            tools.close().add_done_callback(self._gone)
            raise
        # Before the answer, as whoever has it may ask again at once.
        await tools.close()
        self.turns += found.turns
        self.cells += found.cells
        return found

    def _gone(self, closed: asyncio.Future[None]) -> None:
        self._lingering -= 1

    def _open(self, upload: Upload, tools: _Tools) -> Workbook:
        # Nobody else can look into it.
        with tempfile.TemporaryDirectory(prefix=_FOLDER) as folder:
            book = read_workbook(upload.save(Path(folder)), self.limits.reader)
        tools.closing.append(book.close)
        return book

    async def _play(
        self, tools: _Tools, env: FastAskEnv, book: Workbook, question: str
    ) -> tuple[str | None, int]:
        """Why the episode has ended, and how many tokens were sampled."""
        chat, most = self._chat, self._service.engine.config.max_len
        messages = await tools.call(env.ask, book, question)
        least = sum(chat.least_tokens(message.content) for message in messages)
        text = [] if least >= most else await tools.call(chat.encode_prompt, messages, self._shown)
        if max(least, len(text)) >= most:
            raise Refused(
                400, f"the question and the sheets' names take {max(least, len(text)):,} tokens or "
                f"more and the model holds {most:,}: ask more briefly", "question",
            )  # fmt: skip
        sampled = 0
        while True:
            room = most - len(text)
            budget = min(self.limits.turn_tokens, room, self.limits.tokens - sampled)
            turn, ended = await self._turn(text, budget)
            text, sampled = text + turn, sampled + len(turn)
            reason = "stop" if ended == "stop" else "length"
            reply = await tools.call(chat.parse_reply, turn, FastAskEnv.tools, reason)
            step = await tools.call(env.step, reply)
            if step.done:
                cut = reason == "length" and budget < self.limits.turn_tokens
                bound = "context" if budget == room else "token_budget"
                return bound if cut else step.stop_reason, sampled
            seen = await tools.call(chat.encode_observation, step.messages)
            if turn[-1] != chat.stop_id:
                seen = [chat.stop_id, *seen]
            if len(text) + len(seen) >= most or sampled >= self.limits.tokens:
                await tools.call(env.step, Reply("", stop_reason="length"))
                return "context" if sampled < self.limits.tokens else "token_budget", sampled
            text = text + seen

    async def _turn(self, text: list[int], budget: int) -> tuple[list[int], str]:
        loop = asyncio.get_running_loop()
        told: asyncio.Queue[Piece | Exception] = asyncio.Queue()

        def tell(item: Piece | Exception) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(told.put_nowait, item)

        ticket = self._service.submit(Order(text, budget, 0.0, _KEY), tell, promised=True)
        ids: list[int] = []
        try:
            while True:
                item = await told.get()
                if isinstance(item, Exception):
                    raise item
                ids += item.ids
                if item.ended is not None:
                    return ids, item.ended
        finally:
            self._service.cancel(ticket)


class _Tools:
    """Calls of one ask on threads, one after the other also where the ask was cancelled meanwhile.
    closing: what is called, in reverse order, behind the last of them."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.closing: list[Callable[[], None]] = []
        self._threads, self._lock = threads, threading.Lock()

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._run, function, *arguments)

    def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        with self._lock:
            return function(*arguments)

    def close(self) -> asyncio.Future[None]:
        return asyncio.get_running_loop().run_in_executor(self._threads, self._run, self._close)

    def _close(self) -> None:
        for close in reversed(self.closing):
            close()
