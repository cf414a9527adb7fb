"""Servers as replicas: the guide's commands, and a server that is killed and started again."""

import json
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from experiments.config import to_json
from fastask_jax.fleet.http_link import HttpLink, WeightsFolder
from fastask_jax.fleet.remote import RemoteSlots
from fastask_jax.fleet.replica import Broken, Lost
from fastask_jax.fleet.server_client import ServerClient
from fastask_jax.report.metrics import read_metrics
from fastask_jax.rollout.episodes import Episode, Group
from fastask_jax.rollout.settings import RolloutConfig, RolloutStats
from fastask_jax.rollout.transcript import Trajectory
from tests.fastask_jax.serve.servers import serving
from tests.fastask_jax.test_asynchronous import check_groups
from tests.fastask_jax.test_loop import ROOT, flat, small

GUIDE = (ROOT / "docs/asynchronous.md").read_text("utf-8")
STEPS = 8


def commands():
    section = GUIDE.split("\n## Servers as replicas\n")[1].split("\n## ")[0]
    found = re.findall(r"```bash\n(.*?)\n```", section, re.DOTALL)
    assert len(found) == 4
    return [command.split() for command in found]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


@pytest.mark.slow
def test_a_server_is_killed_and_started_again_and_the_run_goes_on(tmp_path):
    make, *serve, run = commands()
    weights = tmp_path / "weights"
    assert make == ["mkdir", "-p", "runs/weights"]
    weights.mkdir()
    ports = [free_port(), free_port()]

    def server(number):
        words = [str(weights) if word == "runs/weights" else word for word in serve[number]]
        assert words[:2] == ["fastask", "serve"] and words[2:4] == ["--port", f"800{number + 1}"]
        return serving(*words[4:], port=ports[number])

    config = small(tmp_path / "run", steps=STEPS, eval_tasks=2, eval_every=4, save_every=STEPS)
    ours = ("run_dir", "mode", "fleet.")
    flags = {k: v for k, v in flat(json.loads(to_json(config))).items() if not k.startswith(ours)}
    text = " ".join(run).replace("runs/weights", str(weights)).replace("8001", str(ports[0]))
    text = text.replace("8002", str(ports[1])).replace("runs/http", str(config.run_dir))
    words = [sys.executable, *text.split()[1:], "--fleet.retry", "2", "--fleet.restarts", "30"]
    words += [f"--{name}={value}" for name, value in flags.items()]
    metrics = config.run_dir / "metrics.jsonl"

    def steps():
        return metrics.read_text().count("\n") if metrics.exists() else 0

    with server(0) as kept, server(1) as killed, (tmp_path / "log").open("w+") as log:
        learner = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)

        def until(what):
            deadline = time.monotonic() + 300
            while not what():
                assert learner.poll() is None and time.monotonic() < deadline, (
                    Path(log.name).read_text()
                )
                time.sleep(0.05)

        try:
            until(lambda: steps() > 2)
            killed.process.kill()
            killed.process.wait()
            before = steps()
            with server(1) as again:
                def sampled():
                    text = httpx.get(again.url + "/metrics").text
                    return float(re.search(r'_tokens_total\{kind="sampled"\} (\S+)', text)[1])

                assert learner.poll() is None or before < STEPS
                until(lambda: learner.poll() is not None or sampled() > 0)
                assert learner.wait(300) == 0, Path(log.name).read_text()
                assert sampled() > 0, "nothing came from the server after its restart"
            version = httpx.get(kept.url + "/v1/models").json()["data"][0]["version"]
            assert version == STEPS
        finally:
            learner.kill()
            learner.wait()
        said = Path(log.name).read_text()
    assert before < STEPS, "it was killed in the middle"
    check_groups(config.run_dir, STEPS, 2)
    lines = read_metrics(config.run_dir)
    assert sum(line.get("rollout/lost", 0) for line in lines) > 0
    assert "is lost: http://127.0.0.1:" in said
    gaps = [line["policy/gap"] for line in lines if "policy/gap" in line]
    assert gaps and max(gaps) < 1e-4
    assert not any(weights.iterdir()), "weights are left behind"


class Slow:
    """A client whose answers come when the test says."""

    def __init__(self):
        self.asked = []

    def post(self, path, body):
        future = Future()
        self.asked.append((path.rpartition("/")[2], body, future))
        return future


class Held:
    path = "/weights"

    def __init__(self):
        self.readers = 0

    def hold(self):
        self.readers += 1
        return True

    def release(self):
        self.readers -= 1


def slots_of(client, capacity=4):
    config = RolloutConfig(max_turn_tokens=8, max_tokens=20)
    return RemoteSlots(client, capacity, 64, 2, config, RolloutStats())


def step(slots):
    slots.begin()
    return slots.end()


def episodes(name, count, first=False):
    group = Group(name, first, unfinished=count)
    for copy in range(count):
        trajectory = Trajectory(name, 0, copy)
        key = np.arange(2, dtype=np.uint32)
        group.episodes.append(Episode(f"{name}/{copy}", None, trajectory, key, group))
        group.episodes[-1].prompt = [5, 6, 7]
    return group.episodes


def answer(ids, versions, stop="length", cached=0, prompt=3):
    usage = {"prompt_tokens": prompt, "cached_tokens": cached}
    return {
        "ids": ids, "logprobs": [-1.0] * len(ids), "versions": versions, "stop_reason": stop,
        "usage": usage,
    }  # fmt: skip


def test_new_groups_wait_for_their_weights_and_old_ones_do_not():
    client, folder = Slow(), Held()
    slots = slots_of(client)
    slots.params, slots.version = folder, 0
    [old] = episodes("old", 1)
    slots.enqueue([old], False)
    assert step(slots) == [] and [kind for kind, *_ in client.asked] == ["weights"]
    assert client.asked[0][1] == {"version": 0, "path": "/weights"} and folder.readers == 1
    client.asked[0][2].set_result({})
    step(slots)
    assert folder.readers == 0 and slots.take_begun() == [old.group] and old.group.oldest == 0
    kind, body, turn = client.asked[1]
    assert kind == "generate" and body == {
        "ids": [5, 6, 7], "max_tokens": 8, "temperature": 1.0, "key": [0, 1], "min_version": 0
    }  # fmt: skip

    slots.params, slots.version = folder, 1
    [new] = episodes("new", 1)
    slots.enqueue([new], False)
    turn.set_result(answer([8, 9], [0, 1]))
    assert step(slots) == [old]
    assert old.trajectory.versions.tolist() == [-1, -1, -1, 0, 1] and old.turn == [8, 9]
    assert old.ended == "length" and new.group.oldest is None
    old.trajectory.add_observation([3])
    slots.observe(old, [3])
    step(slots)
    assert client.asked[2][0] == "weights"
    kind, body, turn = client.asked[3]  # by the weights of before, which it began with
    assert body["ids"] == [5, 6, 7, 8, 9, 3] and body["min_version"] == 0
    client.asked[2][2].set_result({})
    turn.set_result(answer([2], [1], "stop", cached=5, prompt=6))
    assert step(slots) == [old] and old.ended == "stop"
    step(slots)
    assert client.asked[4][1]["min_version"] == 1 and slots.take_begun() == [new.group]
    assert slots.stats.refed_tokens == 0 and slots.stats.sampled_tokens == 3


def test_a_dropped_group_is_dropped_at_the_server():
    client = Slow()
    slots = slots_of(client, capacity=2)
    slots.params, slots.version = Held(), 0
    step(slots)
    client.asked[0][2].set_result({})
    both, other = episodes("both", 3), episodes("other", 1)
    slots.enqueue(both, False)
    slots.enqueue(other, True)
    step(slots)
    assert slots.wanted and slots.busy
    assert other[0].slot is not None and both[0].slot is not None and both[1].slot is None
    slots.forget(both[0].group)
    cancelled = [future.cancelled() for _, _, future in client.asked[1:]]
    assert cancelled == [False, True] and not slots.wanted and slots.busy
    slots.forget(other[0].group)
    assert not slots.busy and step(slots) == []


def test_tokens_of_older_weights_than_were_given_are_a_loss():
    client = Slow()
    slots = slots_of(client)
    slots.params, slots.version = Held(), 3
    slots.enqueue(episodes("group", 1), False)
    step(slots)
    client.asked[0][2].set_result({})
    step(slots)
    client.asked[1][2].set_result(answer([8], [2]))
    with pytest.raises(Lost, match="older weights"):
        step(slots)


def test_weights_stay_while_somebody_reads_them(tmp_path):
    def save(path, params):
        path.mkdir()
        (path / "weights").write_text(params)

    left = tmp_path / "000007"
    left.mkdir()
    (tmp_path / "mine").write_text("")
    (tmp_path / "20261203").mkdir()
    with WeightsFolder(tmp_path, save):
        pass
    # It may be that of a run that runs, until this one has the run directory for itself.
    assert left.exists()
    with WeightsFolder(tmp_path, save) as folder:
        first = folder.write("one")
        assert not left.exists()
        assert first.hold()
        second = folder.write("two")
        assert Path(first.path).exists() and not first.hold()
        first.release()
        assert not Path(first.path).exists()
        assert (Path(second.path) / "weights").read_text() == "two"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["20261203", "mine"]


@contextmanager
def answering(*answers):
    """A server that gives these answers, one a connection; None hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def run():
            for status, body in answers:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    if status is not None:
                        head = f"HTTP/1.1 {status} X\r\nConnection: close\r\n"
                        connection.sendall(
                            f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
                        )

        threading.Thread(target=run, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def ask(url, retry=2.0):
    with ServerClient(url, None, retry, 10.0, 2) as client:
        return client.post("/x", {}).result(30)


def test_a_client_asks_again_for_a_while():
    with answering((None, ""), (500, "oh"), (429, "{}"), (200, '{"a": 1}')) as url:
        assert ask(url) == {"a": 1}
    began = time.monotonic()
    with pytest.raises(Lost, match=r"hasn't served for 0.3 s \(ConnectError"):
        ask(f"http://127.0.0.1:{free_port()}", 0.3)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "status, body, error, said",
    [
        (409, '{"error": {"message": "weights 3 are wanted"}}', Lost, "started anew: weights 3"),
        (401, '{"error": {"message": "send the key"}}', RuntimeError, "/x answers 401: send the"),
        (200, "<html>", RuntimeError, "answers 200: <html>"),
        (200, "[]", RuntimeError, r"answers 200: \[\]"),
        (404, "", RuntimeError, "answers 404: nothing"),
    ],
)
def test_what_asking_again_would_not_cure_is_told(status, body, error, said):
    with answering((status, body)) as url, pytest.raises(error, match=said):
        ask(url)


def test_a_link_can_be_started_again_after_a_loss_and_not_after_an_error(tmp_path, capsys):
    lives = []

    @contextmanager
    def make(ending):
        lives.append(ending)
        if len(lives) == 1:
            raise Lost("http://there hasn't served")
        if len(lives) == 2:
            raise ValueError("it serves another model")
        while not ending.wait(0.01):
            pass
        raise Lost("the run ends")
        yield

    news: queue.SimpleQueue = queue.SimpleQueue()
    link = HttpLink("replica 0", make, WeightsFolder(tmp_path, lambda path, params: None))
    link.start(news.put)
    link._thread.join(10)
    assert not link.alive() and news.empty()
    assert "replica 0 is lost: http://there" in capsys.readouterr().err
    link.start(news.put)
    assert isinstance(told := news.get(timeout=10), Broken) and "another model" in told.text
    link.start(news.put)
    assert link.alive()
    link.stop()
    assert not link.alive() and capsys.readouterr().err == ""


def test_without_httpx_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[http\]'"):
        ServerClient("http://127.0.0.1:1", None, 1.0, 1.0, 1)

