"""Packing: trajectories of many lengths -> rows of one static shape.

Short trajectories share a row as segments; the model keeps them apart by segment id, and
positions restart at 0 in each.  Rows have one of a few configured lengths and their number is
rounded up, so a whole run compiles a handful of shapes.  Which trajectory goes where depends on
the lengths and their order alone.

Alignment, everywhere in the learner: arrays are per token.  The logprob at token t is that of
token t given those before it in its segment, and mask[t] is true iff token t was sampled by the
policy.  The first token of a trajectory can't be sampled, as nothing predicts it.

Left out: splitting a trajectory over rows.  One that is too long is an error, never a truncation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray

# A batch holds NumPy arrays on the host, JAX arrays of the same shapes inside a jitted function.
AnyArray = Any

# Rounding in a sampler's softmax can lift the logprob of a certain token just above 0.
LOGPROB_SLACK = 1e-3


class Trainable(Protocol):
    """What the packer needs of a trajectory of n tokens (`rollout.Trajectory` has it).

    One with an attribute `expert_ids` that isn't None, [n, layers with experts, K], has its tokens
    routed to those experts (router replay).
    """

    @property
    def ids(self) -> NDArray[np.int32]: ...  # [n] token ids

    @property
    def mask(self) -> NDArray: ...  # [n] true (or 1) where the policy sampled the token

    @property
    def logprobs(self) -> NDArray[np.float32]: ...  # [n] of the sampler; ignored off the mask

    @property
    def versions(self) -> NDArray[np.int32]: ...  # [n] policy version; ignored off the mask

    @property
    def advantage(self) -> float: ...  # shared by all sampled tokens


@dataclass(frozen=True)
class TrainableTokens:
    """The plainest Trainable."""

    ids: NDArray
    mask: NDArray
    logprobs: NDArray
    advantage: float
    versions: NDArray = field(default_factory=lambda: np.zeros(0, np.int32))
    expert_ids: NDArray | None = None

    def __post_init__(self) -> None:
        if len(self.versions) == 0:
            object.__setattr__(self, "versions", np.zeros(len(self.ids), np.int32))


@dataclass(frozen=True)
class PackConfig:
    """Shapes of packed batches.

    row_lengths: the row lengths (tokens) that may be compiled; a batch takes the shortest one
        that holds its longest trajectory.
    micro_batch_rows: rows per gradient-accumulation step.  The number of rows of a batch is a
        power of two times this.
    min_rows: a batch has at least this many rows.  Rows that stay empty cost no time, as the
        train step skips them, so a generous number means that only one shape per row length is
        ever compiled.
    """

    row_lengths: tuple[int, ...] = (512, 1024, 2048)
    micro_batch_rows: int = 8
    min_rows: int = 256

    def __post_init__(self) -> None:
        object.__setattr__(self, "row_lengths", tuple(self.row_lengths))
        if not self.row_lengths or min(self.row_lengths) < 1:
            raise ValueError(f"row_lengths must hold positive lengths, not {self.row_lengths}")
        if list(self.row_lengths) != sorted(set(self.row_lengths)):
            raise ValueError(f"row_lengths must rise, not {self.row_lengths}")
        for name in ("micro_batch_rows", "min_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "tokens",
        "positions",
        "segment_ids",
        "mask",
        "behaviour_logprobs",
        "advantages",
        "versions",
        "proximal_logprobs",
        "reference_logprobs",
        "expert_ids",
    ],
    meta_fields=[],
)
@dataclass(frozen=True)
class Batch:
    """A packed batch; arrays are [rows, length] (with micro-batches in front inside the step).

    tokens, positions, segment_ids (1, 2, ... in a row; 0 is padding), versions: int32.
    mask: bool.  behaviour_logprobs, advantages: float32, 0 where the mask is false.
    proximal_logprobs, reference_logprobs: float32, only for objectives that use them.
    expert_ids: int32 [rows, length, layers with experts, K], only for router replay: the experts
        of every token, sampled or not, in place of those that the router would choose.
    """

    tokens: Int[AnyArray, "*rows length"]
    positions: Int[AnyArray, "*rows length"]
    segment_ids: Int[AnyArray, "*rows length"]
    mask: Bool[AnyArray, "*rows length"]
    behaviour_logprobs: Float[AnyArray, "*rows length"]
    advantages: Float[AnyArray, "*rows length"]
    versions: Int[AnyArray, "*rows length"]
    proximal_logprobs: Float[AnyArray, "*rows length"] | None = None
    reference_logprobs: Float[AnyArray, "*rows length"] | None = None
    expert_ids: Int[AnyArray, "*rows length layers k"] | None = None


@dataclass(frozen=True)
class Packed:
    """A batch and where each trajectory lies in it (row, first column, length; [trajectories])."""

    batch: Batch
    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def unpack(self, values: NDArray) -> list[NDArray]:
        """Per-trajectory pieces of [rows, length] values, in the order given to `pack`."""
        spans = zip(self.rows, self.starts, self.lengths, strict=True)
        return [np.asarray(values)[row, start : start + n] for row, start, n in spans]

    @property
    def used_rows(self) -> int:
        return int(self.rows.max()) + 1 if len(self.rows) else 0

    @property
    def fill(self) -> float:
        """Share of the used rows' cells that hold a token."""
        cells = self.used_rows * self.batch.tokens.shape[1]
        return float(self.lengths.sum()) / cells if cells else 0.0


def pack(trajectories: Sequence[Trainable], config: PackConfig) -> Packed:
    """Packs trajectories into rows by first-fit decreasing.

    Raises ValueError for a trajectory that is longer than the longest row, is empty, has arrays
    of different lengths, claims to have sampled its first token, has a logprob or advantage that
    is not a usable number, has ids that aren't whole numbers, or has expert ids (or of another
    shape) where others have none.
    """
    lengths = np.array([len(item.ids) for item in trajectories], dtype=np.int64)
    for index, item in enumerate(trajectories):
        _check(index, item)
    longest = int(lengths.max(initial=1))
    fitting = [length for length in config.row_lengths if length >= longest]
    if not fitting:
        raise ValueError(
            f"trajectory {int(lengths.argmax())} has {longest} tokens and the longest row holds "
            f"{max(config.row_lengths)}: raise PackConfig.row_lengths, or lower the rollout's "
            "token budget"
        )
    length = fitting[0]
    rows, starts, used = _first_fit_decreasing(lengths, length)
    shape = (_row_count(max(used, config.min_rows), config.micro_batch_rows), length)

    batch = Batch(
        tokens=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        segment_ids=np.zeros(shape, np.int32),
        mask=np.zeros(shape, bool),
        behaviour_logprobs=np.zeros(shape, np.float32),
        advantages=np.zeros(shape, np.float32),
        versions=np.zeros(shape, np.int32),
        expert_ids=_expert_ids(trajectories, shape),
    )
    segments = np.zeros(shape[0], np.int32)
    # In order of the columns, so that segment ids rise along a row.
    for index in np.lexsort((starts, rows)):
        item, row, n = trajectories[index], rows[index], lengths[index]
        span = slice(starts[index], starts[index] + n)
        sampled = np.asarray(item.mask).astype(bool)
        segments[row] += 1
        batch.tokens[row, span] = item.ids
        batch.positions[row, span] = np.arange(n)
        batch.segment_ids[row, span] = segments[row]
        batch.mask[row, span] = sampled
        batch.behaviour_logprobs[row, span] = np.where(sampled, item.logprobs, 0.0)
        batch.advantages[row, span] = np.where(sampled, item.advantage, 0.0)
        batch.versions[row, span] = np.where(sampled, item.versions, 0)
        if batch.expert_ids is not None:
            batch.expert_ids[row, span] = item.expert_ids
    return Packed(batch, rows, starts, lengths)


def check_ids(batch: Batch, vocab_size: int, experts: int) -> None:
    """Raises ValueError for token ids outside a vocabulary, and for expert ids outside a layer's
    experts or twice at a token: a gather would take others in silence."""
    tokens = np.asarray(batch.tokens)
    if tokens.min(initial=0) < 0 or tokens.max(initial=0) >= vocab_size:
        wrong = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise ValueError(
            f"the batch holds the token id {wrong}, and the model knows 0 to {vocab_size - 1}: "
            "its tokenizer isn't the model's"
        )
    if batch.expert_ids is None:
        return
    chosen = np.sort(np.asarray(batch.expert_ids)[np.asarray(batch.segment_ids) > 0], axis=-1)
    if chosen.min(initial=0) < 0 or chosen.max(initial=0) >= experts:
        wrong = chosen[(chosen < 0) | (chosen >= experts)][0]
        raise ValueError(f"router replay names the expert {wrong} of {experts}")
    if (chosen[..., 1:] == chosen[..., :-1]).any():
        raise ValueError("router replay names an expert twice for one token")


def micro_batches(batch: Batch, micro_batch_rows: int) -> Batch:
    """The same batch as [micro-batches, micro_batch_rows, length]; ValueError if rows don't fit."""
    rows = batch.tokens.shape[0]
    if rows % micro_batch_rows:
        raise ValueError(
            f"{rows} rows don't divide into micro-batches of {micro_batch_rows} rows: pack with "
            f"PackConfig(micro_batch_rows={micro_batch_rows})"
        )
    return jax.tree.map(
        lambda array: array.reshape(-1, micro_batch_rows, *array.shape[1:]), batch
    )


def _expert_ids(trajectories: Sequence[Trainable], shape: tuple[int, int]) -> NDArray | None:
    """Room for the experts of all tokens, if the trajectories name any."""
    found = [getattr(item, "expert_ids", None) for item in trajectories]
    shapes = [None if ids is None else np.shape(ids) for ids in found]
    first = next((shape for shape in shapes if shape is not None), None)
    if first is None:
        return None
    for index, ids in enumerate(found):
        if ids is not None:
            _check_whole(index, "expert_ids", ids)
    if shapes != [(len(item.ids), *first[1:]) for item in trajectories]:
        raise ValueError(
            "router replay needs expert_ids [tokens, layers with experts, K] of every trajectory, "
            f"one entry per token; got {', '.join(map(str, shapes[:8]))}"
        )
    return np.zeros((*shape, *first[1:]), np.int32)


def _first_fit_decreasing(lengths: NDArray, capacity: int) -> tuple[NDArray, NDArray, int]:
    rows = np.zeros(len(lengths), np.int64)
    starts = np.zeros(len(lengths), np.int64)
    free = np.full(len(lengths), capacity, np.int64)
    for index in np.argsort(-lengths, kind="stable"):
        row = int(np.argmax(free >= lengths[index]))
        rows[index] = row
        starts[index] = capacity - free[row]
        free[row] -= lengths[index]
    return rows, starts, int(np.sum(free < capacity))


def _row_count(rows: int, micro_batch_rows: int) -> int:
    needed = -(-rows // micro_batch_rows)
    return micro_batch_rows * (1 << (needed - 1).bit_length())


def _check(index: int, item: Trainable) -> None:
    n = len(item.ids)
    if n == 0:
        raise ValueError(f"trajectory {index} has no tokens")
    _check_whole(index, "ids", item.ids)
    for name in ("mask", "logprobs", "versions"):
        if len(getattr(item, name)) != n:
            raise ValueError(
                f"trajectory {index} has {n} ids but {len(getattr(item, name))} {name}: "
                "every array must have one entry per token"
            )
    sampled = np.asarray(item.mask).astype(bool)
    if sampled[0]:
        raise ValueError(
            f"trajectory {index} marks its first token as sampled, but nothing predicts a first "
            "token: clear mask[0]"
        )
    recorded = np.asarray(item.logprobs, dtype=np.float64)[sampled]
    if not (np.isfinite(recorded).all() and (recorded <= LOGPROB_SLACK).all()):
        where = int(np.flatnonzero(sampled)[~(recorded <= LOGPROB_SLACK) | np.isinf(recorded)][0])
        raise ValueError(
            f"trajectory {index} has the logprob {item.logprobs[where]} at sampled token {where}: "
            "the sampler must record a finite logprob of at most 0"
        )
    with np.errstate(over="ignore"):
        advantage = np.float32(item.advantage)
    if not np.isfinite(advantage):
        raise ValueError(f"trajectory {index} has the advantage {item.advantage}")


def _check_whole(index: int, name: str, ids: Any) -> None:
    kind = np.asarray(ids).dtype
    if kind.kind not in "iu":
        raise ValueError(f"trajectory {index} has {name} of type {kind}: they are whole numbers")
