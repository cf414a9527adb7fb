"""The plot of where time went."""

import pytest

from fastask_jax.report.utilisation import LEARNER, plot_utilisation, shares

LINES = [
    {"step": 0, "time/eval": 9.0},  # an evaluation alone is no step
    {"step": 1, "time/learn": 1.0, "time/rollout": 3.0},
    {"step": 2, "time/learn": 2.0, "time/rollout": 0.0, "time/eval": 6.0},
]


def test_shares_are_of_each_step():
    steps, (learn, evaluate, wait) = shares(LINES, LEARNER)
    assert steps == [1, 2]
    assert learn == [0.25, 0.25] and evaluate == [0.0, 0.75] and wait == [0.75, 0.0]


@pytest.mark.parametrize("count", [2, 3])
def test_one_step_or_more_make_a_picture(tmp_path, count):
    path = plot_utilisation(LINES[:count], tmp_path / "u.png", title="a run")
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_no_step_is_told():
    with pytest.raises(ValueError, match="no training steps"):
        plot_utilisation(LINES[:1], "unused.png")
