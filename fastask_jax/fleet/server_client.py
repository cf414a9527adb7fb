"""A client of one `fastask serve`, for use from threads: requests that are tried again.

Requests run on an event loop of the client's own thread; `post` gives a future, and cancelling
that closes the connection, at which the server drops the request.  Where the server can't be
reached, is full, or answers with an error of its own, a request is tried again for a limited time
and then fails with `Lost`.

Left out: what the answers mean (`remote.py`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from types import ModuleType
from typing import Any, Self

from fastask_jax.fleet.replica import Lost

# Pauses between two tries (seconds).
_FIRST, _LONGEST = 0.1, 5.0


class ServerClient:
    """Ends with its `with` block.

    retry: seconds after which a request isn't tried again.  silence: seconds without a byte of an
    answer after which the connection counts as lost.  connections: at a time.

    Raises ModuleNotFoundError without httpx.
    """

    def __init__(
        self, url: str, api_key: str | None, retry: float, silence: float, connections: int
    ) -> None:
        self.url, self._retry = url, retry
        self._httpx = httpx = _httpx()
        self._loop = asyncio.new_event_loop()
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(silence, connect=10.0),
            limits=httpx.Limits(max_connections=connections),
            trust_env=False,  # weights and texts go where the config says, past any proxy
        )
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"client of {url}", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._run(self._close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def get(self, path: str) -> Future[dict[str, Any]]:
        """The JSON object there; see `post`."""
        return self._run(self._ask("GET", path, None))

    def post(self, path: str, body: Any) -> Future[dict[str, Any]]:
        """The JSON object that answers `body`.  Fails with Lost where the server is lost or was
        started anew, and with RuntimeError where it refuses the request for good."""
        return self._run(self._ask("POST", path, body))

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _close(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.aclose()

    async def _ask(self, method: str, path: str, body: Any) -> dict[str, Any]:
        until, pause = self._loop.time() + self._retry, _FIRST
        while True:
            try:
                answer = await self._client.request(method, path, json=body)
                if answer.status_code < 500 and answer.status_code != 429:
                    return self._read(path, answer)
                problem = f"it answers {answer.status_code}: {_message(answer)}"
            except self._httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}".rstrip(": ")
            if self._loop.time() + pause > until:
                raise Lost(f"{self.url} hasn't served for {self._retry:g} s ({problem})")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def _read(self, path: str, answer: Any) -> dict[str, Any]:
        if answer.status_code == 409:
            raise Lost(f"{self.url} was started anew: {_message(answer)}")
        value = None
        if answer.status_code == 200:
            try:
                value = answer.json()
            except ValueError:
                pass
        if not isinstance(value, dict):
            raise RuntimeError(
                f"{self.url}{path} answers {answer.status_code}: {_message(answer)}"
            )
        return value


def _message(answer: Any) -> str:
    """The text of an error in an answer, or the beginning of one that isn't of such a server."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(answer.text.split())[:100] or "nothing"


def _httpx() -> ModuleType:
    try:
        import httpx
    except ModuleNotFoundError as error:
        if error.name != "httpx":
            raise
        raise ModuleNotFoundError(
            "fleet.place=http needs httpx: pip install '.[http]'", name="httpx"
        ) from None
    return httpx
