"""The fleet under random schedules: replicas, learner and kills of both on a simulated clock.

The fleet and its ledger are the real ones; replicas answer after random delays, mostly short and
sometimes very long, so that anything may overtake anything that isn't said by the same one.
"""

import heapq
import json
import random
from collections import Counter
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from fastask_jax.fleet.fleet import Fleet
from fastask_jax.fleet.ledger import Ledger
from fastask_jax.fleet.replica import Begin, Cancel, Ended, Sampled, Weights
from fastask_jax.rollout.transcript import Trajectory


class Link:
    """A replica that samples by the clock of its world."""

    def __init__(self, world, name):
        self.world, self.name, self.packs = world, name, "packed"
        self.life, self.up, self.hung, self.restarts = 0, False, False, True

    def start(self, tell):
        self.life, self.up, self.tell = self.life + 1, True, tell
        self.hung = False
        self.version, self.groups, self.said = -1, {}, 0.0

    def pack(self, params):
        """The learner's arrays are gone after its next update, so they are good only now."""
        assert params == f"weights {self.world.fleet.ledger.version}"
        return f"packed {params}"

    def send(self, order):
        self.arrives(self.on_order, order)

    def arrives(self, what, *arguments):
        """In the order in which it was sent, as in a pipe."""
        self.said = max(self.said, self.world.clock + self.world.delay(0.1))
        self.world.at(self.said, self.mine(what), *arguments)

    def mine(self, what):
        """`what`, unless the replica has died meanwhile."""
        life = self.life

        def act(*arguments):
            if self.up and not self.hung and self.life == life:
                what(*arguments)

        return act

    def on_order(self, order):
        if isinstance(order, Weights):
            assert order.params == f"packed weights {order.version}"
            assert order.version >= self.version
            self.version = order.version
        elif isinstance(order, Begin):
            assert self.version >= 0 and order.key not in self.groups
            self.groups[order.key] = []
            self.world.after(self.world.delay(), self.mine(self.on_sample), order.key)
        elif isinstance(order, Cancel):
            self.groups.pop(order.key, None)

    def on_sample(self, key):
        if key not in self.groups:
            return
        versions = self.groups[key]
        versions.append(self.version)
        if len(versions) == 1:
            self.tell(Sampled(key, self.version))
        if self.world.random.random() < 0.5:
            self.world.after(self.world.delay(), self.mine(self.on_sample), key)
        else:
            trajectory = Trajectory("task", 0, 0)
            trajectory.add_prompt([1])
            for version in self.groups.pop(key):
                trajectory.add_sampled([2], [0.0], version)
            self.tell(Ended(key, [trajectory]))

    def alive(self):
        return self.up

    def stop(self, timeout=0.0):
        self.world.hangs += self.hung
        self.up = False


class World:
    def __init__(self, seed, batch, max_staleness, spare, replicas, steps):
        self.random = random.Random(seed)
        self.shape, self.replicas, self.steps = (batch, max_staleness, spare), replicas, steps
        self.clock, self.events, self.tie = 0.0, [], 0
        self.evaluations, self.hangs = 0, 0
        self.begin(None)

    def at(self, time, what, *arguments):
        self.tie += 1
        heapq.heappush(self.events, (time, self.tie, what, arguments))

    def after(self, delay, what, *arguments):
        self.at(self.clock + delay, what, *arguments)

    def delay(self, scale=1.0):
        return self.random.expovariate(1.0) * scale * self.random.choice((0.1, 1.0, 20.0))

    def begin(self, saved):
        """A start of the program: anew, or from what a checkpoint holds."""
        self.events = []
        self.links = [Link(self, f"replica {i}") for i in range(self.replicas)]
        self.fleet = Fleet(
            self.links, Ledger(*self.shape), lambda number: f"task {number}", 1, "0",
            lambda group: self.random.random() < 0.7,
            restarts=10**6, silence=200.0, clock=lambda: self.clock,
        )  # fmt: skip
        self.learning, self.evaluating = False, False
        self.taken = set()
        if saved is not None:
            state, taken = json.loads(saved)
            self.fleet.restore(state, restored)
            self.taken = set(taken)
        self.saved = self.checkpoint()
        self.fleet._news, self.heard = SimpleNamespace(put=self.news), {}
        self.fleet.start()
        self.fleet.publish(self.fleet.ledger.version, f"weights {self.fleet.ledger.version}")

    def news(self, item):
        """What one life says comes in order; some of it after its death, even after the first
        words of the next life."""
        life = item[:2]
        self.heard[life] = max(self.heard.get(life, 0.0), self.clock + self.delay(0.1))
        self.at(self.heard[life], self.fleet.handle, *item)

    def checkpoint(self):
        state = self.fleet.state(lambda t: [t.task, t.versions[1:].tolist()])
        return json.dumps([state, sorted(self.taken)])

    def account(self):
        """Every task that was ever dealt has one fate, waits, is under way or begins again."""
        state = self.fleet.ledger.state()
        fates = sum(state["counts"].get(f, 0) for f in ("taken", "dull", "cancelled", "dropped"))
        held = [*state["again"], *(number for number, _, _ in state["waiting"])]
        assert len(set(held)) == len(held) and not self.taken & set(held)
        assert state["next"] == fates + len(held)

    def run(self):
        for _ in range(100_000):
            self.evaluate()
            self.account()
            if self.fleet.ledger.version == self.steps and not self.evaluating:
                return
            self.learn()
            if not self.events:
                self.clock += 201.0
                self.fleet.look()
            assert self.events, f"nothing will ever happen again: {self.fleet.waits()}"
            self.clock, _, what, arguments = heapq.heappop(self.events)
            what(*arguments)
            chance = self.random.random()
            if chance < 0.01:
                link = self.random.choice(self.links)
                link.hung = self.random.random() < 0.3
                link.up = link.up and link.hung
            elif chance < 0.05:
                self.fleet.look()
            elif chance < 0.055:
                self.begin(self.saved)
        raise AssertionError(f"the run doesn't end: {self.fleet.waits()}")

    def learn(self):
        if self.learning or self.evaluating or (batch := self.fleet.ledger.take()) is None:
            return
        assert len(batch) == self.shape[0]
        for group in batch:
            [trajectory] = group.payload
            oldest = trajectory.versions[1:].min()
            assert group.oldest == oldest and trajectory.task == f"task {group.number}"
            assert 0 <= self.fleet.ledger.version - oldest <= self.shape[1]
            assert group.number not in self.taken
            self.taken.add(group.number)
        self.learning = True
        self.after(self.delay(), self.on_update)

    def on_update(self):
        self.learning = False
        self.fleet.updated(f"weights {self.fleet.ledger.version + 1}")
        if self.random.random() < 0.3 or self.fleet.ledger.version == self.steps:
            self.evaluating = True
            self.fleet.begin_evaluation([f"held out {i}" for i in range(3)])
        elif self.random.random() < 0.5:
            self.saved = self.checkpoint()

    def evaluate(self):
        if self.evaluating and (found := self.fleet.evaluation()) is not None:
            self.fleet.end_evaluation()
            self.evaluating = False
            self.evaluations += 1
            for place, [trajectory] in enumerate(found):
                assert trajectory.task == f"held out {place}"
                assert set(trajectory.versions[1:]) == {self.fleet.ledger.version}
            self.saved = self.checkpoint()


def restored(value):
    trajectory = Trajectory("task", 0, 0)
    trajectory.add_prompt([1])
    for version in value[1]:
        trajectory.add_sampled([2], [0.0], version)
    return trajectory


@settings(max_examples=10_000, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 5),
    max_staleness=st.integers(0, 4),
    spare=st.integers(0, 4),
    replicas=st.integers(1, 3),
    steps=st.integers(1, 5),
)
def test_no_schedule_breaks_the_bound_or_stops_the_run(
    seed, batch, max_staleness, spare, replicas, steps
):
    World(seed, batch, max_staleness, spare, replicas, steps).run()


def test_the_schedules_see_every_fate():
    """The worlds above would prove little if nothing ever died, waited too long or was lost."""
    seen = Counter()
    for seed in range(60):
        world = World(seed, 2, 1, 2, 2, 5)
        world.run()
        seen += world.fleet.ledger.counts
        seen["deaths"] += world.fleet.deaths
        seen["evaluations"] += world.evaluations
        seen["hangs"] += world.hangs
    assert min(seen[fate] for fate in ("taken", "dull", "cancelled", "dropped", "lost")) > 0
    assert seen["deaths"] > seen["hangs"] > 0 and seen["evaluations"] > 60
