"""`fastask mcp` as the official client sees it, with a model behind real HTTP; its confinement."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import httpx2
import openpyxl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mcp import Client, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from fastask_jax import cli
from fastask_jax.ask.places import OutOfPlace, Places
from tests.fastask_jax.policies.remote.scripted import Script, Turn, listening, units_of_west

ROOT = Path(__file__).parents[3]
KEY = "secret-key"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model's server, and the words that name it."""
    file = tmp_path_factory.mktemp("keys") / "key"
    file.write_text(KEY)
    script = Script(units_of_west())
    with listening(script.app()) as url:
        script.words = ["--openai", f"{url}/v1", "--model", "scripted", "--api-key-file", str(file)]
        script.key_file = str(file)
        yield script


@pytest.fixture(scope="module")
def folder(tmp_path_factory, book):
    """Two folders, one of which may be read; links that lead in and out."""
    root = tmp_path_factory.mktemp("mcp")
    inside, outside = root / "inside", root / "outside"
    (inside / "deep").mkdir(parents=True)
    outside.mkdir()
    for place in (inside / "orders.xlsx", inside / "deep" / "more.xlsx", outside / "orders.xlsx"):
        shutil.copy(book, place)
    (inside / "out.xlsx").symlink_to(outside / "orders.xlsx")
    (inside / "door").symlink_to(outside)
    (inside / "in.xlsx").symlink_to(inside / "deep" / "more.xlsx")
    (inside / "loop").symlink_to(inside / "loop")
    (inside / "note.xlsx").write_text("%PDF-1.7")
    return inside


def started(folder, *words):
    """How a client starts it over stdin and stdout."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = ["-m", "fastask_jax.cli", "mcp", str(folder), *map(str, words)]
    return StdioServerParameters(
        command=sys.executable, args=command, env=environment, cwd=str(ROOT)
    )


def test_the_official_client_over_stdio(model, folder, asked):
    async def run():
        async with Client(stdio_client(started(folder, *model.words))) as client:
            [tool] = (await client.list_tools()).tools
            assert tool.name == "ask_workbook" and str(folder) in tool.description
            assert set(tool.input_schema["properties"]) == {"path", "question"}

            async def call(path, question=asked.question):
                found = await client.call_tool(
                    "ask_workbook", {"path": path, "question": question}
                )
                return found.is_error, found

            for path in ("orders.xlsx", str(folder / "orders.xlsx"), "in.xlsx", "deep/../in.xlsx"):
                failed, found = await call(path)
                assert not failed
                assert found.structured_content == {
                    "answer": "42", "type": "number", "evidence": ["Orders!A1:C4"], "note": None
                }  # fmt: skip
                assert "SO-1" not in found.model_dump_json()
            together = await asyncio.gather(*(call("orders.xlsx") for _ in range(6)))
            assert [f.structured_content["answer"] for _, f in together] == ["42"] * 6
            for path, said in (
                ("../outside/orders.xlsx", "lies outside of"),
                ("out.xlsx", "lies outside of"),
                ("door/orders.xlsx", "lies outside of"),
                ("/etc/passwd", "lies outside of"),
                ("missing.xlsx", "no such workbook"),
                ("note.xlsx", "note.xlsx is a PDF"),
                ("deep", "is a folder"),
                ("", "isn't a path"),
            ):
                failed, found = await call(path)
                [text] = [block.text for block in found.content]
                assert failed and said in text and "\n" not in text, (path, text)
                assert "outside/orders" not in text.replace(repr(path), "")
            failed, found = await call("orders.xlsx", " ")
            assert failed and "question is empty" in found.content[0].text

    asyncio.run(run())


def test_over_http_with_a_key(model, folder, asked):
    words = [
        sys.executable, "-m", "fastask_jax.cli", "mcp", str(folder), "--http", "--port", "0",
        "--client-key-file", model.key_file, *model.words,
    ]  # fmt: skip
    with subprocess.Popen(
        words, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("serving MCP on http://127.0.0.1:"), process.stderr.read()
            url = line.split()[-1]
            body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": KEY}):
                assert httpx.post(url, json=body, headers=headers).status_code == 401

            async def run():
                shown = {"authorization": f"Bearer {KEY}"}
                async with (
                    httpx2.AsyncClient(headers=shown) as http,
                    Client(streamable_http_client(url, http_client=http)) as client,
                ):
                    return await client.call_tool(
                        "ask_workbook", {"path": "orders.xlsx", "question": asked.question}
                    )

            assert asyncio.run(run()).structured_content["answer"] == "42"
            process.terminate()
            out, err = process.communicate(timeout=20)
            assert (process.returncode, out, err) in ((0, "", ""), (-15, "", ""))
        finally:
            process.kill()


def test_no_answer_and_a_model_that_is_gone_are_told(folder, model, asked, home, tmp_path):
    from fastask_jax.ask.choice import PolicyChoice
    from fastask_jax.ask.mcp_server import make_server

    async def call(server):
        async with Client(server) as client:
            return await client.call_tool("ask_workbook", {"path": "in.xlsx", "question": "Why?"})

    def choice(url):
        return PolicyChoice(openai=url, model="scripted", api_key_file=model.key_file)

    with listening(Script([Turn("I don't know.")]).app()) as url:
        with choice(f"{url}/v1").open() as asker:
            found = asyncio.run(call(make_server(asker, Places([folder]))))
    assert found.structured_content == {
        "answer": None, "type": None, "evidence": [],
        "note": "no answer after 1 turn: the model ended without one",
    }  # fmt: skip
    lost = openpyxl.Workbook()
    lost.active["A1"] = "=[1]Other!A1"  # in another file
    lost.save(tmp_path / "in.xlsx")
    guess = "no cell was read for it: a guess, unless it is about sheets' names or sizes"
    for reply, note in (
        ("I don't know.", "no answer after 1 turn: the model ended without one"),
        ("ANSWER: 42", guess),
    ):
        with listening(Script([Turn(reply)]).app()) as url:
            with choice(f"{url}/v1").open() as asker:
                found = asyncio.run(call(make_server(asker, Places([tmp_path]))))
        both = f"{note}; 1 formula without a result, read as empty"
        assert found.structured_content["note"] == both
    with listening(Script([], key="another").app()) as url:
        with choice(f"{url}/v1").open() as asker:
            found = asyncio.run(call(make_server(asker, Places([folder]))))
    assert found.is_error and "wrong key; check the key" in found.content[0].text
    assert KEY not in json.dumps(found.model_dump(mode="json"))


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(["..", ".", "deep", "door", "loop", "out.xlsx", "in.xlsx", "orders.xlsx",
                         "", "inside", "outside", "~", "\x00", "x" * 300]) | st.text(max_size=3),
        max_size=6,
    ),
    absolute=st.booleans(),
)  # fmt: skip
def test_no_path_leads_out(folder, parts, absolute):
    path = "/".join(parts)
    path = f"{folder}/{path}" if absolute else path
    try:
        found = Places([folder]).find(path)
    except OutOfPlace as error:
        assert str(error)
    else:
        assert found.exists() and Path(os.path.realpath(found)).is_relative_to(folder.resolve())


@pytest.mark.parametrize(
    "given, said, code",
    [
        ([], "required: DIR", 2),
        (["/nowhere"], "/nowhere isn't a folder", 1),
        (["/tmp", "--http", "--host", "0.0.0.0"], "give --client-key-file", 2),
        (["/tmp", "--http", "--port", "70000"], "--port is from 0", 2),
        (["/tmp", "--model", "m"], "--model goes with", 2),
    ],
)
def test_wrong_usage_is_one_line(given, said, code, capsys):
    assert cli.main(["mcp", *given]) == code
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.count("\n") == 1 and shown.out == ""
