"""Scores of packed tokens under the current weights: the learner's forward pass.

The train step differentiates through a `ScoreFn`; the loop calls a `Scorer` to log how far the
sampler's recorded logprobs are from the learner's.  Both use the same function, so the logged
gap is that of the training graph.

Left out: losses, and anything about how the model computes hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float
from numpy.typing import NDArray

from fastask_jax.learn.losses import Tokens
from fastask_jax.learn.mesh import make_mesh, row_devices, row_sharding
from fastask_jax.learn.metrics import Busiest, Metrics
from fastask_jax.learn.packing import Batch, Packed, micro_batches

Params = Any


class Scores(NamedTuple):
    """logprobs, entropy: float32 [rows, length], at the position of the scored token (0 at
    column 0).  aux: metrics of the model itself, for logging."""

    logprobs: Tokens
    entropy: Tokens
    aux: Metrics


# (params, tokens, positions, segment_ids, temperature) -> Scores
ScoreFn = Callable[[Params, Array, Array, Array, Float[Array, ""] | float], Scores]


def score_fn(model: Any) -> ScoreFn:
    """The scores of `fastask_jax.model` for a ModelConfig; a ScoreFn is returned as it is."""
    if callable(model):
        return model
    from fastask_jax.model import forward, unembedding
    from kernels.linear_logprob import linear_logprob

    def scores(params, tokens, positions, segment_ids, temperature):
        hidden, load = forward(model, params, tokens, positions, segment_ids)
        logprobs, entropy, _ = linear_logprob(
            hidden[:, :-1], unembedding(params), tokens[:, 1:], temperature
        )
        shift = ((0, 0), (1, 0))
        aux: Metrics = {}
        if "expert_counts" in load:
            aux["model/busiest_expert"] = Busiest(load["expert_counts"], load["tokens"])
        return Scores(jnp.pad(logprobs, shift), jnp.pad(entropy, shift), aux)

    return scores


class Scorer:
    """Learner logprobs and entropies of a packed batch, without gradients.

        logprobs, entropy = make_scorer(cfg)(params, packed.batch, temperature=1.0)

    Both are float32 numpy [rows, length]; column 0 and padding mean nothing.  Micro-batches that
    hold no token are skipped and left 0.
    """

    def __init__(self, model: Any, micro_batch_rows: int, mesh: Mesh | None) -> None:
        self.mesh = mesh or make_mesh(1)
        self.micro_batch_rows = micro_batch_rows
        self.traces = 0
        check_rows(micro_batch_rows, self.mesh)
        scores = score_fn(model)

        def run(params, tokens, positions, segment_ids, temperature):
            self.traces += 1
            result = scores(params, tokens, positions, segment_ids, temperature)
            return result.logprobs, result.entropy

        self._run = jax.jit(run)

    def __call__(
        self, params: Params, batch: Batch | Packed, temperature: float = 1.0
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        flat = batch.batch if isinstance(batch, Packed) else batch
        micro = micro_batches(flat, self.micro_batch_rows)
        result = np.zeros((2, *micro.tokens.shape), np.float32)
        for index in np.flatnonzero(micro.segment_ids.any(axis=(1, 2))):
            rows = jax.device_put(
                (micro.tokens[index], micro.positions[index], micro.segment_ids[index]),
                row_sharding(self.mesh),
            )
            result[:, index] = jax.device_get(self._run(params, *rows, np.float32(temperature)))
        logprobs, entropy = result.reshape(2, *flat.tokens.shape)
        return logprobs, entropy


def make_scorer(model: Any, *, micro_batch_rows: int = 8, mesh: Mesh | None = None) -> Scorer:
    """A `Scorer` for a ModelConfig (or a ScoreFn)."""
    return Scorer(model, micro_batch_rows, mesh)


def check_rows(micro_batch_rows: int, mesh: Mesh) -> None:
    """Raises ValueError unless the rows of a micro-batch divide over the devices."""
    if micro_batch_rows % row_devices(mesh):
        raise ValueError(
            f"micro_batch_rows={micro_batch_rows} doesn't divide over {row_devices(mesh)} "
            "devices: choose a multiple"
        )
