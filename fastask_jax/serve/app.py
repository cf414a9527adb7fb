"""The HTTP side: routes, keys, limits, streams; a Starlette application over a `Service`.

    POST /inference/v1/generate   token ids in; token ids, logprobs and versions out
    POST /v1/chat/completions     messages in and out, as OpenAI's clients send them
    POST /v1/ask                  a workbook and a question in, an answer and its evidence out
    POST /inference/v1/weights    goes on with the weights in a folder
    GET  /v1/models, /metrics     what is served, and counts for Prometheus
    GET  /healthz                 200, or 503 where the engine has failed; needs no key

Errors are JSON in the shape of OpenAI's, with one line that says what to do.

Left out: the process (`server.py`).
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fastask_jax.rollout.chat import ChatFormat
from fastask_jax.rollout.engine import Params
from fastask_jax.serve.asks import Asks
from fastask_jax.serve.bodies import Limits, Refused, generate_order, read_json, weights_order
from fastask_jax.serve.chat import Answer, make_order, read_chat
from fastask_jax.serve.metrics import Metrics
from fastask_jax.serve.service import (
    Busy,
    Cancelled,
    Order,
    Outdated,
    Piece,
    Service,
    Stopping,
    Ticket,
)
from fastask_jax.serve.streams import EventStream, expire, timed
from fastask_jax.serve.uploads import read_upload

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
# The status of an answer that nobody reads, as servers log it.
_GONE = 499
# How much longer than a request may take its last event, which may be that it was too long, waits
# for a reader (seconds).
_PATIENCE = 5.0

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Served:
    """What the routes share.

    name: of the model.  chat: its template and tokens.  show_tools: whether prompts of chat
    completions show the tools; else they serve to parse calls alone, for a policy that was trained
    so.  asks: None without /v1/ask, for the reason in `no_asks`.  load: reads the weights in a
    folder onto the engine's devices; raises ValueError or OSError for what isn't there or doesn't
    fit.
    weights_from: the folder that all weights come from; None takes none.  api_key: that clients
    have to show.
    """

    service: Service
    name: str
    chat: ChatFormat
    load: Callable[[Path], Params]
    show_tools: bool = True
    asks: Asks | None = None
    no_asks: str = "this server answers no asks: start it with --asks N"
    weights_from: Path | None = None
    api_key: str | None = None
    limits: Limits = Limits()


def make_app(served: Served) -> Starlette:
    """The application; its service has been started.  `state.routes` are its `Routes`."""
    routes = Routes(served)
    app = Starlette(
        routes=[
            Route("/inference/v1/generate", routes.guarded(routes.generate), methods=["POST"]),
            Route("/v1/chat/completions", routes.guarded(routes.chat), methods=["POST"]),
            Route("/v1/ask", routes.guarded(routes.ask), methods=["POST"]),
            Route("/inference/v1/weights", routes.guarded(routes.weights), methods=["POST"]),
            Route("/v1/models", routes.guarded(routes.models), methods=["GET"]),
            Route("/metrics", routes.guarded(routes.metrics), methods=["GET"]),
            Route("/healthz", routes.health, methods=["GET"]),
        ],
        exception_handlers={HTTPException: _no_route},
    )
    app.state.routes = routes
    return app


class Routes:
    """The handlers."""

    def __init__(self, served: Served) -> None:
        self.served, self.service = served, served.service
        self._metrics = Metrics(served.service, served.asks)
        self._began = int(time.time())
        self._open = 0
        self._reads: set[asyncio.Timeout] = set()
        self._streams: set[asyncio.Timeout] = set()
        self._loading = asyncio.Lock()

    def guarded(self, handler: Handler) -> Handler:
        """The handler behind the key, with errors made answers."""

        async def guarded(request: Request) -> Response:
            try:
                self._check_key(request)
                return await handler(request)
            except Exception as error:
                refused = as_refused(error)
                if refused is None:
                    raise
                return error_response(refused)

        return guarded

    def end_reads(self) -> None:
        """Bodies that aren't whole yet are refused: the service takes no orders any more."""
        expire(self._reads)

    def end_streams(self) -> None:
        """Nobody waits any longer for those who don't read what they have asked for."""
        expire(self._streams)

    def _check_key(self, request: Request) -> None:
        if self.served.api_key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        wanted = self.served.api_key.encode()
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), wanted):
            raise Refused(
                401, "send the server's key: Authorization: Bearer KEY", WWW_Authenticate="Bearer"
            )

    # -- generation -----------------------------------------------------------------------------

    async def generate(self, request: Request) -> Response:
        limits = self.served.limits
        until = asyncio.get_running_loop().time() + limits.seconds
        body = await self.read(request, until)
        order, stream = generate_order(body, limits)
        if stream:
            return await self.stream(request, order, until, _events)
        async with self.asked(request, order, until) as (ticket, pieces):
            ids: list[int] = []
            logprobs: list[float] = []
            versions: list[int] = []
            ended = None
            async for piece in pieces:
                ids += piece.ids
                logprobs += piece.logprobs
                versions += [piece.version] * len(piece.ids)
                ended = piece.ended
        return JSONResponse(
            {
                "ids": ids,
                "logprobs": logprobs,
                "versions": versions,
                "stop_reason": ended,
                "key": order.key.tolist(),
                "usage": usage(ticket, len(ids)),
            }
        )

    async def chat(self, request: Request) -> Response:
        served = self.served
        until = asyncio.get_running_loop().time() + served.limits.seconds
        asked = read_chat(await self.read(request, until), served.name)
        most = self.service.engine.config.max_len
        order = await asyncio.to_thread(
            make_order, asked, served.chat, served.limits, most, served.show_tools
        )
        answer = Answer(asked, served.chat, served.name)
        if asked.stream:

            def events(ticket: Ticket, pieces: AsyncIterator[Piece]) -> AsyncIterator[Any]:
                return answer.stream(pieces, lambda: usage(ticket, len(ticket.sampled)))

            return await self.stream(request, order, until, events)
        async with self.asked(request, order, until) as (ticket, pieces):
            async for piece in pieces:
                answer.add(piece)
        return JSONResponse(answer.whole(usage(ticket, len(ticket.sampled))))

    async def ask(self, request: Request) -> Response:
        asks = self.served.asks
        if asks is None:
            raise Refused(501, self.served.no_asks)
        loop = asyncio.get_running_loop()
        began, how = loop.time(), "failed"
        async with asks.admitted():
            try:
                body = await self._ask(request, asks, began + asks.limits.seconds)
                how = "no_answer" if body["answer"] is None else "answered"
                return JSONResponse(body)
            except Exception as error:
                refused = as_refused(error)
                status = 500 if refused is None else refused.status
                named = {_GONE: "cancelled", 408: "timeout", 504: "timeout"}
                how = named.get(status, "refused" if status < 500 else "failed")
                raise
            finally:
                asks.ended[how] += 1
                self._metrics.ask_seconds.observe(loop.time() - began)

    async def _ask(self, request: Request, asks: Asks, until: float) -> dict[str, Any]:
        limits = asks.limits
        try:
            async with asyncio.timeout_at(until):
                upload = await read_upload(request, limits.file, limits.question)
        except TimeoutError:
            raise Refused(408, "the body took too long: send it faster or send less") from None
        loop = asyncio.get_running_loop()
        answering = asyncio.create_task(asks.answer(upload))
        gone = asyncio.create_task(_when_gone(request, lambda: None))
        try:
            await asyncio.wait(
                {answering, gone}, timeout=until - loop.time(), return_when=asyncio.FIRST_COMPLETED
            )
            if answering.done():
                return answering.result().as_dict()
            if gone.done():
                raise Cancelled("the client has gone")
            raise Refused(504, f"it took longer than {limits.seconds:g} s: ask for less")
        finally:
            gone.cancel()
            answering.cancel()
            await asyncio.wait({answering, gone})
            upload.file.close()

    async def read(self, request: Request, until: float) -> dict[str, Any]:
        """The body, if one more request may be open."""
        if self._open >= self.served.limits.requests:
            raise Refused(
                429, f"{self._open} requests are open already: ask again later",
                Retry_After="1", Connection="close",
            )  # fmt: skip
        self._open += 1
        try:
            async with timed(until, self._reads):
                return await read_json(request, self.served.limits.body)
        except TimeoutError:
            self.service.check_alive()
            raise Refused(408, "the body took too long: send it faster or send less") from None
        finally:
            self._open -= 1

    @asynccontextmanager
    async def asked(
        self, request: Request, order: Order, until: float
    ) -> AsyncIterator[tuple[Ticket, AsyncIterator[Piece]]]:
        """An order under way, and its pieces.  It is cancelled when the block ends, the client
        goes or its time is up."""
        loop = asyncio.get_running_loop()
        told: asyncio.Queue[Piece | Exception] = asyncio.Queue()

        def tell(item: Piece | Exception) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(told.put_nowait, item)

        async def pieces() -> AsyncIterator[Piece]:
            ended = None
            while ended is None:
                try:
                    async with asyncio.timeout_at(until):
                        item = await told.get()
                except TimeoutError:
                    raise Refused(
                        504, f"it took longer than {self.served.limits.seconds:g} s: ask for less"
                    ) from None
                if isinstance(item, Exception):
                    raise item
                ended = item.ended
                yield item

        if self._open >= self.served.limits.requests:
            raise Busy(f"{self._open} requests are open already: ask again later")
        try:
            ticket = self.service.submit(order, tell)
        except ValueError as error:
            raise Refused(400, str(error)) from None
        self._open += 1
        began = loop.time()
        watcher = asyncio.create_task(_when_gone(request, lambda: self.service.cancel(ticket)))
        try:
            yield ticket, pieces()
        finally:
            watcher.cancel()
            self.service.cancel(ticket)
            self._open -= 1
            self._metrics.seconds.observe(loop.time() - began)

    async def stream(
        self,
        request: Request,
        order: Order,
        until: float,
        events: Callable[[Ticket, AsyncIterator[Piece]], AsyncIterator[Any]],
    ) -> Response:
        """The answer as server-sent events, made of pieces by `events`.  What is wrong with the
        order is answered before; an error later is the last event."""
        stack = AsyncExitStack()
        ticket, pieces = await stack.enter_async_context(self.asked(request, order, until))

        async def lines() -> AsyncIterator[str]:
            try:
                async for event in events(ticket, pieces):
                    text = event if isinstance(event, str) else json.dumps(event)
                    yield f"data: {text}\n\n"
            except Exception as error:
                refused = as_refused(error)
                if refused is None:
                    raise
                yield f"data: {json.dumps(error_body(refused))}\n\n"

        return EventStream(lines(), stack, lambda: timed(until + _PATIENCE, self._streams))

    # -- the rest -------------------------------------------------------------------------------

    async def weights(self, request: Request) -> Response:
        root = self.served.weights_from
        if root is None:
            raise Refused(403, "this server takes no weights: start it with --weights-from DIR")
        until = asyncio.get_running_loop().time() + self.served.limits.seconds
        version, path = weights_order(await self.read(request, until))
        try:
            folder, allowed = (root / path).resolve(), root.resolve()
        except (OSError, ValueError, RuntimeError):
            raise Refused(400, "path isn't one that this server can follow", "path") from None
        if not folder.is_relative_to(allowed):
            raise Refused(403, f"weights come from {allowed} alone: put them there", "path")
        async with self._loading:  # one at a time: they are large
            began = time.monotonic()
            try:
                params = await asyncio.to_thread(self.served.load, folder)
            except (OSError, ValueError) as error:
                text = " ".join(str(error).split())
                raise Refused(400, f"these weights can't be loaded: {text}", "path") from None
            self.service.set_weights(params, version)
        return JSONResponse({"version": version, "seconds": time.monotonic() - began})

    async def models(self, request: Request) -> Response:
        engine = self.service.engine
        model = {
            "id": self.served.name,
            "object": "model",
            "created": self._began,
            "owned_by": "fastask",
            "version": self.service.version,
            "slots": engine.config.slots,
            "max_len": engine.config.max_len,
            "vocab_size": engine.model.vocab_size,
            "stop_id": engine.stop_id,
            "dtype": engine.model.dtype,
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def health(self, request: Request) -> Response:
        try:
            self.service.check_alive()
        except Stopping as error:
            return error_response(Refused(503, str(error)))
        return JSONResponse({"status": "ok"})


async def _events(ticket: Ticket, pieces: AsyncIterator[Piece]) -> AsyncIterator[Any]:
    count = 0
    async for piece in pieces:
        count += len(piece.ids)
        event: dict[str, Any] = {
            "ids": piece.ids,
            "logprobs": piece.logprobs,
            "versions": [piece.version] * len(piece.ids),
            "stop_reason": piece.ended,
        }
        if piece.ended is not None:
            event |= {"key": ticket.order.key.tolist(), "usage": usage(ticket, count)}
        yield event


async def _when_gone(request: Request, then: Callable[[], None]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    then()


def usage(ticket: Ticket, sampled: int) -> dict[str, int]:
    """Tokens of an answer: cached ones weren't fed, as a slot held them."""
    return {
        "prompt_tokens": len(ticket.order.ids),
        "cached_tokens": ticket.reused or 0,
        "completion_tokens": sampled,
        "total_tokens": len(ticket.order.ids) + sampled,
    }


def as_refused(error: Exception) -> Refused | None:
    """The answer to an error; None for one that is this program's."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, Busy):
        return Refused(429, str(error), Retry_After="1")
    if isinstance(error, Outdated):
        return Refused(409, str(error), "min_version")
    if isinstance(error, Stopping):
        return Refused(503, str(error), Connection="close")
    if isinstance(error, (Cancelled, ClientDisconnect)):
        return Refused(_GONE, "the client has gone")
    return None


def error_body(refused: Refused) -> dict[str, Any]:
    kind = _KINDS.get(refused.status, "server_error" if refused.status >= 500 else _KINDS[400])
    # Half a surrogate pair, as a path or a name may hold, is no UTF-8.
    text = str(refused).encode("utf-8", "backslashreplace").decode("utf-8")
    return {
        "error": {
            "message": text, "type": kind, "param": refused.field, "code": refused.status
        }
    }  # fmt: skip


def error_response(refused: Refused) -> Response:
    return JSONResponse(error_body(refused), refused.status, refused.headers)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = {
        404: "there is no such path: try /v1/models",
        405: "this path takes another method: see the header Allow",
    }.get(error.status_code, error.detail)
    return error_response(
        Refused(error.status_code, text, **dict(error.headers or {}))
    )
