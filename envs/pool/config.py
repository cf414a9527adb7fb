"""What the pool's users see beside the pool itself: its settings, its events, its error."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

from envs.core import Message, Score, Step

MAX_WORKERS = 1024


class PoolError(RuntimeError):
    """The pool can't go on: a wrong factory, or more faults than the error budget allows.

    The pool is closed by the time this is raised."""


@dataclass(frozen=True)
class PoolConfig:
    """Settings of an `EnvPool`; all times in seconds.

    workers: processes, at most 1024; each holds many live episodes and one shared factory.
    call_timeout: how long one reset or step (with the score) may run before the worker is
        killed.  Time spent queueing behind other episodes doesn't count.
    start_timeout: how long a worker may take to import the factory and call it.
    heartbeat_interval, heartbeat_timeout: a worker thread reports this often; a worker
        silent for longer than the timeout is taken for dead, busy or not.
    max_retries: how often in a row one call of an episode is tried again, by replay, after an
        infrastructure fault (exception, deadline, dead worker) before the episode errors.
    verify_replay: replayed answers must equal the recorded ones, else the episode errors.
        Switch off only for an environment that isn't deterministic.
    worker_faults: a worker that has raised this many exceptions is restarted, so that a
        broken one (its sandbox gone, say) doesn't attract every new episode.
    error_budget, error_rate: the run stops when restarts and faults outnumber
        error_budget + error_rate * finished episodes.
    close_timeout: how long `close` waits for workers to end by themselves.
    """

    workers: int = 2
    call_timeout: float = 30.0
    start_timeout: float = 60.0
    heartbeat_interval: float = 1.0
    heartbeat_timeout: float = 20.0
    max_retries: int = 3
    verify_replay: bool = True
    worker_faults: int = 8
    error_budget: int = 32
    error_rate: float = 0.05
    close_timeout: float = 2.0

    def __post_init__(self) -> None:
        for name in ("workers", "worker_faults"):
            if getattr(self, name) < 1:
                raise ValueError(f"PoolConfig.{name} must be at least 1, got {getattr(self, name)}")
        if self.workers > MAX_WORKERS:
            raise ValueError(
                f"PoolConfig.workers must be at most {MAX_WORKERS}, got {self.workers}"
            )
        for name in (
            "call_timeout", "start_timeout", "heartbeat_interval", "heartbeat_timeout",
            "close_timeout",
        ):  # fmt: skip
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"PoolConfig.{name} must be finite, got {getattr(self, name)}")
        for name in ("max_retries", "error_budget", "error_rate", "close_timeout"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"PoolConfig.{name} must be 0 or more, got {getattr(self, name)}")
        for name in ("call_timeout", "start_timeout", "heartbeat_interval"):
            if not getattr(self, name) > 0:
                raise ValueError(f"PoolConfig.{name} must be above 0, got {getattr(self, name)}")
        if not self.heartbeat_timeout >= 2 * self.heartbeat_interval:
            raise ValueError(
                f"PoolConfig.heartbeat_timeout ({self.heartbeat_timeout}) must be at least twice "
                f"heartbeat_interval ({self.heartbeat_interval}), or live workers look dead"
            )


@dataclass(frozen=True)
class Event:
    """The one answer to a `reset` or `step`.

    messages: what is new for the policy (of the reset, or of the step).
    step: the environment's step; None after a reset.
    score: set with the step that is done; the episode is then over and its id free.
    error: an infrastructure fault that retries didn't cure; the episode is over.  Never an
        answer of the model: leave such an episode out of its group.
    seconds, waited: time the call ran in the worker, and queued before it.
    """

    episode_id: Hashable
    messages: tuple[Message, ...] = ()
    step: Step | None = None
    score: Score | None = None
    error: str | None = None
    seconds: float = 0.0
    waited: float = 0.0

    @property
    def done(self) -> bool:
        """Whether the episode is over, scored or errored."""
        return self.error is not None or (self.step is not None and self.step.done)
