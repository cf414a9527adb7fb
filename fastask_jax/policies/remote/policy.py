"""Plays episodes with a model that others serve.

A `RemotePolicy` holds the connection and the bounds; each `Talk` is one conversation with the
`Policy` protocol, and `run` plays a whole episode and scores it.  A fault of the server or of the
environment is the trajectory's `error`, never an answer; a request that is refused for good
(a wrong key, say) is raised, since the next episode would fail as well.

Left out: batches of episodes.  `run` is called from as many threads as shall play at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from envs.core import Environment, Message, Reply, ToolSpec
from fastask_jax.policies.remote.anthropic_messages import URL as ANTHROPIC
from fastask_jax.policies.remote.anthropic_messages import AnthropicMessages
from fastask_jax.policies.remote.client import Lost, OutOfTime, Refused, RemoteClient
from fastask_jax.policies.remote.config import RemoteConfig
from fastask_jax.policies.remote.dialect import Dialect, Native, Strange
from fastask_jax.policies.remote.openai_chat import OpenAIChat
from fastask_jax.policies.remote.trajectory import RemoteTrajectory

_DIALECTS: dict[str, Callable[[], Dialect]] = {
    "openai": OpenAIChat,
    "anthropic": AnthropicMessages,
}
# Said in the model's place where a bound ends the episode.
_NOTHING = Reply("", stop_reason="length")


def open_policy(
    dialect: str, url: str | None, config: RemoteConfig, key: str | None
) -> RemotePolicy:
    """dialect: "openai" or "anthropic".  url: None takes Anthropic's own.

    Raises ValueError for a wrong address or dialect, or where Anthropic's own service would be
    asked without a key."""
    if dialect not in _DIALECTS:
        raise ValueError(f"a dialect is {' or '.join(_DIALECTS)}, not {dialect!r}")
    if url is None:
        if dialect != "anthropic":
            raise ValueError("give the server's address, such as http://127.0.0.1:8000/v1")
        if key is None:
            raise ValueError("no key: set ANTHROPIC_API_KEY or give --api-key-file FILE")
        url = ANTHROPIC
    made = _DIALECTS[dialect]()
    client = RemoteClient(
        url,
        made.headers(key),
        silence=config.silence,
        retry=config.retry,
        requests_per_minute=config.requests_per_minute,
        connections=config.connections,
    )
    return RemotePolicy(client, made, config)


class RemotePolicy:
    """See the module.  Its methods may be called from several threads.  Close it, or use `with`."""

    def __init__(self, client: RemoteClient, dialect: Dialect, config: RemoteConfig) -> None:
        self.client, self.dialect, self.config = client, dialect, config

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self.client.close()

    @property
    def name(self) -> str:
        """The model and where it is: nothing secret."""
        return f"{self.config.model} at {self.client.url}"

    def talk(self) -> Talk:
        """A conversation, which acts as a `Policy` for one episode."""
        return Talk(self)

    def run(
        self, environment: Environment, task: Any = None, *, group: int = 0, sample: int = 0
    ) -> RemoteTrajectory:
        """One scored episode in `environment`, which is closed at its end.

        Raises `client.Refused`; anything else that goes wrong outside of the model is the
        trajectory's `error`.
        """
        talk = self.talk()
        trajectory = talk.trajectory
        trajectory.task_id = str(getattr(task, "id", "question"))
        trajectory.group, trajectory.sample, trajectory.task = group, sample, task
        began = time.monotonic()
        try:
            self._play(talk, environment, task)
        except _Broken as error:
            trajectory.error = str(error)
        except Lost as error:
            trajectory.error = str(error)
        finally:
            environment.close()
            trajectory.seconds = time.monotonic() - began - trajectory.waited
        if trajectory.error is not None:
            trajectory.stop_reason = "error"
        return trajectory

    def _play(self, talk: Talk, environment: Environment, task: Any) -> None:
        messages = _call(environment.reset, task)
        reply = talk.start(messages, environment.tools, task)
        while True:
            step = _call(environment.step, reply)
            if step.done:
                talk.trajectory.score = _call(environment.score)
                talk.trajectory.stop_reason = talk.closing or step.stop_reason or "answered"
                return
            if talk.closing is not None:
                raise _Broken(f"the environment went on after the episode's end ({talk.closing})")
            reply = talk.reply(step.messages)


class Talk:
    """One conversation.  trajectory: what was said so far, and what it took.  closing: which
    bound has ended it ("context", "token_budget", "deadline"); a reply of nothing then stands for
    the rest."""

    def __init__(self, policy: RemotePolicy) -> None:
        self._policy = policy
        config = policy.config
        self.trajectory = RemoteTrajectory("question", model=config.model, rates=config.price)
        self.closing: str | None = None
        self._tools: tuple[ToolSpec, ...] = ()
        self._system: list[Message] = []
        self._history: list[Native] = []
        self._ids: tuple[str, ...] = ()
        self._began = 0.0

    def start(
        self, messages: Sequence[Message], tools: tuple[ToolSpec, ...], task: Any = None
    ) -> Reply:
        """Raises Lost or Refused, also where the first messages don't fit into the model."""
        self._began = time.monotonic()
        self._tools = tools
        self._system = [m for m in messages if m.role == "system"]
        self.trajectory.entries.append(tuple(messages))
        others = [m for m in messages if m.role != "system"]
        if not others or any(m.role != "user" for m in others):
            raise ValueError("an episode begins with system messages and at least one of a user")
        self._history += self._policy.dialect.told(others, ())
        return self._ask(first=True)

    def reply(self, messages: Sequence[Message]) -> Reply:
        """Raises Lost or Refused."""
        self.trajectory.entries.append(tuple(messages))
        self._history += self._policy.dialect.told(messages, self._ids)
        return self._ask(first=False)

    def _ask(self, first: bool) -> Reply:
        config, dialect, trajectory = self._policy.config, self._policy.dialect, self.trajectory
        left = config.deadline - (time.monotonic() - self._began - trajectory.waited)
        budget = config.max_turn_tokens
        if config.max_tokens is not None:
            budget = min(budget, config.max_tokens - trajectory.sampled)
        if budget < 1 or left <= 0:
            return self._close("token_budget" if budget < 1 else "deadline")
        body = dialect.body(config, self._system, self._history, self._tools, budget)
        started = time.monotonic()
        try:
            answered = self._policy.client.post(dialect.path, body, left)
        except OutOfTime:
            return self._close("deadline")
        except Refused as error:
            if error.too_long and not first:
                return self._close("context")
            raise
        except Lost:
            trajectory.waited += time.monotonic() - started
            raise
        trajectory.waited += answered.waited
        trajectory.tries += answered.tries
        try:
            said = dialect.read(answered.value, self._tools)
        except Strange as error:
            raise Lost(
                f"{self._policy.client.url} doesn't answer as {dialect.name} servers do: {error}"
            ) from None
        self._history.append(said.native)
        self._ids = said.ids
        trajectory.entries.append(said.reply)
        trajectory.usages.append(said.usage)
        if said.reply.stop_reason == "length" and budget < config.max_turn_tokens:
            self.closing = "token_budget"
        return said.reply

    def _close(self, why: str) -> Reply:
        self.closing = why
        return _NOTHING


class _Broken(Exception):
    """A fault of the environment."""


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        raise _Broken(f"{type(error).__name__}: {error}") from error
