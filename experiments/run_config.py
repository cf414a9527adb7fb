"""What decides a training run, but for what it is trained on; and what that has to give: a `World`.

An experiment's config adds its tasks and environments to `RunConfig` and makes the `World` of them
(`experiments.fast_ask`, `experiments.verifiers`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.core import ToolSpec
from envs.pool import PoolConfig
from experiments.config import option
from fastask_jax.actor import Record
from fastask_jax.distributed import DistributedConfig
from fastask_jax.fleet.config import FleetConfig
from fastask_jax.learn import Objective, OptimizerConfig, PackConfig
from fastask_jax.loop import LoopConfig
from fastask_jax.model import PRESETS
from fastask_jax.model.lora import LoraConfig
from fastask_jax.model.mesh import MeshConfig
from fastask_jax.model.tokenizers import shipped_weights
from fastask_jax.rollout.engine import EngineConfig
from fastask_jax.rollout.scheduler import RolloutConfig
from kernels.choice import Kernels


@dataclass(frozen=True)
class World:
    """What a run's tasks are, and the environments that they are played in.

    factory, settings: of an `EnvPool`.  tools: that its episodes offer.  stream: deals the tasks
    to train on.  heldout: makes those of evaluations.
    describe: what traces tell of a task.  baselines: names and records of policies without weights
    on the held-out tasks.  decides: named values that a policy's experience follows from, beside
    the tasks; a resumed run must have the same.  title: of plots.
    """

    factory: str
    settings: Any
    tools: tuple[ToolSpec, ...]
    stream: Any
    heldout: Callable[[], list[Any]]
    describe: Callable[[Any], Mapping[str, Any]]
    baselines: Callable[[list[Any]], dict[str, list[Record]]]
    decides: Mapping[str, Any]
    title: str


@dataclass(frozen=True)
class RunConfig:
    """One training run, but for its tasks and environments: `world`."""

    run_dir: Path = option(Path("runs/fast-ask"), "where everything is kept")
    resume: bool = option(False, "go on from the last committed checkpoint, if there is one")
    model: str = option("tiny", "model preset; the weights must have its shape")
    weights: Path | None = option(None, "folder or GGUF file to start from; none: the shipped ones")
    mode: str = option("sync", "sync (sample, learn, in turn) or async (a fleet samples on)")
    loop: LoopConfig = option(LoopConfig(), "")
    objective: Objective = option(Objective(), "")
    optimizer: OptimizerConfig = option(OptimizerConfig(), "")
    lora: LoraConfig = option(LoraConfig(), "")
    rollout: RolloutConfig = option(RolloutConfig(max_turn_tokens=128, max_tokens=512), "")
    engine: EngineConfig = option(EngineConfig(slots=64, max_len=768), "")
    fleet: FleetConfig = option(FleetConfig(), "")
    pack: PackConfig = option(PackConfig((512, 768), 2), "")
    mesh: MeshConfig = option(MeshConfig(), "")
    # The devices of each engine.
    rollout_mesh: MeshConfig = option(MeshConfig(), "")
    kernels: Kernels = option(Kernels(), "")
    distributed: DistributedConfig = option(DistributedConfig(), "")
    pool: PoolConfig = option(PoolConfig(), "")
    compile_cache: Path | None = option(
        None,
        "folder that keeps compiled programs, for later runs and for replicas that are started "
        "anew; whoever can write there can run code here",
    )

    def __post_init__(self) -> None:
        if self.model not in PRESETS:
            raise ValueError(f"model is one of {', '.join(PRESETS)}, not {self.model!r}")
        if self.mode not in ("sync", "async"):
            raise ValueError(f"mode is sync or async, not {self.mode!r}")
        if self.mode == "async" and self.distributed != DistributedConfig():
            raise ValueError(
                "mode async runs with one learner process: leave the fields of distributed out"
            )
        if self.fleet.place == "http" and self.rollout.evict_after is not None:
            raise ValueError(
                "with fleet.place=http the servers give their slots away themselves: leave "
                "rollout.evict_after out"
            )
        if self.fleet.place == "http" and self.lora.rank:
            raise ValueError(
                "with fleet.place=http servers read whole weights, and merged adapters round "
                "otherwise than the learner's: leave lora.rank out"
            )
        if self.mode == "sync" and self.fleet != FleetConfig():
            raise ValueError(
                "the options of fleet are for mode async: give --mode async, or leave them out"
            )
        if self.rollout_mesh != MeshConfig() and self.distributed != DistributedConfig():
            raise ValueError(
                "rollout_mesh is for one learner process: with several, each samples on one device"
            )
        if self.rollout.temperature != self.objective.temperature:
            raise ValueError(
                f"rollout.temperature ({self.rollout.temperature}) and objective.temperature "
                f"({self.objective.temperature}) must be equal: one distribution"
            )
        if self.objective.kl_coef:
            raise ValueError(
                "objective.kl_coef needs the logprobs of a reference policy, which this loop "
                "doesn't make; leave it at 0"
            )
        if max(self.pack.row_lengths) < self.engine.max_len:
            raise ValueError(
                f"pack.row_lengths must reach engine.max_len ({self.engine.max_len}), so that "
                "every trajectory fits into a row"
            )

    @property
    def source(self) -> Path:
        """Where the base weights and their tokenizer lie."""
        return self.weights or shipped_weights(self.model)

    def world(self) -> World:
        """What there is to act in.  Made once a run: it may take a while."""
        raise NotImplementedError
