"""The training loop on the real parts: exact resume, worker kills, compilations, bad input."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from envs.fast_ask.env import FastAskConfig
from envs.pool import PoolConfig
from experiments import fast_ask
from experiments.config import UsageError, parse, to_json
from experiments.fast_ask import PRESET_CONFIGS, Config, TaskConfig, build
from experiments.training import train
from fastask_jax import _exit
from fastask_jax.collect import Batches, Synchronous
from fastask_jax.learn import (
    Objective,
    OptimizerConfig,
    PackConfig,
    TrainState,
    make_train_step,
)
from fastask_jax.learn.checkpoint import Checkpointer
from fastask_jax.learn.objective import Keep
from fastask_jax.loop import LoopConfig, Trainer, gap_warning, record
from fastask_jax.model import load_params
from fastask_jax.model.lora import LoraConfig, init_adapters, merge_adapters
from fastask_jax.report.metrics import MetricsWriter, read_metrics
from fastask_jax.report.summary import read_summary
from fastask_jax.report.traces import read_traces
from fastask_jax.rollout.engine import EngineConfig
from fastask_jax.rollout.scheduler import RolloutConfig

ROOT = Path(__file__).parents[2]
SAME = ("train/reward", "train/accuracy", "train/turns", "loss/policy", "optim/grad_norm")


def small(run_dir: Path, **loop) -> Config:
    """The shipped base on a few tasks: everything real, all of it small."""
    settings = dict(steps=3, batch_size=12, group_size=4, eval_every=3, eval_tasks=3, save_every=1)
    return replace(
        PRESET_CONFIGS["tiny"],
        run_dir=run_dir,
        tasks=TaskConfig(difficulties=("easy",)),
        loop=LoopConfig(**(settings | loop)),
        rollout=RolloutConfig(max_turn_tokens=128, max_tokens=256),
        engine=EngineConfig(slots=16, max_len=512, append_buckets=(64,), attend_buckets=(512,)),
        pack=PackConfig((512,), 4, 16),
        pool=PoolConfig(workers=1),
    )


def rollouts(config: Config, built) -> Synchronous:
    return Synchronous(built.actor, config.tasks.stream("train"), config.loop.batches("mean"))


def values(run_dir: Path) -> list[dict]:
    """The reproducible numbers of each step: none that a clock decides (how full the slots are
    depends on how long tools took)."""
    clock = ("time/", "rollout/", "train/tokens_per_second", "eval/seconds")
    return [
        {k: line[k] for k in line if not k.startswith(clock)} for line in read_metrics(run_dir)
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    return run_dir, train(small(run_dir, steps=4))


@pytest.mark.slow
def test_a_run_leaves_what_the_design_says(finished):
    run_dir, policies = finished
    assert [line["step"] for line in read_metrics(run_dir)] == [0, 1, 2, 3, 4]
    summary = read_summary(run_dir)
    assert set(summary["policies"]) == {"blind", "base", "trained", "oracle"}
    assert summary["policies"]["oracle"]["exact_match"] == 1.0
    assert (run_dir / "reward.png").read_bytes()[:4] == b"\x89PNG"
    assert (run_dir / "policy" / "config.json").exists()
    traces = read_traces(run_dir)
    by_split = {split: [t for t in traces if t["split"] == split] for split in ("train", "eval")}
    assert [t["step"] for t in by_split["eval"]] == [0, 0, 0, 3, 3, 3, 4, 4, 4]
    assert [t["step"] for t in by_split["train"]] == [n for n in (1, 2, 3, 4) for _ in range(8)]
    for trace in traces:
        assert trace["question"] in trace["turns"][0]["text"]
        assert [name for name, *_ in trace["sheets"] if name in trace["turns"][0]["text"]]
        for turn in trace["turns"]:
            if turn["role"] == "reply":
                assert len(turn["chars"]) == len(turn["logprobs"]) == turn["tokens"]
                assert sum(turn["chars"]) == len(turn["text"])
        info = trace["info"]
        assert info["ranges"] == [label for _, _, *part in info["reads"] for label in part]
    assert len(policies["trained"]) == 3


def start(config: Config, *extra: str) -> subprocess.Popen:
    """The run as a process of its own."""
    flags = [f"--{k}={v}" for k, v in flat(json.loads(to_json(config))).items()]
    command = [sys.executable, "-m", "experiments.fast_ask", *flags, *extra]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def flat(tree: dict, prefix: str = "") -> dict[str, str]:
    out: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            out |= flat(value, f"{prefix}{key}.")
        elif value is not None:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            out[prefix + key] = text.lower() if isinstance(value, bool) else text
    return out


@pytest.mark.slow
def test_kill_9_and_resume_equals_an_uninterrupted_run(finished, tmp_path):
    config = small(tmp_path / "run", steps=4)
    process = start(config)
    metrics = config.run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if metrics.exists() and metrics.read_text().count("\n") >= 3:
            break
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert len(read_metrics(config.run_dir)) < 5, "it was killed in the middle"
    resumed = start(config, "--resume=true")
    _, error = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, error
    assert values(config.run_dir) == values(finished[0])


@pytest.mark.slow
def test_lora_trains_adapters_and_leaves_both_forms(tmp_path):
    lora = LoraConfig(rank=2, alpha=64.0)
    config = replace(small(tmp_path / "run", steps=2, eval_tasks=0), lora=lora)
    train(config)
    model, merged = load_params(config.run_dir / "policy")
    _, base = load_params(config.source)
    moved = jax.tree.map(lambda x, y: bool(np.any(x != y)), merged, base)
    attention = moved["blocks"]["layer_1"]["mixer"]
    assert all(attention[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
    assert not (moved["embedding"] or moved["final_norm"] or attention["q_norm"])
    assert not any(moved["blocks"]["layer_0"]["moe"][name] for name in ("gate_up", "router"))
    assert (config.run_dir / "adapter" / "adapter_model.safetensors").exists()
    state = Checkpointer(config.run_dir).restore(
        TrainState(
            params=init_adapters(model, lora, jax.random.key(0)),
            opt_state=config.optimizer.transformation().init(
                init_adapters(model, lora, jax.random.key(0))
            ),
            step=jnp.int32(0),
            version=jnp.int32(0),
        )
    ).state
    again = merge_adapters(model, lora, base, state.params)
    jax.tree.map(np.testing.assert_array_equal, again, merged)
    # The weights under the adapters are in no checkpoint, so a resumed run checks that it has
    # the same.
    for change in ({"lora": replace(lora, alpha=8.0)}, {"weights": config.run_dir / "policy"}):
        with pytest.raises(ValueError, match="was begun with (lora.alpha|fingerprint of weights)"):
            train(replace(config, resume=True, **change))


@pytest.mark.slow
def test_killed_pool_workers_change_nothing(finished, tmp_path):
    config = small(tmp_path / "run", steps=2, eval_tasks=0)
    with build(config) as built:
        kills, over = [], threading.Event()

        def assassin():
            while not over.wait(2.0):
                for worker in built.actor.pool.stats()["workers"]:
                    kills.append(worker["pid"])
                    os.kill(worker["pid"], signal.SIGKILL)

        thread = threading.Thread(target=assassin)
        thread.start()
        try:
            step_fn = make_train_step(
                built.model, config.objective, config.optimizer, micro_batch_rows=4
            )
            Trainer(
                config.loop, config.run_dir, step_fn, config.pack, rollouts(config, built), [],
            ).run(built.params)  # fmt: skip
        finally:
            over.set()
            thread.join()
    assert len(kills) > 1
    expected = [{k: line[k] for k in SAME if k in line} for line in values(finished[0])[1:3]]
    found = [{k: line[k] for k in SAME if k in line} for line in values(config.run_dir)[1:3]]
    assert found == expected and "train/reward" in found[0]


@pytest.mark.slow
def test_a_run_compiles_a_handful_of_times(tmp_path):
    config = small(tmp_path / "run", steps=3, eval_every=2)
    with build(config) as built:
        step_fn = make_train_step(
            built.model, config.objective, config.optimizer, micro_batch_rows=4
        )
        heldout = config.tasks.stream("heldout").take(3)
        state = Trainer(
            config.loop, config.run_dir, step_fn, config.pack, rollouts(config, built), heldout,
        ).run(built.params)  # fmt: skip
        traces = dict(built.actor.engine.traces)
        assert step_fn.traces == 1
        # A fresh cache lies on its device otherwise than one that a call returned: twice at most.
        assert set(traces) <= {"append", "share", "decode"} and max(traces.values()) <= 2
        again = built.actor.evaluate(state.params, 0, heldout)
        assert dict(built.actor.engine.traces) == traces
        assert {r["task"] for r in again} == {t.id for t in heldout}


@pytest.mark.slow
def test_an_earlier_run_is_not_overwritten(finished):
    process = start(small(finished[0], steps=4))
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1
    assert error.count("\n") == 1 and "--resume true" in error


@pytest.mark.slow
def test_a_refused_resume_leaves_the_config_alone(finished):
    before = (finished[0] / "config.json").read_text()
    process = start(small(finished[0], steps=4, seed=3), "--resume=true")
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1 and "loop.seed=0" in error
    assert (finished[0] / "config.json").read_text() == before


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--loop.batch_size=100", "multiple of loop.group_size"),
        ("--loop.stepz=3", "loop.steps"),
        ("--loop.steps=soon", "loop.steps"),
        ("--model=huge", "qwen3.5-35b-a3b"),
        ("--rollout.temperature=0.5", "one distribution"),
        ("--objective.kl_coef=0.1", "reference policy"),
        ("--distributed.process-id=0", "give all three or none"),
        ("--loop.group-size=1", "loop.group_size must be at least 2"),
        ("--run-dir=", "--run-dir: expected a path"),
    ],
)
def test_bad_fields_are_one_line_and_code_2(flag, said, capsys):
    assert _exit.run(lambda: fast_ask.main([flag])) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1


def test_the_code_of_wrong_usage_reaches_the_shell():
    command = [sys.executable, "-m", "experiments.fast_ask", "--loop.stepz=3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "loop.steps" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "flag",
    [
        "env.correct_weight=nan", "env.correct_weight=inf", "env.efficiency_weight=nan",
        "env.concise_weight=-inf", "optimizer.learning_rate=inf", "optimizer.b1=1",
        "optimizer.decay_steps=3", "objective.temperature=inf", "objective.temperature=nan",
        "objective.entropy_coef=inf", "objective.constant_length=inf",
        "objective.keep.max_staleness=nan", "objective.keep.ratio_high=nan",
        "objective.bounds.ipo_tau=inf", "rollout.temperature=inf", "rollout.temperature=nan",
        "lora.alpha=nan", "lora.alpha=inf", "sandbox.start_seconds=nan",
        "sandbox.hard_seconds=inf", "pool.workers=100000", "pool.call_timeout=inf",
    ],
)  # fmt: skip
def test_numbers_that_make_no_sense_are_refused(flag):
    name = flag.partition("=")[0].rpartition(".")[2]
    with pytest.raises(UsageError, match=name):
        parse(Config, [f"--{flag}"], presets=PRESET_CONFIGS, preset="tiny")


def test_the_seed_preset_resolves(capsys, tmp_path):
    words = ["--preset", "qwen3.5-35b-a3b", "--run-dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as done:
        fast_ask.main([*words, "--show-config", "true"])
    assert done.value.code == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["loop"]["batch_size"] == 256 and shown["loop"]["group_size"] == 8
    assert shown["loop"]["steps"] == 100 and shown["loop"]["eval_tasks"] == 128
    assert _exit.run(lambda: fast_ask.main(words)) == 1
    assert "--weights" in capsys.readouterr().err


def test_a_record_needs_a_score():
    from fastask_jax.rollout.transcript import Trajectory

    with pytest.raises(ValueError, match="no score"):
        record(Trajectory("t", 0, 0))


def trainer(run_dir: Path, stream_seed: int = 0, changes: dict | None = None, **loop) -> Trainer:
    """One whose parts are not used: for what it decides by itself."""
    config = replace(small(run_dir, **loop), **(changes or {}))
    tasks = replace(config.tasks, seed=stream_seed)
    step_fn = SimpleNamespace(objective=config.objective)
    actor = SimpleNamespace(config=config.rollout, chat=None)
    source = Synchronous(actor, tasks.stream("train"), config.loop.batches("mean"))
    return Trainer(
        config.loop, run_dir, step_fn, config.pack, source, [],
        settings={"env": config.env, "engine.max_len": config.engine.max_len},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch_size": 8}, r"loop.batch_size=12 \(now 8\)"),
        ({"group_size": 2}, r"loop.group_size=4 \(now 2\)"),
        ({"seed": 1}, r"loop.seed=0 \(now 1\)"),
        ({"eval_tasks": 5}, r"loop.eval_tasks=3 \(now 5\)"),
        ({"stream_seed": 1}, r"tasks.seed=0 \(now 1\)"),
        ({"changes": {"env": FastAskConfig(efficiency_weight=0.5)}},
         r"env.efficiency_weight=0.1 \(now 0.5\)"),
        ({"changes": {"rollout": RolloutConfig(max_turn_tokens=128, max_tokens=64)}},
         r"rollout.max_tokens=256 \(now 64\)"),
        ({"changes": {"objective": Objective(loss="ppo")}},
         r"objective.loss=aipo_clip \(now ppo\)"),
        ({"changes": {"objective": Objective(keep=Keep(max_staleness=2))}},
         r"objective.keep.max_staleness=inf \(now 2\)"),
        ({"changes": {"pack": PackConfig((512, 768), 4, 16)}}, "pack.row_lengths"),
        ({"changes": {"engine": EngineConfig(slots=16, max_len=256)}}, "engine.max_len=512"),
        ({"steps": 1}, "has made 2 steps already.*loop.steps of 2 or more"),
    ],
)
def test_a_run_is_not_resumed_as_another_one(tmp_path, change, said):
    saved = json.loads(json.dumps(trainer(tmp_path)._settings()))
    elsewhere = {  # another machine or mesh
        "rollout": RolloutConfig(max_turn_tokens=128, max_tokens=256, stall_timeout=900.0),
        "engine": EngineConfig(slots=8, max_len=512),
        "pack": PackConfig((512,), 8, 32),
        "optimizer": OptimizerConfig(learning_rate=1e-5),
    }
    same = trainer(tmp_path, save_every=2, eval_every=1, traces=0, steps=9, changes=elsewhere)
    same._check_resumable(2, saved)
    with pytest.raises(ValueError, match=said):
        trainer(tmp_path, **change)._check_resumable(2, saved)


@pytest.mark.parametrize("resume", [False, True])
def test_a_start_beside_a_run_that_is_alive_is_refused_first(tmp_path, resume):
    began = []
    second = trainer(tmp_path)
    second.on_start = lambda: began.append(True)
    with MetricsWriter(tmp_path), pytest.raises(BlockingIOError, match="hasn't ended"):
        second.run(None, resume)
    assert not began


def test_a_resumed_run_counts_the_time_of_its_earlier_sessions(tmp_path):
    with MetricsWriter(tmp_path) as lines:
        lines.write(0, {"time/wall": 100.0})
        lines.write(1, {"time/wall": 500.0})  # not in the checkpoint, but it took that long
    resumed = trainer(tmp_path)
    with ExitStack() as stack:
        resumed._open(stack, resumed._take(stack, True), 0, True)
        assert 500 <= resumed._wall()["time/wall"] < 600
    assert [line["step"] for line in read_metrics(tmp_path)] == [0]


def test_a_checkpoint_that_is_not_finite_is_not_gone_on_from(tmp_path):
    weights, zero = {"w": jnp.array([1.0, jnp.nan])}, jnp.int32(0)
    state = TrainState(params=weights, opt_state={}, step=zero, version=zero)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, {"step": 1, "cursor": 0, "settings": {}})
    resumed = trainer(tmp_path)
    resumed.step_fn = SimpleNamespace(
        lora=None, objective=None, abstract=lambda params: jax.tree.map(jax.typeof, state)
    )
    with pytest.raises(ValueError, match="weights of step 1 in .* aren't all finite"):
        resumed.run(None, resume=True)


@pytest.mark.slow
def test_a_finished_run_resumed_keeps_its_time(finished, tmp_path):
    place = tmp_path / "run"
    shutil.copytree(finished[0], place)
    lines = read_metrics(place)
    lines[-1]["time/wall"] = 5000.0
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    train(replace(small(place, steps=4), resume=True))
    assert 5000 < read_summary(place)["wall_seconds"] < 5600


@pytest.mark.slow
def test_a_run_that_diverges_ends_with_its_last_finite_weights(tmp_path):
    config = small(tmp_path / "run", steps=2, eval_tasks=0)
    config = replace(config, optimizer=OptimizerConfig(learning_rate=3e38))
    with pytest.raises(FloatingPointError, match="step 1: the update isn't finite"):
        train(config)
    assert Checkpointer(config.run_dir).steps() == [0]
    assert not (config.run_dir / "policy").exists()


def test_refilled_batches_are_averaged_over_all_that_was_rolled_out(tmp_path):
    """Groups without signal are replaced; the averages must not forget them."""
    from envs.core import Score
    from fastask_jax.rollout.transcript import Trajectory

    rewards = iter([[0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 1]])

    class Actor:
        chat = None

        def run(self, params, version, tasks, copies, seed, stats):
            return [
                Trajectory(task.id, i, copy, score=Score(reward, {}))
                for i, task in enumerate(tasks)
                for copy, reward in enumerate(next(rewards))
            ]

    stream = small(tmp_path).tasks.stream("train")
    found = Synchronous(Actor(), stream, Batches(3, 4, refill_rounds=1)).collect(1)
    assert [t.reward for t in found.useful] == [0, 1, 0, 0, 1, 0, 0, 1]
    assert len(found.ended) == 20 and sum(t.reward for t in found.ended) == 7
    assert found.values["train/with_signal"] == 8 / 20


def test_a_gap_between_sampler_and_learner_is_told():
    assert gap_warning({"policy/gap": 6e-8}, 0.01) is None
    assert gap_warning({}, 0.01) is None  # a step without signal trains on nothing
    warning = gap_warning({"policy/gap": 0.25}, 0.01)
    assert warning is not None and "0.25 nats" in warning and "\n" not in warning
    with pytest.raises(ValueError, match="gap_alarm must be above 0"):
        LoopConfig(gap_alarm=0.0)
