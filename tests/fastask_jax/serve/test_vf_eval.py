"""`vf-eval`, the evaluator of verifiers, plays our taskset against a served policy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from envs.fast_ask import StreamConfig, TaskStream
from tests.fastask_jax.serve.servers import ROOT, serving

COUNT = 6


@pytest.fixture(scope="module")
def episodes(tmp_path_factory):
    """The saved episodes of an evaluation of the shipped policy."""
    pytest.importorskip("verifiers")
    out = tmp_path_factory.mktemp("evaluated")
    path = os.pathsep.join([str(ROOT), str(ROOT / "envs/verifiers/package")])
    with serving("--slots", 8, "--max-len", 768) as server:
        done = subprocess.run(
            [
                Path(sys.executable).with_name("vf-eval"), "fast-ask-v1", "-m", "tiny",
                "--client.base-url", f"{server.url}/v1", "--client.api-key-var", "NO_KEY",
                "--env.agent.runtime.type", "subprocess", "-n", str(COUNT),
                "--sampling.temperature", "0", "--sampling.max-tokens", "128",
                "--env.taskset.prompt", "short", "--env.taskset.difficulties", "easy",
                "--env.taskset.task.max-turns", "6", "--env.taskset.tools.sessions", "2",
                "--no-push", "--no-rich", "-o", str(out), "--run.name", "here",
            ],
            env={**os.environ, "PYTHONPATH": path}, cwd=out, capture_output=True, text=True,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in (out / "here/traces.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_vf_eval_completes_asks_of_several_turns(episodes):
    stream = TaskStream(StreamConfig("heldout", "tiny", ("easy",)))
    asked = {task.id: task for task in stream.take(COUNT)}
    assert {e["task"]["data"]["id"] for e in episodes} == set(asked)
    right = 0
    for episode in episodes:
        assert episode["ok"], episode["errors"]
        [trace] = episode["traces"]
        task = asked[trace["task"]["data"]["id"]]
        roles = [node["message"]["role"] for node in trace["nodes"]]
        assert roles[:3] == ["system", "user", "assistant"]
        assert trace["nodes"][1]["message"]["content"].startswith(task.question)
        turns = roles.count("assistant")
        rewards = {name: found["score"] for name, found in trace["rewards"].items()}
        assert rewards["efficiency"] == pytest.approx(1 - (turns - 1) / 5)
        said = trace["nodes"][-1]["message"].get("content") or ""
        correct = said.endswith(f"ANSWER: {task.truth}")
        assert rewards["correct"] == correct
        if correct:
            assert turns > 1 and rewards["concise"] == 1.0
            assert trace["metrics"]["tool_calls"] >= turns - 1 and trace["metrics"]["cells"] > 0
            right += 1
    assert right >= 1
