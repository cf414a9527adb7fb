"""One episode: budgets, how it ends, what it pays, and what the Python session may know."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from envs.core import Environment, Reply, ToolCall
from envs.fast_ask import make_task
from envs.fast_ask.env import FastAskConfig, FastAskEnv, make_env, opening
from envs.sandbox import Sandbox, SandboxConfig
from envs.workbook import Sheet, Workbook

METADATA = ToolCall("get_workbook_metadata")


def read(*ranges: str, **more: object) -> ToolCall:
    return ToolCall("read_ranges", {"ranges": list(ranges), **more})


def run(code: str) -> ToolCall:
    return ToolCall("run_python", {"code": code})


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as made:
        yield made


@pytest.fixture
def env(sandbox: Sandbox) -> Iterator[FastAskEnv]:
    made = FastAskEnv(FastAskConfig(), sandbox)
    yield made
    made.close()


TASK = make_task(5, "region_net", "medium")


def test_it_is_an_environment(env: FastAskEnv) -> None:
    assert isinstance(env, Environment)


def test_the_opening_names_question_and_sheets(env: FastAskEnv) -> None:
    system, user = env.reset(TASK)
    assert (system.role, user.role) == ("system", "user") and "ANSWER:" in system.content
    question, sheets = user.content.split("\nSheets: ")
    assert question == TASK.question and sheets.split(", ") == env.toolbox.book.names()
    bare = opening("Why?", ["A"], FastAskConfig(list_sheets=False, prompt="short"))
    assert bare[1].content == "Why?" and len(bare[0].content) < 40


def test_a_right_answer_in_five_turns_by_hand(env: FastAskEnv) -> None:
    env.reset(TASK)
    for _ in range(4):
        step = env.step(Reply("", (METADATA,), tokens=500))
        assert not step.done and step.messages[0].role == "tool"
    step = env.step(Reply(f"I looked.\nANSWER: {TASK.truth}", tokens=40))
    assert step.done and step.stop_reason == "answered" and step.messages == ()
    score = env.score()
    # efficiency 1 - 4/14; concise 1 - (40 - 32)/(256 - 32), of the last message alone
    assert score.parts == pytest.approx(
        {"correct": 1.0, "efficiency": 0.7142857143, "concise": 0.9642857143}
    )
    assert score.total == pytest.approx(1 + 0.07142857143 + 0.04821428571)
    info = score.info
    assert (info["turns"], info["tool_calls"], info["answer"]) == (5, 4, TASK.truth)
    assert (info["type"], info["family"], info["truth"]) == ("region_net", "revenue", TASK.truth)
    assert info["malformed"] == 0 and info["seconds"] > 0 and info["difficulty"] == "medium"


@pytest.mark.parametrize(
    ("tokens", "concise"), [(0, 1.0), (32, 1.0), (144, 0.5), (256, 0.0), (1000, 0.0)]
)
def test_concise_by_hand(env: FastAskEnv, tokens: int, concise: float) -> None:
    env.reset(TASK)
    env.step(Reply("ANSWER: 1", tokens=tokens))
    score = env.score()
    assert score.parts == {"correct": 0.0, "efficiency": 1.0, "concise": pytest.approx(concise)}
    assert score.total == pytest.approx(0.1 + 0.05 * concise)


def test_shaping_may_require_a_right_answer(sandbox: Sandbox) -> None:
    env = FastAskEnv(FastAskConfig(shaping_requires_correct=True), sandbox)
    env.reset(TASK)
    env.step(Reply("ANSWER: 1", tokens=8))
    assert env.score().total == 0.0 and env.score().parts["efficiency"] == 1.0
    env.reset(TASK)
    env.step(Reply(f"ANSWER: {TASK.truth}", tokens=8))
    assert env.score().total == pytest.approx(1.15)


def test_weights_and_budget_are_settings(sandbox: Sandbox) -> None:
    config = FastAskConfig(max_turns=3, correct_weight=2, efficiency_weight=1, concise_weight=0)
    env = FastAskEnv(config, sandbox)
    env.reset(TASK)
    env.step(Reply("", (METADATA,)))
    env.step(Reply(f"ANSWER: {TASK.truth}", tokens=9))
    assert env.score().total == pytest.approx(2 + 0.5)
    one = FastAskEnv(FastAskConfig(max_turns=1), sandbox)
    one.reset(TASK)
    one.step(Reply(f"ANSWER: {TASK.truth}"))
    assert one.score().parts["efficiency"] == 1.0


def test_the_turn_budget_ends_an_episode_without_an_answer(env: FastAskEnv) -> None:
    env.reset(TASK)
    for turn in range(15):
        step = env.step(Reply(f"ANSWER: {TASK.truth}", (METADATA,), tokens=5))
        assert step.done == (turn == 14)
    assert step.stop_reason == "max_turns"
    score = env.score()
    assert score.parts == {"correct": 0.0, "efficiency": 0.0, "concise": 0.0}
    assert score.total == 0.0 and score.info["answer"] is None
    with pytest.raises(RuntimeError, match="over; call reset"):
        env.step(Reply("ANSWER: 1"))


def test_an_answer_beside_tool_calls_is_no_answer_yet(env: FastAskEnv) -> None:
    env.reset(TASK)
    step = env.step(Reply(f"ANSWER: {TASK.truth}", (METADATA,)))
    assert not step.done and step.messages[0].content.count("\n") >= 5
    env.step(Reply("ANSWER: 0"))
    assert env.score().parts["correct"] == 0.0 and env.score().info["answer"] == "0"


def test_the_last_turn_may_answer(env: FastAskEnv) -> None:
    env.reset(TASK)
    for _ in range(14):
        env.step(Reply("", (METADATA,)))
    assert env.step(Reply(f"ANSWER: {TASK.truth}", tokens=8)).stop_reason == "answered"
    assert env.score().parts == {"correct": 1.0, "efficiency": 0.0, "concise": 1.0}


def test_a_reply_without_answer_ends_the_episode(env: FastAskEnv) -> None:
    env.reset(TASK)
    assert env.step(Reply(f"It is {TASK.truth}.", tokens=8)).stop_reason == "no_answer"
    assert env.score().parts["correct"] == 0.0 and env.score().total == pytest.approx(0.15)


def test_a_cut_reply_ends_the_episode(env: FastAskEnv) -> None:
    env.reset(TASK)
    step = env.step(Reply("", (METADATA,), stop_reason="length"))
    assert step.done and step.stop_reason == "length" and env.score().parts["concise"] == 0.0
    env.reset(TASK)
    assert env.step(Reply("Let me see", tokens=9, stop_reason="length")).stop_reason == "length"
    env.reset(TASK)
    said = Reply(f"ANSWER: {TASK.truth}", tokens=9, stop_reason="length")
    assert env.step(said).stop_reason == "answered"
    assert env.score().parts["correct"] == 1.0


def test_a_budget_that_ends_between_turns_is_no_turn_and_no_short_message(
    env: FastAskEnv,
) -> None:
    env.reset(TASK)
    env.step(Reply("", (METADATA,), tokens=20))
    step = env.step(Reply("", stop_reason="length"))  # what the scheduler says then
    assert step.done and step.stop_reason == "length"
    score = env.score()
    assert score.info["turns"] == 1
    assert score.parts == {"correct": 0.0, "efficiency": 1.0, "concise": 0.0}


def test_calls_above_the_limit_of_one_reply_are_refused(env: FastAskEnv) -> None:
    env.reset(TASK)
    step = env.step(Reply("", (METADATA,) * 6))
    texts = [m.content for m in step.messages]
    assert len(texts) == 6 and len(set(texts[:4])) == 1
    assert texts[4:] == ["error: at most 4 calls in one reply"] * 2
    assert env.score().info["tool_calls"] == 6


def test_faults_come_back_as_text(env: FastAskEnv) -> None:
    env.reset(TASK)
    calls = (
        read("Nope!A1"),
        ToolCall("fly"),
        run("1/0"),
        ToolCall("read_ranges", {}, error="no closing tag"),
    )
    texts = [m.content for m in env.step(Reply("", calls)).messages]
    assert all("error: " in text for text in texts) and "ZeroDivisionError" in texts[2]
    info = env.score().info
    assert info["malformed"] == 3 and info["python_errors"] == info["python_calls"] == 1
    assert "ran" in env.step(Reply("", (run("print('ran')"),))).messages[0].content


def test_cells_that_were_read_are_records_and_state_is_kept(env: FastAskEnv) -> None:
    env.reset(TASK)
    env.step(Reply("", (read("Orders!A:D", show=0), read("OrderLines!A:D", show=0))))
    env.step(Reply("", (run("total = sum(l.qty for l in OrderLines)"),)))
    text = env.step(Reply("", (run("print(total, len(Orders), Orders[0]._row)"),))).messages[0]
    lines = [row[2] for r, row in env.toolbox.book["OrderLines"].rows.items() if r > 1]
    orders = len(env.toolbox.book["Orders"].rows) - 1
    assert text.content == f"{sum(lines)} {orders} 2"
    assert env.score().info["cells"] == 4 * (len(lines) + 1 + orders + 1)
    assert len(env.score().info["ranges"]) == 2
    reads = env.score().info["reads"]
    assert [[turn, call] for turn, call, *_ in reads] == [[1, 1], [1, 2]]
    assert [ranges for _, _, *ranges in reads] == [[text] for text in env.score().info["ranges"]]


def test_only_what_is_printed_comes_back(env: FastAskEnv) -> None:
    env.reset(TASK)
    text = env.step(Reply("", (run("x = 5"),))).messages[0].content
    assert "no output" in text


def test_nothing_is_shared_between_episodes(env: FastAskEnv) -> None:
    env.reset(TASK)
    env.step(Reply("", (read("Orders!A:D", show=0), run("secret = 41"))))
    env.reset(make_task(6, "region_net"))
    code = "print([name in globals() for name in ('secret', 'Orders', 'cells')])"
    text = env.step(Reply("", (run(code),))).messages[0].content
    assert text == "[False, False, False]"
    assert env.score().info["python_calls"] == 1 and env.score().info["cells"] == 0


def test_the_session_cannot_tell_yes_from_no_by_its_random_state(env: FastAskEnv) -> None:
    drawn = []
    for seed in (8, 9):  # same task but for the bit that balances yes and no
        env.reset(make_task(seed, "paid_by"))
        code = "import random; print(random.random())"
        drawn.append(env.step(Reply("", (run(code),))).messages[0].content)
    assert drawn[0] == drawn[1] and 0 <= float(drawn[0]) < 1


def test_truth_and_question_are_not_in_the_session(env: FastAskEnv) -> None:
    task = make_task(3, "top_customer", "hard")
    env.reset(task)
    code = (
        "import gc, sys\n"
        "texts = [v for d in gc.get_objects() if isinstance(d, dict) for v in d.values()]\n"
        f"print({task.truth[1:]!r} in [t[1:] for t in texts if isinstance(t, str)],\n"
        "      any(name.split('.')[0] == 'envs' for name in sys.modules))"
    )
    assert env.step(Reply("", (run(code),))).messages[0].content == "False False"


def test_a_plain_workbook_can_be_asked_without_a_task(env: FastAskEnv) -> None:
    book = Workbook([Sheet("S", {1: ("name", "cents"), 2: ("Ada", 5)})])
    messages = env.ask(book, "How much?")
    assert messages[1].content == "How much?\nSheets: S"
    env.step(Reply("", (read("S!A1:B2"),)))
    env.step(Reply("ANSWER: 5"))
    score = env.score()
    assert score.parts["correct"] == 0.0 and score.info["answer"] == "5"
    assert score.info["ranges"] == ["S!A1:B2"] and "truth" not in score.info


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        FastAskConfig(max_turns=0)
    with pytest.raises(ValueError, match="concise_free"):
        FastAskConfig(concise_free=300)
    with pytest.raises(ValueError, match='"full" or "short"'):
        FastAskConfig(prompt="long")


def test_the_pool_factory_makes_envs_that_share_a_sandbox() -> None:
    settings = pickle.loads(pickle.dumps((FastAskConfig(), SandboxConfig())))
    maker = make_env(settings)
    try:
        one, two = maker(1), maker(2)
        for env, seed in ((one, 1), (two, 2)):
            env.reset(make_task(seed, "top_vendor"))
            env.step(Reply("", (run(f"x = {seed}"),)))
        for env, seed in ((one, 1), (two, 2)):
            assert env.step(Reply("", (run("print(x)"),))).messages[0].content == str(seed)
            env.close()
    finally:
        maker.close()
