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

from fastask_jax.model.config import FULL, MOE, ModelConfig
from fastask_jax.model.layers import Adapted, Kernel, low_rank_axes, rms_norm, rotary_table
from fastask_jax.model.mesh import (
    gather_weights,
    look_up,
    own_length,
    sum_over_tokens,
    sum_parts,
    whole_rows,
)
from fastask_jax.model.mixers import Attention, GatedDeltaNet
from fastask_jax.model.mlp import GatedMLP
from fastask_jax.model.moe import Load, MixtureOfExperts
from fastask_jax.model.parameters import Declare, constant, fan_in, normal

Params = dict[str, Any]


def _declare_norm(cfg: ModelConfig, declare: Declare) -> nnx.Param:
    unit = constant(0.0 if cfg.zero_centered_norms else 1.0)
    return declare((cfg.hidden_size,), (None,), unit)


class Layer(nnx.Module):
    """Mixer and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, cfg: ModelConfig, mixer: str, feed_forward: str, declare: Declare):
        self.cfg = cfg
        self.mixer_norm = _declare_norm(cfg, declare)
        self.mixer = (Attention if mixer == FULL else GatedDeltaNet)(cfg, declare)
        self.routed = feed_forward == MOE
        if self.routed:
            self.moe_norm = _declare_norm(cfg, declare)
            self.moe = MixtureOfExperts(cfg, declare)
        else:
            self.mlp_norm = _declare_norm(cfg, declare)
            self.mlp = GatedMLP(cfg, declare)

    def _norm(self, x: jax.Array, weight: nnx.Param) -> jax.Array:
        return rms_norm(x, weight[...], self.cfg.rms_norm_eps, self.cfg.zero_centered_norms)

    def _feed_forward(self, x, valid=None, forced=None, return_chosen=False):
        """The residual stream behind the feed-forward, and the routing of one with experts."""
        if not self.routed:
            length = x.shape[1] if valid is None else valid.shape[1]
            normed = whole_rows(self._norm(x, self.mlp_norm), length)
            return x + sum_parts(self.mlp(normed), x.shape[1]), {}
        out, load = self.moe(self._norm(x, self.moe_norm), valid, forced, return_chosen)
        return x + out, load

    def __call__(self, x, rotary, segment_ids, forced, return_chosen):
        with jax.named_scope(type(self.mixer).__name__):
            normed = whole_rows(self._norm(x, self.mixer_norm), segment_ids.shape[1])
            x = x + sum_parts(self.mixer(normed, rotary, segment_ids), x.shape[1])
        with jax.named_scope("MixtureOfExperts" if self.routed else "GatedMLP"):
            return self._feed_forward(x, segment_ids > 0, forced, return_chosen)

    def extend(self, x, rotary, cache, length, counts):
        normed = self._norm(x, self.mixer_norm)
        out, cache = self.mixer.extend(normed, rotary, cache, length, counts)
        return self._feed_forward(x + sum_parts(out, x.shape[1]))[0], cache


class Block(nnx.Module):
    """The repeating pattern of layers."""

    def __init__(self, cfg: ModelConfig, declare: Declare):
        self.names = tuple(f"layer_{i}" for i in range(len(cfg.block_layers)))
        for name, kinds in zip(self.names, cfg.block_layers, strict=True):
            setattr(self, name, Layer(cfg, *kinds, declare))

    def __call__(self, x, rotary, segment_ids, forced, return_chosen):
        """`forced` and the routing that is returned have a leading axis over layers with experts;
        without any such layer the routing is empty."""
        loads: list[Load] = []
        for name in self.names:
            layer = getattr(self, name)
            choice = forced[len(loads)] if layer.routed and forced is not None else None
            x, load = layer(x, rotary, segment_ids, choice, return_chosen)
            if layer.routed:
                loads.append(load)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *loads) if loads else {}

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
        self.final_norm = _declare_norm(cfg, declare)
        if not cfg.tie_word_embeddings:
            self.head = declare((width, vocab), ("embed", "vocab"), fan_in(width))

    def embed(self, tokens: jax.Array, share: int | None = None) -> jax.Array:
        """`tokens [B, T]` -> `[B, T, D]`, or this device's `share` of the tokens on a mesh."""
        table: Any = self._gather(self.embedding[...], self.embedding)
        own = tokens.shape[1] if share is None else share
        return look_up(table.astype(self.cfg.dtype), tokens, own)

    def rotary(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        cfg = self.cfg
        return rotary_table(positions, cfg.rotary_dim, cfg.rope_theta, cfg.rope_scaling)

    def norm(self, x: jax.Array) -> jax.Array:
        cfg = self.cfg
        return rms_norm(x, self.final_norm[...], cfg.rms_norm_eps, cfg.zero_centered_norms)

    def stacked_blocks(self):
        """`(rebuild, leaves)`: `rebuild(leaves of one block)` is a `Block`."""
        graph, state = nnx.split(self.blocks)
        declared = dict(nnx.to_flat_state(state))

        def rebuild(leaves):
            flat = nnx.traversals.flatten_mapping(leaves)
            flat = {path: self._gather(leaf, declared[path]) for path, leaf in flat.items()}
            return nnx.merge(graph, nnx.traversals.unflatten_mapping(flat))

        return rebuild, nnx.to_pure_dict(state)

    def _gather(self, leaf: Kernel, declared: nnx.Param) -> Kernel:
        """A parameter (of one block, if it is stacked) as this device of a mesh works with it."""
        axes = declared.logical_axes[-leaf.ndim :] if leaf.ndim else ()
        dtype = jnp.float32 if declared.wide else self.cfg.dtype
        if isinstance(leaf, Adapted):
            a_axes, b_axes = low_rank_axes(axes)
            return Adapted(
                gather_weights(leaf.base, axes, declared.blocks, dtype),
                gather_weights(leaf.a, a_axes, (), dtype),
                gather_weights(leaf.b, b_axes, declared.blocks, dtype),
            )
        return gather_weights(leaf, axes, declared.blocks, dtype)

    def __call__(self, tokens, positions, segment_ids, expert_ids, return_expert_ids):
        cfg = self.cfg
        rotary = self.rotary(positions)
        rebuild, stacked = self.stacked_blocks()
        if expert_ids is not None:
            expert_ids = expert_ids.reshape(cfg.num_blocks, -1, *expert_ids.shape[1:])

        def body(x, operands):
            leaves, forced = operands
            return rebuild(leaves)(x, rotary, segment_ids, forced, return_expert_ids)

        if cfg.remat != "none":
            body = jax.checkpoint(body, policy=_SAVED[cfg.remat])
        x, loads = jax.lax.scan(
            body,
            self.embed(tokens, own_length(tokens.shape[1])),
            (stacked, expert_ids),
            unroll=min(cfg.scan_unroll, cfg.num_blocks),
        )
        loads = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), loads)
        real = jnp.sum((segment_ids > 0).astype(jnp.float32))
        return self.norm(x), {**loads, "tokens": sum_over_tokens(real, split=False)}


# What a recomputed block keeps for its backward pass.  Products with weights have no batch axes,
# those within attention and the delta rule have.
_SAVED = {"block": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}


def abstract_decoder(cfg: ModelConfig) -> Decoder:
    """The module with shapes in place of arrays."""
    return nnx.eval_shape(lambda: Decoder(cfg, nnx.Rngs(params=0)))


@functools.lru_cache(maxsize=32)
def _graph(cfg: ModelConfig) -> Any:
    return nnx.split(abstract_decoder(cfg))[0]


@functools.lru_cache(maxsize=32)
def _abstract_blocks(cfg: ModelConfig) -> Params:
    return nnx.to_pure_dict(nnx.split(abstract_decoder(cfg).blocks)[1])


def merge(cfg: ModelConfig, params: Params) -> Decoder:
    """The module over `params`; for use while tracing.  Of parameters whose blocks aren't stacked
    (`cache.unstacked`) its blocks have shapes in place of arrays."""
    if isinstance(params["blocks"], list):
        params = {**params, "blocks": _abstract_blocks(cfg)}
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
    expert_ids: jax.Array | None = None,
    return_expert_ids: bool = False,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Hidden states (after the final norm) of packed rows.

    Args:
      cfg: static under jit.
      params: from `init_params` or `load_params`.
      tokens: `[B, T]` int32.
      positions: `[B, T]` int32, counted from 0 within each segment.
      segment_ids: `[B, T]` int32; 0 is padding, neighbouring segments have different ids.
      expert_ids: `[layers with experts, B, T, K]` integers below `num_experts`: the experts to use
        instead of those that the router would choose (router replay).  Their weights are still
        the router's probabilities, and its gradient goes through those.  Padding needs ids too.
      return_expert_ids: static; adds the experts used to what is returned, in the same layout.

    Returns:
      `hidden [B, T, D]`, and sums over the real tokens: `tokens` (a scalar) and, over the layers
      with experts if there are any, `expert_counts` and `router_probs` `[layers with experts,
      experts]`; all float32 and free to be added over micro-batches; see `load_balance_loss`.
      `expert_ids`, int32, where it was asked for.

    Raises:
      ValueError: expert ids of another shape, or for a model without experts.
    """
    if cfg.num_moe_layers == 0 and (expert_ids is not None or return_expert_ids):
        raise ValueError("this model has no experts, so there are no expert ids")
    if expert_ids is not None:
        expected = (cfg.num_moe_layers, *tokens.shape, cfg.num_experts_per_tok)
        if expert_ids.shape != expected:
            raise ValueError(f"expert_ids has shape {expert_ids.shape}, expected {expected}")
    return merge(cfg, params)(tokens, positions, segment_ids, expert_ids, return_expert_ids)


def unembedding(params: Params) -> jax.Array:
    """The head `[D, V]`: its own matrix, or the embedding's transpose when tied."""
    return params["head"] if "head" in params else params["embedding"].T


def load_balance_loss(cfg: ModelConfig, aux: dict[str, jax.Array]) -> jax.Array:
    """Switch-style balance loss, mean over layers; 1 when perfectly balanced, times top-k.

    `num_experts * sum_e fraction_e * mean_prob_e`, as in `transformers` except that layers are
    averaged rather than pooled.

    Raises:
      ValueError: no layer has experts.
    """
    if "expert_counts" not in aux:
        raise ValueError("this model has no experts, so there is no load to balance")
    fraction = jax.lax.stop_gradient(aux["expert_counts"]) / aux["tokens"]
    mean_prob = aux["router_probs"] / aux["tokens"]
    return cfg.num_experts * jnp.mean(jnp.sum(fraction * mean_prob, axis=-1))
