"""The result line of benchmarks."""

import json

import pytest

from experiments.bench.report import report


def test_the_line_holds_medians_and_the_workload(capsys):
    line = report("pool", "episodes/s", [40.0, 61.23456, 50.0], workers=2, busy=1 / 3)
    assert json.loads(capsys.readouterr().out) == line
    assert line == {
        "bench": "pool", "value": 50.0, "unit": "episodes/s", "runs": 3, "workers": 2,
        "busy": 0.3333,
    }  # fmt: skip


@pytest.mark.parametrize("higher, ratio", [(True, 2.0), (False, 0.5)])
def test_a_ratio_above_one_means_ours_is_better(higher, ratio, capsys):
    line = report(
        "x",
        "s",
        [10.0, 8.0, 12.0],
        peer="theirs",
        peer_runs=[5.0, 5.0, 90.0],
        higher_is_better=higher,
    )
    assert (line["peer"], line["peer_value"], line["ratio"]) == ("theirs", 5.0, ratio)
    assert capsys.readouterr().out.count("\n") == 1


def test_wrong_input_is_refused():
    with pytest.raises(ValueError, match="at least one run"):
        report("x", "s", [])
    with pytest.raises(ValueError, match="runs of a peer"):
        report("x", "s", [1.0], peer="theirs")
    with pytest.raises(ValueError, match="peer_value, ratio"):
        report("x", "s", [1.0], ratio=2, peer_value=1)
