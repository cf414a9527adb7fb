"""Intervals: numbers worked by hand, and how often they hold the truth."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr, ndtri
from scipy.stats import binom

from fastask_jax.report.intervals import paired_interval, share_interval, unpaired_interval
from fastask_jax.report.stats import wilson


@given(st.lists(st.integers(0, 1), min_size=1, max_size=60))
def test_one_rollout_a_task_is_wilson(right) -> None:
    low, high = share_interval(right, np.ones(len(right)))
    assert (low, high) == pytest.approx(wilson(sum(right), len(right)), abs=1e-12)


def test_rollouts_that_all_agree_are_worth_one_a_task_and_independent_ones_more() -> None:
    right = np.repeat([0, 1], [8, 12])
    alone = share_interval(right, np.ones(20))
    agreeing = share_interval(4 * right, np.full(20, 4))
    # Student's 2.093 for 19 degrees of freedom in the place of 1.960; that apart they are alike.
    n, p, z = 20, 0.6, 2.093024
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    assert agreeing == pytest.approx((centre - half, centre + half), abs=1e-6)
    assert agreeing[0] < alone[0] and alone[1] < agreeing[1]
    # Two of four right in each task: no spread between tasks, so as good as 80 rollouts.
    even = share_interval(np.full(20, 2), np.full(20, 4))
    n, p = 80, 0.5
    half = z / (1 + z * z / n) * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    assert even[1] - even[0] == pytest.approx(2 * half, abs=1e-6)


def test_edges() -> None:
    assert share_interval([0, 0, 0], [2, 2, 2])[0] == 0.0
    assert share_interval([2, 2, 2], [2, 2, 2])[1] == 1.0
    assert share_interval([3], [4])[0] < 0.75 < share_interval([3], [4])[1]
    assert share_interval([0, 0], [0, 0]) == (0.0, 1.0)
    assert share_interval([1, 0, 1], [1, 0, 1]) == pytest.approx(wilson(2, 2))
    with pytest.raises(ValueError, match="more than it has"):
        share_interval([5], [4])
    with pytest.raises(ValueError, match="needs a task"):
        paired_interval([])


def test_paired_numbers_by_hand() -> None:
    # 100 tasks, the first policy alone right in 20, the second alone in 10.  With the half tasks:
    # mean 10 / 101, mean square 31 / 101; the normal interval around that.
    differences = np.repeat([1.0, -1.0, 0.0], [20, 10, 70])
    low, high = paired_interval(differences)
    spread = 1.984 * np.sqrt((31 / 101 - (10 / 101) ** 2) / 100)
    assert (low, high) == pytest.approx((10 / 101 - spread, 10 / 101 + spread), abs=0.011)
    assert -0.02 < low < 0 < 0.2 < high < 0.22  # of lattice 1/100: 30 tasks don't suffice
    # The same differences in other places, and the other way round.
    assert paired_interval(-differences[::-1]) == pytest.approx((-high, -low), abs=0.011)


def test_nothing_that_differs_is_not_a_difference_of_nothing() -> None:
    low, high = paired_interval(np.zeros(10))
    assert low < -0.1 and 0.1 < high
    assert paired_interval(np.zeros(1000))[1] < 0.005
    # Nine of nine: surely above 0, not surely 1.
    low, high = paired_interval(np.ones(9))
    assert 0.2 < low < 0.9 and high == 1.0
    # One rollout of four makes a quarter of a step.
    assert paired_interval(np.zeros(10), step=0.25)[1] == pytest.approx(high_of(10) / 4)


def high_of(tasks: int) -> float:
    return float(paired_interval(np.zeros(tasks))[1])


def test_unpaired_against_published_values() -> None:
    # R. G. Newcombe, Statistics in Medicine 17 (1998), pages 873 to 890, table II, method 10:
    # 56/70 - 48/80 and 9/10 - 3/10.
    for (a, m), (b, n), wanted in [
        ((56, 70), (48, 80), (0.0524, 0.3339)),
        ((9, 10), (3, 10), (0.1705, 0.8090)),
    ]:
        found = unpaired_interval(a / m, wilson(a, m), b / n, wilson(b, n))
        assert found == pytest.approx(wanted, abs=5e-5)


def test_one_rollout_a_task_holds_the_truth_of_any_rate() -> None:
    """Exact, over all outcomes; it swings with the lattice of 128 outcomes."""
    for tasks in (128, 512):
        right = np.arange(tasks) < np.arange(tasks + 1)[:, None]
        low, high = share_interval(right, np.ones(tasks))
        for rate in np.arange(0.05, 0.951, 0.01):
            inside = (low <= rate) & (rate <= high)
            assert 0.93 <= binom.pmf(np.arange(tasks + 1), tasks, rate)[inside].sum() <= 0.97


# Each pair of rates is one scenario; the second policy's rate is the first's neighbour or far off.
RATES = ((0.1, 0.15), (0.5, 0.5), (0.85, 0.2), (0.9, 0.94))


def draw(rng, rates, times, tasks, rollouts):
    """Right rollouts per task of two policies, [times, tasks] each.  How hard a task is, both
    policies feel; how it suits one of them, that one's rollouts alone."""
    hard = rng.standard_normal((times, tasks))
    for rate in rates:
        suits = 0.5 * rng.standard_normal((times, tasks))
        yield rng.binomial(rollouts, ndtr(ndtri(rate) * 1.5 + hard + suits))


@pytest.mark.slow
@pytest.mark.parametrize(("tasks", "times"), [(128, 2500), (512, 1500)])
@pytest.mark.parametrize("rollouts", [1, 4])
def test_stated_intervals_hold_the_truth_as_often_as_they_say(tasks, times, rollouts) -> None:
    """Within a task the rollouts of a policy correlate, and so do the two policies."""
    rng = np.random.default_rng(1)
    for rates in RATES:
        one, other = draw(rng, rates, times, tasks, rollouts)
        bounds = [share_interval(right, np.full(tasks, rollouts)) for right in (one, other)]
        for rate, (low, high) in zip(rates, bounds, strict=True):
            assert 0.93 <= held(low, rate, high) <= 0.97, rate
        truth = rates[0] - rates[1]
        low, high = paired_interval((one - other) / rollouts, 1 / rollouts, resamples=2000)
        assert 0.93 <= held(low, truth, high) <= 0.97, rates
        shares = [right.mean(-1) / rollouts for right in (one, other)]
        wide = unpaired_interval(shares[0], bounds[0], shares[1], bounds[1])
        # What both policies feel falls out of the difference.
        assert np.mean(high - low) < 0.97 * np.mean(wide[1] - wide[0]), rates
        if rollouts > 1:
            # Taking rollouts for tasks would claim too much, and this test would notice.
            naive = np.array([wilson(n, tasks * rollouts) for n in one.sum(-1)[:500]])
            assert held(naive[:, 0], rates[0], naive[:, 1]) < 0.92


def held(low, truth, high) -> float:
    return float(np.mean((low - 1e-6 <= truth) & (truth <= high + 1e-6)))
