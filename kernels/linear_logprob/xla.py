"""Chunked `linear_logprob`: loops over blocks of the vocabulary and of tokens, logits recomputed
in the backward pass.

Memory is one block of logits, whatever the numbers of tokens and of words; the price is one more
matrix product (8 N D V operations forward plus backward instead of 6).  On CPUs, where a product
costs far more than moving what it gave, the logits of the first words are kept, up to a fixed
number of bytes.  The words are the outer loop: a block's part of the head is read once, and its
gradient written once, for all tokens.  Only the tokens that are asked for are worked on: they are
moved to the front and the inner loop ends after the last of them.  Over a mesh, each device holds
some words of the head, and the sums over the vocabulary go through collectives after the loops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
from jax import numpy as jnp

from kernels.choice import target_platform

Outputs = tuple[jax.Array, jax.Array, jax.Array]
Carry = TypeVar("Carry")


class Sizes(NamedTuple):
    """`words` of a block; elements of logits at once, enough tokens to fill the matrix units and
    to pay for a pass over the gradient of a block of the head; elements kept."""

    words: int
    elements: int
    kept: int


SIZES = {"cpu": Sizes(1 << 12, 1 << 21, 1 << 26)}
_ACCELERATOR = Sizes(1 << 13, 1 << 26, 0)
# Stands for minus infinity where a difference of two such must not be NaN.
_LOW = -1e30


class Layout(NamedTuple):
    """Sizes of the blocks, how many blocks of words are kept for the backward pass, the mesh axis
    over which the vocabulary is split, and whether this is for a CPU."""

    tokens: int
    words: int
    kept: int
    axis_name: str | None
    cpu: bool


def _even(total: int, most: int, multiple: int) -> int:
    """The size of about equal blocks of at most about `most`: a multiple of `multiple`."""
    blocks = max(1, -(-total // most))
    return -(-total // blocks // multiple) * multiple


def layout(tokens: int, vocab: int, axis_name: str | None, platform: str) -> Layout:
    sizes = SIZES.get(platform, _ACCELERATOR)
    words = vocab if vocab <= sizes.words else _even(vocab, sizes.words, 128)
    block = _even(tokens, max(8, sizes.elements // words), 8)
    kept = min(-(-vocab // words), sizes.kept // (-(-tokens // block) * block * words))
    return Layout(block, words, kept, axis_name, platform == "cpu")


def linear_logprob(
    hidden: jax.Array,
    head: jax.Array,
    ids: jax.Array,
    temperature: jax.Array,
    mask: jax.Array | None,
    axis_name: str | None = None,
) -> Outputs:
    """`hidden [N, D]`, `head [D, V]`, `ids [N]`, `temperature [N]`, `mask [N]` bool or None ->
    three `[N]` float32, zero where not `mask`; V is this device's part where `axis_name` is."""
    tokens = ids.shape[0]
    blocks = layout(tokens, head.shape[1], axis_name, target_platform())
    pad = -tokens % blocks.tokens
    if mask is None:
        order, count = jnp.arange(tokens + pad), jnp.int32(tokens)
    else:
        count = jnp.sum(mask, dtype=jnp.int32)
        order = jnp.argsort(~jnp.pad(mask, (0, pad)), stable=True)
    place = jnp.minimum(order, tokens - 1)
    # Tokens that aren't wanted may hold anything, NaN too.
    rows = jnp.where((jnp.arange(tokens + pad) < count)[:, None], hidden[place], 0)
    if blocks.cpu:
        rows = rows.astype(jnp.float32)
    heat = jax.lax.stop_gradient(temperature)[place]
    scored = _scored(blocks, rows, head.T, ids[place], heat, count)
    if mask is None:
        return tuple(x[:tokens] for x in scored)  # type: ignore[return-value]
    back = jnp.argsort(order)[:tokens]
    return tuple(x[back] for x in scored)  # type: ignore[return-value]


def _take(block: int, index: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
    return [jax.lax.dynamic_slice_in_dim(x, index * block, block) for x in arrays]


def _logits(rows: jax.Array, part: jax.Array, temperature: jax.Array) -> jax.Array:
    """`rows [B, D]`, `part [W, D]` -> `[B, W]`."""
    logits = jnp.matmul(rows, part.T, preferred_element_type=jnp.float32)
    return logits / temperature[:, None]


class _Words(NamedTuple):
    """A block of words: its number, where it starts in this device's part of the head, the token
    id of its first word, its rows of the head `[W, D]`, and how many of its first words blocks
    before it had: all blocks are of one size, so the last may begin within the one before it."""

    number: jax.Array
    start: jax.Array
    first: jax.Array
    part: jax.Array
    seen: jax.Array | None

    def columns(self) -> jax.Array:
        return jnp.arange(self.part.shape[0])

    def fresh(self, logits: jax.Array, otherwise: float) -> jax.Array:
        """`logits [B, W]`, with another value for the words that were seen before."""
        if self.seen is None:
            return logits
        return jnp.where(self.columns() >= self.seen, logits, otherwise)

    def logits_at(self, ids: jax.Array, logits: jax.Array, gather: bool) -> jax.Array:
        """`logits [B, W]` at `ids [B]`, zero for the ids of other blocks."""
        place = ids - self.first
        seen = 0 if self.seen is None else self.seen
        if gather:
            inside = (place >= seen) & (place < self.part.shape[0])
            index = jnp.where(inside, place, 0)[:, None]
            return jnp.where(inside, jnp.take_along_axis(logits, index, axis=1)[:, 0], 0.0)
        mine = self.columns() == jnp.where(place >= seen, place, -1)[:, None]
        return jnp.sum(jnp.where(mine, logits, 0.0), axis=-1)


def _over_words(
    blocks: Layout,
    head: jax.Array,
    visit: Callable[[_Words, bool, Carry], Carry],
    carry: Carry,
) -> Carry:
    """`carry = visit(words, is_kept, carry)` for each block of the head's rows `[V, D]`."""
    vocab, width, kept = head.shape[0], blocks.words, blocks.kept
    offset = 0 if blocks.axis_name is None else vocab * jax.lax.axis_index(blocks.axis_name)

    def block(is_kept: bool, index: jax.Array, carry: Carry) -> Carry:
        start = jnp.minimum(index * width, vocab - width)
        part = jax.lax.dynamic_slice_in_dim(head, start, width)
        if blocks.cpu:
            part = part.astype(jnp.float32)
        seen = None if vocab % width == 0 else index * width - start
        return visit(_Words(index, start, offset + start, part, seen), is_kept, carry)

    for begin, end, is_kept in ((0, kept, True), (kept, -(-vocab // width), False)):
        if end - begin == 1:
            carry = block(is_kept, jnp.int32(begin), carry)
        elif end > begin:
            carry = jax.lax.fori_loop(
                begin, end, lambda index, x, is_kept=is_kept: block(is_kept, index, x), carry
            )
    return carry


def _scored(blocks: Layout, *arguments: jax.Array) -> Outputs:
    scored = jax.custom_vjp(_forward_only, nondiff_argnums=(0,))
    scored.defvjp(_forward, _backward)
    return scored(blocks, *arguments)


def _forward_only(blocks: Layout, *arguments: jax.Array) -> Outputs:
    return _forward(blocks._replace(kept=0), *arguments)[0]


def _rescaled(
    peak: jax.Array, total: jax.Array, weighted: jax.Array, higher: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`total = sum(w)` and `weighted = sum(w * x)`, for `x = logits - peak` and `w = exp(x)`, as
    they are for a higher peak."""
    decay = jnp.exp(peak - higher)
    return total * decay, decay * (weighted + (peak - higher) * total)


def _forward(
    blocks: Layout,
    hidden: jax.Array,
    head: jax.Array,
    ids: jax.Array,
    temperature: jax.Array,
    count: jax.Array,
) -> tuple[Outputs, tuple[jax.Array, ...]]:
    """The first `count` of N tokens, N a multiple of the block; the rest is zero."""
    block = blocks.tokens

    def visit(words, is_kept, carry):
        def step(index, carry):
            sums, kept = carry
            rows, chosen_ids, heat, *old = _take(block, index, hidden, ids, temperature, *sums)
            peak, total, weighted, chosen = old
            logits = _logits(rows, words.part, heat)
            if is_kept:
                at = (words.number, index * block, 0)
                kept = jax.lax.dynamic_update_slice(kept, logits[None], at)
            chosen += words.logits_at(chosen_ids, logits, gather=blocks.cpu)
            logits = words.fresh(logits, _LOW)
            higher = jnp.maximum(peak, jnp.max(logits, axis=-1))
            total, weighted = _rescaled(peak, total, weighted, higher)
            shifted = logits - higher[:, None]
            weights = jnp.exp(shifted)
            total += jnp.sum(weights, axis=-1)
            weighted += jnp.sum(weights * shifted, axis=-1)
            sums = tuple(
                jax.lax.dynamic_update_slice_in_dim(x, value, index * block, axis=0)
                for x, value in zip(sums, (higher, total, weighted, chosen), strict=True)
            )
            return sums, kept

        return jax.lax.fori_loop(0, (count + block - 1) // block, step, carry)

    zero = jnp.zeros(ids.shape, jnp.float32)
    kept = jnp.zeros((blocks.kept, ids.shape[0], blocks.words), jnp.float32)
    carry = ((jnp.full(ids.shape, _LOW), zero, zero, zero), kept)
    (peak, total, weighted, chosen), kept = _over_words(blocks, head, visit, carry)
    if blocks.axis_name is not None:
        higher = jax.lax.pmax(peak, blocks.axis_name)
        total, weighted = _rescaled(peak, total, weighted, higher)
        total, weighted, chosen = jax.lax.psum((total, weighted, chosen), blocks.axis_name)
        peak = higher
    real = jnp.arange(ids.shape[0]) < count
    total = jnp.where(real, total, 1.0)
    log_total = jnp.log(total)
    # In exact arithmetic neither bound can be crossed; rounding must not cross it either.
    values = (
        jnp.minimum(chosen - peak - log_total, 0.0),
        jnp.maximum(log_total - weighted / total, 0.0),
        peak + log_total,
    )
    logprob, entropy, lse = (jnp.where(real, value, 0.0) for value in values)
    residuals = (hidden, head, ids, temperature, count, entropy, lse, kept)
    return (logprob, entropy, lse), residuals


def _backward(blocks: Layout, residuals: Any, cotangents: Outputs) -> tuple:
    block = blocks.tokens
    hidden, head, ids, temperature, count, entropy, lse, kept = residuals
    real = jnp.arange(ids.shape[0]) < count
    d_logprob, d_entropy, d_lse = (jnp.where(real, x, 0.0) for x in cotangents)
    if blocks.axis_name is not None:
        # Every peer has a copy of the outputs, and this device's words enter all of them.
        d_logprob, d_entropy, d_lse = jax.lax.psum(
            (d_logprob, d_entropy, d_lse), blocks.axis_name
        )
    # d logits = p * (d_lse - d_logprob - d_entropy * (log p + H)) + d_logprob at the id
    constant = d_lse - d_logprob - d_entropy * entropy

    def visit(words, is_kept, gradients):
        def step(index, carry):
            d_hidden, d_part = carry
            rows, chosen_ids, heat, row_lse, row_constant, row_logprob, row_entropy, d_rows = _take(
                block, index, hidden, ids, temperature, lse, constant, d_logprob, d_entropy,
                d_hidden,
            )
            if is_kept:
                at, size = (words.number, index * block, 0), (1, block, blocks.words)
                logits = jax.lax.dynamic_slice(kept, at, size)[0]
            else:
                logits = _logits(rows, words.part, heat)
            log_p = logits - row_lse[:, None]
            d_logits = jnp.exp(log_p) * (row_constant[:, None] - row_entropy[:, None] * log_p)
            mine = words.columns() == (chosen_ids - words.first)[:, None]
            d_logits += jnp.where(mine, row_logprob[:, None], 0.0)
            d_logits = words.fresh(d_logits / heat[:, None], 0.0)
            # Factors in the types of the forward product, so that a bfloat16 head isn't widened.
            d_rows += jnp.matmul(
                d_logits.astype(words.part.dtype), words.part, preferred_element_type=jnp.float32
            )
            d_part += jnp.matmul(
                d_logits.T.astype(rows.dtype), rows, preferred_element_type=jnp.float32
            )
            put = jax.lax.dynamic_update_slice_in_dim(d_hidden, d_rows, index * block, axis=0)
            return put, d_part

        d_hidden, d_head = gradients
        d_part = jnp.zeros(words.part.shape, jnp.float32)
        steps = (count + block - 1) // block
        d_hidden, d_part = jax.lax.fori_loop(0, steps, step, (d_hidden, d_part))
        d_part = d_part.astype(head.dtype)
        if words.seen is not None:
            d_part += jax.lax.dynamic_slice_in_dim(d_head, words.start, blocks.words)
        return d_hidden, jax.lax.dynamic_update_slice_in_dim(d_head, d_part, words.start, axis=0)

    gradients = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros_like(head)
    d_hidden, d_head = _over_words(blocks, head, visit, gradients)
    return d_hidden.astype(hidden.dtype), d_head, None, None, None
