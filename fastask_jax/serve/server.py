"""`fastask serve`: loads a model, serves it, and ends in order.

On SIGTERM the process stops to accept, lets running requests and asks end within `--grace` seconds,
answers the others with 503, and exits with 0; on a second one it doesn't wait.  An error of the
engine ends it with 1 and one line.

Left out: the routes (`app.py`); TLS, for which a proxy stands before it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

import jax
import uvicorn

from envs.sandbox import SandboxUnavailable
from fastask_jax.ask.answer import AskError
from fastask_jax.ask.checkpoint import PolicyFolder, find_policy
from fastask_jax.ask.command import compile_cache
from fastask_jax.compiled import keep_compiled
from fastask_jax.model import check_finite, load_params
from fastask_jax.model.tokenizers import load_tokenizer
from fastask_jax.rollout.chat import ChatFormat
from fastask_jax.rollout.engine import Engine, EngineConfig, Params
from fastask_jax.serve.app import Routes, Served, make_app
from fastask_jax.serve.asks import AskLimits, Asks
from fastask_jax.serve.bodies import Limits
from fastask_jax.serve.service import Service
from fastask_jax.serve.settings import ServeConfig, read_key

# Tokens sampled between two looks at who has come and gone.
_STEPS = 8


class ServeError(OSError):
    """The server can't start, or has ended by an error of the engine."""


def serve(config: ServeConfig) -> None:
    """Serves until a signal; prints the address when it is ready.

    Raises ServeError, AskError for the checkpoint, OSError for the address, and KeyboardInterrupt
    after Ctrl-C.
    """
    key = None if config.api_key_file is None else read_key(config.api_key_file)
    listener = _bound(config)
    with listener:
        served = load(config, key)
        try:
            server = _Server(config, served)
            server.run([listener])
        finally:
            served.service.stop()
            if served.asks is not None:
                served.asks.close()
    if served.service.failure is not None:
        failure = served.service.failure
        raise ServeError(f"the engine has failed: {type(failure).__name__}: {failure}")
    if server.signal == signal.SIGINT:
        raise KeyboardInterrupt


def load(config: ServeConfig, api_key: str | None) -> Served:
    """The model on its engine, compiled; its service hasn't started."""
    if jax.config.jax_compilation_cache_dir is None and (cache := compile_cache()):  # type: ignore[attr-defined]
        keep_compiled(cache)
    found = find_policy(config.checkpoint)
    folder = found.path
    try:
        model, params = load_params(folder, param_dtype=config.dtype, dtype=config.dtype)
        check_finite(params, "its weights")
        chat = ChatFormat(load_tokenizer(folder))
        chat.check_fits(model.vocab_size, "the model")
    except Exception as error:  # tokenizers raise bare Exceptions
        raise AskError(f"the checkpoint {folder} can't be loaded: {error}") from error
    # Accelerators want all slots in one call, which then stay in place.
    whole = config.slots if jax.default_backend() != "cpu" else EngineConfig.decode_rows
    settings = EngineConfig(
        config.slots, config.max_len, append_calls=2, decode_rows=whole, decode_steps=_STEPS
    )
    engine = Engine(model, settings, chat.stop_id)

    def newer(path: Path) -> Params:
        other, others = load_params(
            path, engine.mesh, param_dtype=config.dtype, dtype=config.dtype
        )
        if other != model:
            raise ValueError(f"{path} holds a model of another shape than the one that is served")
        check_finite(others, "they")
        return engine.place(others)

    service = Service(engine, engine.place(params), queue=config.queue)
    name = Path(config.checkpoint or folder).resolve().name
    # Before the engine compiles: it takes a second, and may say that there are none.
    asks, no_asks = _asks(config, service, chat, found, name)
    print(f"{name} is loaded; its programs compile, which takes a minute the first time",
          file=sys.stderr, flush=True)  # fmt: skip
    service.warm()
    return Served(
        service,
        name=name,
        chat=chat,
        load=newer,
        show_tools=found.tools_in_prompt or found.assumed,
        asks=asks,
        no_asks=no_asks,
        weights_from=None if config.weights_from is None else Path(config.weights_from),
        api_key=api_key,
        limits=Limits(
            # Ids and text of a full slot, however they are escaped.
            body=(1 << 20) + 64 * config.max_len,
            requests=config.slots + config.queue + 16,
            seconds=config.deadline,
        ),
    )


def _asks(
    config: ServeConfig, service: Service, chat: ChatFormat, folder: PolicyFolder, name: str
) -> tuple[Asks | None, str]:
    """The asks, or why there are none."""
    if not config.asks:
        return None, Served.no_asks
    limits = AskLimits(
        asks=config.asks,
        file=round(config.ask_megabytes * (1 << 20)),
        turns=config.ask_turns,
        seconds=config.ask_seconds,
    )
    try:
        return Asks(service, chat, folder.env, folder.tools_in_prompt, name, limits), ""
    except SandboxUnavailable as error:
        why = f"/v1/ask isn't available here: {' '.join(str(error).split())}"
        print(f"warning: {why}", file=sys.stderr, flush=True)
        return None, why


def _bound(config: ServeConfig) -> socket.socket:
    """A socket that has the address but doesn't listen yet: clients are refused, not left
    waiting, while the model is loaded."""
    listener = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        return listener
    except OSError as error:
        listener.close()
        raise ServeError(
            f"can't listen on {config.host} port {config.port} ({error.strerror or error}): choose "
            "another --port or --host"
        ) from None


class _Server(uvicorn.Server):
    """uvicorn, with this project's signals and end.  signal: the one that has ended it."""

    def __init__(self, config: ServeConfig, served: Served) -> None:
        self._settings, self._service = config, served.service
        self.signal: int | None = None
        # What is wrong with a client's form is told to that client.
        logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
        app = make_app(served)
        self._routes: Routes = app.state.routes
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                # Longer than clients keep idle connections (httpx: 5 s), so that no request
                # meets one that is being closed.
                timeout_keep_alive=30,
                timeout_graceful_shutdown=round(config.grace) + 10,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        def on_failure() -> None:
            loop.call_soon_threadsafe(self._stop)

        self._service.on_failure = on_failure
        self._service.start()
        await super().startup(sockets)
        assert sockets
        host, port, *_ = sockets[0].getsockname()
        host = f"[{host}]" if ":" in host else host
        print(f"serving on http://{host}:{port}", flush=True)

    def _stop(self) -> None:
        self.should_exit = True

    def _abort(self) -> None:
        self._service.abort()
        # The last event is on its way to those who read.
        asyncio.get_running_loop().call_later(1.0, self._routes.end_streams)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.signal = self.signal or sig
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.drain()
        self._routes.end_reads()
        limit = asyncio.get_running_loop().call_later(self._settings.grace, self._abort)
        try:
            await super().shutdown(sockets)
        finally:
            limit.cancel()
