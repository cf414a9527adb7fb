"""Where the loop's rollouts come from: sampled on the spot, or by a fleet that never stops.

`Synchronous` samples each step's tasks with the step's weights and nothing else: deterministic.
`Asynchronous` takes what its fleet has finished, made by weights that are at most
`FleetConfig.max_staleness` updates old, and samples on while the learner learns.  Both give an
evaluation by the weights that they were given last, and their numbers under the same names.

Left out: updates, files and checkpoints (`loop.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np

from fastask_jax.actor import Actor, add_stats
from fastask_jax.distributed import local_copy
from fastask_jax.fleet.config import FleetConfig
from fastask_jax.fleet.fleet import Fleet
from fastask_jax.fleet.ledger import Ledger
from fastask_jax.fleet.links import Link
from fastask_jax.fleet.replica import Usage
from fastask_jax.fleet.saved import from_json, to_json
from fastask_jax.learn import advantages, has_signal
from fastask_jax.rollout.scheduler import RolloutStats
from fastask_jax.rollout.transcript import Trajectory

# Stop reasons of episodes that a budget has cut.
CUT = ("length", "token_budget", "context", "max_turns")
# What becomes of groups, as the ledger counts it.
COUNTS = ("taken", "dull", "cancelled", "dropped", "lost")


@dataclass
class Collected:
    """What a step learns from, and what it tells of.

    useful: valid trajectories of groups with signal, advantages set.  ended: those of the groups
    that the step takes and, for averages, of groups without signal that have ended since the step
    before: over the useful ones alone averages would not be those of the policy.  groups: number
    and oldest version of the groups that an asynchronous step takes.
    """

    useful: list[Trajectory]
    ended: list[Trajectory]
    values: dict[str, float] = field(default_factory=dict)
    groups: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Batches:
    """What a step wants.

    groups: groups of an update, of `copies` rollouts each.  seed: of the run.  kind: of advantage.
    refill_rounds: how often a synchronous step replaces groups without signal by new tasks.
    """

    groups: int
    copies: int
    seed: int = 0
    kind: str = "mean"
    refill_rounds: int = 0


class Source(Protocol):
    """Used in this order: `restore` in a resumed run, `weights`, and then steps of `collect`,
    an update, and `weights` again; `evaluate` and `state` at any time after `weights`.  A
    context manager."""

    chat: Any
    numbered: bool  # whether its groups have numbers that tell which of them a step has taken

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...

    def weights(self, params: Any, version: int) -> None: ...

    def collect(self, step: int) -> Collected: ...

    def evaluate(self, tasks: Sequence[Any]) -> list[Trajectory]: ...

    def settings(self) -> dict[str, Any]: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


def judged(trajectories: Sequence[Trajectory], kind: str) -> list[bool]:
    """Sets the advantages of whole groups; whether each trajectory's group has any signal."""
    groups = [t.group for t in trajectories]
    values = advantages(
        [t.reward for t in trajectories], groups, [t.valid for t in trajectories], kind
    )
    for trajectory, value in zip(trajectories, values, strict=True):
        trajectory.advantage = float(value)
    return has_signal(values, groups).tolist()


class Synchronous:
    """Samples the step's tasks with the step's weights, by the run's seed and the step's number.

    stream: deals tasks by `take(count)` and has an int `cursor`.  place: puts the learner's weights
        where the actor's engine works.
    """

    numbered = False

    def __init__(
        self,
        actor: Actor,
        stream: Any,
        batches: Batches,
        place: Callable[[Any], Any] = local_copy,
    ) -> None:
        self._place = place
        self.actor, self.stream, self.batches, self.chat = actor, stream, batches, actor.chat
        self._weights: tuple[Any, int] = (None, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def weights(self, params: Any, version: int) -> None:
        """What the next call samples with; the caller's again once others are given."""
        self._weights = params, version

    def collect(self, step: int) -> Collected:
        """The step's rollouts, groups with signal first."""
        stats, wanted = RolloutStats(), self.batches
        params, version = self._place(self._weights[0]), self._weights[1]
        kept: list[Trajectory] = []
        spare: list[Trajectory] = []
        for attempt in range(wanted.refill_rounds + 1):
            missing = wanted.groups - len(kept) // wanted.copies
            if not missing:
                break
            seed = f"{wanted.seed}/{step}/{attempt}"
            tasks = self.stream.take(missing)
            found = self.actor.run(params, version, tasks, wanted.copies, seed, stats)
            for trajectory, keep in zip(found, judged(found, wanted.kind), strict=True):
                (kept if keep else spare).append(trajectory)
        useful = [t for t in kept if t.valid]
        valid = len(useful) + sum(t.valid for t in spare)
        values = _stats_values(stats) | {"train/with_signal": len(useful) / max(valid, 1)}
        return Collected(useful, kept + spare, values)

    def evaluate(self, tasks: Sequence[Any]) -> list[Trajectory]:
        """One rollout of each task, as `Actor.evaluate` samples them."""
        return self.actor.evaluation(self._place(self._weights[0]), self._weights[1], tasks)

    def settings(self) -> dict[str, Any]:
        """What decides which rollouts a run sees."""
        return {
            "mode": "sync",
            "loop.refill_rounds": self.batches.refill_rounds,
            "tasks": getattr(self.stream, "config", None),
            "rollout": self.actor.config,
        }

    def state(self) -> dict[str, Any]:
        return {"cursor": self.stream.cursor}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.stream.cursor = int(state["cursor"])


class Asynchronous:
    """Takes groups that a fleet has sampled with weights of bounded age.

    links: the fleet's replicas.  deal: the task of a group, by its number.  rollout: the
    replicas' settings, and tasks: those of the stream that `deal` deals from, both of which belong
    to the run.
    """

    numbered = True

    def __init__(
        self,
        links: Sequence[Link],
        deal: Any,
        chat: Any,
        config: FleetConfig,
        rollout: Any,
        batches: Batches,
        tasks: Any = None,
    ) -> None:
        self.chat, self._config, self._rollout, self._tasks = chat, config, rollout, tasks
        self._ledger: Ledger[list[Trajectory]] = Ledger(
            batches.groups, config.max_staleness, config.spare
        )
        self.fleet = Fleet(
            links, self._ledger, deal, batches.copies, str(batches.seed),
            lambda group: all(judged(group, batches.kind)),
            patience=config.patience, silence=config.silence, restarts=config.restarts,
        )  # fmt: skip
        self._begun = False
        self._usage: list[tuple[int, Usage | None]] = [(0, None)] * len(links)
        self._counts: dict[str, int] = {}

    def __enter__(self) -> Self:
        self.fleet.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.fleet.__exit__(*exception)

    def weights(self, params: Any, version: int) -> None:
        """Tells the replicas; `params` are the caller's again on return."""
        if self._begun:
            version_now = self.fleet.updated(params)
        else:
            self._begun, version_now = True, self._ledger.version
            self.fleet.publish(version_now, params)
        if version_now != version:
            raise RuntimeError(f"the learner is at version {version}, the ledger at {version_now}")

    def collect(self, step: int) -> Collected:
        """The oldest groups that wait; waits for them."""
        groups = self.fleet.take()
        useful = [trajectory for group in groups for trajectory in group.payload]
        dull = self.fleet.drain_dull()
        values = self._usage_values() | self._count_values()
        stale = [self._ledger.staleness(group) for group in groups]
        values["rollout/group_staleness"] = float(np.mean(stale))
        values["rollout/group_staleness_max"] = max(stale)
        values["train/with_signal"] = len(groups) / (len(groups) + len(dull))
        ended = [*useful, *(trajectory for group in dull for trajectory in group)]
        taken = [(group.number, group.oldest) for group in groups]
        return Collected([t for t in useful if t.valid], ended, values, taken)

    def evaluate(self, tasks: Sequence[Any]) -> list[Trajectory]:
        """One rollout of each task.  Raises as `Fleet.evaluate` does."""
        return [trajectory for [trajectory] in self.fleet.evaluate(tasks)]

    def settings(self) -> dict[str, Any]:
        """What decides which rollouts a run sees."""
        return {
            "mode": "async",
            "fleet.max_staleness": self._config.max_staleness,
            "tasks": self._tasks,
            "rollout": self._rollout,
        }

    def state(self) -> dict[str, Any]:
        """The ledger with the groups that wait; those under way begin again in a resumed run."""
        return {"ledger": self.fleet.state(to_json), "told": dict(self._counts)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.fleet.restore(state["ledger"], from_json)
        # Else the first step would tell of all those before it.  Older checkpoints lack it.
        self._counts = dict(state.get("told", state["ledger"]["counts"]))

    def _count_values(self) -> dict[str, float]:
        counts, waiting, under_way = self.fleet.counts()
        new = {name: count - self._counts.get(name, 0) for name, count in counts.items()}
        self._counts = counts
        return {
            **{f"rollout/{name}": float(new.get(name, 0)) for name in COUNTS},
            "rollout/waiting": waiting,
            "rollout/under_way": under_way,
        }

    def _usage_values(self) -> dict[str, float]:
        """What the replicas have done since this was asked last."""
        total, idle, before = RolloutStats(), 0.0, self._usage
        self._usage = self.fleet.usage()
        for (life, then), (life_now, now) in zip(before, self._usage, strict=True):
            if now is None:
                continue
            if then is None or life != life_now:  # it was started anew
                then = Usage(0.0, 0.0, 0, RolloutStats())
            add_stats(total, [now.stats.minus(then.stats)])
            idle += now.idle_seconds - then.idle_seconds
        values = _stats_values(total, len(before))
        return values | {"time/idle": idle / len(before)}


def _stats_values(stats: RolloutStats, replicas: int = 1) -> dict[str, float]:
    """Seconds of an engine by kind (their mean where there are several), and tokens."""
    return {
        "time/append": stats.append_seconds / replicas,
        "time/decode": stats.decode_seconds / replicas,
        "time/pool": stats.pool_seconds / replicas,
        "rollout/occupancy": stats.occupancy,
        "rollout/evictions": stats.evictions,
        "tokens/sampled": stats.sampled_tokens,
        "tokens/prompt": stats.prompt_tokens,
        "tokens/shared": stats.shared_tokens,
        "tokens/observed": stats.observation_tokens,
        "tokens/fed_again": stats.refed_tokens,
    }
