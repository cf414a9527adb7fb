"""Trains a policy on an installed taskset of `verifiers` (Prime Intellect), v1.

    python -m experiments.verifiers --env.taskset gsm8k-v1 --run-dir runs/gsm8k --weights MODEL ...

The loop, its modes and its options are those of `experiments.fast_ask`; tasks, tools and reward are
the taskset's (`envs.verifiers`).  What can be played, and what is refused: docs/verifiers.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from envs.core import ToolSpec
from envs.pool import PoolConfig
from envs.verifiers.choice import DealConfig, TasksetChoice, VerifiersStream, VerifiersTask
from experiments.config import option, parse, run_main
from experiments.fast_ask import PRESET_CONFIGS
from experiments.run_config import RunConfig, World
from experiments.training import run
from fastask_jax.actor import Record

_DESCRIBE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from envs.verifiers.env import main; sys.exit(main(sys.argv[2]))"
)


@dataclass(frozen=True)
class Config(RunConfig):
    """One training run on a taskset of verifiers."""

    run_dir: Path = option(Path("runs/verifiers"), "where everything is kept")
    env: TasksetChoice = option(TasksetChoice(), "")
    # Importing verifiers takes seconds, starting a tool server some more.
    pool: PoolConfig = option(
        PoolConfig(
            call_timeout=600.0, start_timeout=300.0, heartbeat_timeout=60.0, verify_replay=False
        ),
        "",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.env.taskset:
            raise ValueError(
                "env.taskset is missing: give the id of an installed taskset of verifiers"
            )

    def world(self) -> World:
        """Raises ValueError for a taskset that can't be played, with one line that says why."""
        count, tools = describe(self.env)
        deal = DealConfig(self.env.taskset, count, self.loop.eval_tasks, self.loop.seed)
        stream = VerifiersStream(deal)
        return World(
            factory="envs.verifiers.env:make_env",
            settings=(self.env, tools),
            tools=tools,
            stream=stream,
            heldout=stream.heldout,
            describe=_outline,
            baselines=_none,
            decides={"env": self.env},
            title=f"{self.env.taskset}, {self.model} policy",
        )


PRESETS = {
    name: Config(
        model=preset.model,
        loop=preset.loop,
        optimizer=preset.optimizer,
        rollout=preset.rollout,
        engine=preset.engine,
        pack=preset.pack,
        env=TasksetChoice("fast-ask-v1"),
    )
    for name, preset in PRESET_CONFIGS.items()
}


def describe(choice: TasksetChoice) -> tuple[int | None, tuple[ToolSpec, ...]]:
    """How many tasks a taskset has (None: no end of them), and its tools.

    Asked of a process of its own: verifiers and JAX keep out of each other's.  Raises ValueError.
    """
    done = subprocess.run(
        [sys.executable, "-c", _DESCRIBE, json.dumps(sys.path), json.dumps(asdict(choice))],
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["it ended without a word"]
        if "No module named 'verifiers'" in lines[-1]:
            lines.append("pip install '.[verifiers]' brings what this needs")
        raise ValueError(lines[-1])
    found = json.loads(done.stdout.splitlines()[-1])
    return found["count"], tuple(ToolSpec(*tool) for tool in found["tools"])


def _outline(task: VerifiersTask) -> Mapping[str, Any]:
    return {"question": task.id}


def _none(heldout: list[Any]) -> dict[str, list[Record]]:
    """Who could solve any taskset without weights?"""
    return {}


def main(argv: list[str]) -> None:
    run(parse(Config, argv, presets=PRESETS, prog="python -m experiments.verifiers"))


if __name__ == "__main__":
    # Under the name by which processes on other hosts find the classes.
    from experiments import verifiers

    run_main(verifiers.main)
