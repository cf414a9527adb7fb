"""A service's counts as Prometheus reads them, collected when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fastask_jax.serve.asks import Asks
from fastask_jax.serve.service import Service


class Metrics:
    """registry: what to print.  seconds, ask_seconds: how long requests and asks took, the
    collector's own to fill."""

    def __init__(self, service: Service, asks: Asks | None = None) -> None:
        self._service, self._asks = service, asks
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.seconds = Histogram(
            "fastask_request_seconds",
            "Seconds from a request's order to its last token.",
            registry=self.registry,
            buckets=_BUCKETS,
        )
        self.ask_seconds = Histogram(
            "fastask_ask_seconds",
            "Seconds from an ask's first byte to its answer.",
            registry=self.registry,
            buckets=_BUCKETS,
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
        if self._asks is not None:
            yield from _of_asks(self._asks)


def _of_asks(asks: Asks) -> Iterator[Metric]:
    ended = CounterMetricFamily("fastask_asks", "Asks by how they ended.", labels=["ended"])
    for how in ("answered", "no_answer", "refused", "failed", "cancelled", "timeout"):
        ended.add_metric([how], asks.ended[how])
    yield ended
    yield GaugeMetricFamily("fastask_asks_running", "Asks under way.", value=asks.running)
    yield CounterMetricFamily("fastask_ask_turns", "Turns of answered asks.", value=asks.turns)
    yield CounterMetricFamily("fastask_ask_cells", "Cells that they have read.", value=asks.cells)


_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


_ABOUT = {
    "running": "Requests that have a slot.",
    "waiting": "Requests that wait for a slot.",
    "held": "Idle slots whose state a later request may go on from.",
}
