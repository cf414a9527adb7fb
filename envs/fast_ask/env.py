"""One Fast Ask episode: a question, three tools, a turn budget, a verifiable reward.

The reward is the Fast Ask post's: 1.0 correct + 0.1 efficiency + 0.05 concise.
The environment holds the truth; the Python session never does: it is a process forked from
a zygote that was started before any task existed.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from envs.core import Message, Reply, Score, Step, ToolSpec
from envs.fast_ask import answers
from envs.fast_ask.tasks import Task, build_workbook
from envs.fast_ask.tools import TOOLS, Toolbox
from envs.sandbox import Sandbox, SandboxConfig, Session
from envs.workbook import Workbook

SYSTEM_PROMPT = (
    "You answer one question about a workbook. Use the tools to find out, then reply with one "
    "line: ANSWER: followed by the value alone. Money is in whole cents, months are YYYY-MM, "
    "dates YYYY-MM-DD, yes/no questions yes or no, rows Sheet!row, others the plain name or id. "
    "Fewer turns are better."
)
SHORT_PROMPT = "Answer from the workbook."
NO_OUTPUT = "(no output; use print)"


@dataclass(frozen=True)
class FastAskConfig:
    """Budgets and reward of an episode.

    max_turns: replies that a policy may give.
    max_calls: tool calls taken from one reply; more are refused.
    correct_weight, efficiency_weight, concise_weight: of the parts of the reward.
    concise_free, concise_limit: tokens of the last message up to which `concise` is 1, and from
        which it is 0.
    shaping_requires_correct: pay efficiency and concise only with a right answer.
    list_sheets: append the sheet names to the question, as the post's example does.
    prompt: "full" explains the answer format; "short" suits a model trained on it.
    """

    max_turns: int = 15
    max_calls: int = 4
    correct_weight: float = 1.0
    efficiency_weight: float = 0.1
    concise_weight: float = 0.05
    concise_free: int = 32
    concise_limit: int = 256
    shaping_requires_correct: bool = False
    list_sheets: bool = True
    prompt: str = "full"

    def __post_init__(self) -> None:
        if self.max_turns < 1 or self.max_calls < 1:
            raise ValueError("max_turns and max_calls must be at least 1")
        for name in ("correct_weight", "efficiency_weight", "concise_weight"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be finite, not {getattr(self, name)}")
        if not 0 <= self.concise_free < self.concise_limit:
            raise ValueError("concise_free must be at least 0 and below concise_limit")
        if self.prompt not in ("full", "short"):
            raise ValueError(f'prompt is "full" or "short", not {self.prompt!r}')


def system_prompt(config: FastAskConfig) -> str:
    return SYSTEM_PROMPT if config.prompt == "full" else SHORT_PROMPT


def reward_parts(
    config: FastAskConfig, correct: bool, turns: int, final_tokens: int | None
) -> dict[str, float]:
    """Parts of the reward, unweighted, each 0 to 1.  turns: that the policy took.  final_tokens:
    of its last message; None where none ended the episode."""
    efficiency = 1 - (max(turns, 1) - 1) / max(config.max_turns - 1, 1)
    over = (config.concise_limit if final_tokens is None else final_tokens) - config.concise_free
    concise = min(1.0, max(0.0, 1 - over / (config.concise_limit - config.concise_free)))
    return {"correct": float(correct), "efficiency": efficiency, "concise": concise}


def opening(question: str, sheet_names: list[str], config: FastAskConfig) -> list[Message]:
    """The messages that an episode starts with."""
    if config.list_sheets:
        question = f"{question}\nSheets: {', '.join(sheet_names)}"
    return [Message("system", system_prompt(config)), Message("user", question)]


class FastAskEnv:
    """One episode at a time; `reset` starts the next.  Not thread-safe."""

    tools: tuple[ToolSpec, ...] = TOOLS

    def __init__(self, config: FastAskConfig, sandbox: Sandbox) -> None:
        self.config = config
        self._sandbox = sandbox
        self._session: Session | None = None
        self._task: Task | None = None

    def reset(self, task: Task) -> list[Message]:
        # The seed's low bits tell the split and a yes or no: the session doesn't get them.
        return self._start(build_workbook(task), task.question, task.seed >> 2, task)

    def ask(self, book: Workbook, question: str) -> list[Message]:
        """Starts an episode on any workbook; its score knows no truth and stays 0."""
        return self._start(book, question, 0, None)

    def _start(self, book: Workbook, question: str, seed: int, task: Task | None) -> list[Message]:
        self.close()
        self._task, self._seed = task, seed
        self.toolbox = Toolbox(book, self._python, self._bind)
        self.turns = self.tool_calls = 0
        self.python_calls = self.python_errors = 0
        self.reads: list[list[Any]] = []  # [turn, call of that turn, its ranges ...]
        self.final: Reply | None = None
        self.stop_reason: str | None = None
        self._started = time.monotonic()
        return opening(question, book.names(), self.config)

    def _open_session(self) -> Session:
        if self._session is None:
            self._session = self._sandbox.session(seed=self._seed)
        return self._session

    def _bind(self, sheet: str, top: int, left: int, rows: list[list]) -> None:
        self._open_session().bind(sheet, top, left, rows)

    def _python(self, code: str) -> str:
        self.python_calls += 1
        result = self._open_session().run(code)
        output = result.output.rstrip("\n")
        if result.error is None:
            return output or NO_OUTPUT
        self.python_errors += 1
        return f"{output}\nerror: {result.error}".lstrip("\n")

    def step(self, reply: Reply) -> Step:
        if self.stop_reason is not None:
            raise RuntimeError("this episode is over; call reset first")
        if reply.stop_reason == "length" and not (
            reply.tokens or reply.content or reply.tool_calls
        ):
            # A budget ended the episode between two turns.  Nothing was said, so this is no
            # turn, and no short final message to be paid for.
            return self._end("length")
        self.turns += 1
        if not reply.tool_calls:
            self.final = reply
            if answers.last_answer(reply.content) is not None:
                return self._end("answered")
            return self._end("length" if reply.stop_reason == "length" else "no_answer")
        messages = []
        for i, call in enumerate(reply.tool_calls):
            self.tool_calls += 1
            before = len(self.toolbox.ranges_read)
            if i < self.config.max_calls:
                text = self.toolbox.call(call)
            else:
                text = f"error: at most {self.config.max_calls} calls in one reply"
            if ranges := self.toolbox.ranges_read[before:]:
                self.reads.append([self.turns, i + 1, *ranges])
            messages.append(Message("tool", text))
        if reply.stop_reason == "length":
            return self._end("length")
        if self.turns >= self.config.max_turns:
            return self._end("max_turns")
        return Step(tuple(messages), False)

    def _end(self, reason: str) -> Step:
        self.stop_reason = reason
        return Step((), True, reason)

    def score(self) -> Score:
        """Reward of the episode; before its end, that of stopping here without an answer."""
        c = self.config
        said = answers.last_answer(self.final.content) if self.final else None
        task = self._task
        right = task is not None and answers.is_right(said, task.truth, task.answer_type)
        parts = reward_parts(c, right, self.turns, self.final.tokens if self.final else None)
        gate = parts["correct"] if c.shaping_requires_correct else 1.0
        shaping = c.efficiency_weight * parts["efficiency"] + c.concise_weight * parts["concise"]
        info: dict[str, Any] = {
            "answer": said,
            "turns": self.turns,
            "tool_calls": self.tool_calls,
            "malformed": self.toolbox.malformed,
            "cells": self.toolbox.cells_read,
            "ranges": list(self.toolbox.ranges_read),
            "reads": [list(read) for read in self.reads],
            "python_calls": self.python_calls,
            "python_errors": self.python_errors,
            "stop_reason": self.stop_reason,
            "seconds": time.monotonic() - self._started,
        }
        if task:
            info |= {
                "task": task.id,
                "type": task.type,
                "family": task.family,
                "difficulty": task.difficulty,
                "truth": task.truth,
            }
        return Score(c.correct_weight * parts["correct"] + gate * shaping, parts, info)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None


class EnvMaker:
    """Makes environments that share one sandbox; `close` ends the sandbox and its processes."""

    def __init__(self, config: FastAskConfig, sandbox_config: SandboxConfig) -> None:
        self._config = config
        self._sandbox = Sandbox(sandbox_config)

    def __call__(self, episode_id: Any) -> FastAskEnv:
        return FastAskEnv(self._config, self._sandbox)

    def close(self) -> None:
        self._sandbox.close()


def make_env(settings: tuple[FastAskConfig, SandboxConfig]) -> EnvMaker:
    """Factory for `EnvPool`: one sandbox for all episodes of a worker."""
    return EnvMaker(*settings)
