"""/v1/ask and whole conversations over `fastask serve`, as clients see them: one real server, whose
policy knows the answer to one question by heart."""

import asyncio
import json
import os
import re
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest
from mcp import Client, StdioServerParameters, stdio_client

from envs.core import Reply, ToolCall
from envs.fast_ask.env import FastAskConfig, FastAskEnv
from envs.sandbox import Sandbox
from envs.workbook import read_workbook
from experiments.bench.fuzz import Malformed, send
from fastask_jax import cli
from fastask_jax.ask.episode import Asked, Question
from fastask_jax.policies.remote import RemoteConfig, open_policy
from fastask_jax.serve.uploads import harmless
from tests.fastask_jax.serve.servers import ROOT, serving

pytestmark = pytest.mark.slow

ASK, KEY = "/v1/ask", "secret-key"
ASKS = 6


@pytest.fixture(scope="module")
def temporary(tmp_path_factory):
    """Where the server keeps what it keeps for a moment."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("temporary")
        patch.setenv("TMPDIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def server(taught, temporary, tmp_path_factory):
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text(KEY)
    flags = ("--slots", 4, "--max-len", 512, "--asks", ASKS, "--ask-megabytes", 1)
    with serving("--checkpoint", taught, *flags, "--api-key-file", key) as found:
        found.key = str(key)
        yield found


@pytest.fixture(scope="module")
def client(server):
    shown = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, timeout=60, headers=shown) as found:
        yield found


@pytest.fixture(scope="module")
def data(book):
    return Path(book).read_bytes()


def metric(client, name):
    return float(re.search(rf"^{re.escape(name)} (\S+)$", client.get("/metrics").text, re.M)[1])


def until(what, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it didn't come to that"
        time.sleep(0.02)


def ask(client, data, question, name="orders.xlsx"):
    return client.post(ASK, files={"file": (name, data)}, data={"question": question})


def test_an_ask_is_answered(client, data, asked, taught, temporary):
    answer = ask(client, data, f" {asked.question}\n")
    assert answer.status_code == 200
    found = answer.json()
    assert found.pop("seconds") > 0 and found.pop("tokens") > 30
    assert found == {
        "question": asked.question, "answer": "42", "type": "number", "value": 42,
        "evidence": asked.evidence, "turns": 3, "cells": 25, "tool_calls": 3,
        "stop_reason": "answered", "policy": taught.name, "uncalculated": {},
    }  # fmt: skip
    assert list(temporary.iterdir()) == []
    assert metric(client, 'fastask_asks_total{ended="answered"}') >= 1
    assert metric(client, "fastask_ask_cells_total") >= 25
    # Its later turns went on in the slot of the first.
    assert metric(client, 'fastask_tokens_total{kind="reused"}') > 100
    missing = httpx.post(client.base_url.join(ASK), files={"file": data}, data={"question": "?"})
    assert missing.status_code == 401


def test_asks_run_together(client, server, data, asked):
    async def together():
        async with httpx.AsyncClient(
            base_url=server.url, timeout=60, headers=client.headers
        ) as several:
            return await asyncio.gather(
                *(ask(several, data, asked.question) for _ in range(ASKS))
            )

    answers = asyncio.run(together())
    assert [answer.json()["value"] for answer in answers] == [42] * ASKS


def test_the_official_openai_client_asks_over_several_turns(server, book, asked, taught):
    tools = [
        {"type": "function", "function": {"name": tool.name, "description": tool.description,
                                          "parameters": tool.parameters}}
        for tool in FastAskEnv.tools
    ]  # fmt: skip
    turns = 0
    with (
        openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as official,
        Sandbox() as sandbox,
    ):
        env = FastAskEnv(FastAskConfig(prompt="short"), sandbox)
        messages = [
            {"role": message.role, "content": message.content}
            for message in env.ask(read_workbook(book), asked.question)
        ]
        step = None
        while step is None or not step.done:
            turns += 1
            completion = official.chat.completions.create(
                model=taught.name, messages=messages, tools=tools, temperature=0
            )
            said = completion.choices[0].message
            calls = tuple(
                ToolCall(call.function.name, json.loads(call.function.arguments))
                for call in said.tool_calls or ()
            )
            step = env.step(Reply(said.content or "", calls))
            messages.append(said.model_dump(exclude_none=True))
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": told.content}
                for call, told in zip(said.tool_calls or (), step.messages, strict=True)
            ]
        assert (env.score().info["answer"], turns) == ("42", 3)
        env.close()


def test_our_policy_for_such_servers_asks_too(server, book, asked, taught, capsys):
    config = RemoteConfig(taught.name, temperature=0.0)
    with (
        Sandbox() as sandbox,
        open_policy("openai", server.url + "/v1", config, KEY) as policy,
    ):
        env = FastAskEnv(FastAskConfig(prompt="short"), sandbox)
        found = policy.run(Asked(env, read_workbook(book)), Question(asked.question))
    assert found.score.info["answer"] == "42" and found.turns == 3
    # The server counts what it had already.
    assert found.prompt_tokens > found.cached_tokens > 100 and not found.estimated
    words = ["--openai", server.url + "/v1", "--model", taught.name, "--api-key-file", server.key]
    assert cli.main(["ask", book, asked.question, *words, "--prompt", "short",
                     "--temperature", "0"]) == 0  # fmt: skip
    assert capsys.readouterr().out.splitlines()[0] == "42"


def test_the_official_mcp_client_asks_through_this_server(server, book, asked, taught):
    words = ["--openai", server.url + "/v1", "--model", taught.name, "--api-key-file", server.key]
    started = StdioServerParameters(
        command=sys.executable, cwd=str(ROOT), env={**os.environ, "PYTHONPATH": str(ROOT)},
        args=["-m", "fastask_jax.cli", "mcp", str(Path(book).parent), *words,
              "--prompt", "short", "--temperature", "0"],
    )  # fmt: skip

    async def run():
        async with Client(stdio_client(started)) as client:
            return await client.call_tool(
                "ask_workbook", {"path": Path(book).name, "question": asked.question}
            )

    found = asyncio.run(run()).structured_content
    assert (found["answer"], found["evidence"]) == ("42", asked.evidence)


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda data: b"", "is empty"),
        (lambda data: data[: len(data) // 2], "is damaged"),
        (lambda data: b"%PDF-1.7", "is a PDF or text document"),
        (lambda data: b"<html></html>", "is HTML, not a workbook"),
        (lambda data: b"\x00" * 100, "isn't a workbook of a known kind"),
    ],
)
def test_a_file_that_is_no_workbook_is_one_line(client, data, temporary, make, said):
    answer = ask(client, make(data), "How many?", name="../../etc/evil\u202e.xlsx")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert said in error["message"] and error["param"] == "file"
    assert "evil_.xlsx" in error["message"] and "/" not in error["message"]
    assert "\n" not in error["message"] and list(temporary.iterdir()) == []


def test_limits(client, server, data):
    answer = ask(client, data + bytes(2 << 20), "How many?")
    assert answer.status_code == 413 and "1,048,576 bytes" in answer.text
    answer = ask(client, data, "why " * 900)
    assert answer.status_code == 400 and "tokens" in answer.text
    answer = ask(client, data, "x" * 4001)
    assert answer.status_code == 400 and "4,000 characters" in answer.text
    # As many half-sent asks as may run; one more is too many, and each that goes makes room.
    address = server.url.removeprefix("http://").split(":")
    head = (
        f"POST {ASK} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: 5000\r\n"
        "content-type: multipart/form-data; boundary=edge\r\n\r\n--edge"
    )
    cancelled = metric(client, 'fastask_asks_total{ended="cancelled"}')
    held = [socket.create_connection((address[0], int(address[1]))) for _ in range(ASKS)]
    for one in held:
        one.sendall(head.encode())
    until(lambda: metric(client, "fastask_asks_running") == ASKS)
    answer = ask(client, data, "How many?")
    assert answer.status_code == 429 and "asks run already" in answer.text
    for one in held:
        one.close()
    until(lambda: metric(client, "fastask_asks_running") == 0)
    assert metric(client, 'fastask_asks_total{ended="cancelled"}') == cancelled + ASKS


def test_a_client_that_goes_ends_its_ask(client, data, temporary):
    cancelled = metric(client, 'fastask_asks_total{ended="cancelled"}')
    files = {"file": ("b.xlsx", data)}
    with pytest.raises(httpx.ReadTimeout):
        client.post(ASK, files=files, data={"question": "Why?"}, timeout=0.02)
    until(lambda: metric(client, "fastask_asks_running") == 0)
    assert metric(client, 'fastask_asks_total{ended="cancelled"}') == cancelled + 1
    until(lambda: metric(client, "fastask_running") == 0)
    until(lambda: list(temporary.iterdir()) == [])


def test_malformed_requests_are_refused(client, server, data, temporary):
    """`python -m experiments.bench.fuzz` sends 10,000 and to a server without a key."""
    key = ("authorization", f"Bearer {KEY}")
    make = Malformed(1, data)

    def with_key():
        return replace(make(), headers=(key,))

    statuses, wrong = asyncio.run(send(server.url, with_key, 500, 8))
    assert wrong is None, (statuses, wrong.as_bytes()[:300])
    assert statuses.total() == 500 and {400, 403, 404, 405, 415} <= set(statuses)
    assert client.get("/healthz").status_code == 200
    assert list(temporary.iterdir()) == []
    assert metric(client, 'fastask_asks_total{ended="failed"}') == 0
    assert server.process.poll() is None


def test_names_of_files():
    assert harmless("a/b\\c d.csv") == "c d.csv"
    for name in ("", "..", "/", "...", "\0"):
        assert harmless(name) in ("workbook", "_")
    assert len(harmless("ü" * 500 + ".xlsx").encode()) <= 80
    assert harmless("x" * 200 + ".ods").endswith("x.ods")


def test_the_end_waits_for_asks(client, server, data, asked, temporary):
    """Last: it ends the server."""

    async def run():
        async with httpx.AsyncClient(
            base_url=server.url, timeout=60, headers=client.headers
        ) as several:
            asks = [asyncio.create_task(ask(several, data, asked.question)) for _ in range(ASKS)]
            while metric(client, "fastask_asks_running") < ASKS:
                await asyncio.sleep(0.001)
            server.process.terminate()
            return await asyncio.gather(*asks)

    answers = asyncio.run(run())
    assert [answer.status_code for answer in answers] == [200] * ASKS
    assert [answer.json()["value"] for answer in answers] == [42] * ASKS
    assert server.process.wait(60) == 0
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--asks", "-1"], "--asks must be at least 0"),
        (["--ask-turns", "0"], "--ask-turns must be at least 1"),
        (["--ask-seconds", "0"], "--ask-seconds must be a number of seconds"),
        (["--ask-megabytes", "0"], "--ask-megabytes must be above 0"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(flags, said, capsys):
    assert cli.main(["serve", *flags]) == 2
    assert said in capsys.readouterr().err
