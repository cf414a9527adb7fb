"""Scores of packed tokens under the current weights: the learner's forward pass.

The train step differentiates through a `ScoreFn`; the loop calls a `Scorer` to log how far the
sampler's recorded logprobs are from the learner's.  Both use the same function, so the logged
gap is that of the training graph.  Only sampled tokens (the loss mask) are scored.

Left out: losses, and anything about how the model computes hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float
from numpy.typing import NDArray

from fastask_jax.learn.losses import Tokens
from fastask_jax.learn.metrics import Busiest, Metrics
from fastask_jax.learn.packing import Batch, Packed, check_ids, micro_batches
from fastask_jax.model.decoder import unembedding
from fastask_jax.model.mesh import (
    ROW_AXES,
    AnyMesh,
    gather_weights,
    make_mesh,
    parts,
    put,
    row_spec,
    whole_rows,
)
from fastask_jax.model.sharding import check_rows, forward, hidden_spec
from kernels.linear_logprob import linear_logprob

Params = Any


class Scores(NamedTuple):
    """logprobs, entropy: float32 [rows, length], at the position of the scored token; 0 where
    the mask is false, hence at column 0.  aux: metrics of the model itself, for logging."""

    logprobs: Tokens
    entropy: Tokens
    aux: Metrics


# (params, tokens, positions, segment_ids, mask, temperature) -> Scores.  With router replay a
# further argument follows: the batch's expert ids.
ScoreFn = Callable[..., Scores]


def score_fn(model: Any, mesh: AnyMesh | None = None) -> ScoreFn:
    """The scores of `fastask_jax.model` for a ModelConfig; a ScoreFn is returned as it is."""
    if callable(model):
        return model

    def scores(params, tokens, positions, segment_ids, mask, temperature, expert_ids=None):
        if expert_ids is not None:
            expert_ids = jnp.moveaxis(expert_ids, 2, 0)
        hidden, load = forward(
            model, params, tokens, positions, segment_ids, expert_ids, mesh=mesh
        )
        # The hidden state at t scores token t + 1.
        ids, wanted = (jnp.pad(x[:, 1:], ((0, 0), (0, 1))) for x in (tokens, mask))
        logprobs, entropy = _score_hidden(
            hidden, unembedding(params), ids, wanted, temperature, mesh,
            model.kernels.linear_logprob,
        )  # fmt: skip
        logprobs, entropy = (jnp.pad(x[:, :-1], ((0, 0), (1, 0))) for x in (logprobs, entropy))
        aux: Metrics = {}
        if "expert_counts" in load:
            aux["model/busiest_expert"] = Busiest(load["expert_counts"], load["tokens"])
        return Scores(logprobs, entropy, aux)

    return scores


def _score_hidden(
    hidden: Float[Array, "rows length width"],
    head: Float[Array, "width vocab"],
    ids: Array,
    wanted: Array,
    temperature: Float[Array, ""] | float,
    mesh: AnyMesh | None,
    implementation: str,
) -> tuple[Tokens, Tokens]:
    """Logprobs and entropies of `ids` where `wanted`, with the vocabulary split over `tensor`."""

    def local(hidden, head, ids, wanted, temperature):
        head = gather_weights(head, ("embed", "vocab"), (), hidden.dtype).astype(hidden.dtype)
        logprobs, entropy, _ = linear_logprob(
            whole_rows(hidden, ids.shape[1]),
            head,
            ids,
            temperature,
            wanted,
            axis_name="tensor" if parts("tensor") > 1 else None,
            implementation=implementation,
        )
        return logprobs, entropy

    temperature = jnp.asarray(temperature, jnp.float32)
    if mesh is None or mesh.size == 1:
        return local(hidden, head, ids, wanted, temperature)
    rows = PartitionSpec(ROW_AXES)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(
            hidden_spec(mesh, ids.shape[1]),
            PartitionSpec("fsdp", "tensor"),
            rows,
            rows,
            PartitionSpec(),
        ),
        out_specs=(rows, rows),
        check_vma=False,
    )(hidden, head, ids, wanted, temperature)


class Scorer:
    """Learner logprobs and entropies of a packed batch, without gradients.

        logprobs, entropy = make_scorer(cfg)(params, packed.batch, temperature=1.0)

    Both are float32 numpy [rows, length], 0 off the mask.  Micro-batches that hold no sampled
    token are skipped.  Raises ValueError for token or expert ids that the model doesn't have.
    """

    def __init__(self, model: Any, micro_batch_rows: int, mesh: Mesh | None) -> None:
        self.mesh = mesh or make_mesh()
        self.micro_batch_rows = micro_batch_rows
        self.traces = 0
        self._model = None if callable(model) else model
        check_rows(micro_batch_rows, self.mesh)
        scores = score_fn(model, self.mesh)

        def run(params, temperature, rows, replayed):
            self.traces += 1
            result = scores(params, *rows, temperature, *replayed)
            return result.logprobs, result.entropy

        # Copied to every device, so that every process can read them.
        self._run = jax.jit(run, out_shardings=NamedSharding(self.mesh, PartitionSpec()))

    def __call__(
        self, params: Params, batch: Batch | Packed, temperature: float = 1.0
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        flat = batch.batch if isinstance(batch, Packed) else batch
        if self._model is not None:
            check_ids(flat, self._model.vocab_size, self._model.num_experts)
        micro = micro_batches(flat, self.micro_batch_rows)
        result = np.zeros((2, *micro.tokens.shape), np.float32)
        for index in np.flatnonzero(micro.mask.any(axis=(1, 2))):
            rows = (micro.tokens, micro.positions, micro.segment_ids, micro.mask)
            replayed = () if micro.expert_ids is None else (micro.expert_ids,)
            rows, replayed = put(
                jax.tree.map(lambda array: array[index], (rows, replayed)),  # noqa: B023
                NamedSharding(self.mesh, row_spec()),
            )
            result[:, index] = jax.device_get(
                self._run(params, np.float32(temperature), rows, replayed)
            )
        logprobs, entropy = result.reshape(2, *flat.tokens.shape)
        return logprobs, entropy


def make_scorer(model: Any, *, micro_batch_rows: int = 8, mesh: Mesh | None = None) -> Scorer:
    """A `Scorer` for a ModelConfig (or a ScoreFn)."""
    return Scorer(model, micro_batch_rows, mesh)
