"""`fastask serve` as its clients see it: real processes, httpx."""

import asyncio
import json
import math
import re
import socket
import time
from itertools import groupby

import httpx
import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastask_jax import cli
from fastask_jax.learn import PackConfig, pack
from fastask_jax.learn.score import make_scorer
from fastask_jax.model import load_params, save_params, shipped_weights
from fastask_jax.model.tokenizers import load_tokenizer
from fastask_jax.rollout.transcript import Trajectory
from tests.fastask_jax.serve.servers import serving

pytestmark = pytest.mark.slow

SLOTS, MAX_LEN, VOCAB = 8, 512, 2560
GENERATE, WEIGHTS = "/inference/v1/generate", "/inference/v1/weights"


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A checkpoint that hardly ever stops, and the folder of another version of it: with their
    models and parameters."""
    root = tmp_path_factory.mktemp("weights")
    model, params = load_params(shipped_weights("tiny"))
    params["embedding"] = params["embedding"].at[2].set(0.0)
    newer = jax.tree.map(lambda x: x * 1.03, params)
    tokenizer = load_tokenizer(shipped_weights("tiny"))
    for name, tree in (("start", params), ("newer", newer)):
        save_params(root / name, model, tree, extras=tokenizer.save_pretrained)
    return root, model, {-1: params, 5: newer}


@pytest.fixture(scope="module")
def server(weights):
    flags = ("--slots", SLOTS, "--max-len", MAX_LEN, "--weights-from", weights[0])
    with serving("--checkpoint", weights[0] / "start", *flags) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, timeout=60) as found:
        yield found


def prompt(number, length=20):
    return [(17 * number + 31 * i) % (VOCAB - 300) + 300 for i in range(length)]


def order(number, **fields):
    temperature = (1.0, 0.7, 0.0)[number % 3]
    body = {"ids": prompt(number, 5 + number), "max_tokens": 12, "temperature": temperature}
    return body | {"seed": number} | fields


def ask(client, body):
    answer = client.post(GENERATE, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def metric(client, name):
    return float(re.search(rf"^{re.escape(name)} (\S+)$", client.get("/metrics").text, re.M)[1])


def until(what, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it didn't come to that"
        time.sleep(0.02)


def test_many_at_once_get_what_each_gets_alone(server, client):
    async def together():
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as several:
            return await asyncio.gather(
                *(several.post(GENERATE, json=order(number)) for number in range(64))
            )

    answers = asyncio.run(together())
    assert [answer.status_code for answer in answers] == [200] * 64
    for number, answer in enumerate(answers):
        alone, found = ask(client, order(number)), answer.json()
        assert {k: found[k] for k in found if k != "usage"} == {
            k: alone[k] for k in alone if k != "usage"
        }
        assert len(found["ids"]) == len(found["logprobs"]) == len(found["versions"])
        assert all(math.isfinite(p) and p <= 0 for p in found["logprobs"])
        assert found["usage"]["prompt_tokens"] == 5 + number
        assert found["stop_reason"] == "length" and set(found["versions"]) == {-1}
    # The key that an answer names, in place of the seed.
    first = answers[0].json()
    again = {k: v for k, v in order(0).items() if k != "seed"} | {"key": first["key"]}
    assert ask(client, again)["ids"] == first["ids"]
    other = ask(client, order(0, seed="another"))
    assert other["ids"] != first["ids"] and other["key"] != first["key"]


def test_a_conversation_goes_on_in_its_slot(client):
    first = ask(client, order(0, max_tokens=100))
    held = order(0)["ids"] + first["ids"]
    second = order(0) | {"ids": held + prompt(99, 30), "max_tokens": 100}
    before = metric(client, 'fastask_tokens_total{kind="fed"}')
    found = ask(client, second)
    assert found["usage"]["cached_tokens"] == len(held)
    assert metric(client, 'fastask_tokens_total{kind="fed"}') - before == 30
    # A turn cut by its length goes on without any new text.
    third = ask(client, second | {"ids": second["ids"] + found["ids"], "max_tokens": 5})
    assert third["usage"]["cached_tokens"] == len(second["ids"] + found["ids"])

    for number in range(SLOTS):  # all slots forget
        ask(client, {"ids": [300 + number], "max_tokens": 1})
    fresh = ask(client, second)
    assert fresh["usage"]["cached_tokens"] == 0
    assert fresh["ids"] == found["ids"]
    np.testing.assert_allclose(fresh["logprobs"], found["logprobs"], atol=1e-5)


def events(answer):
    for line in answer.iter_lines():
        if line:
            assert line.startswith("data: ")
            yield json.loads(line.removeprefix("data: "))


def streamed(client, body):
    with client.stream("POST", GENERATE, json=body | {"stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        return list(events(answer))


def test_a_stream_brings_the_same_in_pieces(client):
    whole = ask(client, order(1, max_tokens=60))
    pieces = streamed(client, order(1, max_tokens=60))
    assert len(pieces) > 3 and [p["stop_reason"] for p in pieces[:-1]] == [None] * (
        len(pieces) - 1
    )
    for name in ("ids", "logprobs", "versions"):
        assert [x for piece in pieces for x in piece[name]] == whole[name]
    assert pieces[-1]["stop_reason"] == "length"
    assert pieces[-1]["usage"]["completion_tokens"] == 60 and pieces[-1]["key"] == whole["key"]


def test_further_stop_tokens_end_a_request(client):
    whole = ask(client, order(2, max_tokens=40))
    place = 20
    stop = whole["ids"][place]
    place = whole["ids"].index(stop)
    found = ask(client, order(2, max_tokens=40, stop=[stop]))
    assert found["ids"] == whole["ids"][: place + 1] and found["stop_reason"] == "stop"


def test_requests_go_on_with_new_weights(server, client, weights):
    """Each token's logprob is the learner's by the version that the answer names."""
    root, model, params = weights

    async def run():
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as several:
            def one(number):
                body = {"ids": prompt(number), "max_tokens": 480, "seed": number}
                return several.post(GENERATE, json=body)

            async def swap():
                while metric(client, "fastask_running") < 4:
                    await asyncio.sleep(0.01)
                body = {"version": 5, "path": "newer"}
                return await several.post(WEIGHTS, json=body)

            swapped = asyncio.create_task(swap())
            answers = []
            while not swapped.done():  # loading may take longer than a request
                answers += await asyncio.gather(*map(one, range(4)))
            return await swapped, answers

    swapped, answers = asyncio.run(run())
    assert swapped.status_code == 200 and swapped.json()["version"] == 5
    found = [answer.json() for answer in answers]
    assert any(set(answer["versions"]) == {-1, 5} for answer in found)
    trajectories = []
    for number, answer in enumerate(found[-4:]):
        trajectory = Trajectory("request", number, 0)
        trajectory.add_prompt(prompt(number % 4))
        tokens = zip(answer["ids"], answer["logprobs"], answer["versions"], strict=True)
        for version, part in groupby(tokens, lambda token: token[2]):
            ids, logprobs, _ = zip(*part, strict=True)
            trajectory.add_sampled(ids, logprobs, version)
        trajectories.append(trajectory)
    packed = pack(trajectories, PackConfig(row_lengths=(MAX_LEN,), micro_batch_rows=2))
    score = make_scorer(model, micro_batch_rows=2)
    for version, tree in params.items():
        logprobs, _ = score(tree, packed, 1.0)
        for learned, t in zip(packed.unpack(logprobs), trajectories, strict=True):
            mine = t.mask & (t.versions == version)
            assert not mine.any() or np.abs(learned - t.logprobs)[mine].max() < 1e-4
    assert client.get("/v1/models").json()["data"][0]["version"] == 5
    assert ask(client, order(0, min_version=5))["versions"][0] == 5
    refused = client.post(GENERATE, json=order(0, min_version=6))
    assert refused.status_code == 409 and "weights 6 are wanted" in refused.text


def test_weights_come_from_their_folder_alone(client, weights, tmp_path):
    for path, status, said in (
        ("missing", 400, "can't be loaded"),
        (str(shipped_weights("tiny")), 403, "weights come from"),
        ("../" * 20 + "etc", 403, "weights come from"),
        ("a\0b", 400, "path must be"),
        (".", 400, "can't be loaded"),
    ):
        answer = client.post(WEIGHTS, json={"version": 9, "path": path})
        assert answer.status_code == status and said in answer.json()["error"]["message"], path
    (weights[0] / "link").symlink_to(tmp_path)
    assert client.post(WEIGHTS, json={"version": 9, "path": "link"}).status_code == 403
    assert client.get("/v1/models").json()["data"][0]["version"] != 9


def test_a_path_that_is_no_utf_8_is_refused(client):
    body = b'{"version": 6, "path": "a\\udc80b"}'
    answer = client.post(WEIGHTS, content=body, headers=JSON)
    assert answer.status_code == 400 and "a\\udc80b" in answer.json()["error"]["message"]


@pytest.mark.parametrize("temperature", [1e-10, 1e-37, 1e-300])
def test_a_tiny_temperature_is_nearly_greedy(client, temperature):
    greedy = ask(client, order(0, temperature=0))
    assert ask(client, order(0, temperature=temperature))["ids"] == greedy["ids"]


def test_a_client_that_goes_frees_its_slot(client):
    cancelled = 'fastask_requests_total{ended="cancelled"}'
    before = metric(client, cancelled)
    body = {"ids": prompt(0), "max_tokens": 480}
    with client.stream("POST", GENERATE, json=body | {"stream": True}) as answer:
        next(events(answer))
    with pytest.raises(httpx.ReadTimeout):
        client.post(GENERATE, json=body, timeout=0.15)
    until(lambda: metric(client, cancelled) == before + 2)
    until(lambda: metric(client, "fastask_running") == 0)


WRONG = [
    ({}, "ids is missing"),
    ({"ids": []}, "max_tokens is missing"),
    ({"ids": [], "max_tokens": 4}, "ids is empty"),
    ({"ids": [VOCAB], "max_tokens": 4}, "from 0 to 2559"),
    ({"ids": [-1], "max_tokens": 4}, "ids must be"),
    ({"ids": [1.0], "max_tokens": 4}, "ids must be"),
    ({"ids": [True], "max_tokens": 4}, "ids must be"),
    ({"ids": "1", "max_tokens": 4}, "ids must be"),
    ({"ids": [1], "max_tokens": 0}, "max_tokens must be"),
    ({"ids": [1], "max_tokens": MAX_LEN}, "more than the 512 tokens"),
    ({"ids": [1], "max_tokens": 10**30}, "more than the 512 tokens"),
    ({"ids": [1], "max_tokens": 4, "temperature": -1}, "temperature must be"),
    ({"ids": [1], "max_tokens": 4, "temperature": "1"}, "temperature must be"),
    ({"ids": [1], "max_tokens": 4, "seed": 1.5}, "seed must be"),
    ({"ids": [1], "max_tokens": 4, "seed": 1, "key": [1, 2]}, "seed or key"),
    ({"ids": [1], "max_tokens": 4, "key": [1, 2**32]}, "key must be"),
    ({"ids": [1], "max_tokens": 4, "stream": 1}, "stream must be"),
    ({"ids": [1], "max_tokens": 4, "top_p": 1}, "unknown field 'top_p'"),
    ([], "must be a JSON object"),
]


@pytest.mark.parametrize("body, said", WRONG)
def test_a_wrong_request_is_told_what_is_wrong(client, body, said):
    answer = client.post(GENERATE, json=body)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]
    assert answer.text.count("\n") == 0


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    "method, path, content, headers, status",
    [
        ("POST", GENERATE, b"{", JSON, 400),
        ("POST", GENERATE, b'{"ids": [1], "max_tokens": 4, "temperature": NaN}', JSON, 400),
        ("POST", GENERATE, b'{"ids": [1], "max_tokens": 4, "temperature": 1e999}', JSON, 400),
        ("POST", GENERATE, b"[" * 100_000, JSON, 400),
        ("POST", GENERATE, b"9" * 10_000, JSON, 400),
        ("POST", GENERATE, b"\xff\xfe", JSON, 400),
        ("POST", GENERATE, b"{}", {"content-type": "text/plain"}, 415),
        ("POST", GENERATE, b"{}", {}, 415),
        ("POST", GENERATE, b" " * (9 << 20), JSON, 413),
        ("GET", GENERATE, b"", {}, 405),
        ("DELETE", "/v1/models", b"", {}, 405),
        ("POST", "/inference/v1/generated", b"{}", JSON, 404),
    ],
)
def test_a_wrong_call_is_told_what_is_wrong(client, method, path, content, headers, status):
    answer = client.request(method, path, content=content, headers=headers)
    assert answer.status_code == status
    assert answer.json()["error"]["message"] and answer.text.count("\n") == 0


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
names = ("ids", "max_tokens", "temperature", "seed", "key", "stop", "min_version", "stream")
fitting = st.fixed_dictionaries({"ids": st.just([300]), "max_tokens": st.just(1)})
bodies = st.one_of(
    values,
    st.dictionaries(st.sampled_from(names), values),
    st.tuples(fitting, st.dictionaries(st.sampled_from(names), values)).map(lambda t: t[0] | t[1]),
)


@settings(
    max_examples=100, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(body=bodies, path=st.sampled_from([GENERATE, WEIGHTS]))
def test_no_body_breaks_the_server(client, body, path):
    content = json.dumps(body).encode()
    answer = client.post(path, content=content, headers=JSON)
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, (body, answer.text)
    assert client.get("/healthz").status_code == 200


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(content=st.binary(max_size=64))
def test_no_bytes_break_the_server(client, content):
    answer = client.post(GENERATE, content=content, headers=JSON)
    assert 400 <= answer.status_code < 500


def test_the_key_and_the_end(tmp_path, weights):
    """Only who shows the key is served; after SIGTERM what runs ends, the rest gets 503, a body
    that isn't whole included."""
    key = tmp_path / "key"
    key.write_text("secret-key\n")
    flags = ("--slots", 1, "--queue", 2, "--max-len", MAX_LEN, "--api-key-file", key)
    # Weights that hardly ever stop, so that the first still runs when the signal comes.
    with (
        serving("--checkpoint", weights[0] / "start", *flags) as server,
        socket.socket() as slow,
    ):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret-key"}):
            for path in ("/v1/models", "/metrics"):
                answer = httpx.get(server.url + path, headers=headers)
                assert answer.status_code == 401 and "Bearer KEY" in answer.text
            assert httpx.post(server.url + GENERATE, json={}, headers=headers).status_code == 401
        assert httpx.get(server.url + "/healthz").status_code == 200
        shown = {"authorization": "Bearer secret-key"}

        host, port = server.url.removeprefix("http://").split(":")
        slow.settimeout(20)
        slow.connect((host, int(port)))
        fields = [f"POST {GENERATE} HTTP/1.1", "Host: x", "Authorization: Bearer secret-key"]
        fields += ["Content-Type: application/json", "Content-Length: 100", "", "{"]
        slow.sendall("\r\n".join(fields).encode())

        async def run():
            async with httpx.AsyncClient(
                base_url=server.url, timeout=60, headers=shown
            ) as several:
                refused = await several.post(WEIGHTS, json={"version": 1, "path": "x"})
                assert refused.status_code == 403 and "--weights-from" in refused.text

                # A seed that doesn't stop early: the one that takes longest.
                body = {"ids": prompt(1), "max_tokens": 480, "temperature": 2.0}
                tries = [await several.post(GENERATE, json=body | {"seed": n}) for n in range(2)]
                lengths = [len(answer.json()["ids"]) for answer in tries]
                longest = body | {"seed": lengths.index(max(lengths))}

                async def one(number):
                    await asyncio.sleep(0.02 * number)
                    return await several.post(GENERATE, json=longest)

                tasks = [asyncio.create_task(one(n)) for n in range(4)]
                await asyncio.sleep(0.1)
                server.process.terminate()
                return max(lengths), await asyncio.gather(*tasks)

        length, answers = asyncio.run(run())
        # One ran, two waited, and there was no room for a fourth.
        assert [answer.status_code for answer in answers] == [200, 503, 503, 429], length
        assert len(answers[0].json()["ids"]) == length
        assert "shutting down" in answers[1].text and "wait already" in answers[3].text
        assert slow.recv(1000).startswith(b"HTTP/1.1 503 ")
        code = server.process.wait(60)
        server.reader.join(10)
        assert (code, "".join(server.said)) == (0, "")


BROKEN = """
import sys
from fastask_jax.rollout.engine import Engine
decode, calls = Engine.decode, []
def breaking(*arguments):
    calls.append(1)
    if len(calls) > 8:
        raise FloatingPointError("the device is gone")
    return decode(*arguments)
Engine.decode = breaking
from fastask_jax.cli import main
sys.exit(main(["serve", *sys.argv[1:]]))
"""


def test_an_engine_that_fails_ends_the_process():
    with serving("--slots", 1, "--max-len", 256, command=("-c", BROKEN)) as server:
        answer = httpx.post(
            server.url + GENERATE, timeout=60,
            json={"ids": prompt(1), "max_tokens": 230, "temperature": 100},
        )  # fmt: skip
        assert answer.status_code == 503 and "the device is gone" in answer.text
        code = server.process.wait(60)
        server.reader.join(10)
        assert code == 1
        assert "".join(server.said) == (
            "error: the engine has failed: FloatingPointError: the device is gone\n"
        )


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--port", "70000"], "--port is from 0 to 65535"),
        (["--slots", "0"], "--slots must be at least 1"),
        (["--max-len", "1"], "--max-len must be at least 2"),
        (["--deadline", "nan"], "--deadline must be a number of seconds"),
        (["--host", "0.0.0.0"], "give --api-key-file"),
        (["--host", "::"], "give --api-key-file"),
        (["--weights-from", "/nowhere/at/all"], "isn't a folder"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(flags, said, capsys):
    assert cli.main(["serve", *flags]) == 2
    shown = capsys.readouterr().err
    assert said in shown and shown.count("\n") == 1


def test_a_port_in_use_and_a_bad_key_are_one_line(server, tmp_path, capsys):
    assert cli.main(["serve", "--port", server.url.rpartition(":")[2]]) == 1
    assert "choose another --port" in capsys.readouterr().err
    key = tmp_path / "key"
    key.write_text("two words")
    assert cli.main(["serve", "--api-key-file", str(key)]) == 1
    shown = capsys.readouterr().err
    assert "must hold the key alone" in shown and "two words" not in shown
