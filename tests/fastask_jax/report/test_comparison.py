"""Policies compared, on records worked out by hand."""

import pytest
from matplotlib.image import imread

from fastask_jax.report.comparison import compare, difference, in_words, price
from fastask_jax.report.comparison_plot import plot_evaluation
from fastask_jax.report.comparison_tables import page, text
from fastask_jax.report.intervals import share_interval
from fastask_jax.report.stats import wilson
from fastask_jax.report.summary import summarize

TASKS = {"digest": "d1", "count": 20, "split": "heldout", "scale": "tiny", "seed": 0}
TYPES = (("revenue", "region_net"), ("spend", "top_vendor"))


def records(right, rollouts=1, seconds=0.5, **more):
    """right(task, rollout) of 20 tasks."""
    found = []
    for task in range(20):
        family, kind = TYPES[task % 2]
        for rollout in range(rollouts):
            correct = bool(right(task, rollout))
            found.append(
                {"task": f"t{task}", "rollout": rollout, "family": family, "type": kind,
                 "difficulty": ("easy", "hard")[task // 10], "correct": correct,
                 "reward": float(correct), "parts": {"correct": float(correct)}, "turns": 3,
                 "cells": 40, "tokens": 50, "prompt_tokens": 400, "seconds": seconds, **more}
            )  # fmt: skip
    return found


POLICIES = {
    "base": records(lambda t, r: t < 4),
    "near": records(lambda t, r: t < 4 or t == 9, seconds=1.0),
    "good": records(lambda t, r: t < 18, seconds=0.25, cached_tokens=100, tokens=100),
}


def evaluation(**more):
    return compare(POLICIES, "base", tasks=TASKS, rollouts=1, partial={}, **more)


def test_rollouts_of_a_task_are_pooled() -> None:
    two = records(lambda t, r: t < 10 or (t < 14 and r == 0), rollouts=2)
    found = summarize(two)
    assert (found["exact_match"], found["tasks"], found["rollouts"]) == (0.6, 20, 40)
    counts = [2] * 10 + [1] * 4 + [0] * 6
    assert (found["low"], found["high"]) == pytest.approx(
        tuple(map(float, share_interval(counts, [2] * 20)))
    )
    assert found["by_type"]["region_net"]["tasks"] == 10
    # Against one rollout a task: 24/40 less 4/20.
    pair = difference({"two": two, "base": POLICIES["base"]}, "two", "base")
    assert pair["difference"] == pytest.approx(0.4) and pair["tasks"] == 20
    same = difference({"two": two, "base": two}, "two", "base")
    assert same["difference"] == 0 and same["noise"] and same["low"] < 0 < same["high"]


def test_only_tasks_that_both_have_are_compared() -> None:
    half = [r for r in POLICIES["good"] if r["task"] in ("t0", "t19")]
    pair = difference({"half": half, "base": POLICIES["base"]}, "half", "base")
    assert (pair["tasks"], pair["difference"]) == (2, 0.0)
    assert difference({"half": half, "base": []}, "half", "base") is None


def test_numbers_and_words() -> None:
    found = evaluation(prices={"good": {"prompt": 1.0, "completion": 5.0, "cached": 0.1}})
    good = found["policies"]["good"]
    assert (good["low"], good["high"]) == wilson(18, 20)
    assert good["seconds_ratio"] == 0.5 and found["policies"]["near"]["seconds_ratio"] == 2.0
    # 300 fresh tokens at 1 dollar, 100 kept ones at 0.1, 100 said at 5, for a million each.
    assert good["price"] == pytest.approx(810e-6)
    assert good["price_total"] == pytest.approx(20 * 810e-6)
    assert found["policies"]["base"]["price"] is None
    pairs = {(p["policy"], p["than"]): p for p in found["differences"]}
    assert set(pairs) == {("near", "base"), ("good", "base"), ("good", "near")}
    near, better = pairs["near", "base"], pairs["good", "base"]
    assert near["difference"] == pytest.approx(0.05) and near["noise"]
    assert in_words(near).endswith("inside the noise: these tasks don't tell them apart.")
    assert in_words(better).startswith("good is better than base: +70.0 points (95 %: +")
    assert in_words(better | {"difference": -0.7}).startswith("good is worse than base: -70.0")
    assert better["low"] < 0.7 < better["high"] and not better["noise"]
    assert better["unpaired"][0] < 0.7 < better["unpaired"][1]
    by = found["differences_by"]["difficulty"]["hard"]
    assert [(p["policy"], p["difference"]) for p in by] == [("near", 0.0), ("good", 0.8)]
    assert set(found["differences_by"]) == {"family", "type", "difficulty"}


def test_a_price_needs_rates_and_counts() -> None:
    record, rates = POLICIES["base"][0], {"prompt": 1.0, "completion": 5.0}
    assert price(record, rates) == pytest.approx(650e-6)
    written = record | {"written_tokens": 100, "cached_tokens": 200}
    assert price(written, rates | {"written": 2.0, "cached": 0.0}) == pytest.approx(550e-6)
    for other in ({"estimated": True}, {"tokens": None}, {"prompt_tokens": None}):
        assert price(record | other, rates) is None
    assert price(record, None) is None


def test_tables_and_page() -> None:
    found = evaluation()
    lines = text(found).splitlines()
    assert max(map(len, lines)) <= 100
    near = next(line for line in lines if line.startswith("near - base"))
    assert near.endswith("inside the noise") and "+5.0" in near
    whole = page(found, "Title", "evaluation.png")
    assert "Task set `d1`: 20 heldout tasks, scale tiny, seed 0. One rollout each." in whole
    assert "- good is better than base: +70.0 points" in whole
    assert "[+10, " in whole  # of one family, inside the noise
    assert "is partial" not in whole
    broken = found | {"partial": {"near": {"left": 2, "wanted": 20, "why": "t3: lost"}}}
    assert "near is partial: 2 of 20 rollouts have no record; t3: lost" in text(broken)
    assert "near is partial" in page(broken, "Title", "evaluation.png")


def test_policies_without_records_are_left_out() -> None:
    found = compare({"base": POLICIES["base"], "gone": []}, "gone", tasks=TASKS, rollouts=1)
    assert set(found["policies"]) == {"base"} and found["differences"] == []
    assert found["policies"]["base"]["seconds_ratio"] is None
    assert "base" in text(found)


def test_plot(tmp_path) -> None:
    image = imread(plot_evaluation(evaluation(), tmp_path / "e.png", title="Title"))
    assert image.shape[0] > 500 and image.shape[1] > 900
    assert ((image[..., 2] > 0.5) & (image[..., 0] < 0.35)).sum() > 50
    with pytest.raises(ValueError, match="no policy to draw"):
        plot_evaluation(compare({}, "base", tasks=TASKS, rollouts=1), tmp_path / "none.png")
