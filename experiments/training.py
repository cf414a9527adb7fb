"""A training run from its config: weights, rollouts, the loop, and what is left at the end.

The same for every `World`.  Leaves out what is acted in: that is the config's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh

from experiments.config import check_place, format_config, save_config
from experiments.rollouts import source
from experiments.run_config import RunConfig, World
from fastask_jax.actor import Record
from fastask_jax.compiled import keep_compiled
from fastask_jax.distributed import Channel, host_copy, is_main, started
from fastask_jax.fleet.ray_link import connected
from fastask_jax.learn import make_train_step
from fastask_jax.loop import Trainer, read_records, write_records
from fastask_jax.model import PRESETS, ModelConfig, check_finite, load_params, save_params
from fastask_jax.model.lora import LoraConfig, init_adapters, merge_adapters
from fastask_jax.model.peft import check_peft, save_adapter
from fastask_jax.model.tokenizers import load_tokenizer
from fastask_jax.report.metrics import read_metrics
from fastask_jax.report.plots import plot_run
from fastask_jax.report.summary import write_summary
from fastask_jax.report.tables import closing_table, group_table
from fastask_jax.report.utilisation import plot_utilisation
from fastask_jax.rollout.chat import ChatFormat

_FAKE_DEVICES = "xla_force_host_platform_device_count"

# Fields of a preset that no checkpoint's config.json holds.
_HOW_IT_RUNS = (
    "dtype", "remat", "scan_unroll", "delta_chunk", "moe_implementation",
)  # fmt: skip


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


def run(config: RunConfig) -> None:
    """The whole of a training command: the config told, the run, the closing tables."""
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
