"""The decoder: embedding, blocks of layers, final norm; in its packed (training) form.

Flax `nnx` modules define the parameters and the computation.  They are split once, into a plain
nested dict of arrays that the learner, the engine and the checkpoint share; functions here merge
that dict back while they are traced, which costs nothing when they run.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from flax import nnx
from jax import numpy as jnp

from fastask_jax.model.config import FULL, ModelConfig
from fastask_jax.model.layers import rms_norm, rotary_table
from fastask_jax.model.mixers import GatedAttention, GatedDeltaNet
from fastask_jax.model.moe import MixtureOfExperts
from fastask_jax.model.parameters import Declare, constant, fan_in, normal

Params = dict[str, Any]


class Layer(nnx.Module):
    """Mixer and experts, each behind a norm and added to the residual stream."""

    def __init__(self, cfg: ModelConfig, kind: str, declare: Declare):
        self.cfg = cfg
        self.mixer_norm = declare((cfg.hidden_size,), (None,), constant(0.0))
        mixer = GatedAttention if kind == FULL else GatedDeltaNet
        self.mixer = mixer(cfg, declare)
        self.moe_norm = declare((cfg.hidden_size,), (None,), constant(0.0))
        self.moe = MixtureOfExperts(cfg, declare)

    def __call__(self, x, rotary, segment_ids):
        eps = self.cfg.rms_norm_eps
        with jax.named_scope(type(self.mixer).__name__):
            x = x + self.mixer(rms_norm(x, self.mixer_norm[...], eps), rotary, segment_ids)
        with jax.named_scope("MixtureOfExperts"):
            out, load = self.moe(rms_norm(x, self.moe_norm[...], eps), segment_ids > 0)
            return x + out, load

    def extend(self, x, rotary, cache, length, counts):
        eps = self.cfg.rms_norm_eps
        normed = rms_norm(x, self.mixer_norm[...], eps)
        out, cache = self.mixer.extend(normed, rotary, cache, length, counts)
        x = x + out
        return x + self.moe(rms_norm(x, self.moe_norm[...], eps), None)[0], cache


class Block(nnx.Module):
    """The repeating pattern of layers."""

    def __init__(self, cfg: ModelConfig, declare: Declare):
        self.names = tuple(f"layer_{i}" for i in range(len(cfg.block_types)))
        for name, kind in zip(self.names, cfg.block_types, strict=True):
            setattr(self, name, Layer(cfg, kind, declare))

    def __call__(self, x, rotary, segment_ids):
        loads = []
        for name in self.names:
            x, load = getattr(self, name)(x, rotary, segment_ids)
            loads.append(load)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *loads)

    def init_cache(self, slots: int, max_len: int) -> dict[str, Any]:
        return {name: getattr(self, name).mixer.init_cache(slots, max_len) for name in self.names}

    def extend(self, x, rotary, cache, length, counts):
        after = {}
        for name in self.names:
            layer = getattr(self, name)
            x, after[name] = layer.extend(x, rotary, cache[name], length, counts)
        return x, after


class Decoder(nnx.Module):
    """Parameters of the whole model; `blocks` holds every block, stacked on a leading axis."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        self.cfg = cfg
        declare = Declare(rngs)
        vocab, width = cfg.vocab_size, cfg.hidden_size
        self.embedding = declare(
            (vocab, width), ("vocab", "embed"), normal(cfg.initializer_range)
        )
        self.blocks = Block(cfg, declare.stacked(cfg.num_blocks))
        self.final_norm = declare((width,), (None,), constant(0.0))
        if not cfg.tie_word_embeddings:
            self.head = declare((width, vocab), ("embed", "vocab"), fan_in(width))

    def embed(self, tokens: jax.Array) -> jax.Array:
        return self.embedding[...].astype(self.cfg.dtype)[tokens]

    def rotary(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rotary_table(positions, self.cfg.rotary_dim, self.cfg.rope_theta)

    def norm(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.final_norm[...], self.cfg.rms_norm_eps)

    def stacked_blocks(self):
        """`(rebuild, leaves)`: `rebuild(leaves of one block)` is a `Block`."""
        graph, state = nnx.split(self.blocks)
        return functools.partial(nnx.merge, graph), nnx.to_pure_dict(state)

    def __call__(self, tokens, positions, segment_ids):
        rotary = self.rotary(positions)
        rebuild, stacked = self.stacked_blocks()

        def body(x, leaves):
            return rebuild(leaves)(x, rotary, segment_ids)

        if self.cfg.remat == "block":
            body = jax.checkpoint(body)
        x, loads = jax.lax.scan(
            body, self.embed(tokens), stacked, unroll=min(self.cfg.scan_unroll, self.cfg.num_blocks)
        )
        loads = jax.tree.map(lambda leaf: leaf.reshape(self.cfg.num_layers, -1), loads)
        return self.norm(x), {**loads, "tokens": jnp.sum((segment_ids > 0).astype(jnp.float32))}


def abstract_decoder(cfg: ModelConfig) -> Decoder:
    """The module with shapes in place of arrays."""
    return nnx.eval_shape(lambda: Decoder(cfg, nnx.Rngs(params=0)))


@functools.lru_cache(maxsize=32)
def _graph(cfg: ModelConfig) -> Any:
    return nnx.split(abstract_decoder(cfg))[0]


def merge(cfg: ModelConfig, params: Params) -> Decoder:
    """The module over `params`; for use while tracing."""
    return nnx.merge(_graph(cfg), params)


@functools.partial(jax.jit, static_argnums=0)
def _init(cfg: ModelConfig, key: jax.Array) -> Params:
    return nnx.to_pure_dict(nnx.split(Decoder(cfg, nnx.Rngs(params=key)))[1])


def init_params(cfg: ModelConfig, key: jax.Array) -> Params:
    """Random float32 parameters, a plain nested dict; leaves under "blocks" are stacked."""
    return _init(cfg, key)


def forward(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Hidden states (after the final norm) of packed rows.

    Args:
      cfg: static under jit.
      params: from `init_params` or `load_params`.
      tokens: `[B, T]` int32.
      positions: `[B, T]` int32, counted from 0 within each segment.
      segment_ids: `[B, T]` int32; 0 is padding, neighbouring segments have different ids.

    Returns:
      `hidden [B, T, D]` and router sums over the real tokens: `expert_counts` and `router_probs`
      `[layers, experts]` and `tokens` (a scalar), all float32 and free to be added over
      micro-batches; see `load_balance_loss`.
    """
    return merge(cfg, params)(tokens, positions, segment_ids)


def unembedding(params: Params) -> jax.Array:
    """The head `[D, V]`: its own matrix, or the embedding's transpose when tied."""
    return params["head"] if "head" in params else params["embedding"].T


def load_balance_loss(cfg: ModelConfig, aux: dict[str, jax.Array]) -> jax.Array:
    """Switch-style balance loss, mean over layers; 1 when perfectly balanced, times top-k.

    `num_experts * sum_e fraction_e * mean_prob_e`, as in `transformers` except that layers are
    averaged rather than pooled.
    """
    fraction = jax.lax.stop_gradient(aux["expert_counts"]) / aux["tokens"]
    mean_prob = aux["router_probs"] / aux["tokens"]
    return cfg.num_experts * jnp.mean(jnp.sum(fraction * mean_prob, axis=-1))
