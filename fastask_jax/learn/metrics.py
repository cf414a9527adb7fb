"""Metrics that carry their own reduction.

A metric made inside one micro-batch must be merged with those of the others, and a maximum that
is averaged is a wrong number on a dashboard.  So a metric here is not a float with a telling
name: it is a `Sum` (a weighted mean), a `Total`, a `Max` or a `SampleSize`, and each knows how
to merge.

Left out: names, files and plots.  `results` turns a step's metrics into plain floats; the run's
report takes it from there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fastask_jax.learn.masked import masked_max, masked_sum


class Metric(Protocol):
    """What every metric can do.  All are pytrees of float32 arrays."""

    NEUTRAL: ClassVar[float]  # what every leaf holds before anything was seen

    def merge(self, other: Self) -> Self: ...

    def result(self) -> float | None: ...


Metrics = dict[str, Metric]


@partial(jax.tree_util.register_dataclass, data_fields=["value", "weight"], meta_fields=[])
@dataclass(frozen=True)
class Sum:
    """A weighted mean kept as numerator and denominator; merging adds both."""

    NEUTRAL: ClassVar[float] = 0.0

    value: Array
    weight: Array

    @classmethod
    def of(cls, values: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Sum:
        """Mean of `values` over the tokens of `mask`."""
        return cls(masked_sum(values, mask), jnp.sum(mask, dtype=jnp.float32))

    def merge(self, other: Sum) -> Sum:
        return Sum(self.value + other.value, self.weight + other.weight)

    def result(self) -> float | None:
        weight = float(self.weight)
        return float(self.value) / weight if weight else None


@partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=[])
@dataclass(frozen=True)
class Total:
    """A plain sum, for counts."""

    NEUTRAL: ClassVar[float] = 0.0

    value: Array

    @classmethod
    def of(cls, mask: Bool[Array, "*shape"]) -> Total:
        """How many are true."""
        return cls(jnp.sum(mask, dtype=jnp.float32))

    def merge(self, other: Total) -> Total:
        return Total(self.value + other.value)

    def result(self) -> float | None:
        return float(self.value)


@partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=[])
@dataclass(frozen=True)
class Max:
    """A maximum; minus infinity when nothing was seen."""

    NEUTRAL: ClassVar[float] = -math.inf

    value: Array

    @classmethod
    def of(cls, values: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Max:
        return cls(masked_max(values, mask).astype(jnp.float32))

    def merge(self, other: Max) -> Max:
        return Max(jnp.maximum(self.value, other.value))

    def result(self) -> float | None:
        value = float(self.value)
        return None if value == -math.inf else value


@partial(
    jax.tree_util.register_dataclass, data_fields=["total", "squares", "count"], meta_fields=[]
)
@dataclass(frozen=True)
class SampleSize:
    """Effective sample size of importance weights as a fraction of the tokens.

    (sum w)^2 / (n sum w^2), Kong 1992: 1 when all weights agree, 1/n when one token has all the
    weight.  Not a mean of per-micro-batch values, hence its own type.
    """

    NEUTRAL: ClassVar[float] = 0.0

    total: Array
    squares: Array
    count: Array

    @classmethod
    def of(cls, weights: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> SampleSize:
        return cls(
            masked_sum(weights, mask),
            masked_sum(jnp.square(weights), mask),
            jnp.sum(mask, dtype=jnp.float32),
        )

    def merge(self, other: SampleSize) -> SampleSize:
        return SampleSize(
            self.total + other.total, self.squares + other.squares, self.count + other.count
        )

    def result(self) -> float | None:
        spread = float(self.count) * float(self.squares)
        return float(self.total) ** 2 / spread if spread else None


@partial(jax.tree_util.register_dataclass, data_fields=["counts", "tokens"], meta_fields=[])
@dataclass(frozen=True)
class Busiest:
    """Largest share of the tokens that any one place took, e.g. an expert in any layer.

    counts: [...] tokens per place, summed over micro-batches; tokens: all of them.
    """

    NEUTRAL: ClassVar[float] = 0.0

    counts: Array
    tokens: Array

    def merge(self, other: Busiest) -> Busiest:
        return Busiest(self.counts + other.counts, self.tokens + other.tokens)

    def result(self) -> float | None:
        tokens = float(self.tokens)
        return float(self.counts.max()) / tokens if tokens else None


def merge(first: Metrics, second: Metrics) -> Metrics:
    """Both micro-batches' metrics as one.  The names must agree (KeyError otherwise)."""
    if first.keys() != second.keys():
        raise KeyError(f"metrics to merge differ in {sorted(first.keys() ^ second.keys())}")
    return {name: metric.merge(second[name]) for name, metric in first.items()}


def empty_like(metrics: Mapping[str, Metric]) -> Metrics:
    """The neutral element of `merge` for metrics of these names and types."""

    def start(metric: Metric) -> Metric:
        return jax.tree.map(lambda leaf: jnp.full(leaf.shape, metric.NEUTRAL, leaf.dtype), metric)

    return {name: start(metric) for name, metric in metrics.items()}


def results(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Plain floats, after one transfer from the device.

    A metric that saw no token has no value and is left out, rather than reported as 0.
    """
    values = {name: metric.result() for name, metric in jax.device_get(dict(metrics)).items()}
    return {name: value for name, value in values.items() if value is not None}
