"""A taskset of `verifiers`, live in this process: its tasks, tool servers and harness.

verifiers is asynchronous, our environments aren't: everything of its runs on one event loop in a
thread of its own, and episodes are started there from outside.

Supported: what its training client supports (`verifiers.v1.clients.train`), of one agent: tasksets
that bring no environment class of their own, harnesses that speak chat completions, in the
subprocess runtime.  Tasks that want a container or a user who opens the conversation are refused.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from typing import Any

import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.mcp import serve_shared
from verifiers.v1.utils.loaders import harness_class

from envs.verifiers.choice import TasksetChoice
from envs.verifiers.exchange import Ended, Exchange, PolicyClient

CHAT = "fast-ask-v1"  # the harness that our own package brings


class _PolicyServer(InterceptionServer):
    """Hands every rollout our client, where verifiers would make one from its config."""

    def __init__(self, client: PolicyClient, secrets: tuple[str, ...]) -> None:
        """secrets: by which the shared tool servers reach the states of rollouts."""
        super().__init__(state_service_secrets=secrets)
        self._policy = client

    def _client(self, config: Any) -> PolicyClient:
        return self._policy


def load(choice: TasksetChoice) -> vf.Taskset:
    """The taskset.  Raises ValueError with one line for one that isn't there or can't be played."""
    name = choice.taskset
    try:
        kind = vf.taskset_config_type(name)
        taskset = vf.load_taskset(kind.model_validate(choice.taskset_config))
        environment = vf.environment_class(name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"there is no taskset {name!r} here ({error}): install its package beside this one"
        ) from None
    except ValidationError as error:
        raise ValueError(f"taskset {name}: {_told(error)}") from None
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{name!r} is no taskset of verifiers v1: {error}") from None
    if environment is not vf.SingleAgentEnv:
        raise ValueError(
            f"taskset {name} is played by its own {environment.__name__}: only plain tasksets, of "
            "one agent, can be trained on"
        )
    if taskset.task_type().NEEDS_CONTAINER:
        raise ValueError(f"tasks of {name} need a container: only those without can be trained on")
    return taskset


def _harness(choice: TasksetChoice) -> vf.HarnessConfig:
    name = choice.harness or vf.default_harness_id(choice.taskset)
    if choice.harness is None and name != choice.taskset:
        name = CHAT
    try:
        kind = vf.harness_config_type(name)
        config = kind.model_validate({**choice.harness_config, "id": name})
        needs = harness_class(name).NEEDS_CONTAINER
    except ModuleNotFoundError as error:
        raise ValueError(f"there is no harness {name!r} here ({error})") from None
    except ValidationError as error:
        raise ValueError(f"harness {name}: {_told(error)}") from None
    if needs:
        raise ValueError(f"harness {name} needs a container: only those without can be used")
    return config


def _told(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where + ': ' if where else ''}{first['msg']}"


class Host:
    """Plays episodes of one taskset.  Raises ValueError for one that can't be played."""

    def __init__(self, choice: TasksetChoice) -> None:
        self.choice = choice
        self.taskset = load(choice)
        self._agent_config = vf.AgentConfig(
            harness=_harness(choice),
            runtime=vf.SubprocessConfig(),
            model="policy",
            # Never asked: it makes harnesses' streams be answered whole, as in training.
            client=vf.TrainClientConfig(),
            sampling=vf.SamplingConfig(),
            max_turns=choice.max_turns,
            timeout={"rollout": choice.timeout},
        )
        self._tasks: list[vf.Task] = []
        self._left: Iterator[vf.Task] = iter(self.taskset)
        self._client = PolicyClient()
        self._live: set[asyncio.Task[None]] = set()
        self._stack = AsyncExitStack()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self._do(self._open())
        except BaseException:
            self.close()
            raise

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    async def _open(self) -> None:
        tools = self.taskset.toolsets(self.taskset.config)
        self._shared = await self._stack.enter_async_context(serve_shared(tools))
        secrets = tuple(s.state_secret for s in self._shared.values() if s.state_secret)
        server = await self._stack.enter_async_context(_PolicyServer(self._client, secrets))
        self._agent = vf.Agent(self._agent_config, interception=server)

    def count(self) -> int | None:
        """Its tasks; None where it has no end."""
        if not self.taskset.bounded:
            return None
        self._tasks += self._left
        return len(self._tasks)

    def task(self, index: int) -> vf.Task:
        """Raises ValueError where there are fewer."""
        self._tasks += itertools.islice(self._left, max(0, index + 1 - len(self._tasks)))
        if index >= len(self._tasks):
            raise ValueError(
                f"taskset {self.choice.taskset} has {len(self._tasks)} tasks here, and task number "
                f"{index} is wanted: it must load the same tasks in every process"
            )
        return self._tasks[index]

    def start(self, task: vf.Task) -> Exchange:
        """Begins an episode."""
        exchange = Exchange(self.loop)
        self.loop.call_soon_threadsafe(self._begin, task, exchange)
        return exchange

    def _begin(self, task: vf.Task, exchange: Exchange) -> None:
        playing = self.loop.create_task(self._play(task, exchange))
        exchange.cancel = lambda: self.loop.call_soon_threadsafe(playing.cancel)
        self._live.add(playing)
        playing.add_done_callback(self._live.discard)

    async def _play(self, task: vf.Task, exchange: Exchange) -> None:
        def on_trace(trace: vf.Trace) -> None:
            exchange.trace = trace
            self._client.exchanges[trace.id] = exchange

        ended = Ended(error="it was cancelled")
        try:
            trace = await self._agent.run(task, tools=self._shared, on_trace=on_trace)
            ended = Ended(trace, exchange.problem or _failure(trace))
        except Exception as error:
            ended = Ended(error=exchange.problem or f"{type(error).__name__}: {error}")
        finally:
            if exchange.trace is not None:
                self._client.exchanges.pop(exchange.trace.id, None)
            exchange.end(ended)

    def close(self) -> None:
        """Ends its episodes and its tool servers."""

        async def end() -> None:
            for playing in list(self._live):
                playing.cancel()
            await asyncio.gather(*self._live, return_exceptions=True)
            await self._stack.aclose()

        if self.loop.is_closed():
            return
        try:
            self._do(end())
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()


def _failure(trace: vf.Trace) -> str | None:
    if trace.ok:
        return None
    error = trace.last_error
    return "it failed" if error is None else f"{error.type}: {error.message}"
