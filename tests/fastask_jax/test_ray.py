"""Replicas in Ray actors: the guide's commands on three nodes, one of which is killed."""

import importlib.util
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from jax import numpy as jnp

from envs.pool import EnvPool, PoolConfig
from experiments.config import to_json
from fastask_jax.fleet.config import FleetConfig
from fastask_jax.fleet.ray_link import RayLink, connected
from fastask_jax.fleet.ray_pool import ray_workers
from fastask_jax.fleet.replica import Begin, Broken, Cancel, Sampled, Weights
from fastask_jax.report.metrics import read_metrics
from fastask_jax.rollout.scheduler import RolloutStats
from tests.envs.test_pool import play, tasks_of
from tests.fastask_jax.test_asynchronous import check_groups
from tests.fastask_jax.test_loop import ROOT, flat, small
from tests.processes import command_line, tree

GUIDE = (ROOT / "docs/ray.md").read_text("utf-8")
STEPS = 12
ENVIRONMENTS = "tests.envs.pool_envs:counting"


def hosts(pid: int, actor: bytes = b"ray::_Host") -> list[int]:
    """The replicas on a node, or other actors."""
    return [child for child in tree(pid) if actor in command_line(child)]


def until(what, seconds=120.0, why=lambda: ""):
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, f"it didn't come to that {why()}"
        time.sleep(0.1)
    return found


@dataclass
class Cluster:
    """The guide's nodes.  run: its last command."""

    address: str
    run: str
    nodes: list[subprocess.Popen]
    folder: Path
    environment: dict[str, str]

    def start(self, command: str, name: str) -> subprocess.Popen:
        with (self.folder / f"{name}.log").open("w") as log:
            return subprocess.Popen(
                ["bash", "-c", f"exec {command}"], cwd=ROOT, env=self.environment,
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()[-6000:]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs the ray extra")
    with socket.create_server(("127.0.0.2", 0)) as free:
        port = str(free.getsockname()[1])
    export, *nodes, run = re.findall(r"```bash\n(.*?)\n```", GUIDE.replace("6379", port), re.DOTALL)
    assert len(nodes) == 3 and all(command.startswith("ray start") for command in nodes)
    variables = dict(word.split("=") for word in export.removeprefix("export ").split())
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, **variables, "PATH": path}
    # A node that refuses connections is given up after five looks, three seconds apart.
    environment["RAY_health_check_period_ms"] = "500"
    # pytest's folders are too long for Ray's sockets.
    folder = tempfile.TemporaryDirectory(prefix="ray-")
    environment["RAY_TMPDIR"] = folder.name
    found = Cluster(f"127.0.0.2:{port}", run, [], tmp_path_factory.mktemp("ray"), environment)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        try:
            for number, command in enumerate(nodes):
                found.nodes.append(found.start(command, f"node{number}"))
                until(
                    lambda n=number: "Ray runtime started" in found.said(f"node{n}"),
                    why=lambda n=number: found.said(f"node{n}"),
                )
            yield found
        finally:
            for node in reversed(found.nodes):
                node.terminate()
            for node in found.nodes:
                node.wait(60)
            folder.cleanup()


class Parrot:
    """A scheduler's surface: says which groups came, and by which weights."""

    def __init__(self, settings):
        self.stats, self.added, self.weights = RolloutStats(), [], None
        self.settings = settings

    @property
    def unfinished(self):
        return len(self.added)

    def set_weights(self, params, version):
        self.weights, self.version = params, version

    def add(self, key, task, copies, seed, first=False):
        self.added.append((key, self.settings, float(self.weights["w"][0]), os.getpid()))

    def cancel(self, key):
        self.added.append((key, "cancelled"))

    def round(self, patience):
        added, self.added = self.added, []
        return SimpleNamespace(
            sampled=[SimpleNamespace(key=key, oldest=self.version) for key in added], ended=[]
        )

    def close(self):
        pass


@contextmanager
def make(settings):
    if settings == "broken":
        raise ValueError("no such engine")
    yield Parrot(settings), lambda params: {"w": params["w"].copy()}


@pytest.fixture(scope="module")
def ray(cluster):
    with connected(FleetConfig(place="ray", ray_address=cluster.address), workers=0):
        yield


@contextmanager
def link(settings, **request):
    made = RayLink("replica 0", f"{__name__}:make", settings, request or {"CPU": 1.0})
    news: queue.SimpleQueue = queue.SimpleQueue()
    made.start(news.put)
    try:
        yield made, news
    finally:
        made.stop()
        assert not made.alive()


@pytest.mark.slow
def test_orders_keep_their_order_and_a_killed_actor_is_started_anew(ray):
    with link("seven") as (replica, news):
        weights = {"w": jnp.full(1 << 20, 7.0)}
        replica.send(Weights(3, replica.pack(weights)))
        for key in range(50):
            replica.send(Begin(key, "task", 4, "seed"))
            replica.send(Cancel(key))
        said = [news.get(timeout=60) for _ in range(100)]
        assert all(isinstance(item, Sampled) and item.version == 3 for item in said)
        pid = said[0].key[3]
        for key, (begun, cancelled) in enumerate(zip(said[::2], said[1::2], strict=True)):
            assert (begun.key, cancelled.key) == ((key, "seven", 7.0, pid), (key, "cancelled"))

        os.kill(pid, signal.SIGKILL)
        until(lambda: not replica.alive(), 30)
        assert not any(isinstance(news.get(), Broken) for _ in range(news.qsize()))
        again: queue.SimpleQueue = queue.SimpleQueue()
        replica.send(Begin(50, "task", 4, "seed"))  # lost, as it was sent to the dead
        replica.start(again.put)
        replica.send(Weights(4, replica.pack({"w": jnp.ones(1)})))
        replica.send(Begin(51, "task", 4, "seed"))
        key, _, weight, second = again.get(timeout=60).key
        assert (key, weight) == (51, 1.0) and second != pid


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings, factory, said",
    [
        ("broken", "make", "ValueError: no such engine"),
        ("seven", "nothing", "AttributeError"),
    ],
)
def test_errors_are_told_and_end_the_replica(ray, settings, factory, said):
    replica = RayLink("replica 0", f"{__name__}:{factory}", settings, {"CPU": 1.0})
    news: queue.SimpleQueue = queue.SimpleQueue()
    replica.start(news.put)
    told = news.get(timeout=60)
    assert isinstance(told, Broken) and said in told.text
    until(lambda: not replica.alive(), 30)
    replica.stop()


@pytest.mark.slow
def test_a_replica_without_room_waits_and_can_be_stopped(ray):
    with link("seven", moons=1.0) as (replica, news):
        replica.send(Weights(0, replica.pack({"w": jnp.ones(1)})))
        time.sleep(1)
        assert replica.alive() and news.empty()
        replica.stop(timeout=1)
        until(lambda: not replica.alive(), 30)


@pytest.mark.slow
def test_environments_of_lost_workers_are_replayed_on_other_nodes(cluster, ray):
    tasks, settings = tasks_of(24, steps=8), {"pause": 0.02}
    with EnvPool(ENVIRONMENTS, settings, PoolConfig(workers=2)) as pool:
        expected = play(pool, tasks)
    launch = ray_workers({"CPU": 0.5})
    with EnvPool(ENVIRONMENTS, settings, PoolConfig(workers=2), launch) as pool:
        _, first, second = cluster.nodes
        places = [hosts(node.pid, b"ray::_Place") for node in (first, second)]
        assert list(map(len, places)) == [1, 1]
        timer = threading.Timer(0.5, os.kill, (places[0][0], signal.SIGKILL))
        timer.start()
        assert play(pool, tasks) == expected
        timer.join()
        stats = pool.stats()
        assert stats["restarts"] == 1 and stats["replays"] > 0 and stats["errors"] == 0
        assert 0 < stats["call_seconds"] < 5 and 0 <= stats["wait_seconds"] < 60
    for node in (first, second):
        until(lambda pid=node.pid: not hosts(pid, b"ray::_Place"), 30)


@pytest.mark.slow
def test_a_node_is_killed_and_the_run_goes_on(cluster, tmp_path):
    config = small(tmp_path / "run", steps=STEPS, eval_tasks=0, save_every=STEPS)
    ours = ("run_dir", "mode", "fleet.")
    flags = {k: v for k, v in flat(json.loads(to_json(config))).items() if not k.startswith(ours)}
    assert "--run-dir runs/ray " in cluster.run
    command = cluster.run.replace("runs/ray", str(config.run_dir))
    command += "".join(f" --{name}={value}" for name, value in flags.items())
    # Its environments run anywhere, too; what is left of the cluster has room for all.
    command += " --fleet.ray-resources CPU=0.5 --fleet.ray-pools CPU=0.1"
    run = cluster.start(command, "run")
    metrics = config.run_dir / "metrics.jsonl"
    _, lost, other = cluster.nodes

    def goes_on(what):
        def look():
            assert run.poll() is None, cluster.said("run")
            return what()

        return until(look, why=lambda: cluster.said("run"))

    try:
        goes_on(lambda: metrics.exists() and metrics.read_text().count("\n") > 3)
        assert len(hosts(lost.pid)) == len(hosts(other.pid)) == 1
        # Ray spreads the workers as well as it can: the node that is lost is one that has some.
        lost, other = sorted((lost, other), key=lambda node: not hosts(node.pid, b"ray::_Place"))
        assert hosts(lost.pid, b"ray::_Place")
        for pid in tree(lost.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        goes_on(lambda: len(hosts(other.pid)) == 2)
        assert run.wait(120) == 0, cluster.said("run")
    finally:
        run.kill()
        run.wait()
    check_groups(config.run_dir, STEPS, 2)
    assert sum(line.get("rollout/lost", 0) for line in read_metrics(config.run_dir)) > 0
    until(lambda: not hosts(other.pid), 30)


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    config = FleetConfig(place="ray", ray_address="127.0.0.2:6379")
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[ray\]'"), connected(config, 1):
        pass
