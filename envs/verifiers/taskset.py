"""Fast Ask as a taskset of `verifiers` v1: our tasks, our tools over MCP, our reward.

    vf-eval fast-ask-v1 -m MODEL --client.base-url URL --env.taskset.scale tiny ...

One tool server serves all rollouts of a process, as a server for each would take seconds to start.
It finds a rollout's workbook and Python session by the state that verifiers keeps for it: what the
task is made from, and the calls so far.  Sessions beyond `FastAskToolsConfig.sessions` are closed,
the longest unused first, and made again by repeating their calls: tools are deterministic.

Different from our own environment: calls of one reply aren't limited in number, as a tool server
can't see replies.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import verifiers.v1 as vf
from pydantic import Field, WithJsonSchema, field_validator

from envs.core import ToolCall, ToolSpec
from envs.fast_ask import (
    DIFFICULTIES,
    FAMILIES,
    KINDS,
    StreamConfig,
    Task,
    TaskStream,
    build_workbook,
    make_task,
)
from envs.fast_ask.answers import is_right, last_answer
from envs.fast_ask.env import FastAskConfig, FastAskEnv, opening, reward_parts
from envs.fast_ask.tools import TOOLS
from envs.sandbox import Sandbox, SandboxConfig

REWARD = FastAskConfig()


class FastAskData(vf.TaskData):
    """A task: what it is rebuilt from, and what it is judged by."""

    seed: int
    type: str
    family: str
    difficulty: str
    scale: str
    answer_type: str
    truth: str


class FastAskState(vf.State):
    """What the tool server knows of a rollout, and tells of it.

    task: seed, type, difficulty and scale.  calls: name and arguments of each so far."""

    rollout: str = ""
    task: tuple[int, str, str, str] | None = None
    calls: list[tuple[str, dict[str, Any]]] = Field(default_factory=list)
    cells: int = 0
    malformed: int = 0
    ranges: list[str] = Field(default_factory=list)


class FastAskToolsConfig(vf.SharedToolsetConfig):
    sessions: int = Field(64, ge=1)
    """Workbooks and Python sessions kept open at a time."""


@dataclass
class _Session:
    env: FastAskEnv
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        self.calls.append((name, arguments))
        return self.env.toolbox.call(ToolCall(name, arguments))


class FastAskTools(vf.Toolset[FastAskToolsConfig, FastAskState]):
    """The tools of `envs.fast_ask.tools`, by their own names."""

    TOOL_PREFIX = None

    async def setup(self) -> None:
        self._sandbox = Sandbox(SandboxConfig())
        self._exit_stack.callback(self._sandbox.close)
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    def register(self, mcp: Any) -> None:
        for spec in TOOLS:
            mcp.add_tool(
                self._with_state(self._function(spec)),
                name=spec.name,
                description=spec.description,
                structured_output=False,
            )

    def _function(self, spec: ToolSpec) -> Any:
        """A function with the tool's parameters, whose schemas are ours: what is wrong with an
        argument is for the toolbox to say."""

        async def call(**arguments: Any) -> str:
            return await self._call(spec.name, arguments)

        required = spec.parameters["required"]
        call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=inspect.Parameter.empty if name in required else None,
                    annotation=_annotation(schema),
                )
                for name, schema in spec.parameters["properties"].items()
            ],
            return_annotation=str,
        )
        return call

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        state = self.state
        given = {key: value for key, value in arguments.items() if value is not None}
        session = self._sessions.get(state.rollout)
        if session is None:
            if state.task is None:
                raise ValueError("this rollout has no task: its Task.setup has not run")
            session = self._sessions[state.rollout] = _Session(FastAskEnv(REWARD, self._sandbox))
            async with session.lock:
                try:
                    await asyncio.to_thread(_begin, session, state.task, state.calls)
                except BaseException:
                    del self._sessions[state.rollout]
                    raise
        self._sessions.move_to_end(state.rollout)
        async with session.lock:
            answer = await asyncio.to_thread(session.call, name, given)
        toolbox = session.env.toolbox
        state.calls = list(session.calls)
        state.cells, state.malformed = toolbox.cells_read, toolbox.malformed
        state.ranges = list(toolbox.ranges_read)
        await self._close_spare()
        return answer

    async def _close_spare(self) -> None:
        for rollout, session in list(self._sessions.items()):
            if len(self._sessions) <= self.config.sessions:
                return
            if not session.lock.locked():
                del self._sessions[rollout]
                await asyncio.to_thread(session.env.close)


def _annotation(schema: dict[str, Any]) -> Any:
    """A text stays one, even where it reads as JSON."""
    if schema["type"] == "string":
        return Annotated[str, WithJsonSchema(schema)]
    return Annotated[Any, WithJsonSchema(schema)]


def _begin(
    session: _Session, task: tuple[int, str, str, str], calls: list[tuple[str, dict[str, Any]]]
) -> None:
    session.env.reset(make_task(*task))
    for name, arguments in calls:
        session.call(name, arguments)


class FastAskTaskConfig(vf.TaskConfig):
    max_turns: int = Field(REWARD.max_turns, ge=1)
    """Turns that a rollout may take; `efficiency` is counted in shares of them."""
    shaping_requires_correct: bool = REWARD.shaping_requires_correct
    """Pay efficiency and concise only with a right answer."""

    @property
    def reward(self) -> FastAskConfig:
        return FastAskConfig(max_turns=self.max_turns)


class FastAskTask(vf.Task[FastAskData, FastAskState, FastAskTaskConfig]):
    """One question.  Its reward is the sum of our environment's parts, with their weights."""

    @property
    def key(self) -> str:
        return str(self.data.id)

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        data = self.data
        trace.state.rollout = trace.id
        trace.state.task = (data.seed, data.type, data.difficulty, data.scale)

    @vf.stop
    async def max_turns(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= self.config.max_turns

    @vf.reward(weight=REWARD.correct_weight)
    async def correct(self, trace: vf.Trace) -> float:
        return self._parts(trace)["correct"]

    @vf.reward(weight=REWARD.efficiency_weight)
    async def efficiency(self, trace: vf.Trace) -> float:
        return self._gated(trace, "efficiency")

    @vf.reward(weight=REWARD.concise_weight)
    async def concise(self, trace: vf.Trace) -> float:
        return self._gated(trace, "concise")

    @vf.metric
    async def cells(self, trace: vf.Trace) -> float:
        return float(trace.state.cells)

    @vf.metric
    async def tool_calls(self, trace: vf.Trace) -> float:
        return float(len(trace.state.calls))

    @vf.metric
    async def malformed_calls(self, trace: vf.Trace) -> float:
        return float(trace.state.malformed)

    def _gated(self, trace: vf.Trace, name: str) -> float:
        parts = self._parts(trace)
        gate = parts["correct"] if self.config.shaping_requires_correct else 1.0
        return gate * parts[name]

    def _parts(self, trace: vf.Trace) -> dict[str, float]:
        said, final = trace.assistant_messages, None
        if said and not said[-1].tool_calls:
            final = said[-1].content or ""
        answer = None if final is None else last_answer(final)
        right = is_right(answer, self.data.truth, self.data.answer_type)
        tokens = None if final is None else _tokens(trace)
        return reward_parts(self.config.reward, right, len(said), tokens)


def _tokens(trace: vf.Trace) -> int | None:
    """Tokens of the last message, as the server counted them; None where it doesn't say."""
    usage = [call.usage for call in trace.calls if call.node is not None]
    return usage[-1].completion_tokens if usage and usage[-1] is not None else None


class FastAskTasksetConfig(vf.TasksetConfig):
    """Which questions are asked; see `envs.fast_ask.StreamConfig`."""

    task: FastAskTaskConfig = FastAskTaskConfig()
    tools: FastAskToolsConfig = FastAskToolsConfig()
    split: Literal["train", "heldout"] = "heldout"
    scale: Literal["tiny", "standard"] = "tiny"
    difficulties: list[str] = Field(default_factory=lambda: list(DIFFICULTIES))
    """easy, medium, hard; dealt equally."""
    families: list[str] = Field(default_factory=lambda: list(FAMILIES))
    """revenue, reconciliation, spend."""
    seed: int = 0
    count: int = Field(128, ge=1)
    """Tasks there are; `-n` takes the first of them."""
    prompt: Literal["full", "short"] = "full"
    """The short one suits the policies that this project trains."""

    @field_validator("families")
    @classmethod
    def _known(cls, families: list[str]) -> list[str]:
        unknown = [name for name in families if name not in FAMILIES]
        if unknown or not families:
            raise ValueError(f"families are some of {', '.join(FAMILIES)}, not {families}")
        return families

    def stream(self) -> TaskStream:
        types = tuple(name for name, kind in KINDS.items() if kind.family in self.families)
        return TaskStream(
            StreamConfig(self.split, self.scale, tuple(self.difficulties), types, self.seed)
        )


class FastAskTaskset(vf.Taskset[FastAskTask, FastAskTasksetConfig]):
    """The first `count` tasks of a stream, which are the same everywhere."""

    @classmethod
    def toolsets(cls, config: FastAskTasksetConfig) -> list[vf.Toolset]:
        return [FastAskTools(config.tools)]

    def load(self) -> Iterable[FastAskTask]:
        stream = self.config.stream()
        for number in range(self.config.count):
            yield FastAskTask(self._data(stream.task(number)), self.config.task)

    def _data(self, task: Task) -> FastAskData:
        config = FastAskConfig(prompt=self.config.prompt)
        system, user = opening(task.question, build_workbook(task).names(), config)
        return FastAskData(
            id=task.id,
            name=task.id,
            prompt=user.content,
            system_prompt=system.content,
            seed=task.seed,
            type=task.type,
            family=task.family,
            difficulty=task.difficulty,
            scale=task.scale,
            answer_type=task.answer_type,
            truth=task.truth,
        )


if __name__ == "__main__":  # verifiers starts tool servers as `python -m MODULE`
    FastAskTools.run()
