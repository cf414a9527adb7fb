"""Chat completions as OpenAI's own client sees them, and pieces of replies cut anywhere."""

import asyncio
import json

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envs.core import Message, ToolCall
from fastask_jax.model import shipped_weights
from fastask_jax.model.tokenizers import load_tokenizer
from fastask_jax.rollout.chat import ChatFormat
from fastask_jax.serve.bodies import Limits, Refused
from fastask_jax.serve.chat import Answer, make_order, read_chat
from fastask_jax.serve.service import Piece
from tests.fastask_jax.serve.servers import serving

CHAT = "/v1/chat/completions"
SAID = [
    {"role": "system", "content": "Answer."},
    {"role": "user", "content": [{"type": "text", "text": "Net revenue of "},
                                 {"type": "text", "text": "North?"}]},
]  # fmt: skip
LOOK = {
    "type": "function",
    "function": {
        "name": "look", "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "array"}}},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with serving("--slots", 2, "--max-len", 512) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def shipped():
    return ChatFormat(load_tokenizer(shipped_weights("tiny")))


@pytest.mark.slow
def test_a_completion_is_the_parsed_text_of_the_sampled_tokens(client, server, shipped):
    [model] = client.models.list().data
    given = dict(model=model.id, messages=SAID, max_tokens=60, seed=3, temperature=0.8)
    found = client.chat.completions.create(**given, logprobs=True)
    [choice] = found.choices
    prompt = shipped.encode_prompt(
        [Message("system", "Answer."), Message("user", "Net revenue of North?")]
    )
    raw = httpx.post(
        server.url + "/inference/v1/generate", timeout=60,
        json={"ids": prompt, "max_tokens": 60, "seed": 3, "temperature": 0.8},
    ).json()  # fmt: skip
    assert found.usage.prompt_tokens == len(prompt)
    assert found.usage.completion_tokens == len(raw["ids"])
    assert [token.logprob for token in choice.logprobs.content] == raw["logprobs"]
    text = shipped.decode(raw["ids"])
    assert "".join(token.token for token in choice.logprobs.content) == text
    assert choice.message.content == text.removesuffix(shipped.stop_text).strip()
    assert choice.finish_reason == raw["stop_reason"]

    stream = client.chat.completions.create(
        **given, logprobs=True, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == choice.message.content
    told = [c.choices[0].logprobs for c in chunks]
    assert [t.logprob for some in told if some for t in some.content] == raw["logprobs"]
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason
    assert last.choices == [] and last.usage.completion_tokens == len(raw["ids"])
    # The shipped policy was trained without seeing its tools; others see them in the prompt.
    more = client.chat.completions.create(**given, tools=[LOOK])
    assert more.usage.prompt_tokens == found.usage.prompt_tokens
    asked = read_chat({"model": "tiny", "messages": SAID, "tools": [LOOK]}, "tiny")
    hidden, seen = (make_order(asked, shipped, Limits(), 512, show).ids for show in (False, True))
    assert hidden == prompt and len(seen) > len(prompt)
    less = client.chat.completions.create(**given, tools=[LOOK], tool_choice="none")
    assert less.usage.prompt_tokens == found.usage.prompt_tokens


@pytest.mark.slow
def test_a_conversation_with_calls_goes_in(client):
    [model] = client.models.list().data
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": []}'}}
    said = [*SAID, {"role": "assistant", "content": None, "tool_calls": [call]}]
    said += [{"role": "tool", "tool_call_id": "1", "content": "nothing"}]
    found = client.chat.completions.create(
        model=model.id, messages=said, tools=[LOOK], max_tokens=4
    )
    assert found.choices[0].finish_reason in ("length", "stop", "tool_calls")


@pytest.mark.slow
def test_errors_are_those_of_the_client(client):
    [model] = client.models.list().data
    with pytest.raises(openai.NotFoundError, match="no such model here"):
        client.chat.completions.create(model="other", messages=SAID)
    with pytest.raises(openai.BadRequestError, match="top_p must be 1"):
        client.chat.completions.create(model=model.id, messages=SAID, top_p=0.5)
    with pytest.raises(openai.BadRequestError, match="a slot holds 512"):
        long = [{"role": "user", "content": "word " * 100_000}]
        client.chat.completions.create(model=model.id, messages=long)
    with pytest.raises(openai.BadRequestError, match="more than the 512"):
        client.chat.completions.create(model=model.id, messages=SAID, max_tokens=512)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["role", "content", "tool_calls", "function", "name", "type", "text"]),
        inner, max_size=4,
    ),
    max_leaves=10,
)  # fmt: skip
FIELDS = ["messages", "tools", "tool_choice", "max_tokens", "stream_options", "stop", "n", "seed"]


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), values))
def test_a_body_is_read_or_refused(body):
    try:
        asked = read_chat({"model": "m", "messages": SAID} | body, "m")
    except Refused as refused:
        assert 400 <= refused.status < 500 and str(refused)
    else:
        assert asked.messages


def replies(chat):
    calls = (ToolCall("look", {"at": ["A1", 'B"2']}), ToolCall("look", {"at": []}))
    return [
        (chat.encode_reply(Message("assistant", "Some words, é ü 漢字 \U0001f600.")), 0),
        (chat.encode_reply(Message("assistant", "", calls)), 2),
        (chat.encode_reply(Message("assistant", "Let me look <tool", calls[:1])), 1),
        (chat.encode_text("  <tool_call>nonsense</tool_call> and more"), 0),
        (chat.encode_text("<think>hm</think> yes <tool_ca"), 0),
        (chat.encode_text("<think>never ended"), 0),
    ]


def answered(chat, ids, cuts, asked):
    """The whole answer, and the events of a stream in pieces."""
    whole = Answer(asked, chat, "m")
    edges = sorted({0, *(cut for cut in cuts if cut < len(ids)), len(ids)})
    pieces = [
        Piece(ids[a:b], [-0.5] * (b - a), 0, "stop" if b == len(ids) else None)
        for a, b in zip(edges, edges[1:], strict=False)
    ]
    for piece in pieces:
        whole.add(piece)

    async def run():
        async def source():
            for piece in pieces:
                yield piece

        answer = Answer(asked, chat, "m")
        return [event async for event in answer.stream(source(), dict)]

    usage = {"prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": 1, "total_tokens": 2}
    return whole.whole(usage)["choices"][0], asyncio.run(run())


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    which=st.integers(0, 5), cuts=st.lists(st.integers(1, 60)),
    tools=st.booleans(), logprobs=st.booleans(),
)  # fmt: skip
def test_a_stream_says_the_same_however_it_is_cut(shipped, which, cuts, tools, logprobs):
    ids, calls = replies(shipped)[which]
    body = {"model": "m", "messages": SAID, "logprobs": logprobs}
    asked = read_chat(body | ({"tools": [LOOK]} if tools else {}), "m")
    choice, events = answered(shipped, ids, cuts, asked)
    assert events.pop() == "[DONE]"
    json.dumps(events)
    deltas = [event["choices"][0]["delta"] for event in events]
    message = choice["message"]
    assert "".join(d.get("content") or "" for d in deltas) == (message["content"] or "")
    found = [c["function"] for d in deltas for c in d.get("tool_calls", ())]
    assert found == [c["function"] for c in message.get("tool_calls", ())]
    assert len(found) == (calls if tools else 0)
    assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert choice["finish_reason"] == ("tool_calls" if found else "stop")
    told = [e["choices"][0]["logprobs"] for e in events]
    told = [token for some in told if some for token in some["content"]]
    assert told == (choice["logprobs"]["content"] if logprobs else [])
    if logprobs:
        assert len(told) == len(ids)
