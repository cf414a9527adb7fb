"""JSON posts to one server, from any thread: tried again while that can help, at a given rate.

A connection that fails, a try that is silent for too long, a body that can't be unpacked, 408, 409,
429 and everything from 500 on are tried again with growing pauses, longer ones where the server
asks for that, until `retry` seconds have gone: then the server is `Lost`.  Any other answer but a
JSON object is `Refused` at once: the same request would fail again.

Left out: streams, redirects, and what the answers mean.
"""

from __future__ import annotations

import email.utils
import json
import random
import threading
import time
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Self
from urllib.parse import urlsplit

from fastask_jax.policies.remote.keys import is_loopback

# Pauses between two tries (seconds).
_FIRST, _LONGEST = 0.5, 30.0
_MOST_BYTES = 64 << 20
# What servers answer to a conversation that they don't take; also to settings.
_OF_CONTENT = (400, 413, 422)


class RemoteError(Exception):
    """The server gives no answer; the text says why."""


class Lost(RemoteError):
    """It can't be reached, is overloaded or broken: no fault of the model."""


class Refused(RemoteError, ValueError):
    """It refuses the request for good: a wrong key, model or setting.  status, code: of its
    answer; `too_long` where the conversation doesn't fit into the model; `own` where another
    conversation may fare better: what this one says is refused, as far as the status tells."""

    def __init__(self, text: str, status: int, code: str = "", too_long: bool = False) -> None:
        super().__init__(text)
        self.status, self.code, self.too_long = status, code, too_long
        self.own = status in _OF_CONTENT


class OutOfTime(RemoteError):
    """The answer didn't come within the caller's seconds."""


@dataclass(frozen=True)
class Answered:
    """value: the JSON object.  seconds: that the successful try took.  waited: spent before it,
    on the rate, pauses and failed tries.  tries: made."""

    value: dict[str, Any]
    seconds: float
    waited: float
    tries: int


class Pace:
    """Evenly spaced turns; for several threads."""

    def __init__(self, per_minute: float | None) -> None:
        self._gap = 0.0 if per_minute is None else 60.0 / per_minute
        self._next = 0.0
        self._lock = threading.Lock()

    def wait(self) -> None:
        if not self._gap:
            return
        with self._lock:
            now = time.monotonic()
            turn = max(self._next, now)
            self._next = turn + self._gap
        time.sleep(turn - now)


class RemoteClient:
    """Close it, or use `with`.

    url: paths are appended to it.  silence, retry, requests_per_minute, connections: as in
    `RemoteConfig`.  Raises ValueError for an address that isn't one, and ModuleNotFoundError
    without httpx.
    """

    def __init__(
        self,
        url: str,
        headers: dict[str, str],
        *,
        silence: float = 120.0,
        retry: float = 120.0,
        requests_per_minute: float | None = None,
        connections: int = 64,
    ) -> None:
        self.url = _checked_url(url)
        self._httpx = httpx = _httpx()
        self._silence, self._retry = silence, retry
        self._pace = Pace(requests_per_minute)
        self._client = httpx.Client(
            headers=headers,
            limits=httpx.Limits(max_connections=connections),
            # A proxy of the environment is for others than this machine.
            trust_env=not is_loopback(self.url),
            # Without TLS there is nothing to verify, and reading the certificates takes 0.3 s.
            verify=self.url.startswith("https:"),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def post(self, path: str, body: Any, seconds: float = float("inf")) -> Answered:
        """What answers `body`.  seconds: that a try may take.

        Raises Lost, Refused, and OutOfTime when a try has taken `seconds`.
        """
        began, pause, tries = time.monotonic(), _FIRST, 0
        while True:
            self._pace.wait()
            started, tries = time.monotonic(), tries + 1
            limit = min(self._silence, seconds)
            asked = 0.0
            try:
                status, headers, data = self._try(path, body, started + limit)
                if not _again(status, data):
                    now = time.monotonic()
                    value = self._read(status, data)
                    return Answered(value, now - started, started - began, tries)
                problem = f"it answers {status}: {_message(data)}"
                asked = _asked_pause(headers)
            except (self._httpx.RequestError, _Silent) as error:
                silent = isinstance(error, (_Silent, self._httpx.TimeoutException))
                if silent and limit == seconds:
                    raise OutOfTime(f"{self.url} took longer than {seconds:.1f} s") from None
                problem = f"{type(error).__name__.lstrip('_')}: {error}".rstrip(": ")
            # Many clients that have failed together shall not come again together.
            wait = max(pause * random.uniform(0.75, 1.0), asked)
            if time.monotonic() - began + wait > self._retry:
                raise Lost(f"{self.url} hasn't answered for {self._retry:g} s ({problem})")
            time.sleep(wait)
            pause = min(2 * pause, _LONGEST)

    def _try(self, path: str, body: Any, until: float) -> tuple[int, Any, bytes]:
        timeout = self._httpx.Timeout(max(until - time.monotonic(), 0.001))
        data = bytearray()
        content = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        kind = {"Content-Type": "application/json"}
        with self._client.stream(
            "POST", self.url + path, content=content, headers=kind, timeout=timeout
        ) as answer:
            for chunk in answer.iter_bytes():
                data += chunk
                if time.monotonic() > until:  # a byte now and then is no answer either
                    raise _Silent("the answer comes too slowly")
                if len(data) > _MOST_BYTES:
                    raise Refused(f"{self.url} answers more than {_MOST_BYTES >> 20} MiB", 200)
            return answer.status_code, answer.headers, bytes(data)

    def _read(self, status: int, data: bytes) -> dict[str, Any]:
        value = _json(data)
        if status == 200 and isinstance(value, dict):
            return value
        if status == 200:
            raise Refused(f"{self.url} doesn't answer with a JSON object: {_message(data)}", 200)
        hint = {
            401: "; check the key",
            403: "; check what the key may do",
            404: "; check the model's name, and the address, which usually ends in /v1",
        }.get(status, "")
        text = f"{self.url} answers {status}: {_message(data)}{hint}"
        raise Refused(text, status, _code(value), _too_long(status, value))


class _Silent(Exception):
    """As httpx's time-outs, for a whole answer."""


def _again(status: int, data: bytes) -> bool:
    if status == 429:  # OpenAI's word for an empty account: waiting doesn't help
        return _code(_json(data)) != "insufficient_quota"
    return status in (408, 409) or status >= 500


def _asked_pause(headers: Any) -> float:
    """Seconds that the server wants to be left alone; 0 where it doesn't say."""
    text = headers.get("retry-after", "")
    try:
        found = float(text)
    except ValueError:
        moment = email.utils.parsedate_tz(text)
        found = 0.0 if moment is None else email.utils.mktime_tz(moment) - time.time()
    return found if 0 < found < float("inf") else 0.0


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _error(value: Any) -> dict[str, Any]:
    error = value.get("error") if isinstance(value, dict) else None
    return error if isinstance(error, dict) else {}


def _code(value: Any) -> str:
    """OpenAI's `code`, Anthropic's `type`."""
    error = _error(value)
    return str(error.get("code") or error.get("type") or "")


def _message(data: bytes) -> str:
    """One line: the text of the error, or the beginning of an answer without one."""
    value = _json(data)
    error = value.get("error") if isinstance(value, dict) else None
    text = error if isinstance(error, str) else _error(value).get("message")
    if not isinstance(text, str):
        text = data[:400].decode("utf-8", "replace")
    line = " ".join(text.split())[:300]
    return "".join(c for c in line if c.isprintable()) or "nothing"


def _too_long(status: int, value: Any) -> bool:
    """Whether the conversation has outgrown the model, in the words of the servers in use."""
    if status not in _OF_CONTENT:
        return False
    text = str(_error(value).get("message", "")).lower()
    return _code(value) == "context_length_exceeded" or any(
        words in text
        for words in (
            "maximum context length",  # OpenAI, vLLM
            "prompt is too long",  # Anthropic
            "exceed context limit",  # Anthropic, with max_tokens
            "exceeds the available context size",  # llama.cpp
            "a slot holds",  # fastask serve
        )
    )


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        wrong = parts.scheme not in ("http", "https") or not parts.hostname
        wrong = wrong or any(c.isspace() or not c.isprintable() for c in url)
        # A name that can't be looked up would count as a server that is away, and be waited for.
        _ = parts.port, (parts.hostname or "").encode("idna")
    except ValueError:
        wrong = True
    if wrong or parts.query or parts.fragment:
        raise ValueError(f"{url!r} isn't an address such as http://127.0.0.1:8000/v1")
    if parts.username or parts.password:
        raise ValueError("the address holds a name or a password: give --api-key-file instead")
    return url.rstrip("/")


def _httpx() -> ModuleType:
    try:
        import httpx
    except ModuleNotFoundError as error:
        if error.name != "httpx":
            raise
        raise ModuleNotFoundError(
            "asking another server needs httpx: pip install '.[http]'", name="httpx"
        ) from None
    return httpx
