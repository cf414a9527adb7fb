"""Chunked `linear_logprob`: a loop over blocks of tokens, logits recomputed in the backward pass.

Memory is one block of logits, whatever the number of tokens; the price is one more matrix
product (8 N D V operations forward plus backward instead of 6).  Only the tokens that are asked
for are worked on: they are moved to the front and the loop ends after the last of them.  Over a
mesh, each device holds some columns of the head and the sums over the vocabulary go through
collectives; as the peers of one vocabulary have the same tokens, they loop equally often.
Blocking over the vocabulary, for which one block of tokens by 248,320 is already large, is left
out here.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import numpy as jnp

from kernels.platform import target_platform

Outputs = tuple[jax.Array, jax.Array, jax.Array]

# Elements of logits held at once: enough rows to fill the matrix units and to pay for a pass over
# the head's gradient, which every block adds to.
_BLOCK_ELEMENTS_CPU = 1 << 21
_BLOCK_ELEMENTS = 1 << 26


def _block(tokens: int, vocab: int) -> int:
    """Tokens per block: a multiple of 8, and little padding in the last block."""
    elements = _BLOCK_ELEMENTS_CPU if target_platform() == "cpu" else _BLOCK_ELEMENTS
    blocks = -(-tokens // max(8, elements // vocab))
    return -(-tokens // blocks // 8) * 8


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
    block = _block(tokens, head.shape[1])
    pad = -tokens % block
    if mask is None:
        order, count = jnp.arange(tokens + pad), jnp.int32(tokens)
    else:
        count = jnp.sum(mask, dtype=jnp.int32)
        order = jnp.argsort(~jnp.pad(mask, (0, pad)), stable=True)
    place = jnp.minimum(order, tokens - 1)
    # Tokens that aren't wanted may hold anything, NaN too.
    rows = jnp.where((jnp.arange(tokens + pad) < count)[:, None], hidden[place], 0)
    heat = jax.lax.stop_gradient(temperature)[place]
    scored = _scored((block, axis_name), rows, head, ids[place], heat, count)
    if mask is None:
        return tuple(x[:tokens] for x in scored)  # type: ignore[return-value]
    back = jnp.argsort(order)[:tokens]
    return tuple(x[back] for x in scored)  # type: ignore[return-value]


def _take(block: int, index: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
    return [jax.lax.dynamic_slice_in_dim(x, index * block, block) for x in arrays]


def _put(block: int, index: jax.Array, array: jax.Array, value: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(array, value, index * block, axis=0)


def _columns(head: jax.Array, ids: jax.Array, axis_name: str | None) -> jax.Array:
    """The token ids that the columns of this device's head stand for."""
    columns = jnp.arange(head.shape[1], dtype=ids.dtype)
    if axis_name is None:
        return columns
    return columns + head.shape[1] * jax.lax.axis_index(axis_name).astype(ids.dtype)


def _scored(static: tuple[int, str | None], *arguments: jax.Array) -> Outputs:
    scored = jax.custom_vjp(_forward_only, nondiff_argnums=(0,))
    scored.defvjp(_forward, _backward)
    return scored(static, *arguments)


def _forward_only(static: tuple[int, str | None], *arguments: jax.Array) -> Outputs:
    return _forward(static, *arguments)[0]


def _forward(
    static: tuple[int, str | None],
    hidden: jax.Array,
    head: jax.Array,
    ids: jax.Array,
    temperature: jax.Array,
    count: jax.Array,
) -> tuple[Outputs, tuple[jax.Array, ...]]:
    """The first `count` of N tokens, N a multiple of the block; the rest is zero."""
    block, axis_name = static
    columns = _columns(head, ids, axis_name)

    def step(index: jax.Array, outputs: Outputs) -> Outputs:
        rows, chosen_ids, heat = _take(block, index, hidden, ids, temperature)
        logits = _logits(rows, head, heat)
        peak = jnp.max(logits, axis=-1)
        if axis_name is not None:
            peak = jax.lax.pmax(peak, axis_name)
        shifted = logits - peak[:, None]
        weights = jnp.exp(shifted)
        total = jnp.sum(weights, axis=-1)
        chosen = jnp.sum(jnp.where(columns == chosen_ids[:, None], shifted, 0.0), axis=-1)
        weighted = jnp.sum(weights * shifted, axis=-1)
        if axis_name is not None:
            total, chosen, weighted = jax.lax.psum((total, chosen, weighted), axis_name)
        log_total = jnp.log(total)
        entropy = log_total - weighted / total
        # In exact arithmetic neither bound can be crossed; rounding must not cross it either.
        values = (
            jnp.minimum(chosen - log_total, 0.0),
            jnp.maximum(entropy, 0.0),
            peak + log_total,
        )
        real = index * block + jnp.arange(block) < count
        return tuple(  # type: ignore[return-value]
            _put(block, index, output, jnp.where(real, value, 0.0))
            for output, value in zip(outputs, values, strict=True)
        )

    zero = jnp.zeros(ids.shape, jnp.float32)
    outputs = jax.lax.fori_loop(0, (count + block - 1) // block, step, (zero, zero, zero))
    return outputs, (hidden, head, ids, temperature, count, outputs[1], outputs[2])


def _backward(static: tuple[int, str | None], residuals: Any, cotangents: Outputs) -> tuple:
    block, axis_name = static
    hidden, head, ids, temperature, count, entropy, lse = residuals
    columns = _columns(head, ids, axis_name)
    real = jnp.arange(ids.shape[0]) < count
    d_logprob, d_entropy, d_lse = (jnp.where(real, x, 0.0) for x in cotangents)
    if axis_name is not None:
        # Every peer has a copy of the outputs, and this device's columns enter all of them.
        d_logprob, d_entropy, d_lse = jax.lax.psum((d_logprob, d_entropy, d_lse), axis_name)
    # d logits = p * (d_lse - d_logprob - d_entropy * (log p + H)) + d_logprob at the id
    constant = d_lse - d_logprob - d_entropy * entropy

    def step(index, carry):
        d_hidden, d_head = carry
        rows, chosen_ids, heat, row_lse, row_constant, row_logprob, row_entropy = _take(
            block, index, hidden, ids, temperature, lse, constant, d_logprob, d_entropy
        )
        log_p = _logits(rows, head, heat) - row_lse[:, None]
        d_logits = jnp.exp(log_p) * (row_constant[:, None] - row_entropy[:, None] * log_p)
        d_logits += jnp.where(columns == chosen_ids[:, None], row_logprob[:, None], 0.0)
        # Factors in the types of the forward product, so that a bfloat16 head is never widened.
        d_logits = d_logits / heat[:, None]
        d_rows = jnp.matmul(
            d_logits.astype(head.dtype), head.T, preferred_element_type=jnp.float32
        )
        d_head = d_head + jnp.matmul(
            rows.T, d_logits.astype(rows.dtype), preferred_element_type=jnp.float32
        )
        return _put(block, index, d_hidden, d_rows), d_head

    d_hidden, d_head = jax.lax.fori_loop(
        0,
        (count + block - 1) // block,
        step,
        (jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(head.shape, jnp.float32)),
    )
    return d_hidden.astype(hidden.dtype), d_head.astype(head.dtype), None, None, None
