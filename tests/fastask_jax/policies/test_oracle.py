"""The oracle answers every task through the tools alone: in memory, from files, within budget."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from envs.core import Message, Reply, ToolCall
from envs.fast_ask import DIFFICULTIES, KINDS, Task, answers, build_workbook, make_task
from envs.fast_ask.env import FastAskConfig, FastAskEnv
from envs.fast_ask.tools import TOOLS
from envs.sandbox import Sandbox
from envs.workbook import read_workbook, write_xlsx
from fastask_jax.policies.base import run_episode
from fastask_jax.policies.oracle import OraclePolicy


@pytest.fixture(scope="module")
def env() -> Iterator[FastAskEnv]:
    with Sandbox() as sandbox:
        yield FastAskEnv(FastAskConfig(), sandbox)


def solve(env: FastAskEnv, task: Task, **settings: bool) -> dict:
    score = run_episode(OraclePolicy(**settings), env, task)
    assert score.parts["correct"] == 1.0, (task, score.info)
    assert score.info["malformed"] == score.info["python_errors"] == 0
    return score.info


@pytest.mark.parametrize("kind", KINDS)
def test_every_tiny_task_is_solved_in_four_turns(env: FastAskEnv, kind: str) -> None:
    for difficulty in DIFFICULTIES:
        for seed in range(100, 108):
            info = solve(env, make_task(seed, kind, difficulty))
            assert info["turns"] == 4 and info["cells"] <= 400


@pytest.mark.parametrize("kind", KINDS)
def test_the_helper_of_an_easy_workbook_is_a_direct_path(env: FastAskEnv, kind: str) -> None:
    for seed in range(100, 110):
        task = make_task(seed, kind, "easy")
        short = solve(env, task, use_helper=True)
        assert short["turns"] == 4
    for seed, difficulty in ((3, "medium"), (4, "hard")):
        solve(env, make_task(seed, kind, difficulty), use_helper=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_standard_tasks_are_solved_within_the_turns(env: FastAskEnv, kind: str) -> None:
    for seed, difficulty in enumerate(DIFFICULTIES, 40):
        task = make_task(seed, kind, difficulty, "standard")
        assert solve(env, task)["turns"] <= 15
        long = solve(env, task, one_read_per_call=True)
        assert 6 <= long["turns"] <= 15
        if difficulty == "easy":
            solve(env, task, use_helper=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_gives_the_same_episode_as_memory(
    env: FastAskEnv, tmp_path: Path, kind: str
) -> None:
    for difficulty in DIFFICULTIES:
        task = make_task(77, kind, difficulty)
        path = tmp_path / "book.xlsx"
        write_xlsx(build_workbook(task), path)
        transcripts = []
        for book in (build_workbook(task), read_workbook(path)):
            messages = env.ask(book, task.question)
            seen = [m.content for m in messages]
            policy = OraclePolicy(use_helper=difficulty == "easy")
            reply = policy.start(messages, TOOLS, task)
            while True:
                step = env.step(reply)
                seen += [m.content for m in step.messages]
                if step.done:
                    break
                reply = policy.reply(step.messages)
            seen.append(reply.content)
            said = answers.last_answer(reply.content)
            assert answers.is_right(said, task.truth, task.answer_type), task
            env.close()
            transcripts.append(seen)
        assert transcripts[0] == transcripts[1]


@pytest.mark.slow
def test_a_large_file_is_solved_like_memory(env: FastAskEnv, tmp_path: Path) -> None:
    task = make_task(12, "over_budget", "easy", "standard")
    path = tmp_path / "book.xlsx"
    write_xlsx(build_workbook(task), path)
    book = read_workbook(path)
    assert [s.rows for s in book.sheets] == [s.rows for s in build_workbook(task).sheets]
    policy = OraclePolicy()
    reply = policy.start(env.ask(book, task.question), TOOLS, task)
    while reply.tool_calls:
        reply = policy.reply(env.step(reply).messages)
    env.close()
    assert reply.content == f"ANSWER: {task.truth}"


class ReadsEverything:
    """Reads sheet after sheet, as many cells as a call and as many calls as a reply allow."""

    def start(self, messages: list[Message], tools: tuple, task: Task) -> Reply:
        return Reply("", (ToolCall("get_workbook_metadata"),))

    def reply(self, messages: tuple[Message, ...]) -> Reply:
        if not hasattr(self, "calls"):
            used = re.findall(r"^(\S+)!A(\d+):([A-Z]+)(\d+)", messages[0].content, re.MULTILINE)
            self.calls = []
            for sheet, top, right, bottom in used:
                rows = 1000 // (ord(right) - 64)
                for first in range(int(top), int(bottom) + 1, rows):
                    last = min(first + rows - 1, int(bottom))
                    ranges = [f"{sheet}!A{first}:{right}{last}"]
                    self.calls.append(ToolCall("read_ranges", {"ranges": ranges, "show": 0}))
        assert not any(m.content.startswith("error") for m in messages)
        calls, self.calls = tuple(self.calls[:4]), self.calls[4:]
        return Reply("", calls)


@pytest.mark.slow
def test_reading_everything_of_a_hard_standard_workbook_exhausts_the_turns(
    env: FastAskEnv,
) -> None:
    for kind in ("region_net", "paid_on", "reversed_row"):
        policy = ReadsEverything()
        score = run_episode(policy, env, make_task(9, kind, "hard", "standard"))
        assert score.info["stop_reason"] == "max_turns" and policy.calls
        assert score.info["cells"] > 40_000


def test_the_oracle_sees_no_truth(env: FastAskEnv) -> None:
    """With the truth taken out of the task it does the same."""
    task = make_task(5, "category_spend", "hard")
    blank = Task(**{**vars(task), "truth": "0"})
    for given in (task, blank):
        score = run_episode(OraclePolicy(), env, given)
        assert score.info["answer"] == task.truth
