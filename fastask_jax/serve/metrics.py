"""A service's counts as Prometheus reads them, collected when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fastask_jax.serve.service import Service


class Metrics:
    """registry: what to print.  seconds: how long requests took, the collector's own to fill."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.seconds = Histogram(
            "fastask_request_seconds",
            "Seconds from a request's order to its last token.",
            registry=self.registry,
            buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600),
        )

    def collect(self) -> Iterator[Metric]:
        """What `CollectorRegistry` calls."""
        service = self._service
        requests = CounterMetricFamily(
            "fastask_requests", "Requests by how they ended.", labels=["ended"]
        )
        for how in ("stop", "length", "cancelled", "refused", "failed"):
            requests.add_metric([how], service.ended[how])
        yield requests
        tokens = CounterMetricFamily(
            "fastask_tokens",
            "Tokens sampled, fed, reused from a slot, shared with an equal text, fed again.",
            labels=["kind"],
        )
        for kind in ("sampled", "fed", "reused", "shared", "again"):
            tokens.add_metric([kind], service.tokens[kind])
        yield tokens
        for name, value in service.load.items():
            yield GaugeMetricFamily(f"fastask_{name}", _ABOUT[name], value=value)
        slots = service.engine.config.slots
        yield GaugeMetricFamily("fastask_slots", "Slots of the engine.", value=slots)
        yield GaugeMetricFamily(
            "fastask_weights_version", "Version of the weights; -1: those of the start.",
            value=service.version,
        )  # fmt: skip


_ABOUT = {
    "running": "Requests that have a slot.",
    "waiting": "Requests that wait for a slot.",
    "held": "Idle slots whose state a later request may go on from.",
}
