"""The bookkeeping of asynchronous training: by hand, and under random schedules."""

import heapq
import json
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_groups_without_signal_make_room():
    ledger = Ledger(batch=1)
    for number in range(3):
        assert ledger.begin() == number
        ledger.sampled(number, 0)
        ledger.finish(number, None, signal=False)
    assert ledger.permits() == 1 and ledger.counts == Counter(dull=3)


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


class World:
    """Rollouts of random length on a simulated clock, a learner, and kills of each."""

    def __init__(self, seed, batch, max_staleness, spare, steps):
        self.random = random.Random(seed)
        self.ledger = Ledger(batch, max_staleness, spare)
        self.shape, self.steps = (batch, max_staleness, spare), steps
        self.clock, self.events, self.tie = 0.0, [], 0
        self.life = 0  # which start of the program this is; events of earlier ones are void
        self.taken, self.ended, self.learning = [], set(), False
        self.saved = (json.dumps(self.ledger.state()), 0, set())

    def at(self, delay, name, number=None):
        self.tie += 1
        heapq.heappush(self.events, (self.clock + delay, self.tie, self.life, name, number))

    def delay(self):
        """Mostly short, sometimes very long: what finishes first is any of them."""
        return self.random.expovariate(1.0) * self.random.choice((0.1, 1.0, 20.0))

    def run(self):
        for _ in range(200_000):
            if self.ledger.version == self.steps:
                return
            while self.ledger.permits():
                self.at(self.delay(), "sample", self.ledger.begin())
            self.learn()
            assert self.events, "nothing will ever happen again"
            self.clock, _, life, name, number = heapq.heappop(self.events)
            if life == self.life:
                getattr(self, f"on_{name}")(number)
            if self.random.random() < 0.02:
                self.kill()
        raise AssertionError("the run doesn't end")

    def learn(self):
        if self.learning or (batch := self.ledger.take()) is None:
            return
        assert len(batch) == self.ledger.batch
        for group in batch:
            assert 0 <= self.ledger.staleness(group) <= self.ledger.max_staleness
            assert group.number not in self.ended
            self.ended.add(group.number)
        self.learning = True
        self.at(self.delay(), "update")

    def on_sample(self, number):
        if number not in self.ledger._under_way:
            return
        self.ledger.sampled(number, self.ledger.version)
        fate = self.random.random()
        if fate < 0.05:
            self.ledger.lose(number)
        elif fate < 0.6:
            self.at(self.delay(), "sample", number)
        else:
            self.at(self.delay(), "finish", number)

    def on_finish(self, number):
        if number in self.ledger._under_way:
            signal = self.random.random() < 0.7
            self.ledger.finish(number, number, signal)
            if not signal:
                self.ended.add(number)

    def on_update(self, _):
        self.learning = False
        self.ledger.updated()
        self.ended.update(self.ledger.cancel_stale())
        if self.random.random() < 0.5:
            self.saved = (json.dumps(self.ledger.state()), self.ledger.version, set(self.ended))

    def kill(self):
        """The program dies and goes on from its last commit."""
        state, version, ended = self.saved
        self.ledger = Ledger(*self.shape)
        self.ledger.restore(json.loads(state))
        assert self.ledger.version == version
        self.life += 1
        self.learning = False
        self.ended = set(ended)
        known = {n for n, *_ in json.loads(state)["waiting"]} | set(self.ledger._again)
        # Every group that was ever dealt has ended, waits, or begins again: none is lost.
        dropped = self.ledger.counts["dropped"]
        assert len(ended | known) >= self.ledger._next - dropped
        assert not ended & known


@settings(max_examples=10_000, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 5),
    max_staleness=st.integers(0, 4),
    spare=st.integers(0, 4),
    steps=st.integers(1, 6),
)
def test_no_schedule_breaks_the_bound_or_stops_the_run(seed, batch, max_staleness, spare, steps):
    World(seed, batch, max_staleness, spare, steps).run()
