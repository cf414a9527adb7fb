"""What the chaos run accepts of a ledger; the killing itself is in test_asynchronous.py."""

import json

import pytest

from experiments.bench.chaos import Config, check
from experiments.config import UsageError, parse
from experiments.fast_ask import PRESET_CONFIGS
from experiments.fast_ask import Config as Run


def write(run_dir, batches):
    lines = [{"step": step, "groups": groups} for step, groups in batches]
    (run_dir / "groups.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_good_ledger_passes(tmp_path):
    write(tmp_path, [(1, [[0, 0], [1, 0]]), (2, [[3, 0], [2, 1]]), (3, [[4, 1], [7, 0]])])
    assert check(tmp_path, 3, 2, bound=2) == 2


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        ([(1, [[0, 0]]), (3, [[1, 1]])], "doesn't hold updates 1 to 2"),
        ([(1, [[0, 0]]), (1, [[0, 0]])], "doesn't hold updates 1 to 2"),
        ([(1, [[0, 0]]), (2, [[0, 1]])], r"taken twice: \[0\]"),
        ([(1, [[0, 0]]), (2, [])], "1 groups were taken"),
        ([(1, [[0, 1]]), (2, [[1, 1]])], "ages of groups go from -1"),
        ([(1, [[0, 0]]), (2, [[1, -1]])], "ages of groups go from 0 to 2, 1 allowed"),
    ],
)
def test_a_bad_ledger_is_told(tmp_path, batches, said):
    write(tmp_path, batches)
    with pytest.raises(RuntimeError, match=said):
        check(tmp_path, 2, 1, bound=1)


def test_its_run_is_one_that_exists():
    run = parse(Run, Config().flags(), presets=PRESET_CONFIGS)
    assert (run.mode, run.fleet.place, run.loop.steps) == ("async", "process", 400)
    with pytest.raises(UsageError, match="minutes must be above 0"):
        parse(Config, ["--minutes", "0"])
