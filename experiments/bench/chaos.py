"""An asynchronous training run whose processes are killed all the time.

`python -m experiments.bench.chaos`: trains the tiny policy with `--mode async --fleet.place
process` and sends SIGKILL to an environment worker, an engine replica and the trainer itself, each
every so many seconds; a killed trainer is started anew with `--resume true`.  When `minutes` are
over the killing ends and the run is let to its last step.  Then groups.jsonl is checked: every
update there once, no group in two of them, none older than the bound.

Only processes of the run are killed, by their numbers.  Leaves out lost hosts (docs/ray.md) and
full disks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from experiments.bench.report import report
from experiments.config import UsageError, option, parse, run_main
from fastask_jax._exit import DONE

_ROOT = Path(__file__).parents[2]
# How the command lines of a replica and of an environment worker are told from others.
_REPLICA, _WORKER = b"multiprocessing.spawn", b"envs.pool.worker"


@dataclass(frozen=True)
class Config:
    run_dir: Path = option(Path("runs/chaos"), "of the run; must not exist")
    minutes: float = option(10.0, "how long processes are killed")
    steps: int = option(400, "updates of the run; it is to outlast the killing")
    worker_every: float = option(2.0, "seconds between kills of an environment worker")
    replica_every: float = option(60.0, "seconds between kills of an engine replica")
    trainer_every: float = option(180.0, "seconds between kills of the trainer")
    max_staleness: int = option(2, "updates that a token may be old")
    batch_size: int = option(32, "episodes of an update")
    group_size: int = option(4, "episodes of a group")
    patience: float = option(1800.0, "seconds that the run may take after the last kill")
    seed: int = option(0, "of tasks and sampling")

    def __post_init__(self) -> None:
        for name in ("minutes", "worker_every", "replica_every", "trainer_every", "patience"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, not {self.steps}")

    def flags(self) -> list[str]:
        """The run's own options: short episodes on small books, saved after each update."""
        return [
            "--preset=tiny", f"--run-dir={self.run_dir}", "--mode=async", "--fleet.place=process",
            f"--fleet.max-staleness={self.max_staleness}", "--fleet.restarts=1000",
            "--fleet.spare=2", f"--loop.steps={self.steps}", f"--loop.batch-size={self.batch_size}",
            f"--loop.group-size={self.group_size}", "--loop.eval-tasks=0", "--loop.save-every=1",
            f"--loop.seed={self.seed}", f"--tasks.seed={self.seed}", "--tasks.difficulties=easy",
            f"--optimizer.decay-steps={self.steps}", "--engine.slots=64", "--engine.max-len=512",
            "--engine.append-buckets=64", "--engine.attend-buckets=512",
            "--rollout.max-tokens=256", "--pack.row-lengths=512", "--pool.workers=2",
            # What an outage of minutes may cost is for its user to say; here it is the point.
            "--pool.error-budget=100000", "--pool.max-retries=100",
            f"--compile-cache={self.run_dir.with_name(self.run_dir.name + '.compiled')}",
        ]  # fmt: skip


class Run:
    """The trainer and everything that it has started."""

    def __init__(self, config: Config, log: Path) -> None:
        self._config, self._log = config, log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "experiments.fast_ask", *self._config.flags()]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--resume=true"], cwd=_ROOT, stdout=log, stderr=log
            )

    def ended(self) -> bool:
        """Whether the run is over; raises RuntimeError where it failed by itself."""
        assert self.process is not None
        code = self.process.poll()
        if code is not None and code != DONE:
            tail = "\n".join(self._log.read_text("utf-8").splitlines()[-5:])
            raise RuntimeError(f"the run ended by itself with exit code {code}:\n{tail}")
        return code is not None

    def kill(self, kind: str) -> bool:
        """Kills the trainer, or one of its replicas or workers; false where there is none."""
        assert self.process is not None
        if kind == "trainer":
            self.process.kill()
            self.process.wait()
            self.start()
            return True
        replicas = _having(_children(self.process.pid), _REPLICA)
        found = replicas
        if kind == "worker":
            found = [pid for r in replicas for pid in _having(_children(r), _WORKER)]
        for pid in found[:1]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                return True
        return False

    def close(self) -> None:
        """Its replicas and workers end when it is gone."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def _children(pid: int) -> list[int]:
    """Of all its threads: a replica is started anew by another one than the first time."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, file.read_text().split())
    return found


def _having(pids: Sequence[int], word: bytes) -> list[int]:
    found = []
    for pid in pids:
        with suppress(OSError):
            if word in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def check(run_dir: Path, steps: int, groups: int, bound: int) -> int:
    """The oldest use of a group, in updates.

    Raises RuntimeError where groups.jsonl misses an update or has it twice, or where a group was
    taken twice or was too old.
    """
    lines = [json.loads(x) for x in (run_dir / "groups.jsonl").read_text("utf-8").splitlines()]
    if [line["step"] for line in lines] != list(range(1, steps + 1)):
        raise RuntimeError(f"{run_dir}/groups.jsonl doesn't hold updates 1 to {steps}, each once")
    taken = Counter(number for line in lines for number, _ in line["groups"])
    twice = sorted(number for number, times in taken.items() if times > 1)
    if twice:
        raise RuntimeError(f"groups that were taken twice: {twice}")
    if len(taken) != groups * steps:
        raise RuntimeError(f"{len(taken)} groups were taken, not {groups} an update")
    # Update n starts from version n - 1.
    ages = [line["step"] - 1 - oldest for line in lines for _, oldest in line["groups"]]
    if min(ages) < 0 or max(ages) > bound:
        raise RuntimeError(f"ages of groups go from {min(ages)} to {max(ages)}, {bound} allowed")
    return max(ages)


def main(argv: list[str]) -> None:
    config = parse(Config, argv, prog="python -m experiments.bench.chaos", description=__doc__)
    if config.run_dir.exists():
        raise UsageError(f"{config.run_dir} exists: choose another --run-dir")
    config.run_dir.parent.mkdir(parents=True, exist_ok=True)
    run = Run(config, config.run_dir.with_name(config.run_dir.name + ".log"))
    every = {
        "worker": config.worker_every,
        "replica": config.replica_every,
        "trainer": config.trainer_every,
    }
    began = time.monotonic()
    due = {kind: began + seconds for kind, seconds in every.items()}
    killed: Counter[str] = Counter()
    told = 0
    run.start()
    try:
        while not run.ended():
            now = time.monotonic()
            over = now - began > 60 * config.minutes
            for kind, seconds in every.items():
                if not over and now >= due[kind]:
                    # Where there is none just now, the next one that comes up.
                    if run.kill(kind):
                        killed[kind] += 1
                        due[kind] = now + seconds
            if now - began > 60 * config.minutes + config.patience:
                raise RuntimeError(
                    f"the run hasn't ended {config.patience:g} s after the last kill"
                )
            if now - began >= 60 * (told + 1):
                told += 1
                at = _steps(config.run_dir)
                print(f"minute {told}: update {at}, killed {dict(killed)}", flush=True)
            time.sleep(0.1)
    finally:
        run.close()
    seconds = time.monotonic() - began
    groups = config.batch_size // config.group_size
    oldest = check(config.run_dir, config.steps, groups, config.max_staleness)
    report(
        "chaos", "updates", [float(config.steps)], seconds=seconds,
        killed_for=min(seconds, 60 * config.minutes), killed=dict(killed),
        groups=groups * config.steps, taken_twice=0, oldest=oldest,
        max_staleness=config.max_staleness,
    )  # fmt: skip


def _steps(run_dir: Path) -> int:
    path = run_dir / "groups.jsonl"
    return path.read_text("utf-8").count("\n") if path.exists() else 0


if __name__ == "__main__":
    run_main(main)
