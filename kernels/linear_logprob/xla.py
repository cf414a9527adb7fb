"""Chunked `linear_logprob`: a scan over blocks of tokens, logits recomputed in the backward pass.

Memory is one block of logits, whatever the number of tokens; the price is one more matrix
product (8 N D V operations forward plus backward instead of 6).  Blocking over the vocabulary,
for which one block of tokens by 248,320 is already large, is left out here.
"""

from __future__ import annotations

import jax
from jax import numpy as jnp

# Elements of logits held at once; about the second-level cache of a core in float32.
_BLOCK_ELEMENTS = 1 << 19


def _block(tokens: int, vocab: int) -> int:
    block = max(8, min(tokens, _BLOCK_ELEMENTS // vocab))
    return max(8, block // 8 * 8)


def _logits(hidden: jax.Array, head: jax.Array, temperature: jax.Array) -> jax.Array:
    logits = jnp.matmul(hidden, head, preferred_element_type=jnp.float32)
    return logits.astype(jnp.float32) / temperature[:, None]


def _split(block: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Pads the leading axis to a multiple of `block` and folds it to `[blocks, block, ...]`."""
    tokens = arrays[0].shape[0]
    pad = -tokens % block
    # Padding with ones keeps the padded temperatures harmless as divisors.
    return tuple(
        jnp.pad(x, ((0, pad),) + ((0, 0),) * (x.ndim - 1), constant_values=1).reshape(
            -1, block, *x.shape[1:]
        )
        for x in arrays
    )


@jax.custom_vjp
def linear_logprob(
    hidden: jax.Array, head: jax.Array, ids: jax.Array, temperature: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`hidden [N, D]`, `head [D, V]`, `ids [N]`, `temperature [N]` -> three `[N]` float32."""
    return _forward(hidden, head, ids, temperature)[0]


def _forward(
    hidden: jax.Array, head: jax.Array, ids: jax.Array, temperature: jax.Array
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], tuple[jax.Array, ...]]:
    tokens, vocab = hidden.shape[0], head.shape[1]
    columns = jnp.arange(vocab, dtype=ids.dtype)

    def step(_, block):
        hidden, ids, temperature = block
        logits = _logits(hidden, head, temperature)
        peak = jnp.max(logits, axis=-1)
        shifted = logits - peak[:, None]
        weights = jnp.exp(shifted)
        total = jnp.sum(weights, axis=-1)
        chosen = jnp.sum(jnp.where(columns == ids[:, None], shifted, 0.0), axis=-1)
        log_total = jnp.log(total)
        entropy = log_total - jnp.sum(weights * shifted, axis=-1) / total
        # In exact arithmetic neither bound can be crossed; rounding must not cross it either.
        return None, (
            jnp.minimum(chosen - log_total, 0.0),
            jnp.maximum(entropy, 0.0),
            peak + log_total,
        )

    block = _block(tokens, vocab)
    _, outputs = jax.lax.scan(step, None, _split(block, hidden, ids, temperature))
    logprob, entropy, lse = (x.reshape(-1)[:tokens] for x in outputs)
    return (logprob, entropy, lse), (hidden, head, ids, temperature, entropy, lse)


def _backward(residuals, cotangents):
    hidden, head, ids, temperature, entropy, lse = residuals
    tokens, vocab = hidden.shape[0], head.shape[1]
    columns = jnp.arange(vocab, dtype=ids.dtype)
    d_logprob, d_entropy, d_lse = cotangents
    # d logits = p * (d_lse - d_logprob - d_entropy * (log p + H)) + d_logprob at the id
    constant = d_lse - d_logprob - d_entropy * entropy

    def step(d_head, block):
        hidden, ids, temperature, lse, constant, d_logprob, d_entropy = block
        log_p = _logits(hidden, head, temperature) - lse[:, None]
        d_logits = jnp.exp(log_p) * (constant[:, None] - d_entropy[:, None] * log_p)
        d_logits += jnp.where(columns == ids[:, None], d_logprob[:, None], 0.0)
        d_logits /= temperature[:, None]
        d_hidden = jnp.matmul(d_logits, head.astype(jnp.float32).T)
        d_head = d_head + jnp.matmul(hidden.astype(jnp.float32).T, d_logits)
        return d_head, d_hidden

    block = _block(tokens, vocab)
    pad = -tokens % block
    folded = _split(block, hidden, ids, temperature, lse, constant, d_logprob, d_entropy)
    if pad:
        # The ones that pad the cotangents must not reach the head's gradient.
        real = (jnp.arange(tokens + pad) < tokens).reshape(-1, block)
        folded = folded[:4] + tuple(jnp.where(real, x, 0.0) for x in folded[4:])
    d_head, d_hidden = jax.lax.scan(step, jnp.zeros(head.shape, jnp.float32), folded)
    d_hidden = d_hidden.reshape(-1, hidden.shape[1])[:tokens]
    return d_hidden.astype(hidden.dtype), d_head.astype(head.dtype), None, None


linear_logprob.defvjp(_forward, _backward)
