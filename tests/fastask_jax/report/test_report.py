"""Statistics, summary, tables, progress and plots, on records worked out by hand."""

import io
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from fastask_jax.report.metrics import ACCURACY, REWARD, TOKENS_PER_SECOND, TURNS
from fastask_jax.report.plots import plot_run, plot_sweep
from fastask_jax.report.progress import Progress
from fastask_jax.report.stats import mean, smooth, wilson
from fastask_jax.report.summary import read_summary, summarize, write_summary
from fastask_jax.report.tables import closing_table, group_table


def record(kind: str, correct: bool, family: str = "revenue", turns: int = 3, **more):
    parts = {"correct": float(correct), "efficiency": 1 - (turns - 1) / 14, "concise": 1.0}
    reward = parts["correct"] + 0.1 * parts["efficiency"] + 0.05
    return {
        "type": kind,
        "family": family,
        "difficulty": "easy",
        "correct": correct,
        "reward": reward,
        "parts": parts,
        "turns": turns,
        "cells": 40,
        "seconds": 0.25,
        **more,
    }


POLICIES = {
    "blind": [record("target_met", i < 5, turns=1, cells=0) for i in range(10)]
    + [record("duplicate_payment_row", False, "reconciliation", 1, cells=0) for i in range(10)],
    "trained": [record("target_met", i < 5) for i in range(10)]
    + [record("duplicate_payment_row", i < 9, "reconciliation", 5) for i in range(10)],
}


def test_wilson_against_published_values() -> None:
    # R. G. Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
    for successes, trials, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        assert wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)
    assert wilson(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="5 successes in 4 trials"):
        wilson(5, 4)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_the_share_and_mirrors(pair) -> None:
    successes, trials = pair
    low, high = wilson(successes, trials)
    assert 0 <= low <= successes / trials <= high <= 1
    other = wilson(trials - successes, trials)
    assert (1 - other[1], 1 - other[0]) == pytest.approx((low, high), abs=1e-12)


def test_mean_and_smooth() -> None:
    assert math.isnan(mean([]))
    assert smooth([0, 3, 6, 9], 3) == [1.5, 3, 6, 7.5]
    assert smooth([1, 5], 1) == [1, 5]
    with pytest.raises(ValueError):
        smooth([1.0], 0)


def test_summary_numbers_and_file(tmp_path) -> None:
    got = write_summary(tmp_path, POLICIES, steps=100, wall_seconds=12.5, seed=3)
    trained = got["policies"]["trained"]
    assert trained["exact_match"] == 0.7 and trained["tasks"] == 20
    assert (trained["low"], trained["high"]) == wilson(14, 20)
    assert trained["turns"] == 4 and trained["cells"] == 40 and trained["seconds"] == 0.25
    assert trained["turns_correct"] == pytest.approx((5 * 3 + 9 * 5) / 14)
    assert trained["parts"]["correct"] == 0.7
    assert trained["mean_reward"] == pytest.approx(0.7 + 0.1 * (1 - 3 / 14) + 0.05)
    assert trained["by_type"]["duplicate_payment_row"]["exact_match"] == 0.9
    assert trained["by_family"]["revenue"]["tasks"] == 10
    assert read_summary(tmp_path) == got == json.loads((tmp_path / "summary.json").read_text())
    assert (got["steps"], got["wall_seconds"], got["seed"]) == (100, 12.5, 3)
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_summary_edges(tmp_path) -> None:
    assert summarize([record("a", False)])["turns_correct"] is None
    with pytest.raises(ValueError, match="no episodes"):
        summarize([])
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(ValueError, match="has no policies"):
        read_summary(tmp_path)


def test_closing_table() -> None:
    table = closing_table({**POLICIES, "none": [record("a", False)]})
    lines = table.text().splitlines()
    assert lines[0] == "1 to 20 held-out tasks"
    trained = next(line for line in lines if line.startswith("trained")).split()
    assert trained[:6] == ["trained", "70.0", "%", "48.1", "-", "85.5"]
    assert trained[-4:] == ["0.786", "4.0", "4.3", "40"]
    assert "0.0 %" in next(line for line in lines if line.startswith("none"))
    assert max(map(len, lines)) <= 100
    markdown = table.markdown().splitlines()
    assert markdown[2].startswith("| policy | exact match | 95 % interval | mean reward |")
    assert all(line.count("|") == markdown[2].count("|") for line in markdown[2:])


def test_group_table_compares_with_blind_in_every_type() -> None:
    table = group_table(POLICIES)
    lines = table.text().splitlines()
    row = next(line for line in lines if "duplicate_payment_row" in line)
    assert row.split() == ["duplicate_payment_row", "10", "0", "(0-28)", "90", "(60-98)", "+90"]
    assert lines[-1] == "trained is not above blind in: target_met"
    better = {**POLICIES, "trained": [record("target_met", True)] * 10 + POLICIES["trained"][10:]}
    assert group_table(better).text().endswith("trained is above blind in every type")
    alone = group_table({"base": POLICIES["trained"]})
    assert alone.notes == () and "blind" not in alone.text()
    assert "| **revenue** |" in table.markdown()


def test_full_group_table_fits_100_columns() -> None:
    kinds = [f"a_type_with_a_long_name_{i:02}" for i in range(14)]
    rows = [record(k, True, "reconciliation") for k in kinds for _ in range(10)]
    table = group_table({name: rows for name in ("blind", "base", "trained", "oracle")})
    assert max(map(len, table.text().splitlines())) <= 100


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


VALUES = {REWARD: 0.61234, ACCURACY: 0.55, TURNS: 4.21, TOKENS_PER_SECOND: 7312.0, "loss": 1.0}


def test_progress_in_a_log_is_plain_lines() -> None:
    out = io.StringIO()
    with Progress(40, start=10, every=10, stream=out) as progress:
        for step in range(11, 41):
            progress.update(step, VALUES)
        progress.note("saved")
    lines = out.getvalue().splitlines()
    assert len(lines) == 4 and lines[-1] == "saved"
    assert lines[0].startswith(
        "training 20/40  reward 0.612  accuracy 55.0%  turns 4.2  7,312 tokens/s  ["
    )
    assert "\r" not in out.getvalue()


def test_progress_on_a_terminal_is_one_bar() -> None:
    out = Terminal()
    with Progress(3, stream=out) as progress:
        for step in (1, 2, 3):
            progress.update(step, VALUES)
        progress.note("saved")
    text = out.getvalue()
    assert "\r" in text and "3/3" in text and "reward 0.612" in text
    assert "saved\n" in text


def _steps(count: int):
    for step in range(count + 1):
        line = {"step": step}
        if step:
            line |= {REWARD: 0.01 * step, ACCURACY: 0.005 * step, TURNS: 4.0}
        if step % 20 == 0:
            line |= {"eval/exact_match": 0.3, "eval/low": 0.2, "eval/high": 0.4}
            line |= {"eval/mean_reward": 0.4, "eval/turns": 3.5}
        yield line


@pytest.mark.parametrize("count", [1, 4, 60])
def test_run_plot_is_drawn(tmp_path, count) -> None:
    path = plot_run(
        list(_steps(count)), tmp_path / "reward.png", references={"blind": 0.1, "oracle": 1.0}
    )
    image = imread(path)
    assert image.shape[0] > 600 and image.shape[1] > 900
    # Both inks of the curves are on the page.
    blue = (image[..., 2] > 0.5) & (image[..., 0] < 0.35)
    orange = (image[..., 0] > 0.7) & (image[..., 2] < 0.3)
    assert blue.sum() > 50 and orange.sum() > 50


def test_run_plot_leaves_out_what_is_missing(tmp_path) -> None:
    lines = [{"step": s, REWARD: None if s == 2 else 0.5} for s in range(1, 9)]
    assert plot_run(lines, tmp_path / "r.png").exists()
    with pytest.raises(ValueError, match="no training steps"):
        plot_run([{"step": 0, "eval/exact_match": 0.1}], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_sweep_plots(tmp_path) -> None:
    rows = [
        {"optimizer.lr": lr, "loss": loss, "exact_match": 0.5, "low": 0.4, "high": 0.6}
        for lr in ("1e-4", "1e-3")
        for loss in ("ppo", "cispo")
    ]
    rows.append({"optimizer.lr": "1e-2", "loss": "ppo", "exact_match": None})
    assert plot_sweep(rows, ["optimizer.lr", "loss"], tmp_path / "a.png").stat().st_size > 5000
    assert plot_sweep(rows[:2], ["loss"], tmp_path / "b.png").stat().st_size > 5000
    with pytest.raises(ValueError, match="no finished run"):
        plot_sweep(rows[-1:], ["loss"], tmp_path / "c.png")
