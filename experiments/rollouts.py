"""Where a run's rollouts come from: an engine in this process, or a fleet of replicas."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from envs.pool import EnvPool
from envs.pool.process import Launch, WorkerProcess
from experiments.run_config import RunConfig, World
from fastask_jax.actor import Actor
from fastask_jax.collect import Asynchronous, Source, Synchronous
from fastask_jax.compiled import keep_compiled
from fastask_jax.distributed import local_copy
from fastask_jax.fleet.http_link import HttpLink, WeightsFolder, connected_server
from fastask_jax.fleet.links import Link, ProcessLink, ThreadLink
from fastask_jax.fleet.ray_link import RayLink
from fastask_jax.fleet.ray_pool import ray_workers
from fastask_jax.fleet.remote import RemoteSlots
from fastask_jax.fleet.server_client import ServerClient
from fastask_jax.model import ModelConfig, save_params
from fastask_jax.model.tokenizers import load_tokenizer
from fastask_jax.rollout.chat import ChatFormat
from fastask_jax.rollout.engine import Engine
from fastask_jax.rollout.scheduler import RolloutStats, Scheduler
from fastask_jax.serve.settings import read_key


@contextmanager
def environments(
    config: RunConfig, launch: Launch = WorkerProcess, world: World | None = None
) -> Iterator[EnvPool]:
    """A pool of the config's environments, in workers that `launch` starts."""
    world = world or config.world()
    with EnvPool(world.factory, world.settings, config.pool, launch) as pool:
        yield pool


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
        made = ("experiments.rollouts:replica", (config, model, world))
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
