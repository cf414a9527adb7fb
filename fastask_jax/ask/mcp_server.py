"""`fastask mcp`: the tool `ask_workbook` for agents that speak MCP, by the official SDK.

Over stdin and stdout for a client that starts it, or over streamable HTTP (`--http`).  It answers
from workbooks in the folders that it was started with, and returns the answer and its evidence
alone: what was read on the way stays out of the agent's context.  Everything is loaded before the
first call.

Left out: resources, prompts, and uploads (`fastask serve` takes those).
"""

from __future__ import annotations

import hmac
import logging
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import anyio
import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel, Field

from envs.workbook import WorkbookError
from fastask_jax import __version__
from fastask_jax._exit import printable
from fastask_jax.ask.answer import AskError
from fastask_jax.ask.asker import Asker
from fastask_jax.ask.choice import PolicyChoice
from fastask_jax.ask.command import block_store, compile_cache, counted, unsupported, why_none
from fastask_jax.ask.places import OutOfPlace, Places
from fastask_jax.policies.remote import RemoteError
from fastask_jax.serve.settings import is_loopback, read_key

# Asks at a time; others wait.  Of our own engine one runs at a time.
_AT_ONCE = 8

App = Callable[[Any, Any, Any], Awaitable[None]]


class WorkbookAnswer(BaseModel):
    """What the agent gets."""

    answer: str | None = Field(description="The value, as written by the model; null without one.")
    type: str | None = Field(
        description="yes_no, month, date, invoice, row, cents, number or name; null without one."
    )
    evidence: list[str] = Field(description="The ranges that were read for it, as Sheet!A1:D20.")
    note: str | None = Field(description="Why there is no answer, or why to doubt it.")


@dataclass(frozen=True)
class McpConfig:
    """folders: that may be read.  http: serve it on host and port; else stdin and stdout.
    client_key_file: the key that clients show."""

    folders: tuple[str, ...]
    http: bool = False
    host: str = "127.0.0.1"
    port: int = 8200
    client_key_file: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"--port is from 0 to 65535, not {self.port}")
        if self.http and self.client_key_file is None and not is_loopback(self.host):
            raise ValueError(
                f"others than this machine can reach {self.host}: give --client-key-file, so that "
                "not everyone can read your workbooks"
            )


def serve_mcp(config: McpConfig, choice: PolicyChoice) -> None:
    """Serves until the client hangs up (or, over HTTP, a signal comes).

    Raises ValueError and OSError for folders, keys and addresses, and what `Asker` raises.
    """
    places = Places(config.folders)
    key = None if config.client_key_file is None else read_key(config.client_key_file)
    with ExitStack() as stack:
        store = block_store()
        asker = stack.enter_context(choice.open(store=store, compile_cache=compile_cache()))
        server = make_server(asker, places, shipped=choice == PolicyChoice())
        if config.http:
            _serve_http(server, config, key)
        else:
            server.run("stdio")


def make_server(asker: Asker, places: Places, *, shipped: bool = False) -> MCPServer:
    """The server with its one tool."""
    # Its log goes to stderr, where one line for each fault of an agent is one too many.
    server: MCPServer = MCPServer("fastask", version=__version__, log_level="ERROR")
    logging.getLogger("mcp").setLevel(logging.ERROR)
    limiter: anyio.CapacityLimiter | None = None

    def ask(path: str, question: str) -> WorkbookAnswer:
        try:
            file = places.find(path)
        except OutOfPlace as error:
            raise ToolError(printable(str(error))) from None
        try:
            found = asker.ask(file, question)
        except (WorkbookError, AskError, RemoteError, OSError) as error:
            text = " ".join(str(error).replace(str(file), path).split())
            raise ToolError(printable(text)) from None
        if found.answer is None:
            notes = [why_none(found, hint=False, shipped=shipped)]
        else:
            notes = [doubt] if (doubt := unsupported(found)) else []
        if missing := sum(found.uncalculated.values()):
            notes.append(f"{counted(missing, 'formula')} without a result, read as empty")
        return WorkbookAnswer(
            answer=None if found.answer is None else printable(found.answer),
            type=found.type,
            evidence=[printable(place) for place in found.evidence],
            note="; ".join(notes) or None,
        )

    async def ask_workbook(path: str, question: str) -> WorkbookAnswer:
        nonlocal limiter
        limiter = limiter or anyio.CapacityLimiter(_AT_ONCE)
        return await anyio.to_thread.run_sync(ask, path, question, limiter=limiter)

    server.tool(
        description=(
            "Answers one narrow question about a workbook file (xlsx, xlsm, xlsb, xls, ods or csv) "
            "with one value, and tells the ranges that were read for it. "
            f"Files may lie in: {places}"
        ),
    )(ask_workbook)
    return server


def _serve_http(server: MCPServer, config: McpConfig, key: str | None) -> None:
    app: App = server.streamable_http_app(
        host=config.host, json_response=True, stateless_http=True
    )
    running = _Server(
        uvicorn.Config(
            app if key is None else with_key(app, key),
            host=config.host,
            port=config.port,
            log_level="error",
            access_log=False,
            server_header=False,
            ws="none",
        )
    )
    try:
        running.run()
    except SystemExit:  # what uvicorn makes of an address that it can't have
        raise OSError(
            f"can't listen on {config.host} port {config.port}: choose another --port or --host"
        ) from None


class _Server(uvicorn.Server):
    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port, *_ = self.servers[0].sockets[0].getsockname()
            host = f"[{host}]" if ":" in host else host
            print(f"serving MCP on http://{host}:{port}/mcp", file=sys.stdout, flush=True)


def with_key(app: App, key: str) -> App:
    """The application behind a key: `Authorization: Bearer KEY`."""
    wanted = b"Bearer " + key.encode()

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, wanted):
                body = b'{"error": "send the key: Authorization: Bearer KEY"}'
                headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
                await send({"type": "http.response.start", "status": 401, "headers": headers})
                await send({"type": "http.response.body", "body": body})
                return
        await app(scope, receive, send)

    return guarded
