"""Environments that the pool's tests run in worker processes, some of which misbehave."""

from __future__ import annotations

import os
import signal
import time
import zlib
from pathlib import Path

from envs.core import Message, Reply, Score, Step


class CountingEnv:
    """Deterministic: each answer and the score depend on everything said so far.

    The task is a dict: `steps` to the end, `seed`, and `faults` {turn: kind}, turn 0 being the
    reset.  A kind that ends in "!" strikes every time, else once (marked by a file)."""

    tools = ()

    def __init__(self, episode_id, config):
        self.id = episode_id
        self.config = config
        self.turn = 0

    def reset(self, task):
        self.task = task
        self.state = zlib.crc32(repr(task["seed"]).encode())
        self._misbehave()
        return [Message("system", f"count {task['steps']}"), Message("user", str(self.state))]

    def step(self, reply: Reply):
        self.turn += 1
        time.sleep(self.config.get("pause", 0.0))
        self._misbehave()
        self.state = zlib.crc32(reply.content.encode(), self.state)
        text = str(self.state) + self.config.get("padding", "")
        if self.config.get("show_pid"):
            text = f"{os.getpid()} {id(self.config)}"
        if self.config.get("clock"):
            text = repr(time.time_ns())
        done = self.turn >= self.task["steps"]
        return Step((Message("tool", text),), done, "answered" if done else None)

    def score(self):
        info = {"turns": self.turn}
        if self.config.get("bad_info"):
            info["closure"] = lambda: None
        return Score(self.state / 2**32, {"correct": 1.0}, info)

    def close(self):
        if "closed" in self.config:
            (Path(self.config["closed"]) / str(self.id)).touch()

    def _misbehave(self):
        kind = self.task.get("faults", {}).get(self.turn)
        if kind is None:
            return
        if not kind.endswith("!"):
            mark = Path(self.config["marks"]) / f"{self.id}-{self.turn}"
            if mark.exists():
                return
            mark.touch()
        match kind.rstrip("!"):
            case "raise":
                raise OSError("the sandbox is gone")
            case "exit":
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "sleep":
                time.sleep(60)


def counting(config):
    shared = dict(config or {})
    return lambda episode_id: CountingEnv(episode_id, shared)


def with_jax(config):
    import jax  # noqa: F401  (what the worker must refuse)

    return counting(config)


def lazily_jax(config):
    class Late(CountingEnv):
        def reset(self, task):
            import jax  # noqa: F401

            return super().reset(task)

    return lambda episode_id: Late(episode_id, {})


def broken(config):
    raise RuntimeError("no such licence server")


def returns_nothing(config):
    return None


def wrong_step(config):
    class Wrong(CountingEnv):
        def step(self, reply):
            return "not a step"

    return lambda episode_id: Wrong(episode_id, {})


def closing(config):
    class Maker:
        def __call__(self, episode_id):
            return CountingEnv(episode_id, config)

        def close(self):
            (Path(config["closed"]) / "maker").touch()

    return Maker()


class Opaque:
    """Pickles, but can't be unpickled."""

    def __reduce__(self):
        return (_refuse, ())


def _refuse():
    raise ValueError("opaque on purpose")
