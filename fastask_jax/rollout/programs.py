"""What an engine compiles: feeding text to some slots, copying slots, and decoding.

A call covers a number of rows; row r stands for slot `slots[r]`, whose state is taken out of the
cache and put back, and a row whose slot lies behind the last one is idle.  With `slots` None the
rows are the slots themselves, and nothing is moved.

Over a mesh, rows are split as slots are.  Which slots a row stands for isn't known when a call is
compiled, so taking and putting rows gathers them from all devices; rows that are the slots stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from fastask_jax.model import (
    ModelConfig,
    extend,
    init_cache,
    reset_slots,
    unembedding,
    unstacked,
)
from fastask_jax.model.mesh import ROW_AXES, row_spec
from fastask_jax.rollout.sampling import sample

Cache = Any
Params = Any


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


def _where(
    leaf: Array, slots: Array | None, attend: int, slot_axis: int, length_axis: int
) -> tuple | None:
    """The index of some slots, and of their first `attend` tokens where a leaf has tokens; None
    for all of it."""
    if slots is None and (length_axis < 0 or leaf.shape[length_axis] == attend):
        return None
    index: list[Any] = [slice(None)] * (max(slot_axis, length_axis) + 1)
    if slots is not None:
        index[slot_axis] = slots
    if length_axis >= 0:
        index[length_axis] = slice(0, attend)
    return tuple(index)


def take(
    cache: Cache, axes: CacheAxes, slots: Int[Array, " rows"] | None, attend: int
) -> Cache:
    """The state of some slots as a cache of its own that can hold `attend` tokens."""

    def part(leaf: Array, slot: int, length: int) -> Array:
        index = _where(leaf, slots, attend, slot, length)
        return leaf if index is None else leaf.at[index].get(mode="clip")

    return jax.tree.map(part, cache, axes.slot, axes.length)


def put(
    cache: Cache,
    axes: CacheAxes,
    slots: Int[Array, " rows"] | None,
    attend: int,
    rows: Cache,
) -> Cache:
    """The opposite of `take`; rows whose slot is out of bounds are dropped."""

    def whole(leaf: Array, new: Array, slot: int, length: int) -> Array:
        index = _where(leaf, slots, attend, slot, length)
        return new if index is None else leaf.at[index].set(new, mode="drop")

    return jax.tree.map(whole, cache, rows, axes.slot, axes.length)


def append(
    model: ModelConfig,
    axes: CacheAxes,
    max_len: int,
    mesh: Mesh,
    params: Params,
    cache: Cache,
    slots: Int[Array, " rows"] | None,
    tokens: Int[Array, "rows bucket"],
    counts: Int[Array, " rows"],
    fresh: Bool[Array, " rows"],
) -> Cache:
    """Rows append their first `counts` tokens; `fresh` ones are emptied before."""
    rows = reset_slots(take(cache, axes, slots, max_len), fresh)
    _, rows = extend(model, params, rows, tokens, counts, mesh=mesh)
    return put(cache, axes, slots, max_len, rows)


def share(
    axes: CacheAxes,
    max_len: int,
    cache: Cache,
    origins: Int[Array, " rows"],
    targets: Int[Array, " rows"],
) -> Cache:
    """Slots `targets` take the state of slots `origins`."""
    return put(cache, axes, targets, max_len, take(cache, axes, origins, max_len))


def next_tokens(
    model: ModelConfig,
    mesh: Mesh,
    params: Params,
    head: Float[Array, "width vocab"],
    cache: Cache,
    pending: Int[Array, " rows"],
    active: Bool[Array, " rows"],
    keys: UInt32[Array, "rows 2"],
    temperature: Float[Array, "*rows"],
) -> tuple[Cache, Int[Array, " rows"], Float[Array, " rows"]]:
    """Feeds the pending token of the active rows and samples the next ones, with logprobs.

    head: of `unembedding`, in the type that the model computes in.
    """
    hidden, cache = extend(
        model, params, cache, pending[:, None], active.astype(jnp.int32), mesh=mesh
    )
    logits = jnp.dot(hidden[:, 0], head, preferred_element_type=jnp.float32)
    if mesh.size > 1:
        # The head stays where it is; only logits travel, as sampling reads whole rows of them.
        for spec in (PartitionSpec(ROW_AXES, "tensor"), row_spec()):
            logits = jax.lax.with_sharding_constraint(logits, NamedSharding(mesh, spec))
    # The new token's index is the number of tokens fed before it.
    return cache, *sample(logits, keys, cache["length"], temperature)


def decode(
    model: ModelConfig,
    axes: CacheAxes,
    attend: int,
    steps: int,
    stop_id: int,
    mesh: Mesh,
    params: Params,
    cache: Cache,
    slots: Int[Array, " rows"] | None,
    pending: Int[Array, " rows"],
    keys: UInt32[Array, "rows 2"],
    budgets: Int[Array, " rows"],
    temperature: Float[Array, " rows"],
) -> tuple[Cache, tuple[Array, Array, Array, Array]]:
    """Tokens and logprobs [steps, rows], how many of them count per row, and steps run.

    A row ends at `stop_id` or when its budget is spent; one without a budget is idle.
    """
    rows = pending.shape[0]
    head = unembedding(params).astype(model.dtype)  # as the learner scores
    if model.unrolled and mesh.size == 1:
        params = unstacked(model, params)  # once, not at each step

    def running(state: tuple) -> Array:
        step, _, _, active, *_ = state
        return (step < steps) & active.any()

    def advance(state: tuple) -> tuple:
        step, cache, pending, active, tokens, logprobs, taken = state
        cache, token, logprob = next_tokens(
            model, mesh, params, head, cache, pending, active, keys, temperature
        )
        pending = jnp.where(active, token, pending)
        taken = taken + active
        tokens = tokens.at[step].set(token)
        logprobs = logprobs.at[step].set(logprob)
        active = active & (token != stop_id) & (taken < budgets)
        return step + 1, cache, pending, active, tokens, logprobs, taken

    state = (
        jnp.int32(0),
        take(cache, axes, slots, attend),  # once, as a slice in the loop would be taken each step
        pending,
        budgets > 0,
        jnp.zeros((steps, rows), jnp.int32),
        jnp.zeros((steps, rows), jnp.float32),
        jnp.zeros(rows, jnp.int32),
    )
    step, part, _, _, tokens, logprobs, taken = jax.lax.while_loop(running, advance, state)
    return put(cache, axes, slots, attend, part), (tokens, logprobs, taken, step)
