"""A server behind OpenAI's protocol whose model is the oracle, wrong now and then.

Stateless, as a model is: what it says next follows from the question and the tool results in the
request.  Every third task (by its question) it answers with a zero.
"""

import threading
import zlib

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from envs.core import Message
from fastask_jax.policies.oracle import OraclePolicy
from tests.fastask_jax.policies.remote.scripted import (
    Script,
    Turn,
    read_openai,
    refuse,
    say_openai,
)


class AskedOracle:
    """broken: questions that it answers with an error of its own.  asked: requests so far."""

    def __init__(self, tasks) -> None:
        self.tasks = {task.question: task for task in tasks}
        self.broken: set[str] = set()
        self.asked = 0
        self._lock = threading.Lock()

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/chat/completions", self.answer, methods=["POST"])])

    async def answer(self, request: Request) -> Response:
        with self._lock:
            self.asked += 1
        body = await request.json()
        if body["model"] != "scripted":
            return refuse(404, "no such model")
        read_openai(body, request)
        question = body["messages"][1]["content"].split("\nSheets: ")[0]
        if question in self.broken:
            return JSONResponse({"error": {"message": "out of order"}}, 500)
        turn = self.turn(self.tasks[question], body["messages"][2:])
        return JSONResponse(say_openai(Script([]), turn))

    def turn(self, task, history) -> Turn:
        policy = OraclePolicy(use_helper=True)
        reply, told = policy.start([], (), task), []
        for message in [*history, {"role": "assistant"}]:
            if message["role"] == "tool":
                told.append(Message("tool", message["content"]))
            elif told:
                reply, told = policy.reply(tuple(told)), []
        if not reply.tool_calls and zlib.crc32(task.question.encode()) % 3 == 0:
            return Turn("ANSWER: 0")
        return Turn(reply.content, tuple((c.name, c.arguments) for c in reply.tool_calls))
