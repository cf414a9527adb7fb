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
        gives it.  "ray": an actor each on the nodes of a Ray cluster (docs/ray.md).
    ray_address: HOST:PORT of the cluster, or "auto" for the one this host belongs to; empty starts
        Ray on this host alone.
    ray_resources: what each replica takes of its node, as NAME=AMOUNT: CPU, GPU, or whatever the
        nodes offer.  Ray hides GPUs from a replica that asks for none.
    patience: seconds without a group that begins or ends, while the learner waits, after which the
        run ends and says who waits for whom.  Compiling counts: be generous.
    silence: seconds without a word from a replica that has work, after which it is stopped and
        started anew (in processes and with Ray).  It says nothing while it compiles.
    restarts: losses of replicas that are borne between two updates.
    """

    max_staleness: int = 2
    spare: int = 0
    replicas: int = 1
    place: str = "thread"
    ray_address: str = ""
    ray_resources: tuple[str, ...] = ("CPU=1",)
    patience: float = 1200.0
    silence: float = 600.0
    restarts: int = 10

    def __post_init__(self) -> None:
        for name, least in (("max_staleness", 0), ("spare", 0), ("replicas", 1), ("restarts", 0)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"fleet.{name} must be at least {least}, not {getattr(self, name)}"
                )
        if self.place not in ("thread", "process", "ray"):
            raise ValueError(f'fleet.place is "thread", "process" or "ray", not {self.place!r}')
        self.ray_request()  # checks the form
        for name in ("patience", "silence"):
            if not getattr(self, name) > 0:
                raise ValueError(f"fleet.{name} must be above 0 seconds, not {getattr(self, name)}")

    def ray_request(self) -> dict[str, float]:
        """`ray_resources` by name.  Raises ValueError for what isn't NAME=AMOUNT."""
        request = {}
        for text in self.ray_resources:
            name, _, amount = text.partition("=")
            try:
                request[name.strip()] = float(amount)
            except ValueError:
                name = ""
            if not name.strip() or not request[name.strip()] > 0:
                raise ValueError(
                    f"fleet.ray_resources are NAME=AMOUNT with amounts above 0, not {text!r}"
                )
        return request
