"""The decoding engine: a fixed pool of slots whose state stays alive between turns.

A slot holds one episode: keys and values of the attention layers, convolution and recurrent
state of the gated-delta layers.  `append` feeds ids (a prompt, a tool result) to some slots,
`share` copies a fed prompt to the other copies of its group, `decode` samples up to a few
tokens in all running slots in one call.  While a tool runs its slot just isn't decoded.

Each slot keeps its last token back as *pending*: decoding feeds it and samples the next.  So a
turn of n tokens is n decode steps, and no state has to be undone when a turn ends.

What a slot computes doesn't depend on its company, bit for bit, although calls take whichever
slots are ready: each kind of call covers a fixed number of rows, and its other sizes (how long a
text is, how much of the cache is attended to) follow from each row alone; rows of different sizes
go into different calls.  So results don't depend on when tools answer.  Only ids and logprobs
come to the host.  Weights are an argument of each call; the engine keeps none.

Left out: eviction under memory pressure, meshes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Bool, Float, Int, UInt32

from fastask_jax.model import (
    ModelConfig,
    extend,
    init_cache,
    reset_slots,
    unembedding,
    unstacked,
)
from fastask_jax.rollout.sampling import sample

Cache = Any
Params = Any


@dataclass(frozen=True)
class EngineConfig:
    """Shapes of an engine.  Programs are compiled when first used: one for each append bucket,
    one for each attend bucket, and one to share prompts.

    slots: episodes that are alive at a time.
    max_len: tokens a slot can hold, prompt and all turns together.
    append_rows: slots that one append call feeds.
    append_buckets: token counts of an append call; longer texts are fed in pieces.
    decode_rows: slots that one decode call covers, at most all.  Small calls waste less when few
        slots run, and suit CPUs; accelerators want all slots in one.
    attend_buckets: cache lengths that decoding attends to, besides `max_len`; None takes an
        eighth, a quarter and a half of it.
    decode_steps: decode steps per call, i.e. per host round trip.
    """

    slots: int = 128
    max_len: int = 1024
    append_rows: int = 16
    append_buckets: tuple[int, ...] = (16, 64, 256)
    decode_rows: int = 32
    attend_buckets: tuple[int, ...] | None = None
    decode_steps: int = 16

    def __post_init__(self) -> None:
        for name in ("slots", "max_len", "append_rows", "decode_rows", "decode_steps"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"EngineConfig.{name} must be at least 1, not {getattr(self, name)}"
                )
        for name in ("append_rows", "decode_rows"):
            object.__setattr__(self, name, min(getattr(self, name), self.slots))
        attend = self.attend_buckets
        if attend is None:
            attend = tuple(sorted({-(-self.max_len // (128 * n)) * 128 for n in (2, 4, 8)}))
        attend = (*(size for size in attend if size < self.max_len), self.max_len)
        object.__setattr__(self, "attend_buckets", attend)
        object.__setattr__(self, "append_buckets", tuple(self.append_buckets))
        for name in ("append_buckets", "attend_buckets"):
            sizes = getattr(self, name)
            if not sizes or min(sizes) < 1 or list(sizes) != sorted(set(sizes)):
                raise ValueError(f"EngineConfig.{name} must rise from 1 up, not {sizes}")


@dataclass(frozen=True)
class Turn:
    """A slot's order for one decode call.

    key: the episode's sampling key, [2] uint32.  budget: tokens it may still sample this turn.
    """

    key: np.ndarray
    budget: int


@dataclass(frozen=True)
class Sampled:
    """What a slot sampled in one decode call; `ended` is "stop", "length", or None (goes on)."""

    ids: list[int]
    logprobs: list[float]
    ended: str | None


class Engine:
    """A pool of `config.slots` live slots for the model `model`; turns end at `stop_id`.

    device: where it decodes, and where the weights that it is given lie; JAX's default if None.

    Attributes: `traces` counts compilations by function; `lengths` [slots] is the number of
    tokens of each slot, the pending one included; `row_steps` counts rows times decode steps so
    far, idle rows included.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        stop_id: int,
        device: jax.Device | None = None,
    ) -> None:
        if not 0 <= stop_id < model.vocab_size:
            raise ValueError(
                f"stop token {stop_id} is outside of the model's vocabulary ({model.vocab_size}); "
                "tokenizer and model don't belong together"
            )
        self.model, self.config, self.stop_id = model, config, stop_id
        self.traces: Counter[str] = Counter()
        self.lengths = np.zeros(config.slots, np.int32)
        self.row_steps = 0
        self._pending = np.zeros(config.slots, np.int32)
        cache = partial(init_cache, model, slots=config.slots, max_len=config.max_len)
        where = None if device is None else SingleDeviceSharding(device)
        self._cache = jax.jit(cache, out_shardings=where)()
        axes = cache_axes(model, config.max_len)
        self._append = self._jit("append", partial(_append, model, axes, config.max_len))
        share = partial(_share, axes, config.max_len)
        self._share = self._jit("share", share, cache_argument=0)
        self._decode = {
            attend: self._jit(
                "decode", partial(_decode, model, axes, attend, config.decode_steps, stop_id)
            )
            for attend in config.attend_buckets or ()
        }

    def _jit(self, name: str, function: Callable, cache_argument: int = 1) -> Callable:
        def counted(*arguments: Any) -> Any:
            self.traces[name] += 1  # runs at trace time only
            return function(*arguments)

        return jax.jit(counted, donate_argnums=cache_argument)

    def room(self, slot: int) -> int:
        """Tokens that still fit into the slot."""
        return self.config.max_len - int(self.lengths[slot])

    def append(
        self, params: Params, texts: Mapping[int, Sequence[int]], fresh: bool = False
    ) -> None:
        """Feeds ids to slots; `fresh` slots are zeroed first and begin with them.

        Raises ValueError for an empty text or one that doesn't fit.
        """
        queues: dict[int, list[tuple[int, list[int], bool]]] = {}
        depth = 0
        for slot, ids in texts.items():
            held = 0 if fresh else int(self.lengths[slot])
            if not len(ids) or held + len(ids) > self.config.max_len:
                raise ValueError(
                    f"{len(ids)} tokens don't fit slot {slot} that holds {held} of "
                    f"{self.config.max_len} (EngineConfig.max_len)"
                )
            fed = [*([] if fresh else [int(self._pending[slot])]), *map(int, ids)]
            self._pending[slot] = fed.pop()
            self.lengths[slot] = held + len(ids)
            largest = self.config.append_buckets[-1]
            pieces = [fed[i : i + largest] for i in range(0, len(fed), largest)]
            if fresh and not pieces:
                pieces = [[]]  # a prompt of one token: only the reset
            for index, piece in enumerate(pieces):
                queues.setdefault(index, []).append((slot, piece, fresh and index == 0))
            depth = max(depth, len(pieces))
        for index in range(depth):
            self._append_pieces(params, queues[index])

    def _append_pieces(
        self, params: Params, pieces: list[tuple[int, list[int], bool]]
    ) -> None:
        by_bucket: dict[int, list[tuple[int, list[int], bool]]] = {}
        for piece in pieces:
            bucket = next(b for b in self.config.append_buckets if b >= len(piece[1]))
            by_bucket.setdefault(bucket, []).append(piece)
        for bucket, members in sorted(by_bucket.items()):
            for start in range(0, len(members), self.config.append_rows):
                batch = members[start : start + self.config.append_rows]
                # Rows without a piece point behind the last slot: nothing is written for them.
                slots = np.full(self.config.append_rows, self.config.slots, np.int32)
                tokens = np.zeros((self.config.append_rows, bucket), np.int32)
                counts = np.zeros(self.config.append_rows, np.int32)
                fresh = np.zeros(self.config.append_rows, bool)
                for row, (slot, ids, new) in enumerate(batch):
                    slots[row], counts[row], fresh[row] = slot, len(ids), new
                    tokens[row, : len(ids)] = ids
                self._cache = self._append(params, self._cache, slots, tokens, counts, fresh)

    def share(self, sources: Mapping[int, int]) -> None:
        """Slot `target` takes the state of slot `sources[target]`; no source is a target."""
        pairs = list(sources.items())
        for start in range(0, len(pairs), self.config.append_rows):
            targets = np.full(self.config.append_rows, self.config.slots, np.int32)
            origins = np.zeros(self.config.append_rows, np.int32)
            for row, (target, origin) in enumerate(pairs[start : start + self.config.append_rows]):
                targets[row], origins[row] = target, origin
                self.lengths[target] = self.lengths[origin]
                self._pending[target] = self._pending[origin]
            self._cache = self._share(self._cache, origins, targets)

    def decode(
        self, params: Params, turns: Mapping[int, Turn], temperature: float
    ) -> dict[int, Sampled]:
        """Samples up to `decode_steps` tokens in each slot of `turns`.

        A slot pauses at its stop token or when its budget is spent.  Temperature 0 is greedy.
        """
        config = self.config
        by_bucket: dict[int, list[int]] = {}
        for slot, turn in turns.items():
            if not 0 < turn.budget <= self.room(slot):
                raise ValueError(
                    f"slot {slot} has room for {self.room(slot)} tokens, not {turn.budget}"
                )
            # Every step feeds one token, the pending one first.
            fed = int(self.lengths[slot]) - 1 + min(turn.budget, config.decode_steps)
            bucket = next(size for size in self._decode if size >= fed)
            by_bucket.setdefault(bucket, []).append(slot)
        calls = []
        for bucket, members in sorted(by_bucket.items()):
            for start in range(0, len(members), config.decode_rows):
                batch = members[start : start + config.decode_rows]
                calls.append((batch, self._decode_rows(params, bucket, batch, turns, temperature)))
        results: dict[int, Sampled] = {}
        for batch, outputs in calls:
            results |= self._collect(batch, turns, *jax.device_get(outputs))
        return results

    def _decode_rows(
        self,
        params: Params,
        bucket: int,
        batch: list[int],
        turns: Mapping[int, Turn],
        temperature: float,
    ) -> tuple[Array, ...]:
        """Starts one decode call; `batch` fills its first rows, the others idle."""
        rows = self.config.decode_rows
        slots = np.full(rows, self.config.slots, np.int32)
        pending = np.zeros(rows, np.int32)
        keys = np.zeros((rows, 2), np.uint32)
        budgets = np.zeros(rows, np.int32)
        for row, slot in enumerate(batch):
            slots[row], pending[row] = slot, self._pending[slot]
            keys[row], budgets[row] = turns[slot].key, turns[slot].budget
        self._cache, outputs = self._decode[bucket](
            params, self._cache, slots, pending, keys, budgets, np.float32(temperature)
        )
        return outputs

    def _collect(
        self,
        batch: list[int],
        turns: Mapping[int, Turn],
        tokens: np.ndarray,
        logprobs: np.ndarray,
        taken: np.ndarray,
        steps: np.ndarray,
    ) -> dict[int, Sampled]:
        self.row_steps += int(steps) * self.config.decode_rows
        results = {}
        for row, slot in enumerate(batch):
            count = int(taken[row])
            ids = tokens[:count, row].tolist()
            self._pending[slot] = ids[-1]
            self.lengths[slot] += count
            ended = "stop" if ids[-1] == self.stop_id else None
            if ended is None and count == turns[slot].budget:
                ended = "length"
            results[slot] = Sampled(ids, logprobs[:count, row].tolist(), ended)
        return results


@dataclass(frozen=True)
class CacheAxes:
    """Trees like the cache: the slot axis of each leaf, and its length axis (one entry per
    token, as keys and values have; -1 where there is none)."""

    slot: Any
    length: Any


def cache_axes(model: ModelConfig, max_len: int) -> CacheAxes:
    """Found by comparing the shapes of caches of different sizes."""

    def shapes(slots: int, length: int) -> Any:
        return jax.eval_shape(partial(init_cache, model, slots=slots, max_len=length))

    def axis(small: jax.ShapeDtypeStruct, large: jax.ShapeDtypeStruct) -> int:
        sizes = zip(small.shape, large.shape, strict=True)
        differing = [i for i, (a, b) in enumerate(sizes) if a != b]
        if len(differing) > 1:
            raise ValueError(f"cache leaf of shape {large.shape} has several slot or length axes")
        return differing[0] if differing else -1

    one = shapes(1, max_len)
    by_slot = jax.tree.map(axis, one, shapes(2, max_len))
    if -1 in jax.tree.leaves(by_slot):
        raise ValueError("every cache leaf needs a slot axis")
    return CacheAxes(by_slot, jax.tree.map(axis, one, shapes(1, max_len + 1)))


def _where(slots: Array, attend: int, slot_axis: int, length_axis: int) -> tuple:
    """The index of some slots, and of their first `attend` tokens where a leaf has tokens."""
    index: list[Any] = [slice(None)] * (max(slot_axis, length_axis) + 1)
    index[slot_axis] = slots
    if length_axis >= 0:
        index[length_axis] = slice(0, attend)
    return tuple(index)


def _take(cache: Cache, axes: CacheAxes, slots: Int[Array, " rows"], attend: int) -> Cache:
    """The state of some slots as a cache of its own that can hold `attend` tokens."""

    def take(leaf: Array, slot: int, length: int) -> Array:
        return leaf.at[_where(slots, attend, slot, length)].get(mode="clip")

    return jax.tree.map(take, cache, axes.slot, axes.length)


def _put(
    cache: Cache, axes: CacheAxes, slots: Int[Array, " rows"], attend: int, rows: Cache
) -> Cache:
    """The opposite of `_take`; rows whose slot is out of bounds are dropped."""

    def put(leaf: Array, new: Array, slot: int, length: int) -> Array:
        return leaf.at[_where(slots, attend, slot, length)].set(new, mode="drop")

    return jax.tree.map(put, cache, rows, axes.slot, axes.length)


def _append(
    model: ModelConfig,
    axes: CacheAxes,
    max_len: int,
    params: Params,
    cache: Cache,
    slots: Int[Array, " rows"],
    tokens: Int[Array, "rows bucket"],
    counts: Int[Array, " rows"],
    fresh: Bool[Array, " rows"],
) -> Cache:
    rows = reset_slots(_take(cache, axes, slots, max_len), fresh)
    _, rows = extend(model, params, rows, tokens, counts)
    return _put(cache, axes, slots, max_len, rows)


def _share(
    axes: CacheAxes,
    max_len: int,
    cache: Cache,
    origins: Int[Array, " rows"],
    targets: Int[Array, " rows"],
) -> Cache:
    return _put(cache, axes, targets, max_len, _take(cache, axes, origins, max_len))


def _decode(
    model: ModelConfig,
    axes: CacheAxes,
    attend: int,
    steps: int,
    stop_id: int,
    params: Params,
    cache: Cache,
    slots: Int[Array, " rows"],
    pending: Int[Array, " rows"],
    keys: UInt32[Array, "rows 2"],
    budgets: Int[Array, " rows"],
    temperature: Float[Array, ""],
) -> tuple[Cache, tuple[Array, Array, Array, Array]]:
    """Tokens and logprobs [steps, rows], how many of them count per row, and steps run."""
    rows = pending.shape[0]
    head = unembedding(params).astype(model.dtype)  # as the learner scores

    def running(state: tuple) -> Array:
        step, _, _, active, *_ = state
        return (step < steps) & active.any()

    blocks = unstacked(model, params) if model.unrolled else None

    def advance(state: tuple) -> tuple:
        step, cache, pending, active, tokens, logprobs, taken = state
        hidden, cache = extend(
            model, params, cache, pending[:, None], active.astype(jnp.int32), blocks=blocks
        )
        logits = jnp.dot(hidden[:, 0], head, preferred_element_type=jnp.float32)
        # The new token's index is the number of tokens fed before it.
        token, logprob = sample(logits, keys, cache["length"], temperature)
        pending = jnp.where(active, token, pending)
        taken = taken + active
        tokens = tokens.at[step].set(token)
        logprobs = logprobs.at[step].set(logprob)
        active = active & (token != stop_id) & (taken < budgets)
        return step + 1, cache, pending, active, tokens, logprobs, taken

    state = (
        jnp.int32(0),
        _take(cache, axes, slots, attend),  # once, as a slice in the loop would be taken each step
        pending,
        budgets > 0,
        jnp.zeros((steps, rows), jnp.int32),
        jnp.zeros((steps, rows), jnp.float32),
        jnp.zeros(rows, jnp.int32),
    )
    step, part, _, _, tokens, logprobs, taken = jax.lax.while_loop(running, advance, state)
    return _put(cache, axes, slots, attend, part), (tokens, logprobs, taken, step)
