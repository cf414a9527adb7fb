"""`vf-eval`, the evaluator of verifiers, plays our taskset against a served policy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from envs.core import Reply, ToolCall
from envs.fast_ask import StreamConfig, TaskStream
from envs.fast_ask.env import FastAskConfig, FastAskEnv
from envs.sandbox import Sandbox, SandboxConfig
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
    """Each is what our own environment makes of the same replies, its tools' answers and reward."""
    stream = TaskStream(StreamConfig("heldout", "tiny", ("easy",)))
    asked = {task.id: task for task in stream.take(COUNT)}
    assert {e["task"]["data"]["id"] for e in episodes} == set(asked)
    right = 0
    with Sandbox(SandboxConfig()) as sandbox:
        env = FastAskEnv(FastAskConfig(prompt="short", max_turns=6), sandbox)
        for episode in episodes:
            assert episode["ok"], episode["errors"]
            [trace] = episode["traces"]
            said = [node["message"] for node in trace["nodes"]]
            shown = [(m.role, m.content) for m in env.reset(asked[episode["task"]["data"]["id"]])]
            calls = iter(trace["calls"])
            while len(shown) < len(said):
                assert shown == [(m["role"], m.get("content") or "") for m in said[: len(shown)]]
                reply = _reply(said[len(shown)], next(calls))
                shown.append(("assistant", reply.content))
                shown += [(m.role, m.content) for m in env.step(reply).messages]
            score, rewards = env.score(), trace["rewards"]
            assert {name: found["score"] for name, found in rewards.items()} == score.parts
            total = sum(found["score"] * found["weight"] for found in rewards.values())
            assert total == pytest.approx(score.total)
            metrics = trace["metrics"]
            assert (metrics["cells"], metrics["tool_calls"]) == (
                score.info["cells"], score.info["tool_calls"],
            )  # fmt: skip
            right += score.parts["correct"] == 1.0 and score.info["turns"] > 1
    assert right >= 1


def _reply(message: dict, call: dict) -> Reply:
    calls = tuple(
        ToolCall(c["name"], json.loads(c["arguments"])) for c in message.get("tool_calls") or ()
    )
    return Reply(message.get("content") or "", calls, call["usage"]["completion_tokens"])
