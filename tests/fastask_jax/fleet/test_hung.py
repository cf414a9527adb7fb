"""Replicas that live and say nothing, die, or outlive their learner; and what is told of them."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from fastask_jax.collect import Asynchronous, Batches
from fastask_jax.fleet.config import FleetConfig
from fastask_jax.fleet.fleet import Fleet, Stalled
from fastask_jax.fleet.ledger import Ledger
from fastask_jax.fleet.links import ProcessLink
from fastask_jax.fleet.replica import Begin, Ended, Sampled, Stop, Usage
from fastask_jax.rollout.scheduler import RolloutStats
from fastask_jax.rollout.transcript import Trajectory
from tests.processes import running


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


class Stubborn(Deaf):
    """A link that takes its time to end, until it is told not to; Ctrl-C comes meanwhile."""

    def __init__(self, interrupted=False):
        self.orders, self.waits, self.interrupted = [], [], interrupted

    def send(self, order):
        self.orders.append(order)

    def stop(self, timeout=30.0):
        self.waits.append(timeout)
        if timeout and self.interrupted:
            raise KeyboardInterrupt


def test_a_second_interrupt_leaves_no_replica_behind():
    links = [Stubborn(), Stubborn(interrupted=True), Stubborn()]
    with pytest.raises(KeyboardInterrupt), Fleet(links, Ledger(1), str, 1, "0", bool):
        pass
    assert all(isinstance(link.orders[-1], Stop) for link in links)
    assert [link.waits for link in links] == [[30.0, 0.0], [30.0, 0.0], [0.0]]


BUSY = """
import sys, time
from contextlib import contextmanager
from pathlib import Path
import os
from fastask_jax.fleet.links import ProcessLink

@contextmanager
def make(settings):
    Path(settings).write_text(str(os.getpid()))
    time.sleep(600)  # as one that compiles, which reads no orders
    yield

if __name__ == "__main__":
    ProcessLink("replica 0", "busy:make", sys.argv[1]).start(print)
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_replica_that_is_busy_ends_with_its_learner(tmp_path):
    (tmp_path / "busy.py").write_text(BUSY)
    pid_file = tmp_path / "pid"
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    words = [sys.executable, str(tmp_path / "busy.py"), str(pid_file)]
    learner = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": paths})
    try:
        wait_until(lambda: pid_file.exists() and pid_file.read_text(), 120)
    finally:
        learner.kill()
        learner.wait()
    pid = int(pid_file.read_text())
    wait_until(lambda: not running(pid), 10)


def wait_until(what, seconds):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it didn't come to that"
        time.sleep(0.05)


def test_numbers_of_a_replica_begin_anew_with_its_life(monkeypatch):
    batches = Batches(1, 1)
    source = Asynchronous([Deaf()], str, None, FleetConfig(), None, batches)
    told = [
        (1, Usage(5.0, 1.0, 0, RolloutStats(sampled_tokens=100, decode_seconds=4.0))),
        (2, Usage(8.0, 2.0, 0, RolloutStats(sampled_tokens=30, decode_seconds=3.0))),
        (2, None),
        (3, Usage(1.0, 0.5, 0, RolloutStats(sampled_tokens=7, decode_seconds=0.5))),
    ]
    found = []
    for one in told:
        monkeypatch.setattr(source.fleet, "usage", lambda one=one: [one])
        values = source._usage_values()
        found.append([values["tokens/sampled"], values["time/decode"], values["time/idle"]])
    assert found == [[100, 4.0, 1.0], [30, 3.0, 2.0], [0, 0.0, 0.0], [7, 0.5, 0.5]]


def test_a_resumed_run_tells_of_its_own_groups():
    def make():
        return Asynchronous([Deaf()], str, None, FleetConfig(), None, Batches(1, 1))

    def end(source, signal=True):
        ledger = source._ledger
        number = ledger.begin()
        ledger.sampled(number, ledger.version)
        ledger.finish(number, [], signal)
        return ledger

    first = make()
    for _ in range(3):
        end(first).take()
        end(first, signal=False)
        first._ledger.updated()
        values = first._count_values()
        assert (values["rollout/taken"], values["rollout/dull"]) == (1, 1)
    end(first, signal=False)  # between the step's numbers and the checkpoint
    state = json.loads(json.dumps(first.state()))
    second = make()
    second.restore(state)
    end(second).take()
    values = second._count_values()
    assert (values["rollout/taken"], values["rollout/dull"]) == (1, 1)
