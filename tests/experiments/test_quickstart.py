"""The quickstart's last step, without the training before it."""

import pytest

from experiments import quickstart
from experiments.config import UsageError
from fastask_jax import ask


def test_an_example_that_fails_does_not_fail_the_run(tmp_path, monkeypatch, capsys) -> None:
    asked = []

    def broken(book, questions, choice):
        asked.append((book, questions, choice.checkpoint))
        raise ask.AskError("the question was broken off")

    monkeypatch.setattr(quickstart, "train", lambda config: {})
    monkeypatch.setattr(ask, "main", broken)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    quickstart.main([f"--run-dir={run_dir}"])
    shown = capsys.readouterr().out
    assert "the question was broken off" in shown and "(the true answer is " in shown
    assert asked == [(str(run_dir / "example.xlsx"), asked[0][1], str(run_dir))]
    assert (run_dir / "example.xlsx").exists()


def test_wrong_numbers_are_wrong_usage() -> None:
    for word, said in (("--steps=0", "loop.steps"), ("--eval-tasks=-1", "loop.eval_tasks")):
        with pytest.raises(UsageError, match=said):
            quickstart.main([word])


def test_few_steps_warm_up_for_no_longer_than_they_last() -> None:
    optimizer = quickstart.Quickstart(steps=2).config().optimizer
    assert optimizer.warmup_steps == optimizer.decay_steps == 2
