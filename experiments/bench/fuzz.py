"""Malformed requests to `fastask serve`: each is refused with a 4xx, and the server stays.

`python -m experiments.bench.fuzz`: 10,000 of them over real connections, made from a seed, to all
endpoints: broken HTTP, wrong methods, paths and headers, bodies that are no JSON, JSON of wrong
fields and types, forms that are cut, doubled or mislabelled, and files that are no workbooks, or
workbooks cut short.  `value` is the count of answers that aren't a 4xx, and of requests without an
answer; whatever it is above 0, the first of them is told and the exit code is 1.  At the end the
server answers a good request and ends in order.
"""

from __future__ import annotations

import asyncio
import io
import json
import random
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from experiments.bench.asks import cases
from experiments.bench.report import report
from experiments.bench.served import served
from experiments.config import option, parse, run_main

GENERATE, CHAT, ASK = "/inference/v1/generate", "/v1/chat/completions", "/v1/ask"
WEIGHTS = "/inference/v1/weights"
_GET = ("/v1/models", "/metrics", "/healthz")
_GOOD: dict[str, dict[str, Any]] = {
    GENERATE: {"ids": [300, 301], "max_tokens": 1, "temperature": 1.0, "seed": 1},
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "?"}], "max_tokens": 1},
    WEIGHTS: {"version": 1, "path": "x"},
}
# No field takes one of these, in any place.
_NEVER: tuple[Any, ...] = ({"a": {}}, {"": []}, [[[]]], [{"x": 1}], -1.5, 1e300, [None, {}])


@dataclass(frozen=True)
class Config:
    requests: int = option(10_000, "how many")
    connections: int = option(8, "at a time")
    seed: int = option(0, "of what is sent")

    def __post_init__(self) -> None:
        if self.requests < 1 or not 1 <= self.connections <= 64:
            raise ValueError("requests is at least 1, and connections 1 to 64")


@dataclass(frozen=True)
class Request:
    """raw: bytes that are sent as they are, in place of the rest."""

    method: str
    path: str
    body: bytes = b""
    kind: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    raw: bytes | None = None

    def as_bytes(self) -> bytes:
        if self.raw is not None:
            return self.raw
        lines = [f"{self.method} {self.path} HTTP/1.1", "host: localhost"]
        if self.kind is not None:
            lines.append(f"content-type: {self.kind}")
        lines += [f"{name}: {value}" for name, value in self.headers]
        lines.append(f"content-length: {len(self.body)}")
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + self.body


class Malformed:
    """Requests from a seed.  book: a good workbook, to be broken."""

    def __init__(self, seed: int, book: bytes) -> None:
        self._random, self._book = random.Random(seed), book
        self._kinds: tuple[tuple[int, Callable[[], Request]], ...] = (
            (30, self._wrong_field),
            (12, self._no_json),
            (10, self._wrong_call),
            (3, self._broken_http),
            (25, self._wrong_form),
            (12, self._wrong_book),
            (8, self._wrong_message),
        )

    def __call__(self) -> Request:
        weights = [weight for weight, _ in self._kinds]
        [(_, make)] = self._random.choices(self._kinds, weights)
        return make()

    def _bytes(self, most: int = 64) -> bytes:
        return self._random.randbytes(self._random.randrange(most))

    def _wrong_field(self) -> Request:
        path = self._random.choice(list(_GOOD))
        body: dict[str, Any] = dict(_GOOD[path])
        how = self._random.randrange(3)
        if how == 0:
            del body[self._random.choice([n for n in body if n not in ("temperature", "seed")][:2])]
        elif how == 1:
            body[self._random.choice(list(body))] = self._random.choice(_NEVER)
        else:
            body[self._text()] = self._random.choice((1, "x", *_NEVER))
        return Request("POST", path, json.dumps(body).encode(), "application/json")

    def _text(self) -> str:
        """A name that no field has."""
        letters = "".join(chr(self._random.choice((65, 233, 0x1F600, 0xD800, 0, 34))) for _ in "ab")
        return f"{letters}_{self._random.randrange(1000)}"

    def _wrong_message(self) -> Request:
        wrong: Any = self._random.choice(
            (
                [], {}, "?", [None], [[]], [{}], [{"role": "king", "content": "?"}],
                [{"role": "user"}], [{"role": "user", "content": 1}],
                [{"role": "user", "content": [{"type": "image_url"}]}],
                [{"role": "user", "content": [{"type": "text", "text": {}}]}],
                [{"role": "assistant", "tool_calls": [{}]}],
                [{"role": "assistant", "tool_calls": [{"function": {"name": "a",
                                                                   "arguments": "{"}}]}],
                [{"role": "user", "content": "?", "tool_calls": 7}],
                [{"role": "user", "content": "x" * 200_000}],
            )
        )  # fmt: skip
        body = _GOOD[CHAT] | {"messages": wrong}
        if self._random.random() < 0.3:
            tools: Any = self._random.choice(([1], [{}], [{"function": {"name": 1}}], [[]], "all"))
            body = _GOOD[CHAT] | {"tools": tools}
        return Request("POST", CHAT, json.dumps(body).encode(), "application/json")

    def _no_json(self) -> Request:
        path = self._random.choice(list(_GOOD))
        good = json.dumps(_GOOD[path]).encode()
        body = self._random.choice(
            (
                b"", b"[]", b"null", b"\xff\xfe", b"{" * 5000, b"[" * 5000, b"9" * 5000,
                good[: self._random.randrange(len(good))],
                good + b"}",
                good.replace(b": 1", b": NaN", 1) + b"]",
                b"\x00" + self._bytes(),
            )
        )  # fmt: skip
        return Request("POST", path, body, "application/json")

    def _wrong_call(self) -> Request:
        how = self._random.randrange(3)
        if how == 0:
            path = "/" + "".join(self._random.choices("abcv1/%.-_~2E", k=12)) + "x"
            return Request(self._random.choice(("GET", "POST", "PUT")), path)
        if how == 1:
            path = self._random.choice((*_GOOD, ASK, *_GET))
            return Request(self._random.choice(("PUT", "DELETE", "PATCH", "OPTIONS")), path)
        path = self._random.choice(list(_GOOD))
        kinds = (None, "text/plain", "application/jso", "é", "multipart/form-data")
        kind = self._random.choice(kinds)
        return Request("POST", path, json.dumps(_GOOD[path]).encode(), kind)

    def _broken_http(self) -> Request:
        raw = self._random.choice(
            (
                b"\x00\x01\x02\x03\r\n\r\n",
                b"GET\r\n\r\n",
                b"GET / HTTP/9.9\r\n\r\n",
                b"POST /v1/ask HTTP/1.1\r\nhost: x\r\ncontent-length: ten\r\n\r\n",
                b"POST /v1/ask HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
                b"POST /v1/ask HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n",
                b"GET /v1/models HTTP/1.1\r\nhost : x\r\n\r\n",
                b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
            )
        )
        return Request("", "", raw=raw)

    # -- forms ------------------------------------------------------------------------------

    def _form(self, parts: Sequence[tuple[str, str | None, bytes]]) -> bytes:
        out = bytearray()
        for name, file, content in parts:
            given = "" if file is None else f'; filename="{file}"'
            head = f'--edge\r\ncontent-disposition: form-data; name="{name}"{given}\r\n\r\n'
            out += head.encode("utf-8", "replace") + content + b"\r\n"
        return bytes(out) + b"--edge--\r\n"

    def _wrong_form(self) -> Request:
        file, question = ("file", "b.xlsx", self._book), ("question", None, b"How many?")
        kind = "multipart/form-data; boundary=edge"
        good = self._form((file, question))
        body, kind = self._random.choice(
            (
                (self._form((file,)), kind),
                (self._form((question,)), kind),
                (self._form((file, file, question)), kind),
                (self._form((file, question, question)), kind),
                (self._form((file, question, ("more", None, b"x"))), kind),
                (self._form((("file", None, b"text"), question)), kind),
                (self._form((file, ("question", "q.txt", b"How many?"))), kind),
                (self._form((file, ("question", None, b"  \r\n "))), kind),
                (self._form((file, ("question", None, b"x" * 5000))), kind),
                (self._form((file, ("question", None, b"x" * 100_000))), kind),
                (good[: self._random.randrange(len(good) - 20)], kind),
                (good, "multipart/form-data"),
                (good, "multipart/form-data; boundary="),
                (good, "multipart/form-data; boundary=other"),
                (good, "multipart/form-data; boundary=" + "e" * 300),
                (good, "multipart/form-data; charset=utf-99; boundary=other"),
                (good, "application/x-www-form-urlencoded"),
                (b"file=1&question=2", "application/x-www-form-urlencoded"),
                (b"", kind),
                (b"--edge" + self._bytes(), kind),
                (b"--edge\r\n" + self._bytes() + b"\r\n\r\nx\r\n--edge--\r\n", kind),
                (good.replace(b"content-disposition", b"content-\xff", 1), kind),
                (good.replace(b'name="file"', b"name*=utf-8''%ff"), kind),
            )
        )
        return Request("POST", ASK, body, kind)

    def _wrong_book(self) -> Request:
        book = self._book
        content = self._random.choice(
            (
                b"",
                b"%PDF-1.7 " + self._bytes(),
                b"{\\rtf1 " + self._bytes(),
                b"<html>" + self._bytes(),
                b"<?xml version='1.0'?>" + self._bytes(),
                b"PK\x03\x04" + self._bytes(2000),
                b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + self._bytes(2000),
                b"\x00" + self._bytes(2000) + b"\x00",
                book[: self._random.randrange(4, len(book) - 30)],
                self._bomb(),
                self._zip({"[Content_Types].xml": b"<a"}),
                self._zip({"xl/workbook.xml": self._bytes()}),
                self._zip({"xl/workbook.xml": b"<!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;</a>"}),
            )
        )
        names = ("b.xlsx", "b.csv", "../../b.xlsx", "", "\u202eb", "b\\c/..", "b" * 300)
        name = self._random.choice(names)
        return Request(
            "POST", ASK, self._form((("file", name, content), ("question", None, b"How many?"))),
            "multipart/form-data; boundary=edge",
        )  # fmt: skip

    def _zip(self, parts: dict[str, bytes]) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            for name, content in parts.items():
                # No time of writing: requests follow from the seed alone.
                archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
        return out.getvalue()

    def _bomb(self) -> bytes:
        if not hasattr(self, "_bombed"):
            parts = {"[Content_Types].xml": b"<Types/>", "xl/workbook.xml": b" " * (20 << 20)}
            self._bombed = self._zip(parts)
        return self._bombed


async def answered(port: int, request: Request) -> int:
    """The status of the answer; 0 where there was none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        closing = request
        if request.raw is None:
            closing = replace(request, headers=(*request.headers, ("connection", "close")))
        writer.write(closing.as_bytes())
        try:
            await writer.drain()
        except ConnectionError:
            pass  # refused before all of it was read
        async with asyncio.timeout(60):
            line = await reader.readline()
            await reader.read()
        return int(line.split()[1]) if line.startswith(b"HTTP/1.1 ") else 0
    except (ConnectionError, TimeoutError, IndexError, ValueError):
        return 0
    finally:
        writer.close()


async def send(
    url: str, make: Callable[[], Request], count: int, connections: int
) -> tuple[Counter[int], Request | None]:
    """Answers by status, and the first request whose answer is no 4xx."""
    port = urlsplit(url).port
    assert port is not None
    statuses: Counter[int] = Counter()
    wrong: list[Request] = []
    left = count

    async def some() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            request = make()
            status = await answered(port, request)
            statuses[status] += 1
            if not 400 <= status < 500:
                wrong.append(request)

    await asyncio.gather(*(some() for _ in range(connections)))
    return statuses, wrong[0] if wrong else None


def main(argv: list[str] | None = None) -> int:
    config = parse(Config, argv, description=__doc__)
    [case] = cases(1)
    good = _GOOD[CHAT]
    with served("--slots", 8, "--max-len", 512) as server:
        began = time.perf_counter()
        statuses, wrong = asyncio.run(
            send(server.url, Malformed(config.seed, case.book), config.requests, config.connections)
        )
        seconds = time.perf_counter() - began
        fine = asyncio.run(
            send(
                server.url,
                lambda: Request("POST", CHAT, json.dumps(good).encode(), "application/json"), 1, 1,
            )
        )[0]  # fmt: skip
        code, _ = server.end()
    refused = sum(count for status, count in statuses.items() if 400 <= status < 500)
    if wrong is not None:
        print(f"not refused: {wrong.as_bytes()[:400]!r}")
    report(
        "fuzz", "requests not refused", [float(config.requests - refused)],
        higher_is_better=False, requests=config.requests, seconds=seconds,
        statuses={str(status): count for status, count in sorted(statuses.items())},
        good_after=fine[200], exit_code=code,
    )  # fmt: skip
    return int(refused < config.requests or fine[200] != 1 or code != 0)


if __name__ == "__main__":
    run_main(main)
