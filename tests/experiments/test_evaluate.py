"""Evaluating a checkpoint: what would make its numbers those of something else is refused."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.config import UsageError, save_config
from experiments.evaluate import EvaluateConfig, check_asked_as_trained, main
from experiments.fast_ask import PRESET_CONFIGS, train
from fastask_jax.ask.checkpoint import PolicyFolder

TINY = PRESET_CONFIGS["tiny"]


def test_a_policy_is_evaluated_as_it_was_trained_or_not_at_all(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    place = tmp_path / "policy"
    as_tiny = PolicyFolder(place, TINY.env)
    check_asked_as_trained(as_tiny, TINY)
    full = PolicyFolder(place, replace(TINY.env, prompt="full", max_turns=7), tools_in_prompt=True)
    with pytest.raises(ValueError, match="trained with other settings") as caught:
        check_asked_as_trained(full, TINY)
    assert str(caught.value).endswith(
        "add --train.env.prompt full --train.env.max_turns 7 --train.rollout.tools_in_prompt true"
    )
    followed = replace(
        TINY,
        env=replace(TINY.env, prompt="full", max_turns=7),
        rollout=replace(TINY.rollout, tools_in_prompt=True),
    )
    check_asked_as_trained(full, followed)
    alone = replace(full, path=tmp_path / "mine")  # of no run: nothing is known of it
    check_asked_as_trained(alone, TINY)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--temperature", "-1"], "temperature must be 0 or more"),
        (["--temperature", "nan"], "temperature must be 0 or more"),
        (["--temperature", "inf"], "temperature must be 0 or more"),
        (["--policies", "blind,blind"], "names one twice"),
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
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "summary.json", "evals"}


def test_weights_that_are_not_finite_are_not_evaluated(tmp_path) -> None:
    weights = shutil.copytree(TINY.source, tmp_path / "weights")
    file = weights / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + np.float32("nan").tobytes())
    words = ["--policies=base", f"--train.weights={weights}", f"--run-dir={tmp_path / 'run'}"]
    with pytest.raises(ValueError, match="weights aren't all finite"):
        main(words)
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_is_evaluated_unless_it_says_otherwise():
    assert EvaluateConfig().policies == ("blind", "base", "oracle")
    with_one = EvaluateConfig(checkpoint=Path("runs/tiny"))
    assert with_one.policies == ("blind", "base", "trained", "oracle")
    with pytest.raises(ValueError, match="a checkpoint is for the policy trained"):
        EvaluateConfig(checkpoint=Path("runs/tiny"), policies=("base",))
