"""Group advantages against hand-worked numbers and their invariances."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastask_jax.learn.advantages import advantages, has_signal

# Two groups of 3 and 2 in shuffled order: group 7 has rewards 1, 0, 0.5 and group 3 has 1.15, 0.
REWARDS = [1.0, 1.15, 0.0, 0.0, 0.5]
GROUPS = [7, 3, 7, 3, 7]


def test_mean_centred_uneven_groups_in_shuffled_order():
    np.testing.assert_allclose(
        advantages(REWARDS, GROUPS), [0.5, 0.575, -0.5, -0.575, 0.0], atol=1e-15
    )


def test_mean_std_divides_by_the_population_deviation():
    deviation = np.sqrt((0.25 + 0.25 + 0.0) / 3)
    expected = [0.5 / deviation, 1.0, -0.5 / deviation, -1.0, 0.0]
    np.testing.assert_allclose(advantages(REWARDS, GROUPS, kind="mean_std"), expected, rtol=1e-5)


def test_rloo_compares_with_the_mean_of_the_others():
    expected = [1 - 0.25, 1.15, 0 - 0.75, -1.15, 0.5 - 0.5]
    np.testing.assert_allclose(advantages(REWARDS, GROUPS, kind="rloo"), expected, atol=1e-15)


def test_errored_rollouts_leave_before_the_statistics_and_get_zero():
    valid = [True, True, True, False, False]
    result = advantages([1.0, 1.15, 0.0, np.nan, 0.5], GROUPS, valid)
    # Group 7 keeps rewards 1 and 0; group 3 keeps one rollout, so it has nothing to compare with.
    np.testing.assert_allclose(result, [0.5, 0.0, -0.5, 0.0, 0.0])


@pytest.mark.parametrize("kind", ["mean", "mean_std", "rloo"])
def test_group_of_one_and_group_of_equals_get_exactly_zero(kind):
    result = advantages([0.9, 0.1, 0.1, 0.1], ["one", "same", "same", "same"], kind=kind)
    assert result.tolist() == [0.0, 0.0, 0.0, 0.0]


def test_variance_takes_two_passes():
    # E[x^2] - E[x]^2 loses every digit here.
    rewards = np.array([0.0, 1e-3, 2e-3]) + 1e8
    spread = np.std(rewards - 1e8)
    result = advantages(rewards, [0, 0, 0], kind="mean_std")
    np.testing.assert_allclose(result, np.array([-1e-3, 0, 1e-3]) / spread, rtol=2e-3, atol=1e-4)


def test_all_errored_and_empty_batches_are_zero():
    assert advantages([np.nan, np.inf], [0, 0], [False, False]).tolist() == [0.0, 0.0]
    assert advantages([], []).shape == (0,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(rewards=[1.0], group_ids=[0], kind="median"), "unknown advantage kind 'median'"),
        (dict(rewards=[1.0, 2.0], group_ids=[0]), "equally long"),
        (dict(rewards=[1.0, 2.0], group_ids=[0, 0], valid=[True]), "equally long"),
        (dict(rewards=[1.0, np.nan], group_ids=[0, 0]), "rollout 1 is nan: mark a failed"),
    ],
)
def test_bad_input_is_one_clear_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        advantages(**arguments)


def test_has_signal_names_the_groups_worth_training_on():
    values = advantages([1, 1, 0, 1, 0.5], ["a", "a", "b", "b", "c"])
    assert has_signal(values, ["a", "a", "b", "b", "c"]).tolist() == [
        False,
        False,
        True,
        True,
        False,
    ]


rollouts = st.lists(
    st.tuples(
        st.floats(-10, 10, allow_nan=False).map(lambda x: round(x, 4)),
        st.integers(0, 4),
        st.booleans(),
    ),
    min_size=1,
    max_size=40,
)


@settings(deadline=None, max_examples=100)
@given(rollouts, st.sampled_from(["mean", "mean_std", "rloo"]), st.randoms())
def test_permuting_the_rollouts_permutes_the_advantages(items, kind, random):
    order = list(range(len(items)))
    random.shuffle(order)
    plain = advantages(*zip(*items, strict=True), kind=kind)
    shuffled = advantages(*zip(*(items[i] for i in order), strict=True), kind=kind)
    np.testing.assert_allclose(shuffled, plain[order], rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=100)
@given(rollouts, st.sampled_from(["mean", "mean_std", "rloo"]))
def test_valid_advantages_of_a_group_sum_to_zero_and_ignore_a_shift(items, kind):
    rewards, groups, valid = (np.array(column) for column in zip(*items, strict=True))
    result = advantages(rewards, groups, valid, kind)
    for group in np.unique(groups):
        assert abs(result[groups == group].sum()) < 1e-8
    assert (result[~valid] == 0).all()
    shift = 3.0 * groups
    np.testing.assert_allclose(
        advantages(rewards + shift, groups, valid, kind), result, rtol=1e-6, atol=1e-6
    )
