"""Settings of asynchronous training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

# Options of one place alone.
_OF_PLACE = {
    "ray": ("ray_address", "ray_resources", "ray_pools"),
    "http": ("servers", "weights_dir", "api_key_file"),
}


@dataclass(frozen=True)
class FleetConfig:
    """How far sampling may run ahead of learning, and on what.

    max_staleness: updates that may lie between a token and its use; groups with older ones are
        cancelled or dropped, never trained on.  0 samples each batch with the newest weights.
    spare: groups under way beyond those that updates can take: the first to end are taken.
    replicas: engines, each with its own pool of environments.
    place: "thread": in this process, each on a device of its own behind those of the mesh (on the
        mesh's where there are no others).  "process": a process each, on whatever device JAX
        gives it.  "ray": an actor each on the nodes of a Ray cluster (docs/ray.md).  "http": a
        `fastask serve` each, with the environments here.
    ray_address: HOST:PORT of the cluster, or "auto" for the one this host belongs to; empty starts
        Ray on this host alone.
    ray_resources: what each replica takes of its node, as NAME=AMOUNT: CPU, GPU, or whatever the
        nodes offer.  Ray hides GPUs from a replica that asks for none.
    ray_pools: what each environment worker takes of a node, in the same form; the workers of a
        replica then run anywhere in the cluster, by default on its own node.
    servers: the URLs of the servers, one replica each.
    weights_dir: folder of this run's own on a disk that the servers share, by the same path; the
        run directory's weights/ if None.
    api_key_file: file with the key that the servers want.
    retry: seconds for which a request to a server is tried again before the server counts as lost.
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
    ray_pools: tuple[str, ...] = ()
    servers: tuple[str, ...] = ()
    weights_dir: Path | None = None
    api_key_file: Path | None = None
    retry: float = 60.0
    patience: float = 1200.0
    silence: float = 600.0
    restarts: int = 10

    def __post_init__(self) -> None:
        for name, least in (("max_staleness", 0), ("spare", 0), ("replicas", 1), ("restarts", 0)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"fleet.{name} must be at least {least}, not {getattr(self, name)}"
                )
        if self.place not in ("thread", "process", "ray", "http"):
            raise ValueError(
                f'fleet.place is "thread", "process", "ray" or "http", not {self.place!r}'
            )
        for field in ("ray_resources", "ray_pools"):
            self.ray_request(field)  # checks the form
        for place, names in _OF_PLACE.items():
            for name in names if self.place != place else ():
                if getattr(self, name) != getattr(type(self), name):
                    raise ValueError(
                        f"fleet.{name} is for fleet.place={place}: give that too, or leave it out"
                    )
        self._check_servers()
        for name in ("patience", "silence", "retry"):
            if not getattr(self, name) > 0:
                raise ValueError(f"fleet.{name} must be above 0 seconds, not {getattr(self, name)}")

    def _check_servers(self) -> None:
        if self.place != "http":
            return
        if not self.servers:
            raise ValueError(
                "fleet.place=http needs fleet.servers: the addresses that `fastask serve` prints"
            )
        if len(set(self.servers)) < len(self.servers):
            raise ValueError("fleet.servers has an address twice: each is one replica")
        if self.replicas != 1:
            raise ValueError(
                "with fleet.place=http each of fleet.servers is one replica: leave fleet.replicas "
                "out"
            )
        for url in self.servers:
            try:
                parts = urlsplit(url)
                whole = parts.scheme in ("http", "https") and bool(parts.hostname)
                more = parts.path.strip("/") or parts.query or parts.fragment or parts.username
                parts.port  # noqa: B018 - raises ValueError
            except ValueError:
                whole, more = False, ""
            if not whole or more:
                raise ValueError(
                    f"fleet.servers are addresses such as http://127.0.0.1:8000, not {url!r}"
                )

    def ray_request(self, field: str = "ray_resources") -> dict[str, float]:
        """A field's NAME=AMOUNT texts by name.  Raises ValueError for what isn't one."""
        request = {}
        for text in getattr(self, field):
            name, _, amount = text.partition("=")
            try:
                request[name.strip()] = float(amount)
            except ValueError:
                name = ""
            if not name.strip() or not 0 < request[name.strip()] < math.inf:
                raise ValueError(
                    f"fleet.{field} are NAME=AMOUNT with amounts above 0, not {text!r}"
                )
        return request
