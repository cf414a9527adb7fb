"""Chunked `linear_logprob`: loops over blocks of columns and of tokens, logits recomputed in the
backward pass.

Memory is one block of logits, whatever the numbers of tokens and of columns; the price is one
more matrix product (8 N D V operations forward plus backward instead of 6).  The columns are the
outer loop: a block's part of the head is read once, and its gradient written once, for all
tokens.  Only the tokens that are asked for are worked on: they are moved to the front and the
inner loop ends after the last of them.  Over a mesh, each device holds some columns of the head,
and the sums over the vocabulary go through collectives after the loops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
from jax import numpy as jnp

from kernels.choice import target_platform

Outputs = tuple[jax.Array, jax.Array, jax.Array]
Carry = TypeVar("Carry")

# Columns of a block, and elements of logits held at once: enough tokens to fill the matrix units
# and to pay for a pass over the gradient of a block of the head.
_COLUMNS = 1 << 13
_ELEMENTS_CPU = 1 << 21
_ELEMENTS = 1 << 26
# Stands for minus infinity where a difference of two such must not be NaN.
_LOW = -1e30


class Layout(NamedTuple):
    """Sizes of the blocks, and the mesh axis over which the vocabulary is split."""

    tokens: int
    columns: int
    axis_name: str | None


def _even(total: int, most: int, multiple: int) -> int:
    """The size of about equal blocks of at most about `most`: a multiple of `multiple`."""
    blocks = max(1, -(-total // most))
    return -(-total // blocks // multiple) * multiple


def layout(tokens: int, vocab: int, axis_name: str | None, platform: str) -> Layout:
    columns = vocab if vocab <= _COLUMNS else _even(vocab, _COLUMNS, 128)
    elements = _ELEMENTS_CPU if platform == "cpu" else _ELEMENTS
    return Layout(_even(tokens, max(8, elements // columns), 8), columns, axis_name)


def _logits(hidden: jax.Array, head: jax.Array, temperature: jax.Array) -> jax.Array:
    logits = jnp.matmul(hidden, head, preferred_element_type=jnp.float32)
    return logits.astype(jnp.float32) / temperature[:, None]


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
    heat = jax.lax.stop_gradient(temperature)[place]
    scored = _scored(blocks, rows, head, ids[place], heat, count)
    if mask is None:
        return tuple(x[:tokens] for x in scored)  # type: ignore[return-value]
    back = jnp.argsort(order)[:tokens]
    return tuple(x[back] for x in scored)  # type: ignore[return-value]


def _take(block: int, index: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
    return [jax.lax.dynamic_slice_in_dim(x, index * block, block) for x in arrays]


def _over_columns(
    blocks: Layout,
    head: jax.Array,
    visit: Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None, Carry], Carry],
    carry: Carry,
) -> Carry:
    """`carry = visit(start, part, ids, fresh, carry)` for each block of the head's columns: where
    it starts, its part `[D, C]`, the token ids that its columns stand for, and which of them no
    block before had (None for all): the last block is as wide as the others, so it may begin
    within the one before it."""
    vocab, width = head.shape[1], blocks.columns
    first = 0 if blocks.axis_name is None else vocab * jax.lax.axis_index(blocks.axis_name)

    def block(index: jax.Array, carry: Carry) -> Carry:
        start = jnp.minimum(index * width, vocab - width)
        place = start + jnp.arange(width)
        fresh = None if vocab % width == 0 else place >= index * width
        part = jax.lax.dynamic_slice_in_dim(head, start, width, axis=1)
        return visit(start, part, first + place, fresh, carry)

    if vocab == width:
        return visit(jnp.int32(0), head, first + jnp.arange(width), None, carry)
    return jax.lax.fori_loop(0, -(-vocab // width), block, carry)


def _scored(blocks: Layout, *arguments: jax.Array) -> Outputs:
    scored = jax.custom_vjp(_forward_only, nondiff_argnums=(0,))
    scored.defvjp(_forward, _backward)
    return scored(blocks, *arguments)


def _forward_only(blocks: Layout, *arguments: jax.Array) -> Outputs:
    return _forward(blocks, *arguments)[0]


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

    def visit(_, part, columns, fresh, sums):
        def step(index, sums):
            rows, chosen_ids, heat, *old = _take(block, index, hidden, ids, temperature, *sums)
            peak, total, weighted, chosen = old
            logits = _logits(rows, part, heat)
            if fresh is not None:
                logits = jnp.where(fresh, logits, _LOW)
            higher = jnp.maximum(peak, jnp.max(logits, axis=-1))
            total, weighted = _rescaled(peak, total, weighted, higher)
            shifted = logits - higher[:, None]
            weights = jnp.exp(shifted)
            mine = columns == chosen_ids[:, None]
            if fresh is not None:
                mine &= fresh
            new = (
                higher,
                total + jnp.sum(weights, axis=-1),
                weighted + jnp.sum(weights * shifted, axis=-1),
                chosen + jnp.sum(jnp.where(mine, logits, 0.0), axis=-1),
            )
            return tuple(
                jax.lax.dynamic_update_slice_in_dim(x, value, index * block, axis=0)
                for x, value in zip(sums, new, strict=True)
            )

        return jax.lax.fori_loop(0, (count + block - 1) // block, step, sums)

    zero = jnp.zeros(ids.shape, jnp.float32)
    peak, total, weighted, chosen = _over_columns(
        blocks, head, visit, (jnp.full(ids.shape, _LOW), zero, zero, zero)
    )
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
    outputs = tuple(jnp.where(real, value, 0.0) for value in values)
    return outputs, (hidden, head, ids, temperature, count, outputs[1], outputs[2])  # type: ignore[return-value]


def _backward(blocks: Layout, residuals: Any, cotangents: Outputs) -> tuple:
    block = blocks.tokens
    hidden, head, ids, temperature, count, entropy, lse = residuals
    real = jnp.arange(ids.shape[0]) < count
    d_logprob, d_entropy, d_lse = (jnp.where(real, x, 0.0) for x in cotangents)
    if blocks.axis_name is not None:
        # Every peer has a copy of the outputs, and this device's columns enter all of them.
        d_logprob, d_entropy, d_lse = jax.lax.psum(
            (d_logprob, d_entropy, d_lse), blocks.axis_name
        )
    # d logits = p * (d_lse - d_logprob - d_entropy * (log p + H)) + d_logprob at the id
    constant = d_lse - d_logprob - d_entropy * entropy

    def visit(start, part, columns, fresh, gradients):
        def step(index, carry):
            d_hidden, d_part = carry
            rows, chosen_ids, heat, row_lse, row_constant, row_logprob, row_entropy, d_rows = _take(
                block, index, hidden, ids, temperature, lse, constant, d_logprob, d_entropy,
                d_hidden,
            )
            log_p = _logits(rows, part, heat) - row_lse[:, None]
            d_logits = jnp.exp(log_p) * (row_constant[:, None] - row_entropy[:, None] * log_p)
            d_logits += jnp.where(columns == chosen_ids[:, None], row_logprob[:, None], 0.0)
            d_logits = d_logits / heat[:, None]
            if fresh is not None:
                d_logits = jnp.where(fresh, d_logits, 0.0)
            # Factors in the types of the forward product, so that a bfloat16 head isn't widened.
            d_rows += jnp.matmul(
                d_logits.astype(head.dtype), part.T, preferred_element_type=jnp.float32
            )
            d_part += jnp.matmul(
                rows.T, d_logits.astype(rows.dtype), preferred_element_type=jnp.float32
            )
            put = jax.lax.dynamic_update_slice_in_dim(d_hidden, d_rows, index * block, axis=0)
            return put, d_part

        d_hidden, d_head = gradients
        d_hidden, d_part = jax.lax.fori_loop(
            0,
            (count + block - 1) // block,
            step,
            (d_hidden, jnp.zeros(part.shape, jnp.float32)),
        )
        d_part = d_part.astype(head.dtype)
        if part.shape == head.shape:
            return d_hidden, d_part
        if fresh is not None:
            d_part += jax.lax.dynamic_slice_in_dim(d_head, start, part.shape[1], axis=1)
        return d_hidden, jax.lax.dynamic_update_slice_in_dim(d_head, d_part, start, axis=1)

    gradients = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros_like(head)
    d_hidden, d_head = _over_columns(blocks, head, visit, gradients)
    return d_hidden.astype(hidden.dtype), d_head, None, None, None
