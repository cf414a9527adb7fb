"""Sampling one token per slot, from one random number per slot.

The full temperature-scaled softmax is sampled (top-p 1, top-k off), so the recorded logprob is
that of the distribution that was sampled.  Keys are folded from (episode, token position), never
from the slot or the step of the batch: what a trajectory samples doesn't depend on its company.
Inverse transform sampling in two levels (a block, then a token in it): a Gumbel number for every
vocabulary entry would cost a tiny model more than its forward pass.
"""

from __future__ import annotations

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

# Tokens less likely than this, relative to the whole, are never drawn: float32 sums can't
# resolve them, and rounding at a block's edge must not pick one.
NEGLIGIBLE = 1e-12
BLOCK = 64


def episode_key(seed: int | str, task: str, occurrence: int, sample: int) -> np.ndarray:
    """Raw threefry key [2] (uint32) of one episode; equal on every process and platform."""
    text = f"{seed}\0{task}\0{occurrence}\0{sample}".encode("utf-8", "surrogatepass")
    return np.frombuffer(hashlib.blake2b(text, digest_size=8).digest(), "<u4").astype(np.uint32)


def sample(
    logits: Float[Array, "slots vocab"],
    keys: UInt32[Array, "slots 2"],
    positions: Int[Array, " slots"],
    temperature: Float[Array, "*slots"],
) -> tuple[Int[Array, " slots"], Float[Array, " slots"]]:
    """Token and its float32 logprob per slot; `positions` is the token's index in its trajectory.

    temperature: of all slots, or one for each.  0 takes the most likely token and reports its
        logprob at temperature 1.
    """
    temperature = jnp.reshape(temperature, (-1, 1))
    greedy = temperature == 0
    logits = logits.astype(jnp.float32)
    best = jnp.argmax(logits, axis=-1)
    # Shifted by the maximum for range; the sum of weights is then also the normalizer.  Before
    # they are scaled: the maximum is then exactly 0 at any temperature, however small.
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = shifted / jnp.where(greedy, 1.0, temperature)
    weights = jnp.exp(scaled)
    total = jnp.sum(weights, axis=-1)
    tokens = jnp.where(greedy[:, 0], best, _draw(weights, _uniform(keys, positions)))
    chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0]
    return tokens.astype(jnp.int32), jnp.minimum(chosen - jnp.log(total), 0.0)


def _uniform(keys: UInt32[Array, "slots 2"], positions: Int[Array, " slots"]) -> Array:
    def one(key: Array, position: Array) -> Array:
        typed = jax.random.wrap_key_data(key, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(typed, position))

    return jax.vmap(one)(keys, positions)


def _draw(weights: Float[Array, "slots vocab"], uniform: Float[Array, " slots"]) -> Array:
    slots, vocab = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -vocab % BLOCK))).reshape(slots, -1, BLOCK)
    sums = jnp.sum(blocks, axis=-1)
    upto = jnp.cumsum(sums, axis=-1)
    total = upto[:, -1:]
    target = jnp.minimum(uniform[:, None] * total, _below(total))
    block = jnp.argmax((upto > target) & (sums > BLOCK * NEGLIGIBLE * total), axis=-1)[:, None]

    inside = jnp.take_along_axis(blocks, block[..., None], axis=1)[:, 0]
    before = jnp.take_along_axis(upto - sums, block, axis=1)
    upto = jnp.cumsum(inside, axis=-1)
    target = jnp.clip(target - before, 0.0, _below(upto[:, -1:]))
    fits = (upto > target) & (inside > NEGLIGIBLE * total)
    token = jnp.where(fits.any(-1), jnp.argmax(fits, axis=-1), jnp.argmax(inside, axis=-1))
    return block[:, 0] * BLOCK + token


def _below(value: Array) -> Array:
    return jnp.nextafter(value, jnp.zeros_like(value))
