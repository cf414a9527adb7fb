"""Policies: anything that can act in an environment.

`base` says what that means; `oracle`, `explorer` and `random` are scripts, `engine` is our own
model.  Only `engine` needs JAX.
"""

from fastask_jax.policies.base import Policy, run_episode

__all__ = ["Policy", "run_episode"]
