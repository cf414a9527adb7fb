"""Settings of asynchronous training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FleetConfig:
    """How far sampling may run ahead of learning, and on what.

    max_staleness: updates that may lie between a token and its use; groups with older ones are
        cancelled or dropped, never trained on.  0 samples each batch with the newest weights.
    spare: groups under way beyond those that updates can take: the first to end are taken.
    replicas: engines, each with its own pool of environments.
    place: "thread": in this process, each on a device of its own behind those of the mesh (on the
        mesh's where there are no others).  "process": a process each, on whatever device JAX
        gives it.
    patience: seconds without a group that begins or ends, while the learner waits, after which the
        run ends and says who waits for whom.  Compiling counts: be generous.
    restarts: deaths of replicas that are borne between two updates.
    """

    max_staleness: int = 2
    spare: int = 0
    replicas: int = 1
    place: str = "thread"
    patience: float = 1200.0
    restarts: int = 10

    def __post_init__(self) -> None:
        for name, least in (("max_staleness", 0), ("spare", 0), ("replicas", 1), ("restarts", 0)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"fleet.{name} must be at least {least}, not {getattr(self, name)}"
                )
        if self.place not in ("thread", "process"):
            raise ValueError(f'fleet.place is "thread" or "process", not {self.place!r}')
        if not self.patience > 0:
            raise ValueError(f"fleet.patience must be above 0 seconds, not {self.patience}")
