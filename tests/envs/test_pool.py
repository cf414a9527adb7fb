"""The process pool against real worker processes, most of which are made to fail."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.core import Reply, ToolCall
from envs.pool import EnvPool, PoolConfig, PoolError, wire
from tests.processes import running

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@pytest.fixture(autouse=True)
def _importable_envs(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))


def open_pool(config=None, factory="counting", **settings):
    return EnvPool(f"pool_envs:{factory}", config, PoolConfig(**settings))


def tasks_of(count, steps=6, **task):
    return {i: {"steps": steps, "seed": i, **task} for i in range(count)}


def play(pool, tasks, seconds=60.0, live=1000):
    """Plays all tasks to their ends, `live` at a time.  Returns {id: (total, messages, error)}."""
    turn = dict.fromkeys(tasks, 0)
    said = {i: [] for i in tasks}
    ends = {}
    waiting = iter(tasks.items())
    for i, task in itertools.islice(waiting, live):
        pool.reset(i, task)
    deadline = time.monotonic() + seconds
    while len(ends) < len(tasks):
        assert time.monotonic() < deadline, f"only {len(ends)} of {len(tasks)} episodes ended"
        for event in pool.poll(timeout=1.0):
            i = event.episode_id
            assert i not in ends
            said[i] += [message.content for message in event.messages]
            if event.done:
                ends[i] = (event.score and event.score.total, tuple(said[i]), event.error)
                for following, task in itertools.islice(waiting, 1):
                    pool.reset(following, task)
            else:
                turn[i] += 1
                pool.step(i, Reply(f"reply {turn[i]} of {i}", (ToolCall("f", {"x": i}),), 3))
    assert pool.poll(timeout=0) == []
    return ends


def pids(pool):
    return [worker["pid"] for worker in pool.stats()["workers"]]


def gone(pid, seconds=5.0):
    """Whether the process ends within the time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not running(pid):
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="module")
def expected():
    """What 12 episodes of 6 steps say and score when nothing goes wrong."""
    sys.path.insert(0, str(HERE))
    try:
        with open_pool(workers=1) as pool:
            return play(pool, tasks_of(12))
    finally:
        sys.path.remove(str(HERE))


# -- the plain job -------------------------------------------------------------------------


def test_scores_and_messages_do_not_depend_on_the_workers(expected):
    with open_pool(workers=3) as pool:
        assert play(pool, tasks_of(12)) == expected
        stats = pool.stats()
    assert all(total is not None and error is None for total, _, error in expected.values())
    assert len({total for total, _, _ in expected.values()}) == 12
    assert stats["calls"] == 12 * 7 and stats["episodes"] == 12 and stats["live"] == 0
    assert stats["restarts"] == stats["faults"] == stats["replays"] == stats["errors"] == 0
    assert [worker["calls"] for worker in stats["workers"]] == [28, 28, 28]  # least loaded first
    assert all(0 < worker["busy_share"] < 1 for worker in stats["workers"])


def test_an_episode_stays_in_one_worker_and_shares_the_factory_there():
    with open_pool({"show_pid": True}, workers=2) as pool:
        ends = play(pool, tasks_of(8, steps=3))
        owners = set(pids(pool))
    places = [set(said[2:]) for _, said, _ in ends.values()]
    assert all(len(place) == 1 for place in places)
    assert len(set.union(*places)) == 2  # one pid and one shared object for each worker
    assert {int(place.pop().split()[0]) for place in places} == owners


def test_no_barrier_a_slow_episode_holds_up_nobody():
    with open_pool({"marks": "/nonexistent"}, workers=2, call_timeout=100) as pool:
        pool.reset("slow", {"steps": 1, "seed": 0, "faults": {1: "sleep!"}})
        assert [event.episode_id for event in pool.poll()] == ["slow"]
        pool.step("slow", Reply("wait"))
        quick = {0: {"steps": 9, "seed": 1}}
        assert play_beside(pool, quick)[0] is None
        assert pool.stats()["awaited"] == 1


def play_beside(pool, tasks):
    """Plays tasks while another episode's call stays in flight; {id: error}."""
    for i, task in tasks.items():
        pool.reset(i, task)
    errors = {}
    while len(errors) < len(tasks):
        events = pool.poll(timeout=10)
        assert events, "nothing finished within 10 s"
        for event in events:
            if event.done:
                errors[event.episode_id] = event.error
            else:
                pool.step(event.episode_id, Reply("go on"))
    return errors


def test_poll_returns_at_once_when_nothing_is_awaited_and_after_the_timeout_else():
    with open_pool({"pause": 1.0}, workers=1) as pool:
        started = time.monotonic()
        assert pool.poll() == []
        pool.reset(0, {"steps": 1, "seed": 0})
        (event,) = pool.poll()
        assert [m.role for m in event.messages] == ["system", "user"] and event.step is None
        pool.step(0, Reply("x"))
        assert pool.poll(timeout=0.1) == [] and time.monotonic() - started < 0.9
        (event,) = pool.poll(timeout=5)
        assert event.done and event.score.info == {"turns": 1} and event.seconds >= 1.0
        assert pool.poll(timeout=5) == [] and pool.stats()["live"] == 0


def test_megabytes_both_ways_without_polling_do_not_deadlock():
    padding = "x" * 3_000_000
    with open_pool({"padding": padding}, workers=1, call_timeout=20) as pool:
        for i in range(6):
            pool.reset(i, {"steps": 1, "seed": i})
        resets = []
        while len(resets) < 6:
            resets += pool.poll(timeout=20)
        for i in range(6):
            pool.step(i, Reply("y" * 3_000_000))
        time.sleep(0.2)  # both directions are full by now
        ends = []
        while len(ends) < 6:
            events = pool.poll(timeout=20)
            assert events
            ends += events
        assert all(len(event.messages[0].content) > 3_000_000 for event in ends)
        assert pool.stats()["restarts"] == 0


def test_drop_frees_the_environment_and_the_id(tmp_path):
    with open_pool({"pause": 0.3, "closed": str(tmp_path)}, workers=1) as pool:
        pool.reset("a", {"steps": 2, "seed": 1})
        pool.poll()
        pool.step("a", Reply("never answered"))
        pool.drop("a")
        pool.drop("unknown")
        assert pool.poll(timeout=1) == [] and pool.stats()["live"] == 0
        pool.reset("a", {"steps": 2, "seed": 2})
        (event,) = pool.poll()
        assert event.episode_id == "a" and event.step is None
        assert (tmp_path / "a").exists()
        pool.step("a", Reply("x"))
        pool.drop("a")
        pool.reset("a", {"steps": 1, "seed": 3})
        pool.drop("a")
        assert pool.poll(timeout=0.5) == []


def test_misuse_says_what_to_do():
    with open_pool({"pause": 0.2}, workers=1) as pool:
        with pytest.raises(KeyError, match="reset it first"):
            pool.step("a", Reply("x"))
        pool.reset("a", {"steps": 2, "seed": 1})
        with pytest.raises(ValueError, match="live already"):
            pool.reset("a", {"steps": 2, "seed": 1})
        with pytest.raises(ValueError, match="in flight"):
            pool.step("a", Reply("x"))
        with pytest.raises((AttributeError, TypeError)):
            pool.reset("b", {"steps": lambda: 2})
        assert len(pool.poll()) == 1  # the refused calls left nothing behind
        assert pool.poll() == [] and pool.stats()["live"] == 1
    with pytest.raises(PoolError, match="closed"):
        pool.poll()


@pytest.mark.parametrize(
    "setting", [{"workers": 0}, {"call_timeout": 0}, {"max_retries": -1}, {"error_budget": -1},
                {"heartbeat_interval": 5.0, "heartbeat_timeout": 6.0}, {"error_rate": -0.1}]
)
def test_settings_are_checked(setting):
    with pytest.raises(ValueError, match=f"PoolConfig.*{next(reversed(setting))}"):
        PoolConfig(**setting)


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(0, 2000), max_size=20))
def test_frames_survive_any_cut(payloads, cuts):
    messages = [("op", index, payload) for index, payload in enumerate(payloads)]
    stream = b"".join(map(wire.frame, messages))
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    decoder = wire.Decoder()
    got = []
    for start, end in zip(edges, edges[1:], strict=False):
        got += decoder.feed(stream[start:end])
    assert got == messages


# -- faults --------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["raise", "exit", "kill", "sleep"])
def test_a_fault_that_passes_changes_nothing(kind, workers, tmp_path, expected):
    """One episode breaks at its reset, one in the middle, one at its last step."""
    tasks = tasks_of(12)
    for i, turn in ((2, 0), (5, 3), (9, 6)):
        tasks[i] = {**tasks[i], "faults": {turn: kind}}
    with open_pool({"marks": str(tmp_path)}, workers=workers, call_timeout=0.5) as pool:
        assert play(pool, tasks) == expected
        stats = pool.stats()
    assert len(list(tmp_path.iterdir())) == 3 and stats["errors"] == 0
    if kind == "raise":
        assert stats["faults"] == stats["replays"] == 3 and stats["restarts"] == 0
    else:
        assert stats["restarts"] == 3 and stats["replays"] >= 3


@pytest.mark.parametrize("kind", ["raise!", "exit!", "kill!", "sleep!"])
def test_a_fault_that_stays_ends_its_episode_only(kind, expected):
    tasks = tasks_of(12)
    tasks[4] = {**tasks[4], "faults": {3: kind}}
    with open_pool(workers=2, call_timeout=0.4, max_retries=2) as pool:
        ends = play(pool, tasks)
        stats = pool.stats()
    total, said, error = ends.pop(4)
    assert total is None and said == expected[4][1][:4]
    assert "failed 3 times in a row" in error
    reason = {"raise!": "OSError: the sandbox is gone", "exit!": "exited with status 3",
              "kill!": "killed by SIGKILL", "sleep!": "didn't finish a call within 0.4 s"}[kind]
    assert reason in error
    assert ends == {i: end for i, end in expected.items() if i != 4}
    assert stats["errors"] == 1 and stats["episodes"] == 11


@pytest.mark.slow
def test_workers_killed_all_the_time_give_the_same_scores(tmp_path):
    tasks = tasks_of(60, steps=8)
    with open_pool(workers=2) as pool:
        calm = play(pool, tasks)
    settings = {"workers": 2, "max_retries": 10, "error_budget": 1000}
    with open_pool({"pause": 0.005}, **settings) as pool:
        victims, stop = [], threading.Event()

        def reap():
            while not stop.wait(0.2):
                victims.append(pids(pool)[len(victims) % 2])
                os.kill(victims[-1], signal.SIGKILL)

        killer = threading.Thread(target=reap)
        killer.start()
        try:
            assert play(pool, tasks, live=12) == calm
        finally:
            stop.set()
            killer.join()
        stats = pool.stats()
    assert stats["restarts"] >= 5 and stats["replays"] >= 5 and stats["errors"] == 0


def test_idle_episodes_of_a_killed_worker_go_on():
    """The worker dies while the policy thinks: no call is in flight."""
    tasks = tasks_of(3, steps=2)
    with open_pool(workers=1) as pool:
        calm = play(pool, tasks)
        for i, task in tasks.items():
            pool.reset(i, task)
        said = {i: [] for i in tasks}
        for turn in range(3):
            count = 0
            while count < 3:
                for event in pool.poll(timeout=5):
                    said[event.episode_id] += [m.content for m in event.messages]
                    count += 1
            os.kill(pids(pool)[0], signal.SIGKILL)
            time.sleep(0.05)
            for i in tasks if turn < 2 else ():
                pool.step(i, Reply(f"reply {turn + 1} of {i}"))
        assert {i: tuple(texts) for i, texts in said.items()} == {i: e[1] for i, e in calm.items()}


def test_a_worker_that_raises_too_often_is_restarted(expected):
    tasks = tasks_of(12)
    bad = {100 + i: {"steps": 3, "seed": i, "faults": {1: "raise!"}} for i in range(3)}
    with open_pool(workers=2, worker_faults=4, max_retries=3) as pool:
        ends = play(pool, {**tasks, **bad})
        stats = pool.stats()
    assert stats["faults"] == 12 and stats["restarts"] >= 2 and stats["errors"] == 3
    assert {i: ends[i] for i in tasks} == expected


def test_queueing_and_late_polling_are_no_reason_to_kill():
    with open_pool({"pause": 0.2}, workers=1, call_timeout=0.7) as pool:
        tasks = tasks_of(8, steps=1)
        for i, task in tasks.items():
            pool.reset(i, task)
        while pool.stats()["calls"] < 8:
            pool.poll(timeout=1)
        for i in tasks:
            pool.step(i, Reply("x"))  # the last one waits 1.4 s for its turn
        ends = []
        while len(ends) < 4:
            ends += pool.poll(timeout=5)
        time.sleep(1.2)  # the caller is away while the rest finishes
        while len(ends) < 8:
            ends += pool.poll(timeout=5)
        stats = pool.stats()
    assert all(event.score is not None for event in ends)
    assert max(event.waited for event in ends) > 1.0 and max(e.seconds for e in ends) < 0.6
    assert stats["restarts"] == 0 and stats["wait_seconds"] > 0.1


def test_a_silent_worker_is_replaced(expected):
    settings = {"workers": 2, "heartbeat_interval": 0.1, "heartbeat_timeout": 0.6}
    with open_pool(**settings) as pool:
        frozen = pids(pool)[0]
        os.kill(frozen, signal.SIGSTOP)
        assert play(pool, tasks_of(12)) == expected
        assert pool.stats()["restarts"] == 1 and gone(frozen)


def test_a_replay_that_differs_is_an_error_not_a_wrong_answer():
    for verify in (True, False):
        with open_pool({"clock": True}, workers=1, verify_replay=verify) as pool:
            pool.reset(0, {"steps": 2, "seed": 0})
            pool.poll()
            pool.step(0, Reply("a"))
            pool.poll()
            os.kill(pids(pool)[0], signal.SIGKILL)
            assert pool.poll(timeout=0.5) == []  # nothing is awaited: the error waits too
            deadline = time.monotonic() + 5
            while pool.stats()["calls"] < 4 and time.monotonic() < deadline:
                pool.poll(timeout=0)
                time.sleep(0.01)
            pool.step(0, Reply("b"))
            (event,) = pool.poll(timeout=5)
            assert event.done and pool.stats()["live"] == 0
            if verify:
                assert "replay of step 1 differs" in event.error and event.score is None
            else:
                assert event.error is None and event.score.parts == {"correct": 1.0}


def test_values_that_do_not_travel_are_errors_of_their_episode(expected):
    import pool_envs

    with open_pool({"bad_info": True}, workers=1, max_retries=1) as pool:
        (error,) = {error for _, _, error in play(pool, tasks_of(1)).values()}
        assert "failed 2 times" in error and "pickle" in error
    with open_pool(workers=1, max_retries=1) as pool:
        ends = play(pool, {**tasks_of(2), "x": pool_envs.Opaque()})
        assert "opaque on purpose" in ends["x"][2] and ends[0] == expected[0]
    with open_pool(factory="wrong_step", workers=1, max_retries=0) as pool:
        assert "returned str, expected envs.core.Step" in play(pool, tasks_of(1))[0][2]


def test_the_error_budget_stops_the_run():
    with open_pool(workers=2, error_budget=10, error_rate=0.0) as pool:
        before = pids(pool)
        with pytest.raises(PoolError, match=r"11 environment faults .* the last: OSError"):
            play(pool, tasks_of(20, faults={1: "raise!"}))
        for call in (pool.poll, lambda: pool.reset(1, {}), lambda: pool.step(1, Reply("x"))):
            with pytest.raises(PoolError, match="has stopped: 11 environment faults"):
                call()
        assert all(gone(pid) for pid in before)


def test_the_error_budget_grows_with_finished_episodes():
    bad = {i: {"steps": 1, "seed": i, "faults": {1: "raise!"}} for i in range(1000, 1004)}
    settings = {"workers": 2, "error_budget": 2, "error_rate": 0.1, "max_retries": 0}
    with open_pool(**settings) as pool:
        play(pool, tasks_of(40, steps=1))
        assert sum(error is not None for _, _, error in play(pool, bad).values()) == 4
    with open_pool(**settings) as pool, pytest.raises(PoolError, match="3 environment faults"):
        play(pool, bad)


# -- start and end -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "factory, message",
    [
        ("no_such_module:make", r"No module named 'no_such_module' \(a factory lives in a module"),
        ("pool_envs:nothing", r"module pool_envs has no attribute 'nothing'"),
        ("pool_envs:HERE_IS_NO", r"has no attribute"),
        ("pool_envs:__doc__", r"__doc__ is str, not a callable"),
        ("pool_envs:broken", r"RuntimeError: no such licence server"),
        ("pool_envs:returns_nothing", r"returned NoneType; a factory returns a callable"),
        ("pool_envs:with_jax", r"jax is loaded in an environment worker after calling pool_envs"),
    ],
)
def test_a_wrong_factory_is_told_at_once(factory, message):
    with pytest.raises(PoolError, match=message) as caught:
        EnvPool(factory, {}, PoolConfig(workers=1))
    assert f"can't use factory '{factory}'" in str(caught.value)


def test_a_factory_must_be_named_and_its_config_picklable():
    with pytest.raises(ValueError, match='"module:callable"'):
        EnvPool("pool_envs.counting", {})
    with pytest.raises((AttributeError, TypeError)):
        EnvPool("pool_envs:counting", lambda: None)


def test_jax_in_a_worker_is_refused_later_too():
    with open_pool(factory="lazily_jax", workers=1, max_retries=0, call_timeout=120) as pool:
        assert "jax is loaded in an environment worker" in play(pool, tasks_of(1), 180)[0][2]


def test_close_ends_the_workers_and_their_episodes(tmp_path):
    pool = open_pool({"closed": str(tmp_path)}, factory="closing", workers=2)
    workers = pids(pool)
    for i in range(4):
        pool.reset(i, {"steps": 3, "seed": i})
    pool.poll()
    pool.close()
    pool.close()
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "2", "3", "maker"}
    assert all(gone(pid, 0.1) for pid in workers)


def test_close_does_not_wait_for_a_hung_worker():
    with open_pool({"marks": "/nonexistent"}, workers=1, close_timeout=0.3) as pool:
        pool.reset(0, {"steps": 1, "seed": 0, "faults": {0: "sleep!"}})
        workers = pids(pool)
        started = time.monotonic()
    assert time.monotonic() - started < 3 and all(gone(pid, 0.1) for pid in workers)


def test_a_forgotten_pool_ends_its_workers():
    pool = open_pool(workers=1)
    workers = pids(pool)
    del pool
    assert all(gone(pid) for pid in workers)


def script(body):
    """A process that opens a pool, prints its workers' pids and goes on with `body`."""
    text = textwrap.dedent("""
        import os, signal, sys, time
        sys.path[:0] = [{here!r}, {root!r}]
        {first}
        from envs.pool import EnvPool, PoolConfig
        pool = EnvPool("pool_envs:counting", {{}}, PoolConfig(workers=2))
        print(*[worker["pid"] for worker in pool.stats()["workers"]], flush=True)
        {then}
    """).format(here=str(HERE), root=str(ROOT), **body)
    return subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, start_new_session=True)


def test_workers_end_with_a_parent_that_forgets_to_close():
    process = script({"first": "", "then": "pool.reset(1, {'steps': 2, 'seed': 1})"})
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and err == ""
    assert len(out.split()) == 2 and all(gone(int(pid)) for pid in out.split())


@pytest.mark.parametrize("busy", [False, True])
def test_workers_end_with_a_killed_parent(busy):
    reset = "pool.reset(1, {'steps': 2, 'seed': 1, 'faults': {0: 'sleep!'}}); " if busy else ""
    process = script({"first": "", "then": f"{reset}time.sleep(60)"})
    workers = [int(pid) for pid in process.stdout.readline().split()]
    time.sleep(0.2)
    process.kill()
    process.communicate()
    assert len(workers) == 2 and all(gone(pid) for pid in workers)


def test_ctrl_c_is_the_parents_alone():
    # Whoever runs the tests in the background may have them ignore the signal.
    first = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    process = script({"first": first, "then": textwrap.dedent("""
        pool.reset(1, {'steps': 2, 'seed': 1, 'faults': {0: 'sleep!'}})
        try:
            pool.poll()
        except KeyboardInterrupt:
            pool.close()
            sys.exit(130)""").strip()})
    workers = [int(pid) for pid in process.stdout.readline().split()]
    time.sleep(0.2)
    for pid in workers:  # as a terminal would, had they stayed in its group
        os.kill(pid, signal.SIGINT)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and err == ""
    assert all(gone(pid) for pid in workers)


@pytest.mark.slow
def test_works_from_a_process_with_threads_and_jax():
    process = script({
        "first": "import threading, warnings, jax, jax.numpy as jnp; warnings.simplefilter('error')"
                 "; jnp.ones(8).sum().block_until_ready()"
                 "; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "then": "pool.reset(1, {'steps': 2, 'seed': 1}); print(pool.poll()[0].error); pool.close()",
    })
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and out.split()[-1] == "None" and "fork" not in err, err
