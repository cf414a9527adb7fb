"""A server that speaks OpenAI's and Anthropic's protocols and says what a script tells it to.

It is stateless: which turn comes next follows from the history that the client sends, so many
conversations run at a time.  It is strict: a history that the real services would refuse gets
400 with the reason, and fails the test.  Run as a program it listens until it is ended:

    python -m tests.fastask_jax.policies.remote.scripted 8100
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

Call = tuple[str, Any]


@dataclass(frozen=True)
class Turn:
    """calls: (name, arguments); arguments that are a text go out as they are (OpenAI)."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    length: bool = False
    thought: str = ""


@dataclass
class Script:
    """turns: of every conversation.  faults: answers that come before any other, each once: a
    status, or (status, headers, body), or seconds of silence as a float.  key: that clients must
    show.  model: the only one there is."""

    turns: list[Turn]
    faults: list[Any] = field(default_factory=list)
    key: str | None = "secret-key"
    model: str = "scripted"
    usage: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    mangle: Callable[[dict[str, Any]], Any] = lambda value: value

    def app(self) -> Starlette:
        async def openai(request: Request) -> Response:
            return await self.answer(request, read_openai, say_openai, "authorization", "Bearer ")

        async def anthropic(request: Request) -> Response:
            return await self.answer(request, read_anthropic, say_anthropic, "x-api-key", "")

        return Starlette(
            routes=[
                Route("/v1/chat/completions", openai, methods=["POST"]),
                Route("/v1/messages", anthropic, methods=["POST"]),
            ]
        )

    async def answer(self, request, read, say, header, prefix) -> Response:
        with self.lock:
            self.times.append(time.monotonic())
            fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, float):
            await run_in_threadpool(time.sleep, fault)
        elif fault is not None:
            status, headers, body = fault if isinstance(fault, tuple) else (fault, {}, None)
            error = {"error": {"message": f"fault {status}", "type": "fault"}}
            return JSONResponse(error if body is None else body, status, headers)
        if self.key is not None and request.headers.get(header) != prefix + self.key:
            return refuse(401, "wrong key")
        try:
            body = await request.json()
            with self.lock:
                self.bodies.append(body)
            turn = read(body, request)
        except AssertionError as error:
            return refuse(400, f"bad history: {error}")
        except ClientDisconnect:
            return refuse(499, "the client has gone")
        if body["model"] != self.model:
            return refuse(404, "no such model")
        return JSONResponse(self.mangle(say(self, self.turns[turn])))


def refuse(status: int, text: str) -> Response:
    return JSONResponse({"error": {"message": text, "type": "invalid_request_error"}}, status)


def read_openai(body: dict[str, Any], request: Request) -> int:
    messages = body["messages"]
    assert messages[0]["role"] == "system", "no system message"
    assert body["max_completion_tokens"] > 0
    assert all(tool["type"] == "function" for tool in body["tools"])
    open_ids: list[str] = []
    for message in messages[1:]:
        if message["role"] == "tool":
            assert message["tool_call_id"] == open_ids.pop(0), "tool result out of order"
            assert isinstance(message["content"], str)
            continue
        assert not open_ids, "a call without its result"
        for call in message.get("tool_calls", []):
            assert message["role"] == "assistant" and call["type"] == "function"
            assert call["function"]["name"]
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
            open_ids.append(call["id"])
        assert message["content"] is not None or open_ids, "an empty message"
    assert not open_ids, "a call without its result"
    return sum(message["role"] == "assistant" for message in messages)


def say_openai(script: Script, turn: Turn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": turn.text or None}
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": f"call-{n}",
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": given if isinstance(given, str) else json.dumps(given),
                },
            }
            for n, (name, given) in enumerate(turn.calls)
        ]
    reason = "length" if turn.length else "tool_calls" if turn.calls else "stop"
    value = {
        "id": "chatcmpl-1", "object": "chat.completion", "model": script.model, "created": 1,
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
    }  # fmt: skip
    if script.usage:
        value["usage"] = {
            "prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110,
            "prompt_tokens_details": {"cached_tokens": 40},
        }  # fmt: skip
    return value


def read_anthropic(body: dict[str, Any], request: Request) -> int:
    assert request.headers["anthropic-version"] == "2023-06-01"
    assert isinstance(body["system"], str) and body["max_tokens"] > 0
    assert all(tool["input_schema"]["type"] == "object" for tool in body["tools"])
    open_ids: list[str] = []
    wanted = "user"
    for message in body["messages"]:
        assert message["role"] == wanted, "roles don't alternate"
        wanted = {"user": "assistant", "assistant": "user"}[wanted]
        assert message["content"], "an empty message"
        answered = [b["tool_use_id"] for b in message["content"] if b["type"] == "tool_result"]
        assert answered == open_ids, "tool results don't fit the calls"
        open_ids = []
        for block in message["content"]:
            if block["type"] == "text":
                assert block["text"], "an empty text"
            elif block["type"] == "thinking":
                assert block["signature"] == "signed", "a thought was changed"
            elif block["type"] == "tool_use":
                assert isinstance(block["input"], dict) and block["name"]
                open_ids.append(block["id"])
    assert wanted == "assistant" and not open_ids, "the last message isn't the user's"
    return sum(message["role"] == "assistant" for message in body["messages"])


def say_anthropic(script: Script, turn: Turn) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    if turn.thought:
        content.append({"type": "thinking", "thinking": turn.thought, "signature": "signed"})
    if turn.text:
        content.append({"type": "text", "text": turn.text})
    content += [
        {"type": "tool_use", "id": f"toolu-{n}", "name": name, "input": given}
        for n, (name, given) in enumerate(turn.calls)
    ]
    reason = "max_tokens" if turn.length else "tool_use" if turn.calls else "end_turn"
    value = {
        "id": "msg-1", "type": "message", "role": "assistant", "model": script.model,
        "content": content, "stop_reason": reason, "stop_sequence": None,
    }  # fmt: skip
    if script.usage:
        value["usage"] = {
            "input_tokens": 30, "output_tokens": 10,
            "cache_read_input_tokens": 50, "cache_creation_input_tokens": 20,
        }  # fmt: skip
    return value


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """The address of an application that is served on a thread of this process."""
    config = uvicorn.Config(app, port=0, log_level="error", access_log=False, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


def units_of_west() -> list[Turn]:
    """Answers the question of tests/fastask_jax/ask/conftest.py."""
    code = 'print(sum(o.units for o in Orders if o.region=="West"))'
    read = ("read_ranges", {"ranges": ["Orders!A:C"]})
    return [
        Turn(calls=(("get_workbook_metadata", {}),), thought="look around"),
        Turn("I read it.", (read, ("run_python", {"code": code}))),
        Turn("ANSWER: 42"),
    ]


if __name__ == "__main__":
    uvicorn.run(Script(units_of_west()).app(), port=int(sys.argv[1]), log_level="warning")
