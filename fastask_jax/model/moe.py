"""Routed experts, with or without a gated shared expert, dropless.

Two forms with equal results: "dense" runs every expert on every token as one wide gated
feed-forward layer (best for a handful of experts), "sorted" orders the (token, expert) pairs by
expert and runs grouped products (work in proportion to `num_experts_per_tok`).  Router replay
takes the choice of experts as an argument.  Expert parallelism is left out.
"""

from __future__ import annotations

import jax
from flax import nnx
from jax import numpy as jnp

from fastask_jax.model.config import ModelConfig
from fastask_jax.model.layers import linear
from fastask_jax.model.parameters import Declare, fan_in
from kernels.grouped_matmul import grouped_matmul

Load = dict[str, jax.Array]


class MixtureOfExperts(nnx.Module):
    """Top-k of softmax router probabilities, renormalised where the config says so; float32
    routing."""

    def __init__(self, cfg: ModelConfig, declare: Declare):
        self.cfg = cfg
        width, experts = cfg.hidden_size, cfg.num_experts
        routed, shared = cfg.moe_intermediate_size, cfg.shared_expert_intermediate_size
        residual = (2 * cfg.num_layers) ** -0.5
        self.router = declare((width, experts), ("embed", None), fan_in(width))
        # gate and up projections side by side, as in the Hugging Face tensor
        self.gate_up = declare(
            (experts, width, 2 * routed), ("experts", "embed", "ffn"), fan_in(width)
        )
        self.down = declare(
            (experts, routed, width), ("experts", "ffn", "embed"), fan_in(routed, residual)
        )
        if shared:
            self.shared_gate = declare((width, shared), ("embed", "ffn"), fan_in(width))
            self.shared_up = declare((width, shared), ("embed", "ffn"), fan_in(width))
            self.shared_down = declare((shared, width), ("ffn", "embed"), fan_in(shared, residual))
            self.shared_router = declare((width, 1), ("embed", None), fan_in(width))

    def __call__(
        self,
        x: jax.Array,
        valid: jax.Array | None = None,
        forced: jax.Array | None = None,
        return_chosen: bool = False,
    ) -> tuple[jax.Array, Load]:
        """`x [B, T, D]` -> the output, and what was asked for about the routing.

        Args:
          valid: `[B, T]`; adds `expert_counts` and `router_probs` `[experts]`, sums over it.
          forced: `[B, T, K]` integers that replace the router's choice of experts; their weights
            are still the router's.
          return_chosen: adds `expert_ids [B, T, K]`.
        """
        cfg = self.cfg
        flat = x.reshape(-1, x.shape[-1])
        probabilities = jax.nn.softmax(linear(flat.astype(jnp.float32), self.router[...]), axis=-1)
        if forced is None:
            chosen, weights = _top_k(probabilities, cfg.num_experts_per_tok)
        else:
            chosen = forced.reshape(flat.shape[0], cfg.num_experts_per_tok)
            weights = _pick(probabilities, chosen)
        if cfg.norm_topk_prob:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        if cfg.dense_experts:
            out = self._dense(flat, chosen, weights)
        else:
            out = self._sorted(flat, chosen, weights)
            if cfg.shared_expert_intermediate_size:
                out = out + self._shared(flat)
        load: Load = {}
        if valid is not None:
            real = valid.reshape(-1, 1).astype(jnp.float32)
            taken = jnp.sum(_one_hot(chosen, cfg.num_experts), axis=1)
            load["expert_counts"] = jnp.sum(taken * real, axis=0)
            load["router_probs"] = jnp.sum(probabilities * real, axis=0)
        if return_chosen:
            load["expert_ids"] = chosen.astype(jnp.int32).reshape(*x.shape[:2], -1)
        return out.reshape(x.shape), load

    def _shared(self, flat: jax.Array) -> jax.Array:
        inner = jax.nn.silu(linear(flat, self.shared_gate[...]))
        inner = inner * linear(flat, self.shared_up[...])
        return jax.nn.sigmoid(linear(flat, self.shared_router[...])) * linear(
            inner, self.shared_down[...]
        )

    def _dense(self, flat: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
        """All experts, and a shared one as one more, as a single wide feed-forward layer."""
        cfg = self.cfg
        has_shared = cfg.shared_expert_intermediate_size > 0
        width, routed = cfg.hidden_size, cfg.moe_intermediate_size
        per_expert = jnp.sum(
            _one_hot(chosen, cfg.num_experts) * weights[..., None], axis=1
        ).astype(flat.dtype)
        gate, up = (
            jnp.moveaxis(part, 0, 1).reshape(width, -1)
            for part in jnp.split(self.gate_up[...], 2, axis=-1)
        )
        split = cfg.num_experts * routed
        down = self.down[...].reshape(split, width)
        if has_shared:
            shared = jax.nn.sigmoid(linear(flat, self.shared_router[...]))
            gate = jnp.concatenate([gate, self.shared_gate[...]], axis=1)
            up = jnp.concatenate([up, self.shared_up[...]], axis=1)
            down = jnp.concatenate([down, self.shared_down[...]], axis=0)
        inner = jax.nn.silu(linear(flat, gate)) * linear(flat, up)
        scaled = inner[:, :split].reshape(-1, cfg.num_experts, routed) * per_expert[..., None]
        scaled = scaled.reshape(-1, split)
        if has_shared:
            scaled = jnp.concatenate([scaled, inner[:, split:] * shared], axis=1)
        return linear(scaled, down)

    def _sorted(self, flat: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
        """Only the chosen experts, by grouped products over pairs sorted by expert."""
        tokens, k = chosen.shape
        order = jnp.argsort(chosen.reshape(-1), stable=True)
        sizes = jnp.bincount(chosen.reshape(-1), length=self.cfg.num_experts)
        gathered = flat[order // k]
        both = grouped_matmul(gathered, self.gate_up[...].astype(flat.dtype), sizes)
        gate, up = jnp.split(both, 2, axis=-1)
        out = grouped_matmul(jax.nn.silu(gate) * up, self.down[...].astype(flat.dtype), sizes)
        out = jnp.zeros_like(out).at[order].set(out, unique_indices=True)
        return jnp.einsum("nkd,nk->nd", out.reshape(tokens, k, -1), weights.astype(flat.dtype))


def _one_hot(chosen: jax.Array, experts: int) -> jax.Array:
    return (chosen[..., None] == jnp.arange(experts)).astype(jnp.float32)


def _top_k(probabilities: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Indices and values `[N, K]` of the k largest, ties to the lower index."""
    experts = probabilities.shape[-1]
    if experts > 32:
        values, indices = jax.lax.top_k(probabilities, k)
        return indices, values
    # A few masked argmaxes are elementwise work; a sort of a short axis is not.
    remaining = jax.lax.stop_gradient(probabilities)
    picked = []
    for _ in range(k):
        best = jnp.argmax(remaining, axis=-1)
        picked.append(best)
        remaining = jnp.where(best[:, None] == jnp.arange(experts), -1.0, remaining)
    chosen = jnp.stack(picked, axis=-1)
    return chosen, _pick(probabilities, chosen)


def _pick(probabilities: jax.Array, chosen: jax.Array) -> jax.Array:
    """`probabilities [N, E]` at `chosen [N, K]`."""
    experts = probabilities.shape[-1]
    if experts > 32:
        return jnp.take_along_axis(probabilities, chosen, axis=-1)
    # Elementwise work, and a gradient without a scatter.
    return jnp.sum(_one_hot(chosen, experts) * probabilities[:, None, :], axis=-1)
