"""The sweep, over a small real experiment in processes of its own."""

import csv
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from experiments import fast_ask
from experiments import sweep as sweeps
from experiments.config import UsageError, run_main, save_config
from experiments.sweep import main, parse_sweep

ROOT = Path(__file__).parents[2]

# A complete experiment by the project's contracts, only without a model: config on the command
# line, config.json, summary.json, resume, errors.
EXPERIMENT = """
from __future__ import annotations
import time
from dataclasses import dataclass
from pathlib import Path
from experiments.config import option, parse, run_main, save_config
from fastask_jax.report.summary import write_summary

@dataclass(frozen=True)
class Config:
    run_dir: str = option("runs/toy", "where")
    resume: bool = option(False, "go on")
    skill: float = option(0.5, "share of right answers")
    style: str = option("plain", "a name")
    tasks: int = option(10, "count")
    crash: str = option("none", "a style whose run fails")

    def __post_init__(self):
        if not 0 <= self.skill <= 1:
            raise ValueError("skill must be between 0 and 1")

def main(argv):
    config = parse(Config, argv)
    run = Path(config.run_dir)
    save_config(config, run)
    with (run / "starts.txt").open("a") as file:
        file.write(f"resume={config.resume}\\n")
    if config.style == config.crash:
        raise ValueError("the world went away")
    records = [
        dict(type="t", family="f", difficulty="easy", correct=i < config.skill * config.tasks,
             reward=config.skill, parts={"correct": 1.0}, turns=2, cells=3, seconds=0.1)
        for i in range(config.tasks)
    ]
    write_summary(run, {"base": records[-1:], "trained": records}, steps=1, wall_seconds=90.0)

run_main(main)
"""


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the experiment, importable here and in the runs' processes."""
    (tmp_path / "toy.py").write_text(EXPERIMENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(tmp_path)]))
    return tmp_path


@pytest.fixture
def sweep(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The sweep's own part runs here, each run in a process of its own."""

    def call(*argv: str) -> Done:
        with pytest.raises(SystemExit) as caught:
            run_main(main, argv)
        shown = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return Done(caught.value.code, shown.out, shown.err)

    return call


def rows(place: Path) -> list[dict[str, str]]:
    with (place / "out" / "sweep.csv").open() as file:
        return list(csv.DictReader(file))


def starts(place: Path, name: str) -> str:
    return (place / "out" / name / "starts.txt").read_text()


def test_grid_runs_reports_and_is_skipped_the_second_time(place, sweep) -> None:
    argv = ["toy", "--grid", "skill=0.2,0.9", "--grid=style=a,b", "--tasks", "20"]
    done = sweep(*argv, "--run-dir", "out")
    assert done.returncode == 0, done.stderr
    got = rows(place)
    assert [(r["skill"], r["style"]) for r in got] == [
        ("0.2", "a"),
        ("0.2", "b"),
        ("0.9", "a"),
        ("0.9", "b"),
    ]
    assert [float(r["exact_match"]) for r in got] == [0.2, 0.2, 0.9, 0.9]
    assert {r["policy"] for r in got} == {"trained"}
    config = json.loads((place / "out" / "skill=0.9,style=b" / "config.json").read_text())
    assert (config["skill"], config["style"], config["tasks"]) == (0.9, "b", 20)
    table = (place / "out" / "sweep.txt").read_text()
    assert "90.0 % (70-97)" in table and table.strip() in done.stdout
    assert max(map(len, table.splitlines())) <= 100
    assert (place / "out" / "sweep.png").read_bytes().startswith(b"\x89PNG")

    again = sweep(*argv, "--run-dir", "out")
    assert again.returncode == 0
    assert again.stdout.count("done before: exact match") == 4
    assert starts(place, "skill=0.2,style=a") == "resume=False\n"

    other = sweep(*argv[:-1], "30", "--run-dir", "out")
    assert other.returncode == 1
    assert "holds a run with other settings (tasks); give another --run-dir" in other.stdout


def test_failed_runs_show_their_error_line_and_the_rest_go_on(place, sweep) -> None:
    done = sweep("toy", "--grid", "style=a,b,c", "--crash=b", "--run-dir=out")
    assert done.returncode == 1
    assert "1 of 3 runs failed" in done.stderr
    got = rows(place)
    assert [r["status"] for r in got] == ["done", "failed", "done"]
    assert got[1]["error"].startswith("the world went away (log: ")
    assert "run 2 failed: the world went away" in (place / "out" / "sweep.txt").read_text()
    # A value that the config refuses fails alone too, before anything starts.
    done = sweep("toy", "--grid", "skill=0.5,2", "--run-dir", "out2")
    assert done.returncode == 1
    assert "failed: skill must be between 0 and 1" in done.stdout
    assert not (place / "out2" / "skill=2").exists()


def test_a_run_that_was_cut_off_is_resumed_or_started_afresh(place, sweep) -> None:
    argv = ["toy", "--grid", "style=a,b", "--run-dir", "out"]
    assert sweep(*argv).returncode == 0
    for name in ("style=a", "style=b"):
        (place / "out" / name / "summary.json").unlink()
    (place / "out" / "style=a" / "checkpoints" / "3").mkdir(parents=True)
    assert sweep(*argv).returncode == 0
    assert starts(place, "style=a") == "resume=False\nresume=True\n"
    assert starts(place, "style=b") == "resume=False\n"
    # The resumed run's saved config says resume=true; it counts as done all the same.
    assert sweep(*argv).stdout.count("done before") == 2


def test_parsing() -> None:
    got = parse_sweep(
        "sweep --grid optimizer.lr=1e-4,3e-4 --grid=families=a,b;c --seed 3 --x=1".split()
    )
    assert got.module == "experiments.sweep"
    assert got.grid == (("optimizer.lr", ("1e-4", "3e-4")), ("families", ("a,b", "c")))
    assert got.fixed == ("--seed", "3", "--x=1")
    assert got.run_dir == Path("runs/sweep-sweep")
    assert len(got.combinations()) == 4


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ("swep --grid a=1", "no experiment named 'swep'; did you mean sweep?"),
        ("../x --grid a=1", "no experiment named"),
        ("sweep", "give at least one --grid"),
        ("sweep --grid a", "--grid a: expected FIELD=V1,V2"),
        ("sweep --grid a=1,,2", "expected FIELD=V1,V2"),
        ("sweep --grid", "--grid needs a value"),
        ("sweep --grid a=1 --run-dir=", "--run-dir needs a value"),
        ("--grid a=1", "name the experiment first"),
    ],
)
def test_wrong_usage(argv, text) -> None:
    with pytest.raises(UsageError) as caught:
        parse_sweep(argv.split())
    assert text in str(caught.value)


def test_help_and_unknown_field_of_the_experiment(place, sweep) -> None:
    shown = sweep("--help")
    assert shown.returncode == 0 and shown.stdout.startswith("usage: python -m experiments.sweep")
    done = sweep("toy", "--grid", "skil=0.1", "--run-dir", "out")
    assert done.returncode == 2
    assert done.stderr == (
        "error: unknown field --skil; did you mean --skill? (--help lists every field)\n"
    )
    assert not (place / "out").exists()


def test_a_finished_training_run_is_skipped(tmp_path) -> None:
    """Its config holds which kernels it chose, where the sweep asks for "auto"."""
    plan = sweeps.parse_sweep(
        ["fast_ask", "--grid", "loop.steps=1,2", "--preset", "tiny", "--run-dir", str(tmp_path)]
    )
    [values, _] = plan.combinations()
    wanted = sweeps.resolve(plan, values)
    assert isinstance(wanted, dict) and wanted["kernels"]["attention"] == "auto"
    run_dir = tmp_path / "loop.steps=1"
    config = fast_ask.PRESET_CONFIGS["tiny"]
    config = replace(config, run_dir=run_dir, loop=replace(config.loop, steps=1))
    save_config(replace(config, kernels=config.kernels.resolved()), run_dir)
    numbers = {name: 0.5 for name in sweeps.NUMBERS}
    (run_dir / "summary.json").write_text(json.dumps({"policies": {"trained": numbers}}))
    assert sweeps.run_one(plan, values, wanted)["status"] == "done before"
    other = wanted | {"kernels": wanted["kernels"] | {"attention": "reference"}}
    assert "other settings (kernels)" in sweeps.run_one(plan, values, other)["error"]
