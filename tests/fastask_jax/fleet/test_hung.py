"""A replica's process that lives and says nothing."""

import os
import signal
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from fastask_jax.fleet.fleet import Fleet, Stalled
from fastask_jax.fleet.ledger import Ledger
from fastask_jax.fleet.links import ProcessLink
from fastask_jax.fleet.replica import Begin, Ended, Sampled
from fastask_jax.rollout.scheduler import RolloutStats
from fastask_jax.rollout.transcript import Trajectory


class Quick:
    """A scheduler's surface: each group ends at once, and tells the process that it ran in."""

    def __init__(self):
        self.stats, self.added, self.version = RolloutStats(), [], -1

    @property
    def unfinished(self):
        return len(self.added)

    def set_weights(self, params, version):
        self.version = version

    def add(self, key, task, copies, seed, first=False):
        trajectory = Trajectory(str(os.getpid()), 0, 0)
        trajectory.add_prompt([1])
        trajectory.add_sampled([2], [0.0], self.version)
        self.added.append(
            SimpleNamespace(key=key, oldest=self.version, trajectories=[trajectory])
        )

    def cancel(self, key):
        pass

    def round(self, patience):
        added, self.added = self.added, []
        return SimpleNamespace(sampled=added, ended=added)

    def close(self):
        pass


@contextmanager
def make(settings):
    yield Quick(), lambda params: params


class Deaf:
    """A link whose replica ends training groups and never an evaluation."""

    name = packs = "deaf"
    restarts = False

    def start(self, tell):
        self.tell = tell

    def send(self, order):
        if isinstance(order, Begin) and not order.first:
            trajectory = Trajectory("task", 0, 0)
            trajectory.add_prompt([1])
            trajectory.add_sampled([2], [0.0], 0)
            timer = threading.Timer(0.1, self.tell, [Ended(order.key, [trajectory])])
            self.tell(Sampled(order.key, 0))
            timer.start()

    def pack(self, params):
        return params

    def alive(self):
        return True

    def stop(self, timeout=30.0):
        pass


def test_training_doesn_t_hide_an_evaluation_that_hangs():
    with Fleet(
        [Deaf()], Ledger(1), str, 1, "0", lambda group: False, patience=1.0
    ) as fleet:
        fleet.publish(0, {})
        with pytest.raises(Stalled, match="waits for an evaluation; no group has begun or ended"):
            fleet.evaluate(["task"])
        assert fleet.counts()[0]["dull"] > 3  # all the while


@pytest.mark.slow
def test_it_is_stopped_and_another_does_its_work():
    link = ProcessLink("replica 0", f"{__name__}:make", None)
    with Fleet([link], Ledger(2), str, 1, "0", bool, silence=15.0, patience=200.0) as fleet:
        fleet.publish(0, {})
        [first, _] = fleet.take()
        pid = int(first.payload[0].task_id)
        os.kill(pid, signal.SIGSTOP)
        fleet.updated({})
        [second, _] = fleet.take()
        assert int(second.payload[0].task_id) != pid and fleet.deaths == 1
        assert second.oldest == 1
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
