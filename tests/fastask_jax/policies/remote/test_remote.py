"""Episodes with models behind real HTTP servers, in both dialects, faults included."""

import json
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest

from envs.core import Message, Reply, Score, Step, ToolSpec
from envs.fast_ask.env import FastAskConfig, FastAskEnv
from envs.sandbox import Sandbox
from envs.workbook import Sheet, Workbook
from fastask_jax.policies.base import run_episode
from fastask_jax.policies.remote import (
    Lost,
    Price,
    Refused,
    RemoteConfig,
    find_key,
    open_policy,
)
from tests.fastask_jax.policies.remote.scripted import Script, Turn, listening, units_of_west

KEY = "secret-key"
BOOK = Workbook(
    [
        Sheet("Orders", {1: ("order", "region", "units"), 2: ("SO-1", "West", 12),
                         3: ("SO-2", "East", 7), 4: ("SO-3", "West", 30)}),
    ]
)  # fmt: skip
CONFIG = RemoteConfig("scripted", retry=5.0, price=Price(1.0, 5.0, cached=0.1))
both = pytest.mark.parametrize("dialect", ["openai", "anthropic"])


class Ask(FastAskEnv):
    def reset(self, task):
        return self.ask(BOOK, "How many units did West order?")


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox() as found:
        yield found


class Stage:
    """One server for all tests, whose script is the test's."""

    script: Script
    url: str

    async def __call__(self, scope, receive, send):
        await self.script.app()(scope, receive, send)

    @contextmanager
    def __getitem__(self, script):
        self.script = script
        yield self.url


STAGE = Stage()


@pytest.fixture(autouse=True, scope="module")
def stage():
    with listening(STAGE) as STAGE.url:
        yield


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("fastask_jax.policies.remote.client._FIRST", 0.01)


class Echo:
    """Tells what it was told; never touches a workbook."""

    tools = (ToolSpec("look", "Looks.", {"type": "object", "properties": {}}),)

    def __init__(self, fault=None):
        self.said: list[Reply] = []
        self.fault, self.closed = fault, False

    def reset(self, task):
        return [Message("system", "Echo."), Message("user", "Well?")]

    def step(self, reply):
        self.said.append(reply)
        if self.fault == len(self.said):
            raise RuntimeError("the sandbox is gone")
        if not reply.tool_calls:
            return Step((), True, "length" if reply.stop_reason == "length" else "answered")
        return Step(tuple(Message("tool", c.error or "") for c in reply.tool_calls), False)

    def score(self):
        return Score(0.5, {"correct": 0.0}, {})

    def close(self):
        self.closed = True


def play(dialect, script, env, config=CONFIG, key=KEY):
    with STAGE[script] as url, open_policy(dialect, url + "/v1", config, key) as policy:
        return policy.run(env)


@both
def test_a_question_is_answered_through_the_tools(dialect, sandbox):
    script = Script(units_of_west())
    found = play(dialect, script, Ask(FastAskConfig(), sandbox))
    assert (found.valid, found.stop_reason, found.final) == (True, "answered", "ANSWER: 42")
    assert found.score.info["answer"] == "42" and found.score.info["ranges"] == ["Orders!A1:C4"]
    assert (found.turns, found.sampled, found.score.info["cells"]) == (3, 30, 12)
    assert found.prompt_tokens == 300
    [first, second, last] = script.bodies
    assert [tool.get("name") or tool["function"]["name"] for tool in first["tools"]] == [
        "get_workbook_metadata", "read_ranges", "run_python"
    ]  # fmt: skip
    assert "temperature" not in first
    assert "42" in json.dumps(last["messages"]) and len(second["messages"]) < len(last["messages"])
    trace = found.to_json()
    assert [t["role"] for t in trace["turns"]] == ["prompt", *["reply", "observation"] * 2, "reply"]
    assert "How many units" in trace["turns"][0]["text"]
    assert '<tool_call>\n{"name": "run_python"' in trace["turns"][3]["text"]
    assert trace["valid"] and trace["info"]["answer"] == "42" and json.dumps(trace)
    assert 0 < found.seconds < 10 and found.tries == 3


def test_tokens_are_paid_for(sandbox):
    priced = {d: play(d, Script(units_of_west()), Ask(FastAskConfig(), sandbox)) for d in
              ("openai", "anthropic")}  # fmt: skip
    # A turn: 60 new tokens, 40 cached, 10 sampled; and 30 new, 20 written, 50 cached, 10 sampled.
    assert priced["openai"].price == pytest.approx(3 * (60 + 40 * 0.1 + 10 * 5) / 1e6)
    assert priced["anthropic"].price == pytest.approx(3 * (50 + 50 * 0.1 + 10 * 5) / 1e6)
    guessed = play("openai", Script(units_of_west(), usage=False), Ask(FastAskConfig(), sandbox))
    assert guessed.estimated and guessed.price is None and guessed.sampled > 0


@both
def test_it_acts_as_a_policy_too(dialect, sandbox):
    with (
        STAGE[Script(units_of_west())] as url,
        open_policy(dialect, url + "/v1", CONFIG, KEY) as policy,
    ):
        score = run_episode(policy.talk(), Ask(FastAskConfig(), sandbox), None)
    assert score.info["answer"] == "42"


@both
def test_many_at_a_time_share_one_policy(dialect):
    script = Script([Turn(calls=(("look", {}),)), Turn("done")])
    with (
        STAGE[script] as url,
        open_policy(dialect, url + "/v1", CONFIG, KEY) as policy,
    ):
        found = []
        threads = [
            threading.Thread(target=lambda: found.append(policy.run(Echo()))) for _ in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [t.final for t in found] == ["done"] * 16 and len(script.bodies) == 32


WRONG_CALLS = [
    ("openai", "look", "{", "bad JSON"),
    ("openai", "look", '{"a": NaN}', "what is not JSON"),
    ("openai", "look", '{"a": "\\ud800"}', "what is not JSON"),
    ("openai", "look", "[1]", "must be a JSON object"),
    ("openai", "look", "[" * 100_000, "nested too deeply"),
    ("openai", "", "{}", "no function.name"),
    ("anthropic", "look", [1], "must be a JSON object"),
    ("anthropic", "look", "text", "must be a JSON object"),
    ("anthropic", "", {}, "no name"),
]


@pytest.mark.parametrize("dialect, name, arguments, said", WRONG_CALLS)
def test_a_malformed_call_goes_back_to_the_model(dialect, name, arguments, said):
    script = Script([Turn("hm", calls=(("look", {}), (name, arguments))), Turn("done")])
    env = Echo()
    found = play(dialect, script, env)
    assert found.valid and found.final == "done"
    fine, wrong = env.said[0].tool_calls
    assert fine.error is None and said in wrong.error
    [_, last] = script.bodies
    assert said in json.dumps(last["messages"])  # and the server took the history


def test_no_arguments_are_an_empty_object():
    env = Echo()
    play("openai", Script([Turn(calls=(("look", ""),)), Turn("done")]), env)
    assert env.said[0].tool_calls[0].arguments == {} and env.said[0].tool_calls[0].error is None


def test_calls_left_in_the_text_are_read_from_there():
    text = '<tool_call>\n{"name": "look", "arguments": {"at": [1]}}\n</tool_call>'
    script = Script([Turn("I look. " + text), Turn("<tool_call>{oops</tool_call>"), Turn("done")])
    env = Echo()
    found = play("openai", script, env)
    first, second, last = env.said
    assert (first.content, first.tool_calls[0].arguments) == ("I look.", {"at": [1]})
    assert second.tool_calls[0].error and last.content == "done" and found.valid


@both
@pytest.mark.parametrize("fault", [429, 500, 503, 529, 408])
def test_faults_that_pass_are_tried_again(dialect, fault):
    script = Script([Turn("done")], faults=[fault, fault])
    found = play(dialect, script, Echo())
    assert found.valid and found.tries == 3
    assert found.waited > 0 and found.seconds < 1.0


def test_the_server_says_when_to_come_again():
    script = Script([Turn("done")], faults=[(429, {"retry-after": "0.4"}, None)])
    found = play("openai", script, Echo())
    assert found.valid and script.times[1] - script.times[0] >= 0.4
    assert found.waited >= 0.4 > found.seconds
    script = Script([Turn("done")], faults=[(429, {"retry-after": "3600"}, None)])
    found = play("openai", script, Echo())
    assert found.stop_reason == "error" and "hasn't answered for 5 s" in found.error


@both
def test_a_fault_that_stays_is_no_answer(dialect):
    env = Echo()
    found = play(dialect, Script([], faults=[500] * 99), env, replace(CONFIG, retry=0.1))
    assert not found.valid and found.stop_reason == "error" and found.score is None
    assert "answers 500: fault 500" in found.error and found.reward == 0 and env.closed


def test_nobody_there_is_a_fault_and_a_strange_answer_too():
    with open_policy("openai", "http://127.0.0.1:9/v1", replace(CONFIG, retry=0.1), None) as policy:
        found = policy.run(Echo())
    assert "ConnectError" in found.error
    for mangled, said in (({"choices": []}, "choices[0]"), ({}, "choices[0]")):
        script = Script([Turn("x")], mangle=lambda value, mangled=mangled: mangled)
        assert said in play("openai", script, Echo()).error
    script = Script([Turn("x")], mangle=lambda value: {"content": "text"})
    assert "no list of blocks" in play("anthropic", script, Echo()).error


def test_silence_is_tried_again_and_the_deadline_ends_the_episode():
    script = Script([Turn("done")], faults=[0.4])
    found = play("openai", script, Echo(), replace(CONFIG, silence=0.2))
    assert found.valid and found.tries == 2 and found.waited >= 0.2
    script = Script([Turn(calls=(("look", {}),)), Turn("done")])
    with STAGE[script] as url:
        with open_policy("openai", url + "/v1", replace(CONFIG, deadline=0.3), KEY) as policy:
            script.faults = []
            env = Echo()
            step = env.step
            env.step = lambda reply: (script.faults.append(1.2), step(reply))[1]
            began = time.monotonic()
            found = policy.run(env)
            took = time.monotonic() - began
    assert found.stop_reason == "deadline" and found.valid and took < 1


@pytest.mark.parametrize(
    "fault, said",
    [
        ((401, {}, {"error": {"message": "no such key"}}), "no such key; check the key"),
        ((404, {}, {"error": "no such page"}), "answers 404: no such page"),
        ((400, {}, {"error": {"message": "temperature isn't taken"}}), "temperature isn't taken"),
        ((429, {}, {"error": {"message": "pay", "code": "insufficient_quota"}}), "429: pay"),
        ((302, {"location": "http://127.0.0.1/"}, {}), "answers 302"),
        ((200, {}, [1]), "doesn't answer with a JSON object"),
    ],
)
@both
def test_what_can_not_get_better_is_raised(dialect, fault, said):
    env = Echo()
    with pytest.raises(Refused, match="answers|doesn't") as caught:
        play(dialect, Script([], faults=[fault]), env)
    assert said in str(caught.value) and KEY not in str(caught.value) and env.closed


def test_a_body_that_can_not_be_unpacked_is_a_fault_like_a_lost_one():
    faults = [(500, {"content-encoding": "gzip"}, {}), (200, {"content-encoding": "gzip"}, {})]
    found = play("openai", Script([Turn("done")], faults=faults), Echo())
    assert found.valid and found.final == "done" and found.tries == 3


def test_a_count_of_tokens_that_can_not_be_is_none(sandbox):
    def boast(value):
        value["usage"] = dict.fromkeys(("prompt_tokens", "completion_tokens"), 10**400)
        return value

    script = Script([Turn("ANSWER: 42")], mangle=boast)
    found = play("openai", script, Ask(FastAskConfig(), sandbox))
    assert (found.error, found.sampled, found.prompt_tokens) == (None, 0, 0)


def test_only_a_conversation_may_be_refused_alone():
    refusals = {status: Refused("", status).own for status in (200, 302, 400, 401, 404, 413, 422)}
    assert [status for status, own in refusals.items() if own] == [400, 413, 422]


@both
def test_a_conversation_that_outgrows_the_model_ends_there(dialect):
    full = (400, {}, {"error": {"message": "This model's maximum context length is 8"}})
    script = Script([Turn(calls=(("look", {}),))])
    env = Echo()
    step = env.step
    env.step = lambda reply: (script.faults.append(full), step(reply))[1]
    found = play(dialect, script, env)
    assert (found.valid, found.stop_reason, found.turns) == (True, "context", 1)
    with pytest.raises(Refused, match="maximum context length"):
        play(dialect, Script([], faults=[full]), Echo())


@both
def test_budgets_of_tokens(dialect):
    script = Script([Turn(calls=(("look", {}),))] * 9)
    found = play(dialect, script, Echo(), replace(CONFIG, max_tokens=25))
    assert (found.stop_reason, found.turns, found.sampled) == ("token_budget", 3, 30)
    asked = [body.get("max_tokens") or body["max_completion_tokens"] for body in script.bodies]
    assert asked == [25, 15, 5]
    found = play(dialect, Script([Turn("ANS", length=True)]), Echo())
    assert found.stop_reason == "length"


def test_a_fault_of_the_environment_is_told():
    env = Echo(fault=2)
    found = play("openai", Script([Turn(calls=(("look", {}),))] * 2), env)
    assert found.error == "RuntimeError: the sandbox is gone" and not found.valid and env.closed


def test_requests_keep_to_the_rate():
    script = Script([Turn("done")])
    with (
        STAGE[script] as url,
        open_policy(
            "openai", url + "/v1", replace(CONFIG, requests_per_minute=600), KEY
        ) as policy,
    ):
        threads = [threading.Thread(target=policy.run, args=(Echo(),)) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    gaps = [b - a for a, b in zip(script.times, script.times[1:], strict=False)]
    assert script.times[-1] - script.times[0] >= 0.35 and min(gaps) > 0.02


def test_keys_and_addresses(tmp_path, monkeypatch):
    file = tmp_path / "key"
    file.write_text("from-file\n")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "from-env")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert find_key("anthropic", "https://example.org", file) == "from-file"
    assert find_key("anthropic", "https://example.org") == "from-env"
    assert find_key("anthropic", "http://127.0.0.1:8") == "from-env"
    assert find_key("openai", "https://example.org") is None
    with pytest.raises(ValueError, match="without TLS") as caught:
        find_key("anthropic", "http://example.org")
    assert "from-env" not in str(caught.value)
    file.write_text("two words")
    with pytest.raises(ValueError, match="the key alone") as caught:
        find_key("anthropic", "https://example.org", file)
    assert "two words" not in str(caught.value)
    for url in (
        "example.org", "ftp://example.org", "http://", "http://h:port", "http://h/?a=b",
        "http://h h/v1", "http://h/v1\x7f", "http://h\n/v1", "http://h..org/v1",
    ):  # fmt: skip
        with pytest.raises(ValueError, match="isn't an address"):
            open_policy("openai", url, CONFIG, None)
    with pytest.raises(ValueError, match="--api-key-file") as caught:
        open_policy("openai", "http://me:word@127.0.0.1", CONFIG, None)
    assert "word@" not in str(caught.value)
    with pytest.raises(ValueError, match="ANTHROPIC_API_KEY"):
        open_policy("anthropic", None, CONFIG, None)


def test_wrong_settings_are_refused():
    for wrong in (
        {"model": ""}, {"temperature": -1}, {"deadline": 0}, {"max_turn_tokens": 0},
        {"requests_per_minute": 0}, {"retry": float("nan")},
    ):  # fmt: skip
        with pytest.raises(ValueError):
            replace(CONFIG, **wrong)
    with pytest.raises(ValueError, match="price"):
        Price(-1, 1)
    assert issubclass(Lost, Exception)
