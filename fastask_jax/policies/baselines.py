"""Records of the policies that need no weights: blind and oracle, in the real environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envs.fast_ask.env import FastAskConfig, FastAskEnv
from envs.fast_ask.tasks import Task
from envs.sandbox import Sandbox, SandboxConfig
from fastask_jax.policies.base import Policy, run_episode
from fastask_jax.policies.blind import BlindPolicy
from fastask_jax.policies.oracle import OraclePolicy


def baseline_records(
    name: str, tasks: Sequence[Task], env: FastAskConfig, sandbox: SandboxConfig
) -> list[dict[str, Any]]:
    """One record a task, as `report.summary` takes them.  name: "blind" or "oracle"."""
    policy: Policy = (
        BlindPolicy.of_scale(tasks[0].scale) if name == "blind" else OraclePolicy(use_helper=True)
    )
    records = []
    with Sandbox(sandbox) as box:
        episode = FastAskEnv(env, box)
        for task in tasks:
            score = run_episode(policy, episode, task)
            info = score.info
            records.append(
                {
                    **{k: info[k] for k in ("task", "type", "family", "difficulty", "answer")},
                    "truth": info["truth"],
                    "correct": bool(score.parts["correct"]),
                    "reward": score.total,
                    "parts": dict(score.parts),
                    "turns": info["turns"],
                    "cells": info["cells"],
                    "seconds": info["seconds"],
                }
            )
    return records
