"""Asynchronous training on the real parts: threads and processes, kills, resume."""

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.config import UsageError, parse
from experiments.fast_ask import PRESET_CONFIGS, Config
from experiments.training import train
from fastask_jax.fleet.config import FleetConfig
from fastask_jax.report.metrics import read_metrics
from tests.fastask_jax.test_loop import small, start
from tests.processes import children, command_line, running


def asynchronous(run_dir: Path, **loop) -> Config:
    fleet = FleetConfig(max_staleness=2, spare=1)
    return replace(small(run_dir, **loop), mode="async", fleet=fleet)


def check_groups(run_dir: Path, steps: int, bound: int) -> list[int]:
    """Every step has its batch, no group is in two of them, none is too old."""
    lines = [json.loads(line) for line in (run_dir / "groups.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    taken = [number for line in lines for number, _ in line["groups"]]
    assert len(taken) == len(set(taken)) == 3 * steps
    for line in lines:
        # Step n makes version n from version n - 1.
        assert all(0 <= line["step"] - 1 - oldest <= bound for _, oldest in line["groups"])
    return taken


@pytest.mark.slow
def test_a_run_on_threads(tmp_path):
    config = asynchronous(tmp_path / "run", steps=4)
    policies = train(config)
    check_groups(config.run_dir, 4, 2)
    lines = read_metrics(config.run_dir)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert len(policies["trained"]) == 3
    last = lines[-1]
    assert last["policy/staleness_max"] <= 2 and last["train/version"] == 4
    # What the step's own weights have sampled is scored alike by sampler and learner.
    gaps = [line["policy/gap"] for line in lines[1:] if "policy/gap" in line]
    assert gaps and max(gaps) < 1e-4
    for name in ("time/rollout", "time/learn", "time/decode", "time/pool", "time/idle"):
        assert all(line[name] >= 0 for line in lines[1:])
    assert (config.run_dir / "utilisation.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match=r"mode=async \(now sync\)"):
        train(replace(config, mode="sync", fleet=FleetConfig(), resume=True))


def replicas(pid: int) -> list[int]:
    """The processes that `multiprocessing` has spawned for it."""
    return [child for child in children(pid) if b"multiprocessing.spawn" in command_line(child)]


def wait_for(what, process, seconds=300):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := what():
            return found
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    raise AssertionError("it didn't come to that")


@pytest.mark.slow
def test_replica_and_trainer_are_killed_and_the_run_goes_on(tmp_path):
    config = asynchronous(tmp_path / "run", steps=6, eval_tasks=0)
    fleet, compiled = replace(config.fleet, place="process"), tmp_path / "compiled"
    config = replace(config, fleet=fleet, compile_cache=compiled)
    metrics = config.run_dir / "metrics.jsonl"

    def steps(count):
        return lambda: metrics.exists() and metrics.read_text().count("\n") > count

    process = start(config)
    wait_for(steps(1), process)
    assert any(compiled.iterdir())
    [first] = replicas(process.pid)
    os.kill(first, signal.SIGKILL)
    [second] = wait_for(lambda: [pid for pid in replicas(process.pid) if pid != first], process)
    wait_for(steps(2), process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert len(read_metrics(config.run_dir)) < 7, "it was killed in the middle"
    resumed = start(config, "--resume=true")
    _, error = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, error
    check_groups(config.run_dir, 6, 2)
    assert not running(second), "a replica outlived its learner"


HTTP = ("--fleet.place", "http", "--fleet.servers")


def test_nonsense_is_refused():
    for flags, said in [
        (["--mode", "both"], "mode is sync or async"),
        (["--fleet.max-staleness", "-1"], "fleet.max_staleness must be at least 0"),
        (["--fleet.silence", "0"], "fleet.silence must be above 0"),
        (["--fleet.replicas", "0"], "fleet.replicas must be at least 1"),
        (["--fleet.place", "moon"], 'fleet.place is "thread", "process", "ray" or "http"'),
        (["--fleet.place", "http"], "needs fleet.servers"),
        (["--fleet.servers", "http://127.0.0.1:1"], "fleet.servers is for fleet.place=http"),
        ([*HTTP, "127.0.0.1:1"], "addresses such as http://127.0.0.1:8000, not '127.0.0.1:1'"),
        ([*HTTP, "http://127.0.0.1:1/v1"], "addresses such as"),
        ([*HTTP, "http://127.0.0.1:x"], "addresses such as"),
        ([*HTTP, "http://127.0.0.1:1,http://127.0.0.1:1"], "twice"),
        ([*HTTP, "http://127.0.0.1:1", "--fleet.replicas", "2"], "leave fleet.replicas out"),
        ([*HTTP, "http://127.0.0.1:1", "--rollout.evict-after", "1"], "leave rollout.evict_after"),
        ([*HTTP, "http://127.0.0.1:1", "--lora.rank", "2"], "leave lora.rank out"),
        (["--fleet.retry", "0"], "fleet.retry must be above 0"),
        (["--fleet.ray-resources", "CPU=1,GPU"], "fleet.ray_resources are NAME=AMOUNT"),
        (["--fleet.ray-resources", "CPU=-1"], "amounts above 0, not 'CPU=-1'"),
        (["--fleet.ray-resources", "=2"], "not '=2'"),
        (["--fleet.ray-resources", "CPU=inf"], "not 'CPU=inf'"),
        (["--fleet.ray-address", "127.0.0.1:1"], "fleet.ray_address is for fleet.place=ray"),
        (["--fleet.ray-resources", "CPU=2"], "fleet.ray_resources is for fleet.place=ray"),
        (["--fleet.weights-dir", "weights"], "fleet.weights_dir is for fleet.place=http"),
        (["--fleet.api-key-file", "key"], "fleet.api_key_file is for fleet.place=http"),
        (["--fleet.replicas", "2"], "the options of fleet are for mode async"),
        (["--mode", "async", "--distributed.auto", "true"], "one learner process"),
    ]:
        with pytest.raises(UsageError, match=said):
            parse(Config, flags, presets=PRESET_CONFIGS)
