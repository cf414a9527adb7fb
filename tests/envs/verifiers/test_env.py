"""Other people's tasksets as environments of ours: what passes both ways, and what is refused."""

import json

import pytest

from envs.core import Message, Reply, ToolCall
from envs.verifiers.choice import TasksetChoice, VerifiersTask

pytestmark = pytest.mark.slow
FIRST = VerifiersTask("ledger-v1-0", 0)


@pytest.fixture(scope="module")
def ledger(tasksets):
    """Makes environments of the ledger taskset, on one host."""
    from envs.verifiers.env import VerifiersEnv
    from envs.verifiers.host import Host

    host = Host(TasksetChoice("ledger-v1", solved=2.0))
    yield lambda: VerifiersEnv(host)
    host.close()


def odd(prompt: str, task: int = 0):
    """The first step of an episode of the odd taskset, or its error."""
    from envs.verifiers.env import VerifiersEnv
    from envs.verifiers.host import Host

    host = Host(TasksetChoice("odd-v1", args=json.dumps({"prompt": prompt})))
    try:
        env = VerifiersEnv(host)
        env.reset(VerifiersTask("odd", task))
        step = env.step(Reply("Said.", tokens=3))
        while not step.done:
            step = env.step(Reply("Said.", tokens=3))
        return env.score()
    finally:
        host.close()


def test_prompt_tools_turns_and_reward_are_the_tasksets(ledger):
    env = ledger()
    asked = env.reset(FIRST)
    assert asked == [
        Message("system", "Answer from the workbook."),
        Message("user", "What is the balance of cash?\nSheets: Accounts"),
    ]
    assert [(t.name, t.description) for t in env.tools] == [
        ("balance", "The balance of one account."),
        ("read_ranges", "Lists the accounts."),
    ]
    assert env.tools[0].parameters["required"] == ["account"]
    step = env.step(Reply("Look.", (ToolCall("balance", {"account": "cash"}),), tokens=9))
    assert (step.messages, step.done) == ((Message("tool", "120"),), False)
    step = env.step(Reply("ANSWER: 120", tokens=5))
    assert (step.messages, step.done, step.stop_reason) == ((), True, "answered")
    score = env.score()
    assert score.total == pytest.approx(2.25)
    assert score.parts == {"right": 2.0, "brief": 0.25, "correct": 1.0}
    assert score.info["metrics"] == {"words": 2.0, "asked": 1.0}
    assert (score.info["turns"], score.info["tool_calls"], score.info["malformed"]) == (2, 1, 0)
    with pytest.raises(RuntimeError, match="this episode is over"):
        env.step(Reply("more"))


def test_what_is_wrong_with_a_call_is_told_to_the_model(ledger):
    env = ledger()
    env.reset(FIRST)
    calls = (
        ToolCall("nothing", {}),
        ToolCall("balance", {}, "malformed tool call: missing </tool_call>"),
        ToolCall("balance", {"account": "cash"}),
    )
    texts = [m.content for m in env.step(Reply("", calls, tokens=9)).messages]
    assert texts[0] == "error: no tool named 'nothing'; tools: balance, read_ranges"
    assert texts[1].startswith("error: the arguments aren't JSON")
    assert texts[2] == "120"
    env.step(Reply("I don't know.", tokens=4))
    score = env.score()
    assert score.parts["correct"] == 0.0 and score.info["malformed"] == 1
    assert score.total == pytest.approx(0.25)


def test_an_episode_that_a_budget_ends_is_scored_as_it_stands(ledger):
    env = ledger()
    env.reset(FIRST)
    env.step(Reply("", (ToolCall("balance", {"account": "cash"}),), tokens=9))
    step = env.step(Reply("", stop_reason="length"))
    assert (step.done, step.stop_reason) == (True, "length")
    assert env.score().parts == {"right": 0.0, "brief": 0.5, "correct": 0.0}


def test_episodes_side_by_side_do_not_meet_and_dropped_ones_end(ledger):
    one, two = ledger(), ledger()
    one.reset(FIRST), two.reset(VerifiersTask("ledger-v1-1", 1))
    one.step(Reply("", (ToolCall("balance", {"account": "debt"}),), tokens=9))
    assert two.step(Reply("ANSWER: 45", tokens=5)).done and two.score().parts["right"] == 2.0
    exchange = one._exchange
    one.close()
    assert exchange.over.is_set() and not one._host._client.exchanges


def test_a_task_that_is_not_there_is_an_error(ledger):
    with pytest.raises(ValueError, match="has 6 tasks here, and task number 6 is wanted"):
        ledger().reset(VerifiersTask("ledger-v1-6", 6))


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (TasksetChoice("no-such-v1"), "there is no taskset 'no-such-v1' here"),
        (TasksetChoice("json"), "'json' is no taskset of verifiers v1"),
        (TasksetChoice("ledger-v1", args='{"coutn": 3}'), "taskset ledger-v1: coutn: "),
        (TasksetChoice("ledger-v1", harness="codex"), "harness codex needs a container"),
        (TasksetChoice("ledger-v1", harness="no-such"), "there is no harness 'no-such' here"),
    ],
)
def test_what_cannot_be_played_is_refused_in_one_line(tasksets, choice, said):
    from envs.verifiers.host import Host

    with pytest.raises(ValueError, match=said) as error:
        Host(choice)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("rewrite", "its harness rewrites the conversation"),
        ("responses", "doesn't speak chat completions"),
        ("divide", "TaskError: .*division by zero"),
    ],
)
def test_what_cannot_be_trained_on_fails_with_one_line(tasksets, prompt, said):
    with pytest.raises(RuntimeError, match=said):
        odd(prompt)


def test_a_harness_of_its_own_and_an_endless_taskset_are_played(tasksets):
    score = odd("plain", task=3)
    assert score.parts == {"broken": 1.0, "correct": 1.0}


def test_a_run_is_told_of_a_taskset_and_of_what_is_wrong_with_it(tasksets, capsys):
    """What `experiments.verifiers` asks a process of its own."""
    from envs.verifiers.env import main

    assert main('{"taskset": "odd-v1", "args": "{\\"prompt\\": \\"plain\\"}"}') == 0
    assert json.loads(capsys.readouterr().out) == {"count": None, "tools": []}
    assert main('{"taskset": "no-such-v1"}') == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("there is no taskset 'no-such-v1' here")
