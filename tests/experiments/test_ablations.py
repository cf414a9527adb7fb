"""The ablation figures: what is run, and how seeds become an interval."""

import csv

import pytest

from experiments import ablations, sweep
from experiments.config import UsageError


def test_a_point_is_the_mean_over_seeds_with_students_interval():
    values = {"loop.group_size": "4"}
    rows = [{**values, "exact_match": x} for x in (0.80, 0.86, 0.92)]
    rows += [{"loop.group_size": "8", "exact_match": 0.1}, {**values, "exact_match": None}]
    point = ablations._pooled(values, rows)
    # Mean 0.86, deviation 0.06, t(2) = 4.303: 4.303 * 0.06 / sqrt(3) = 0.14906.
    assert point["runs"] == 3 and point["exact_match"] == pytest.approx(0.86)
    assert point["low"] == pytest.approx(0.71094, abs=1e-5) and point["high"] == 1.0
    assert ablations._pooled({"loop.group_size": "2"}, rows)["exact_match"] is None


def test_a_figure_runs_every_point_with_every_seed(tmp_path, monkeypatch, capsys):
    ran = []

    def run_one(plan, values, config):
        ran.append((plan.module, plan.fixed, dict(values)))
        if values["loop.seed"] == "7" and values["loop.group_size"] == "2":
            return {**values, "run_dir": "x", "status": "failed", "error": "it broke"}
        match = 0.5 + 0.01 * int(values["loop.seed"])
        return {**values, "run_dir": "x", "status": "done", "exact_match": match}

    monkeypatch.setattr(sweep, "run_one", run_one)
    monkeypatch.setattr(sweep, "resolve", lambda plan, values: {})
    words = ["group_size", "--seeds=0,3,7", "--run-dir", str(tmp_path), "--loop.steps", "5",
             "--grid", "loop.group_size=2,4"]  # fmt: skip
    assert ablations.main(words) == 1
    assert len(ran) == 6 and all(values["tasks.seed"] == values["loop.seed"] for *_, values in ran)
    module, fixed, _ = ran[0]
    assert module == "experiments.fast_ask" and fixed[-2:] == ("--loop.steps", "5")
    assert (tmp_path / "group_size.png").read_bytes()[:4] == b"\x89PNG"
    with (tmp_path / "sweep.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 6
    shown = capsys.readouterr()
    assert "1 of 6 runs failed" in shown.err and "53.3" in shown.out


@pytest.mark.parametrize("figure", ablations.FIGURES)
def test_every_figure_names_settings_that_exist(figure):
    found = ablations.FIGURES[figure]
    grid = [f"--grid={field}={';'.join(values)}" for field, values in found.grid.items()]
    plan = sweep.parse_sweep(["fast_ask", *grid, *found.fixed, "--preset=tiny"])
    from experiments.config import parse
    from experiments.fast_ask import PRESET_CONFIGS, Config

    for values in plan.combinations():
        options = [f"--{field}={value}" for field, value in values.items()]
        parse(Config, [*plan.fixed, *options], presets=PRESET_CONFIGS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["speed"], "no figure 'speed': choose one of staleness"),
        (["decoys", "--seeds", "0,1"], "at least three"),
        (["decoys", "--seeds", "a,b,c"], "expected whole numbers"),
        (["decoys", "--seeds"], "--seeds needs a value"),
        (["decoys", "--grid", "loop.steps=1,2"], "figure decoys has tasks.difficulties"),
    ],
)
def test_misuse_is_told(words, said):
    with pytest.raises(UsageError, match=said):
        ablations.main(words)
