"""Training on someone else's taskset: two updates of the shipped policy, through the real loop."""

from dataclasses import replace

import pytest

from envs.verifiers.choice import TasksetChoice
from experiments.config import from_json, to_json
from experiments.training import train
from experiments.verifiers import PRESETS, Config
from fastask_jax.learn import PackConfig
from fastask_jax.loop import LoopConfig
from fastask_jax.report.metrics import read_metrics
from fastask_jax.report.summary import read_summary
from fastask_jax.report.traces import read_traces
from fastask_jax.rollout.engine import EngineConfig
from fastask_jax.rollout.scheduler import RolloutConfig
from tests.envs.verifiers.conftest import tasksets

__all__ = ["tasksets"]
pytestmark = pytest.mark.slow


def test_the_shipped_policy_is_trained_on_a_taskset_of_others(tasksets, tmp_path):
    tiny = PRESETS["tiny"]
    config = replace(
        tiny,
        run_dir=tmp_path / "run",
        env=TasksetChoice("ledger-v1", args='{"count": 9}', max_turns=4),
        loop=LoopConfig(steps=2, batch_size=8, group_size=4, eval_every=2, eval_tasks=2),
        rollout=RolloutConfig(max_turn_tokens=128, max_tokens=256),
        engine=EngineConfig(slots=16, max_len=512, append_buckets=(64,), attend_buckets=(512,)),
        pack=PackConfig((512,), 4, 16),
        pool=replace(tiny.pool, workers=1),
    )
    assert from_json(Config, to_json(config)) == config
    policies = train(config)
    assert [record["task"] for record in policies["base"]] == ["ledger-v1-0", "ledger-v1-1"]
    lines = read_metrics(config.run_dir)
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines[1:]:
        assert line["train/failed"] == 0 and line["train/with_signal"] > 0
        assert line["optim/grad_norm"] > 0 and line["policy/gap"] < 1e-3
        assert line["train/reward"] == pytest.approx(line["train/right"] + line["train/brief"])
    traces = [t for t in read_traces(config.run_dir) if t["split"] == "train"]
    assert all(t["task"] not in ("ledger-v1-0", "ledger-v1-1") for t in traces)
    heard = [turn["text"] for t in traces for turn in t["turns"] if turn["role"] == "observation"]
    assert any("cash, stock, debt" in text for text in heard)  # its tool's answer
    assert not any("Error executing tool" in text for text in heard)
    assert set(read_summary(config.run_dir)["policies"]) == {"base", "trained"}
    assert (config.run_dir / "policy" / "config.json").exists()
