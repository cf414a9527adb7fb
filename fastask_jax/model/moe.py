"""Routed experts, with or without a gated shared expert, dropless.

Two forms with equal results: "dense" runs every expert on every token as one wide gated
feed-forward layer (best for a handful of experts), "sorted" orders the (token, expert) pairs by
expert and runs grouped products (work in proportion to `num_experts_per_tok`).  Router replay
takes the choice of experts as an argument.

On a mesh whose `expert` axis splits the experts, the tokens of that axis are gathered, each device
works on the pairs of its own experts (the others' cost it no product), and the outputs are summed
and scattered back.  So no token is dropped whatever the router does, and only collectives that
every platform has are used.
"""

from __future__ import annotations

from functools import partial

import jax
from flax import nnx
from jax import numpy as jnp

from fastask_jax.model.config import ModelConfig
from fastask_jax.model.layers import Adapted, Kernel, linear, swiglu
from fastask_jax.model.mesh import own_tokens, parts, sum_over_tokens, sum_parts, whole_rows
from fastask_jax.model.parameters import Declare, fan_in
from kernels.grouped_matmul import grouped_matmul

Load = dict[str, jax.Array]

# (token, expert) pairs sorted at once; more tokens than that go in turns, each recomputed in the
# backward pass.  Bounds the memory of long rows, whose pairs are many times the tokens.
_PAIRS = 1 << 17


class MixtureOfExperts(nnx.Module):
    """Top-k of softmax router probabilities, renormalised where the config says so; float32
    routing."""

    def __init__(self, cfg: ModelConfig, declare: Declare):
        self.cfg = cfg
        width, experts = cfg.hidden_size, cfg.num_experts
        routed, shared = cfg.moe_intermediate_size, cfg.shared_expert_intermediate_size
        residual = (2 * cfg.num_layers) ** -0.5
        self.router = declare((width, experts), ("embed", None), fan_in(width), wide=True)
        # gate and up projections side by side, as in the Hugging Face tensor
        self.gate_up = declare(
            (experts, width, 2 * routed),
            ("experts", "embed", "ffn"),
            fan_in(width),
            blocks=(routed, routed),
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

        On a mesh, `x`, the output and `expert_ids` are this device's tokens of the rows, the other
        arguments whole rows; the sums are over the whole batch.

        Args:
          valid: `[B, T]`; adds `expert_counts` and `router_probs` `[experts]`, sums over it.
          forced: `[B, T, K]` integers that replace the router's choice of experts; their weights
            are still the router's.
          return_chosen: adds `expert_ids [B, T, K]`.

        Raises:
          ValueError: experts that are to be computed densely and are split over a mesh.
        """
        cfg = self.cfg
        tokens = x.shape[1]
        length = tokens if valid is None else valid.shape[1]
        flat = x.reshape(-1, x.shape[-1])
        probabilities = jax.nn.softmax(linear(flat.astype(jnp.float32), self.router[...]), axis=-1)
        if forced is None:
            chosen, weights = _top_k(probabilities, cfg.num_experts_per_tok)
        else:
            chosen = own_tokens(forced, tokens).reshape(-1, cfg.num_experts_per_tok)
            weights = _pick(probabilities, chosen)
        if cfg.norm_topk_prob:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        load: Load = {}
        if valid is not None:
            real = own_tokens(valid, tokens).reshape(-1, 1).astype(jnp.float32)
            taken = jnp.sum(_one_hot(chosen, cfg.num_experts), axis=1)
            for name, values in (("expert_counts", taken), ("router_probs", probabilities)):
                total = jnp.sum(values * real, axis=0)
                load[name] = sum_over_tokens(total, split=tokens < length)
        if return_chosen:
            load["expert_ids"] = chosen.astype(jnp.int32).reshape(*x.shape[:2], -1)

        x, chosen, weights = (
            whole_rows(part.reshape(-1, tokens, part.shape[-1]), length)
            for part in (flat, chosen, weights)
        )
        flat, chosen, weights = (
            part.reshape(-1, part.shape[-1]) for part in (x, chosen, weights)
        )
        if self._computed_densely():
            out = self._dense(flat, chosen, weights)
        else:
            out = self._sorted(flat, chosen, weights)
            if self._has_shared:
                out = out + self._shared(flat)
        return sum_parts(out.reshape(x.shape), tokens), load

    def _computed_densely(self) -> bool:
        if parts("expert") > 1 and self.cfg.moe_implementation == "dense":
            raise ValueError(
                "moe_implementation dense can't split experts over a mesh: choose auto or sorted"
            )
        if not self.cfg.dense_experts or parts("expert") > 1:
            return False
        # Kernels with low-rank updates don't join into one wide layer.
        shared = (self.shared_gate, self.shared_up, self.shared_down) if self._has_shared else ()
        return not any(isinstance(k[...], Adapted) for k in (self.gate_up, self.down, *shared))

    @property
    def _has_shared(self) -> bool:
        return self.cfg.shared_expert_intermediate_size > 0

    def _shared(self, flat: jax.Array) -> jax.Array:
        inner = swiglu(linear(flat, self.shared_gate[...]), linear(flat, self.shared_up[...]))
        return jax.nn.sigmoid(linear(flat, self.shared_router[...])) * linear(
            inner, self.shared_down[...]
        )

    def _dense(self, flat: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
        """All experts, and a shared one as one more, as a single wide feed-forward layer."""
        cfg = self.cfg
        routed, width = self.down.shape[1:]
        per_expert = jnp.sum(
            _one_hot(chosen, cfg.num_experts) * weights[..., None], axis=1
        ).astype(flat.dtype)
        gate, up = (
            jnp.moveaxis(part, 0, 1).reshape(width, -1)
            for part in jnp.split(self.gate_up[...], 2, axis=-1)
        )
        split = cfg.num_experts * routed
        down = self.down[...].reshape(split, width)
        if self._has_shared:
            shared = jax.nn.sigmoid(linear(flat, self.shared_router[...]))
            gate = jnp.concatenate([gate, self.shared_gate[...]], axis=1)
            up = jnp.concatenate([up, self.shared_up[...]], axis=1)
            down = jnp.concatenate([down, self.shared_down[...]], axis=0)
        inner = swiglu(linear(flat, gate), linear(flat, up))
        scaled = inner[:, :split].reshape(-1, cfg.num_experts, routed) * per_expert[..., None]
        scaled = scaled.reshape(-1, split)
        if self._has_shared:
            scaled = jnp.concatenate([scaled, inner[:, split:] * shared], axis=1)
        return linear(scaled, down)

    def _sorted(self, flat: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
        """Only the chosen experts, wherever on the mesh they are."""
        tokens, width = flat.shape
        at_once = max(1, _PAIRS // (chosen.shape[1] * parts("expert")))
        if tokens <= at_once:
            return self._exchanged(flat, chosen, weights)
        turns = -(-tokens // at_once)
        pad = -tokens % turns
        operands = tuple(
            jnp.pad(x, ((0, pad), (0, 0))).reshape(turns, -1, x.shape[1])
            for x in (flat, chosen, weights)
        )
        step = jax.checkpoint(lambda _, turn: (None, self._exchanged(*turn)))
        return jax.lax.scan(step, None, operands)[1].reshape(-1, width)[:tokens]

    def _exchanged(self, *local: jax.Array) -> jax.Array:
        """`_chosen` of this device's tokens, by all devices of the `expert` axis."""
        if parts("expert") == 1:
            return self._chosen(0, *local)
        gathered = (jax.lax.all_gather(x, "expert", axis=0, tiled=True) for x in local)
        out = self._chosen(jax.lax.axis_index("expert") * self.down.shape[0], *gathered)
        return jax.lax.psum_scatter(out, "expert", scatter_dimension=0, tiled=True)

    def _chosen(
        self, first: jax.Array | int, flat: jax.Array, chosen: jax.Array, weights: jax.Array
    ) -> jax.Array:
        """What this device's experts, numbered from `first`, add to the output: grouped products
        over pairs sorted by expert, those of other devices' experts last."""
        tokens, k = chosen.shape
        own = self.down.shape[0]
        expert = chosen.reshape(-1) - first
        if own < self.cfg.num_experts:
            expert = jnp.where((expert >= 0) & (expert < own), expert, own)
        order = jnp.argsort(expert, stable=True)
        sizes = jnp.bincount(expert, length=own + 1)[:own]
        gathered = flat[order // k]
        grouped = partial(_grouped, self.cfg.kernels.grouped_matmul)
        gate, up = jnp.split(grouped(gathered, self.gate_up[...], sizes), 2, axis=-1)
        out = grouped(swiglu(gate, up), self.down[...], sizes)
        out = jnp.zeros_like(out).at[order].set(out, unique_indices=True)
        return jnp.einsum("nkd,nk->nd", out.reshape(tokens, k, -1), weights.astype(flat.dtype))


def _grouped(implementation: str, x: jax.Array, kernel: Kernel, sizes: jax.Array) -> jax.Array:
    """`grouped_matmul` in the type of `x`, low-rank updates included."""
    if isinstance(kernel, Adapted):
        low = _grouped(implementation, x, kernel.a, sizes)
        update = _grouped(implementation, low, kernel.b, sizes)
        return _grouped(implementation, x, kernel.base, sizes) + update
    return grouped_matmul(x, kernel.astype(x.dtype), sizes, implementation=implementation)


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
