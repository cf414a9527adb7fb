"""Who answers: our own weights, or a model that others serve, as the command line names it.

`fastask ask` and `fastask mcp` share these options.  Imports no JAX before `open`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from envs.fast_ask.env import FastAskConfig

if TYPE_CHECKING:
    from fastask_jax.ask.asker import Asker
    from fastask_jax.policies.remote import RemoteConfig

_REMOTE_ONLY = ("model", "api_key_file", "temperature", "deadline", "prompt")


@dataclass(frozen=True)
class PolicyChoice:
    """checkpoint: None takes the shipped weights.  openai: a server's address.  The others are of
    models elsewhere; see `fastask ask --help`."""

    checkpoint: str | None = None
    openai: str | None = None
    anthropic: bool = False
    anthropic_url: str | None = None
    model: str | None = None
    api_key_file: str | None = None
    temperature: float | None = None
    deadline: float | None = None
    prompt: str | None = None

    def __post_init__(self) -> None:
        if self.anthropic_url is not None and not self.anthropic:
            raise ValueError("--anthropic-url goes with --anthropic")
        named = [self.checkpoint is not None, self.openai is not None, self.anthropic]
        if sum(named) > 1:
            raise ValueError("give one of --checkpoint, --openai and --anthropic")
        if self.remote is None:
            given = [name for name in _REMOTE_ONLY if getattr(self, name) is not None]
            if given:
                flag = given[0].replace("_", "-")
                raise ValueError(f"--{flag} goes with --openai URL or --anthropic")
            return
        if self.model is None:
            raise ValueError(f"--{self.remote} needs --model NAME")
        self.settings()

    @property
    def remote(self) -> str | None:
        """The dialect, or None for our own weights."""
        return "openai" if self.openai is not None else "anthropic" if self.anthropic else None

    def settings(self) -> RemoteConfig:
        """Of a model that others serve.  Raises ValueError for values that can't be."""
        from fastask_jax.policies.remote import RemoteConfig

        assert self.model is not None
        config = RemoteConfig(self.model, temperature=self.temperature)
        if self.deadline is None:
            return config
        # Someone waits: a server that is away isn't waited for longer than for an answer.
        retry = min(config.retry, self.deadline) if self.deadline > 0 else config.retry
        return replace(config, deadline=self.deadline, retry=retry)

    def open(self, **options: Any) -> Asker:
        """options: for `Asker`.  Raises what that raises, and ValueError or OSError for addresses
        and keys."""
        from fastask_jax.ask.asker import Asker

        if self.remote is None:
            return Asker(self.checkpoint, **options)
        from fastask_jax.policies.remote import find_key, open_policy
        from fastask_jax.policies.remote.anthropic_messages import URL

        url = self.openai if self.remote == "openai" else self.anthropic_url
        asked = None if self.prompt is None else FastAskConfig(prompt=self.prompt)
        key = find_key(self.remote, url or URL, self.api_key_file)
        options.pop("compile_cache", None)
        policy = open_policy(self.remote, url, self.settings(), key)
        try:
            return Asker(remote=policy, config=asked, **options)
        except BaseException:
            policy.close()
            raise


def add_choice(parser: argparse.ArgumentParser) -> None:
    """The options, in a group of their own."""
    group = parser.add_argument_group("who answers (the shipped weights, unless one is named)")
    group.add_argument("--checkpoint", metavar="RUN", help="run directory of a training")
    group.add_argument(
        "--openai", metavar="URL", help="a server with OpenAI's API, as http://127.0.0.1:8000/v1"
    )
    group.add_argument(
        "--anthropic", action="store_true",
        help="Anthropic's API, with the key in ANTHROPIC_API_KEY",
    )  # fmt: skip
    group.add_argument(
        "--anthropic-url", metavar="URL", help="another server with that API (.../v1)"
    )
    group.add_argument("--model", metavar="NAME", help="the model's name at the server")
    group.add_argument(
        "--api-key-file", metavar="FILE", help="file whose only line is the server's key"
    )
    group.add_argument(
        "--temperature", type=float, metavar="T", help="of sampling (the server's own choice)"
    )
    group.add_argument(
        "--deadline", type=float, metavar="S", help="seconds that a question may take (600)"
    )
    group.add_argument(
        "--prompt", choices=("full", "short"),
        help="how the task is put: full explains it; short suits policies trained on it",
    )  # fmt: skip


def take_choice(values: dict[str, Any]) -> PolicyChoice:
    """Takes the options out of parsed ones.  Raises ValueError for those that don't go together."""
    return PolicyChoice(**{field.name: values.pop(field.name) for field in fields(PolicyChoice)})
