"""Evaluating a checkpoint: what would make its numbers those of something else is refused."""

import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from experiments.config import UsageError, save_config
from experiments.evaluate import EvaluateConfig, as_trained, main, merged
from experiments.fast_ask import PRESET_CONFIGS
from experiments.training import train
from fastask_jax.ask.checkpoint import PolicyFolder
from fastask_jax.model.tokenizers import load_tokenizer
from tests.experiments.asked_oracle import AskedOracle
from tests.fastask_jax.policies.remote.scripted import listening

TINY = PRESET_CONFIGS["tiny"]


def test_a_policy_is_asked_as_it_was_trained_within_the_budgets_of_all(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model": "tiny"}')
    place = tmp_path / "policy"
    full = PolicyFolder(place, replace(TINY.env, prompt="full"), tools_in_prompt=True)
    asked = as_trained(full, TINY)
    assert (asked.weights, asked.env.prompt, asked.env.max_turns) == (place, "full", 6)
    assert asked.rollout == replace(TINY.rollout, tools_in_prompt=True)
    longer = replace(full, env=replace(full.env, max_turns=7))
    with pytest.raises(ValueError, match="other budgets; add --train.env.max_turns 7, for all"):
        as_trained(longer, TINY)
    alone = replace(longer, path=tmp_path / "mine")  # of no run: nothing is known of it
    assert as_trained(alone, TINY) == replace(TINY, weights=alone.path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--temperature", "-1"], "temperature must be 0 or more"),
        (["--temperature", "nan"], "temperature must be 0 or more"),
        (["--temperature", "inf"], "temperature must be 0 or more"),
        (["--policies", "blind,blind"], "two policies are called blind"),
        (["--policies", "blind,gpt"], "policies are of blind, base, trained, oracle, not gpt"),
        (["--policies", "trained"], "policy trained needs --checkpoint RUN"),
        (["--policy", "gpt=openai:m"], "has no address"),
        (["--reference", "gpt"], "reference 'gpt' is none of blind, base, oracle"),
        (["--price", "gpt=1/2"], "for none of the policies"),
        (["--rollouts", "0"], "rollouts must be at least 1"),
        (["--remote.concurrency", "0"], "remote.concurrency must be at least 1"),
        (["--remote.requests-per-minute", "0"], "requests_per_minute must be above 0"),
    ],
)
def test_wrong_usage_leaves_no_files(words, said, tmp_path) -> None:
    with pytest.raises(UsageError, match=said):
        main([*words, f"--run-dir={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_that_is_none_leaves_no_files(tmp_path) -> None:
    words = ["--policies=trained", f"--checkpoint={tmp_path / 'none'}"]
    with pytest.raises(ValueError, match="no checkpoint at"):
        main([*words, f"--run-dir={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


def test_an_evaluation_replaces_no_training_run_nor_the_other_way_round(tmp_path) -> None:
    run = tmp_path / "run"
    save_config(replace(TINY, run_dir=run), run)  # begun, without a line yet
    before = (run / "config.json").read_text()
    words = ["--policies=blind", "--tasks=1", f"--run-dir={run}"]
    with pytest.raises(FileExistsError, match="another experiment's run: give another --run-dir"):
        main(words)
    (run / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(FileExistsError, match="holds an earlier run: give another --run-dir"):
        main(words)
    assert (run / "config.json").read_text() == before
    assert {p.name for p in run.iterdir()} == {"config.json", "metrics.jsonl"}

    other = tmp_path / "other"
    save_config(EvaluateConfig(run_dir=other), other)
    for resume in (False, True):
        with pytest.raises(FileExistsError, match="another experiment's run"):
            train(replace(TINY, run_dir=other, resume=resume))
    assert [p.name for p in other.iterdir()] == ["config.json"]


def test_an_evaluation_leaves_its_results(tmp_path, capsys) -> None:
    words = ["--policies=blind", "--tasks=2", f"--run-dir={tmp_path}"]
    for _ in range(2):  # again in its own place
        main(words)
        said = capsys.readouterr().out
    assert "evaluating blind: 2 rollouts, 2 of them kept" in said  # the second time
    assert {p.name for p in tmp_path.iterdir()} == {
        "config.json", "setup.json", "records.jsonl", "summary.json", "evals",
        "evaluation.json", "evaluation.md", "evaluation.png",
    }  # fmt: skip
    before = (tmp_path / "records.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"was begun with digest=.*count=2 \(now 3\): go on with"):
        main(["--policies=blind", "--tasks=3", f"--run-dir={tmp_path}"])
    with pytest.raises(ValueError, match=r"begun with env.max_turns=6 \(now 5\)"):
        main([*words, "--train.env.max-turns=5"])
    assert (tmp_path / "records.jsonl").read_bytes() == before


def test_weights_that_are_not_finite_are_not_evaluated(tmp_path) -> None:
    weights = shutil.copytree(TINY.source, tmp_path / "weights")
    file = weights / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + np.float32("nan").tobytes())
    words = ["--policies=base", f"--train.weights={weights}", f"--run-dir={tmp_path / 'run'}"]
    with pytest.raises(ValueError, match="weights aren't all finite"):
        main(words)
    assert not (tmp_path / "run").exists()


def test_which_policies_are_evaluated() -> None:
    def names(**fields):
        return [spec.name for spec in EvaluateConfig(**fields).specs]

    assert names() == ["blind", "base", "oracle"]
    assert names(checkpoint=("runs/tiny",)) == ["blind", "base", "trained", "oracle"]
    assert names(checkpoint=("x/a", "b=x/c")) == ["blind", "base", "a", "b", "oracle"]
    assert names(checkpoint=("x/a",), policies=("base",)) == ["base", "trained"]
    assert names(policy=("base", "s=openai:m@http://h/v1")) == ["base", "s"]
    assert names(policy=("s=openai:m@http://h/v1",), checkpoint=("r",)) == ["trained", "s"]
    assert names(policies=("blind",), policy=("oracle",)) == ["blind", "oracle"]
    assert EvaluateConfig().compared_to == "base"
    assert EvaluateConfig(policy=("oracle", "blind")).compared_to == "oracle"
    words = ["--policy", "base", "--tasks", "2", "--policy=a=checkpoint:b", "--price", "base=1/2"]
    assert merged(words, ("policy", "price")) == [
        "--tasks", "2", "--policy=base,a=checkpoint:b", "--price=base=1/2",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def server():
    oracle = AskedOracle(TINY.tasks.stream("heldout", seed=0).take(14))
    with listening(oracle.app()) as url:
        yield SimpleNamespace(oracle=oracle, url=f"{url}/v1")


def test_a_policy_that_cannot_be_finished_is_partial(server, tmp_path, capsys) -> None:
    words = [
        "--policy=oracle", f"--policy=asked=openai:scripted@{server.url}",
        f"--policy=refused=openai:unknown@{server.url}", "--price=asked=1/5/0.1",
        "--tasks=14", f"--run-dir={tmp_path}", "--remote.retry=0", "--reference=asked",
    ]  # fmt: skip
    tasks = list(server.oracle.tasks.values())
    server.oracle.broken = {tasks[3].question}
    assert main(words) == 1
    said = capsys.readouterr().out
    assert f"asked is partial: 1 of 14 rollouts have no record; {tasks[3].id}: " in said
    assert "refused is partial: 14 of 14 rollouts have no record" in said
    before = (tmp_path / "records.jsonl").read_text()
    server.oracle.broken, server.oracle.asked = set(), 0
    assert main([*words[:2], *words[3:]]) == 0  # without the refused one
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert (tmp_path / "records.jsonl").read_text().startswith(before)  # nothing asked again
    asked = found["policies"]["asked"]
    wrong = sum(zlib.crc32(task.question.encode()) % 3 == 0 for task in tasks)
    assert asked["exact_match"] == (14 - wrong) / 14 and 0 < wrong < 14
    assert server.oracle.asked <= 6  # the turns of one episode
    # The server counts 100 tokens a request, 40 of them kept, and 10 said.
    assert asked["price"] == pytest.approx(asked["turns"] * (60 + 4 + 50) / 1e6)
    assert found["policies"]["oracle"]["seconds_ratio"] is not None


SMALL = [
    "--train.engine.slots=8", "--train.engine.append-buckets=64", "--warm-up=0",
    "--train.engine.attend-buckets=768", "--train.pool.workers=1",
]  # fmt: skip


@pytest.mark.slow
def test_one_command_over_four_policies_killed_and_resumed_gives_the_same_table(
    server, tmp_path
) -> None:
    trained = shutil.copytree(TINY.source, tmp_path / "weights")
    load_tokenizer(TINY.source).save_pretrained(trained)
    file = trained / "model.safetensors"
    rng = np.random.default_rng(0)
    weights = {
        name: (value * (1 + 0.05 * rng.standard_normal(value.shape))).astype(value.dtype)
        for name, value in load_file(file).items()
    }
    save_file(weights, file, {"format": "pt"})
    words = [
        "--policies=base,trained,oracle", f"--checkpoint={trained}", "--tasks=14",
        f"--policy=asked=openai:scripted@{server.url}", "--rollouts=2", *SMALL,
    ]  # fmt: skip

    def run_dir(name):
        return [*words, f"--run-dir={tmp_path / name}"]

    records = tmp_path / "killed" / "records.jsonl"
    command = [sys.executable, "-m", "experiments.evaluate", *run_dir("killed")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=dict(os.environ)) as process:
        try:
            until = time.monotonic() + 300
            # In the middle of its second policy.
            while not records.exists() or records.read_bytes().count(b"\n") < 28 + 5:
                assert process.poll() is None and time.monotonic() < until
                time.sleep(0.005)
        finally:
            process.kill()
    kept = records.read_bytes().splitlines()
    assert 33 <= len(kept) < 56
    with records.open("ab") as lines:
        lines.write(b'{"policy": "trained", "rollout": 1, "ta')
    assert main(run_dir("killed")) == 0
    assert records.read_bytes().splitlines()[: len(kept)] == kept
    assert main(run_dir("whole")) == 0

    killed, whole = (result(tmp_path / name) for name in ("killed", "whole"))
    assert killed == whole
    tables = [table(tmp_path / name) for name in ("killed", "whole")]
    assert tables[0] == tables[1] and len(tables[0]) > 30
    # It is a comparison of four that differ.
    shares = {name: found["exact_match"] for name, found in whole["policies"].items()}
    assert list(shares) == ["base", "trained", "oracle", "asked"]
    assert shares["base"] < shares["asked"] < shares["oracle"] == 1.0
    assert whole["policies"]["trained"]["tokens"] != whole["policies"]["base"]["tokens"]


def result(place):
    """evaluation.json without what clocks have measured."""
    found = json.loads((place / "evaluation.json").read_text())
    for summary in found["policies"].values():
        assert summary.pop("seconds") > 0
        del summary["seconds_ratio"]
    return found


def table(place):
    """evaluation.md without the columns of seconds, which are the first table's last two."""
    lines = (place / "evaluation.md").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| policy "))
    stop = lines.index("", start)
    for i in range(start, stop):
        lines[i] = "|".join(lines[i].split("|")[:-3])
    return lines
