"""The bookkeeping of asynchronous training, by hand (under random schedules: test_schedules)."""

from collections import Counter

import pytest

from fastask_jax.fleet.ledger import Ledger


def fill(ledger, oldest=0):
    """Begins and ends as many groups as may be under way."""
    numbers = []
    while ledger.permits():
        numbers.append(ledger.begin())
        ledger.sampled(numbers[-1], oldest)
        ledger.finish(numbers[-1], f"group {numbers[-1]}")
    return numbers


def test_on_policy_takes_what_the_version_made():
    ledger = Ledger(batch=2)
    assert fill(ledger) == [0, 1] and ledger.permits() == 0
    with pytest.raises(RuntimeError, match="no permit"):
        ledger.begin()
    assert [group.payload for group in ledger.take()] == ["group 0", "group 1"]
    assert ledger.updated() == 1 and ledger.take() is None
    # A group begun with version 0 is of no use any more.
    late = ledger.begin()
    ledger.sampled(late, 0)
    assert ledger.cancel_stale() == [late]
    with pytest.raises(KeyError, match="cancelled"):
        ledger.finish(late, "too late")


def test_so_many_may_be_under_way_as_updates_can_take():
    # Within staleness 2 a group of version 0 may be taken by the updates of versions 0, 1 and 2.
    ledger = Ledger(batch=4, max_staleness=2)
    assert len(fill(ledger)) == 12
    for version in range(3):
        assert [ledger.staleness(group) for group in ledger.take()] == [version] * 4
        ledger.updated()
    assert ledger.counts == Counter(taken=12)


def test_what_waits_too_long_is_dropped_and_replaced():
    ledger = Ledger(batch=2, max_staleness=1)
    fill(ledger)
    for _ in range(2):
        ledger.updated()
    assert ledger.counts["dropped"] == 4 and ledger.take() is None
    assert fill(ledger, oldest=2) == [4, 5, 6, 7]
    assert [group.number for group in ledger.take()] == [4, 5]


def test_the_oldest_goes_first():
    ledger = Ledger(batch=2, max_staleness=3)
    numbers = [ledger.begin() for _ in range(4)]
    for number, oldest in zip(numbers, (3, 0, 2, 1), strict=True):
        ledger.sampled(number, 3)
        ledger.sampled(number, oldest)
        ledger.finish(number, None)
    ledger.version = 3
    assert [group.oldest for group in ledger.take()] == [0, 1]


def test_what_begins_during_an_update_counts_for_it():
    """Else a fast sampler would begin more with the old weights than updates can take."""
    ledger = Ledger(batch=2, max_staleness=1)
    fill(ledger)
    ledger.take()
    assert ledger.permits() == 0
    ledger.updated()
    assert ledger.permits() == 2


def test_groups_without_signal_make_room():
    ledger = Ledger(batch=1)
    for number in range(3):
        assert ledger.begin() == number
        ledger.sampled(number, 0)
        ledger.finish(number, None, signal=False)
    assert ledger.permits() == 1 and ledger.counts == Counter(dull=3)


def test_what_is_lost_or_cut_off_begins_again():
    ledger = Ledger(batch=2, max_staleness=1)
    numbers = [ledger.begin() for _ in range(4)]
    ledger.lose(numbers[2])
    ledger.lose(numbers[1])
    assert [ledger.begin(), ledger.begin()] == [2, 1] and ledger.counts["lost"] == 2
    ledger.sampled(3, 0)
    ledger.finish(3, "waits")
    resumed = Ledger(batch=2, max_staleness=1)
    resumed.restore(ledger.state())
    assert resumed.waiting == 1 and resumed.under_way == 0
    assert [resumed.begin() for _ in range(3)] == [0, 1, 2] and not resumed.permits()


def test_spare_groups_race():
    ledger = Ledger(batch=2, spare=1)
    numbers = [ledger.begin() for _ in range(3)]
    for number in numbers:
        ledger.sampled(number, 0)
    for number in numbers[1:]:
        ledger.finish(number, None)
    assert [group.number for group in ledger.take()] == [1, 2]
    ledger.updated()
    assert ledger.cancel_stale() == [0]


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"max_staleness": -1}, {"spare": -1}])
def test_nonsense_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Ledger(**({"batch": 2} | wrong))
