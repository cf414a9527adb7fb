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

Over a mesh, slots are split over its devices as rows of a batch are, and weights as the learner's.

Left out: eviction under memory pressure, meshes of several processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from fastask_jax.model import ModelConfig, init_cache, unstacked
from fastask_jax.model.mesh import make_mesh, row_devices
from fastask_jax.model.sharding import cache_specs, shardings, specs_like
from fastask_jax.rollout import programs
from fastask_jax.rollout.programs import Params


@dataclass(frozen=True)
class EngineConfig:
    """Shapes of an engine.  Programs are compiled when first used: one for each append bucket,
    one for each attend bucket, and one to share prompts.

    slots: episodes that are alive at a time.
    max_len: tokens a slot can hold, prompt and all turns together.
    append_rows: slots that one append call feeds.
    append_buckets: token counts of an append call; longer texts are fed in pieces.
    append_calls: append calls between two decode calls, while some slots can decode; None makes
        all that wait, which keeps decode calls full.  Few of them keep a long prompt from holding
        up those that decode.
    decode_rows: slots that one decode call covers, at most all.  Small calls waste less when few
        slots run, and suit CPUs; accelerators want all slots in one, which then stay in place.
    attend_buckets: cache lengths that decoding attends to, besides `max_len`; None takes an
        eighth, a quarter and a half of it.
    decode_steps: decode steps per call, i.e. per host round trip.
    """

    slots: int = 128
    max_len: int = 1024
    append_rows: int = 16
    append_buckets: tuple[int, ...] = (16, 64, 256)
    append_calls: int | None = None
    decode_rows: int = 32
    attend_buckets: tuple[int, ...] | None = None
    decode_steps: int = 16

    def __post_init__(self) -> None:
        for name in ("slots", "max_len", "append_rows", "decode_rows", "decode_steps"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"EngineConfig.{name} must be at least 1, not {getattr(self, name)}"
                )
        if self.append_calls is not None and self.append_calls < 1:
            raise ValueError(
                f"EngineConfig.append_calls must be at least 1, or None, not {self.append_calls}"
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
class Piece:
    """What one append call feeds to a slot: `ids` in a row of `bucket` tokens, the slot emptied
    first if `fresh`."""

    slot: int
    ids: list[int]
    bucket: int
    fresh: bool


@dataclass(frozen=True)
class Sampled:
    """What a slot sampled in one decode call; `ended` is "stop", "length", or None (goes on)."""

    ids: list[int]
    logprobs: list[float]
    ended: str | None


@dataclass(frozen=True)
class Decoding:
    """Decode calls under way: the orders, and for each call its rows by slot and its outputs."""

    turns: Mapping[int, Turn]
    calls: Sequence[tuple[Mapping[int, int], tuple[Array, ...]]]

    @property
    def done(self) -> bool:
        """Whether `Engine.finish` wouldn't wait."""
        outputs: list[Any] = [leaf for _, outputs in self.calls for leaf in outputs]
        return all(leaf.is_ready() for leaf in outputs)


class Engine:
    """A pool of `config.slots` live slots for the model `model`; turns end at `stop_id`.

    mesh: the devices that it decodes on; JAX's default one if None.  Weights lie there as `place`
        puts them.

    Attributes: `traces` counts compilations by function; `lengths` [slots] is the number of
    tokens of each slot, the pending one included; `row_steps` counts rows times decode steps so
    far, idle rows included.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        stop_id: int,
        mesh: Mesh | None = None,
    ) -> None:
        if not 0 <= stop_id < model.vocab_size:
            raise ValueError(
                f"stop token {stop_id} is outside of the model's vocabulary ({model.vocab_size}); "
                "tokenizer and model don't belong together"
            )
        self.mesh = mesh = mesh or make_mesh(devices=jax.local_devices()[:1])
        parts = row_devices(mesh)
        for name in ("slots", "append_rows", "decode_rows"):
            if getattr(config, name) % parts:
                raise ValueError(
                    f"EngineConfig.{name} ({getattr(config, name)}) doesn't divide over the "
                    f"{parts} parts into which the mesh splits rows: choose a multiple"
                )
        self.model, self.config, self.stop_id = model, config, stop_id
        self.traces: Counter[str] = Counter()
        self.lengths = np.zeros(config.slots, np.int32)
        self.row_steps = 0
        self._in_place = config.decode_rows == config.slots
        self._pending = np.zeros(config.slots, np.int32)
        where, whole = shardings(mesh, cache_specs(model)), NamedSharding(mesh, PartitionSpec())
        cache = partial(init_cache, model, config.slots, config.max_len, mesh=mesh)
        self._cache = jax.jit(cache, out_shardings=where)()
        axes = programs.cache_axes(model, config.max_len)

        def compiled(name: str, function: Callable, cache_argument: int, outputs: Any) -> Callable:
            def counted(*arguments: Any) -> Any:
                self.traces[name] += 1  # runs at trace time only
                return function(*arguments)

            return jax.jit(counted, donate_argnums=cache_argument, out_shardings=outputs)

        append = partial(programs.append, model, axes, config.max_len, mesh)
        self._append = compiled("append", append, 1, where)
        share = partial(programs.share, axes, config.max_len)
        self._share = compiled("share", share, 0, where)
        decode, rest = partial(programs.decode, model, axes), (config.decode_steps, stop_id, mesh)
        self._decode = {
            attend: compiled("decode", partial(decode, attend, *rest), 1, (where, whole))
            for attend in config.attend_buckets or ()
        }

    def place(self, params: Params, alias: bool = True) -> Params:
        """The weights where and as this engine wants them; `alias`: those that are so already may
        be the given arrays.  Weights that aren't placed are cut into blocks at every call."""
        where = shardings(self.mesh, specs_like(self.model, params, self.mesh))
        params = jax.device_put(params, where, may_alias=alias)
        if self.model.unrolled and self.mesh.size == 1:
            params = jax.jit(unstacked, static_argnums=0)(self.model, params)
        return params

    def room(self, slot: int) -> int:
        """Tokens that still fit into the slot."""
        return self.config.max_len - int(self.lengths[slot])

    def append(
        self, params: Params, texts: Mapping[int, Sequence[int]], fresh: bool = False
    ) -> None:
        """Feeds ids to slots; `fresh` slots are zeroed first and begin with them.

        Raises ValueError for an empty text or one that doesn't fit.
        """
        queues = [self.cut(slot, ids, fresh) for slot, ids in texts.items()]
        while queues := [queue for queue in queues if queue]:
            bucket = queues[0][0].bucket
            fitting = [queue for queue in queues if queue[0].bucket == bucket]
            self.feed(params, [queue.pop(0) for queue in fitting[: self.config.append_rows]])

    def cut(self, slot: int, ids: Sequence[int], fresh: bool = False) -> list[Piece]:
        """The calls' worth of a text, to be fed in this order; the slot counts as holding it.

        Raises ValueError for an empty text or one that doesn't fit.
        """
        held = 0 if fresh else int(self.lengths[slot])
        if not len(ids) or held + len(ids) > self.config.max_len:
            raise ValueError(
                f"{len(ids)} tokens don't fit slot {slot} that holds {held} of "
                f"{self.config.max_len} (EngineConfig.max_len)"
            )
        fed = [*([] if fresh else [int(self._pending[slot])]), *map(int, ids)]
        self._pending[slot] = fed.pop()
        self.lengths[slot] = held + len(ids)
        buckets = self.config.append_buckets
        parts = [fed[i : i + buckets[-1]] for i in range(0, len(fed), buckets[-1])]
        # A fresh text of one token: only the reset.
        return [
            Piece(slot, part, next(b for b in buckets if b >= len(part)), fresh and not place)
            for place, part in enumerate(parts or [[]])
        ]

    def feed(self, params: Params, pieces: Sequence[Piece]) -> None:
        """One append call: pieces of one bucket, of different slots, at most `append_rows`."""
        config = self.config
        # Rows without a piece point behind the last slot: nothing is written for them.
        slots = np.full(config.append_rows, config.slots, np.int32)
        tokens = np.zeros((config.append_rows, pieces[0].bucket), np.int32)
        counts = np.zeros(config.append_rows, np.int32)
        fresh = np.zeros(config.append_rows, bool)
        for row, piece in enumerate(pieces):
            slots[row], counts[row], fresh[row] = piece.slot, len(piece.ids), piece.fresh
            tokens[row, : len(piece.ids)] = piece.ids
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
        self,
        params: Params,
        turns: Mapping[int, Turn],
        temperature: float | Mapping[int, float],
    ) -> dict[int, Sampled]:
        """Samples up to `decode_steps` tokens in each slot of `turns`.

        A slot pauses at its stop token or when its budget is spent.  temperature: of all slots, or
        that of each; 0 is greedy.
        """
        return self.finish(self.start(params, turns, temperature))

    def start(
        self,
        params: Params,
        turns: Mapping[int, Turn],
        temperature: float | Mapping[int, float],
    ) -> Decoding:
        """`decode` without waiting for what comes out: the devices work on until `finish`, before
        which none of these slots may be fed.  Raises ValueError for a budget beyond the room."""
        config = self.config
        if not isinstance(temperature, Mapping):
            temperature = dict.fromkeys(turns, temperature)
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
                # A call that covers all slots has each in the row of its number.
                rows = {s: s if self._in_place else row for row, s in enumerate(batch)}
                calls.append((rows, self._decode_rows(params, bucket, rows, turns, temperature)))
        return Decoding(turns, calls)

    def finish(self, decoding: Decoding) -> dict[int, Sampled]:
        """Waits for what `start` has begun."""
        results: dict[int, Sampled] = {}
        for rows, outputs in decoding.calls:
            results |= self._collect(rows, decoding.turns, *jax.device_get(outputs))
        return results

    def _decode_rows(
        self,
        params: Params,
        bucket: int,
        rows: Mapping[int, int],
        turns: Mapping[int, Turn],
        temperatures: Mapping[int, float],
    ) -> tuple[Array, ...]:
        """Starts one decode call; `rows`: the row of each slot in it.  The others idle."""
        size = self.config.decode_rows
        slots = np.full(size, self.config.slots, np.int32)
        pending = np.zeros(size, np.int32)
        keys = np.zeros((size, 2), np.uint32)
        budgets = np.zeros(size, np.int32)
        temperature = np.ones(size, np.float32)
        for slot, row in rows.items():
            slots[row], pending[row] = slot, self._pending[slot]
            keys[row], budgets[row] = turns[slot].key, turns[slot].budget
            temperature[row] = temperatures[slot]
        self._cache, outputs = self._decode[bucket](
            params,
            self._cache,
            None if self._in_place else slots,
            pending,
            keys,
            budgets,
            temperature,
        )
        return outputs

    def _collect(
        self,
        rows: Mapping[int, int],
        turns: Mapping[int, Turn],
        tokens: np.ndarray,
        logprobs: np.ndarray,
        taken: np.ndarray,
        steps: np.ndarray,
    ) -> dict[int, Sampled]:
        self.row_steps += int(steps) * self.config.decode_rows
        results = {}
        for slot, row in rows.items():
            count = int(taken[row])
            ids = tokens[:count, row].tolist()
            self._pending[slot] = ids[-1]
            self.lengths[slot] += count
            ended = "stop" if ids[-1] == self.stop_id else None
            if ended is None and count == turns[slot].budget:
                ended = "length"
            results[slot] = Sampled(ids, logprobs[:count, row].tolist(), ended)
        return results
