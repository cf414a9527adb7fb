"""The tasks benchmark: its last line, and that a wrong answer makes it fail."""

from __future__ import annotations

import json

import pytest

from envs.fast_ask import DIFFICULTIES, KINDS
from experiments.bench.tasks import Config, main, specs
from fastask_jax.policies.oracle import OraclePolicy


def last_line(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_every_cell_counts_the_same_and_runs_differ() -> None:
    config = Config(per_cell=3, first_seed=50)
    first, second = list(specs(config, "tiny")), list(specs(config, "tiny", run=1))
    assert len(first) == 3 * len(KINDS) * len(DIFFICULTIES) == len(set(first))
    assert {s[0] for s in first} == {50, 51, 52} and {s[0] for s in second} == {53, 54, 55}
    assert Config(oracle=True).count == 100
    with pytest.raises(ValueError, match="runs at least 1"):
        Config(runs=0)


@pytest.mark.slow
def test_speed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(Config(scale="both", per_cell=1, runs=2)) == 0
    line = last_line(capsys)
    assert (line["bench"], line["unit"], line["runs"]) == ("tasks", "tasks/s", 2)
    rates = [line["tiny"]["rate"], line["standard"]["rate"]]
    assert line["value"] == pytest.approx(min(rates), rel=0.5) and min(rates) > 20
    assert line["tiny"]["cells"][1] < 1000 and line["standard"]["cells"][1] > 52_000


def test_oracle(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(Config(scale="tiny", oracle=True, per_cell=1)) == 0
    line = last_line(capsys)
    assert (line["value"], line["unit"]) == (100.0, "% exact match")
    assert line["tiny"]["tasks"] == 42 and line["tiny"]["max_turns"] == 4


def test_wrong_answers_are_named_and_fail(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = OraclePolicy.start

    def forgetful(self, messages, tools, task):  # type: ignore[no-untyped-def]
        reply = start(self, messages, tools, task)
        if task.type == "category_spend":
            self._program = type(self._program)(self._program.reads, "print(0)")
        return reply

    monkeypatch.setattr(OraclePolicy, "start", forgetful)
    assert main(Config(scale="tiny", oracle=True, per_cell=1)) == 1
    out = capsys.readouterr().out
    assert "tiny-hard-category_spend-0: answered '0', truth" in out
    line = json.loads(out.splitlines()[-1])
    assert line["tiny"]["wrong"] == 3 and line["value"] == pytest.approx(100 * 39 / 42, abs=0.01)
