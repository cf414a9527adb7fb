"""Models that others serve, as policies: any OpenAI-compatible server, and Anthropic's API.

    policy = open_policy("openai", "http://127.0.0.1:8000/v1", RemoteConfig("tiny"), key=None)
    with policy:
        trajectory = policy.run(environment, task)     # safe from several threads at a time

`client` asks over HTTP, with retries, a rate and a deadline; `openai_chat` and
`anthropic_messages` are the two dialects; `policy` plays episodes; `trajectory` is the record.
All of it is over httpx (`pip install '.[http]'`), not the vendors' packages: what is needed of
them is one POST each, and one place has to decide what is tried again and what its waiting costs.

Imports no JAX.
"""

from fastask_jax.policies.remote.anthropic_messages import AnthropicMessages
from fastask_jax.policies.remote.client import Lost, Refused, RemoteClient, RemoteError
from fastask_jax.policies.remote.config import Price, RemoteConfig
from fastask_jax.policies.remote.keys import find_key
from fastask_jax.policies.remote.openai_chat import OpenAIChat
from fastask_jax.policies.remote.policy import RemotePolicy, open_policy
from fastask_jax.policies.remote.trajectory import RemoteTrajectory

__all__ = [
    "AnthropicMessages",
    "Lost",
    "OpenAIChat",
    "Price",
    "Refused",
    "RemoteClient",
    "RemoteConfig",
    "RemoteError",
    "RemotePolicy",
    "RemoteTrajectory",
    "find_key",
    "open_policy",
]
