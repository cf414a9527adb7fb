"""The acting half of a run: weights and tasks into scored trajectories, and those into records.

With several processes each rolls out its share of the tasks and all get the whole, the same as
one process would have sampled: what a trajectory contains depends on weights, seed and task alone.

Left out: which tasks and which weights (the loop).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from envs.core import ToolSpec
from fastask_jax.distributed import Channel, deal
from fastask_jax.policies.base import record
from fastask_jax.rollout.chat import ChatFormat
from fastask_jax.rollout.engine import Engine
from fastask_jax.rollout.pools import Pool
from fastask_jax.rollout.scheduler import RolloutConfig, RolloutStats, rollout
from fastask_jax.rollout.transcript import Trajectory

Record = dict[str, Any]


@dataclass
class Actor:
    """Everything that turns weights and tasks into trajectories.

    With several processes, each has one, and all call its methods with the same arguments but
    for the weights, which lie on a device of their own.
    """

    engine: Engine
    chat: ChatFormat
    pool: Pool
    tools: tuple[ToolSpec, ...]
    config: RolloutConfig
    channel: Channel = field(default_factory=lambda: Channel("rollout"))

    def run(
        self,
        params: Any,
        version: int,
        tasks: Sequence[Any],
        copies: int,
        seed: str,
        stats: RolloutStats | None = None,
        temperature: float | None = None,
    ) -> list[Trajectory]:
        """`copies` rollouts of each task, by whichever process; ordered by task, then sample."""
        config = self.config
        if temperature is not None:
            config = replace(config, temperature=temperature)
        places = deal([task.id for task in tasks])

        def act() -> tuple[list[Trajectory], RolloutStats]:
            own = RolloutStats()
            found = rollout(
                self.engine, params, version, [tasks[place] for place in places], copies,
                self.pool, self.chat,
                seed=seed, config=config, tools=self.tools, stats=own,
            )  # fmt: skip
            for trajectory in found:
                trajectory.group, trajectory.task = places[trajectory.group], None
            return found, own

        parts = self.channel.gather("rollout", act)
        if stats is not None:
            add_stats(stats, [own for _, own in parts])
        found = [trajectory for part, _ in parts for trajectory in part]
        for trajectory in found:
            trajectory.task = tasks[trajectory.group]
        return sorted(found, key=lambda trajectory: (trajectory.group, trajectory.sample))

    def evaluate(
        self, params: Any, version: int, tasks: Sequence[Any], temperature: float | None = None
    ) -> list[Record]:
        """One rollout of each task, as records for `report.summary`.

        Each task is sampled with its own seed, the same at every evaluation.  Raises
        RuntimeError when an episode failed for reasons of its own: no score is better than a
        wrong one.
        """
        found = self.run(params, version, tasks, 1, "evaluation", temperature=temperature)
        return evaluation_records(found)


def evaluation_records(found: Sequence[Trajectory]) -> list[Record]:
    """Records of an evaluation's trajectories; RuntimeError where one isn't valid."""
    for trajectory in found:
        if not trajectory.valid:
            raise RuntimeError(f"evaluation of {trajectory.task_id}: {trajectory.error}")
    return [record(t) for t in found]


def add_stats(total: RolloutStats, parts: Sequence[RolloutStats]) -> None:
    """Adds what processes did side by side: counts add up, of times the longest counts."""
    for name in (f.name for f in fields(RolloutStats)):
        before, values = getattr(total, name), [getattr(part, name) for part in parts]
        if isinstance(before, Counter):
            added: Any = sum(values, Counter())
        else:
            added = max(values) if isinstance(before, float) else sum(values)
        setattr(total, name, before + added)
