"""The two token mixers: full attention and the gated delta rule.

Each has a packed form (`__call__`, for training) and a cached form (`extend`, for rollouts: a
slot appends the first `counts` of T tokens to what it already holds).  Both forms call the same
projections and kernels.
"""

from __future__ import annotations

import jax
from flax import nnx
from jax import numpy as jnp

from fastask_jax.model.config import ModelConfig
from fastask_jax.model.layers import (
    Adapted,
    Kernel,
    gated_rms_norm,
    l2_norm,
    linear,
    rms_norm,
    rotate,
)
from fastask_jax.model.mesh import group_count, own_groups, parts
from fastask_jax.model.parameters import (
    Declare,
    constant,
    fan_in,
    inverse_softplus_time_step,
    log_uniform,
)
from kernels.attention import attention, cached_attention
from kernels.gated_delta import causal_conv, gated_delta

Rotary = tuple[jax.Array, jax.Array]
LayerCache = dict[str, jax.Array]


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions, optionally with query/key norms and a sigmoid
    gate on its output (the gate comes out of the query projection, beside each head's query)."""

    def __init__(self, cfg: ModelConfig, declare: Declare):
        self.cfg = cfg
        width, heads, groups, size = cfg.hidden_size, cfg.heads, cfg.kv_heads, cfg.head_dim
        queries = 2 * size if cfg.attention_gate else size
        self.q_proj = declare((width, heads, queries), ("embed", "heads", None), fan_in(width))
        self.k_proj = declare((width, groups, size), ("embed", "kv_heads", None), fan_in(width))
        self.v_proj = declare((width, groups, size), ("embed", "kv_heads", None), fan_in(width))
        self.o_proj = declare(
            (heads, size, width),
            ("heads", None, "embed"),
            fan_in(heads * size, (2 * cfg.num_layers) ** -0.5),
        )
        if cfg.qk_norm:
            unit = constant(0.0 if cfg.zero_centered_norms else 1.0)
            self.q_norm = declare((size,), (None,), unit)
            self.k_norm = declare((size,), (None,), unit)

    def _project(
        self, x: jax.Array, rotary: Rotary
    ) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]:
        """`x [B, T, D]` -> queries, output gates `[B, T, H, K]`, keys, values `[B, T, G, K]`."""
        cfg = self.cfg

        def heads(kernel: Kernel) -> jax.Array:
            flat = linear(x, kernel.reshape(x.shape[-1], -1))
            return flat.reshape(*x.shape[:2], *kernel.shape[1:])

        def own(kernel: Kernel) -> Kernel:
            if isinstance(kernel, Adapted):
                base, b = (own_groups(x, cfg.heads, cfg.kv_heads) for x in (kernel.base, kernel.b))
                return Adapted(base, kernel.a, b)
            return own_groups(kernel, cfg.heads, cfg.kv_heads)

        k_proj, v_proj = own(self.k_proj[...]), own(self.v_proj[...])
        q, k, gate = heads(self.q_proj[...]), heads(k_proj), None
        if cfg.attention_gate:
            q, gate = jnp.split(q, 2, axis=-1)
        if cfg.qk_norm:
            q = rms_norm(q, self.q_norm[...], cfg.rms_norm_eps, cfg.zero_centered_norms)
            k = rms_norm(k, self.k_norm[...], cfg.rms_norm_eps, cfg.zero_centered_norms)
        return rotate(q, rotary), gate, rotate(k, rotary), heads(v_proj)

    def _finish(self, out: jax.Array, gate: jax.Array | None) -> jax.Array:
        if gate is not None:
            out = out * jax.nn.sigmoid(gate)
        out = out.reshape(*out.shape[:2], -1)
        return linear(out, self.o_proj[...].reshape(out.shape[-1], -1))

    def __call__(self, x: jax.Array, rotary: Rotary, segment_ids: jax.Array) -> jax.Array:
        q, gate, k, v = self._project(x, rotary)
        out = attention(q, k, v, segment_ids, implementation=self.cfg.kernels.attention)
        return self._finish(out, gate)

    def init_cache(self, slots: int, max_len: int) -> LayerCache:
        groups = group_count(self.cfg.heads, self.cfg.kv_heads)
        width, dtype = self.cfg.head_dim, self.cfg.dtype
        return {
            "k": jnp.zeros((slots, groups, width, max_len), dtype),
            "v": jnp.zeros((slots, groups, max_len, width), dtype),
        }

    def extend(
        self,
        x: jax.Array,
        rotary: Rotary,
        cache: LayerCache,
        length: jax.Array,
        counts: jax.Array,
    ) -> tuple[jax.Array, LayerCache]:
        q, gate, k, v = self._project(x, rotary)
        step = jnp.arange(x.shape[1])
        # A position beyond the cache is dropped by the scatter: that is how padding is skipped.
        room = cache["v"].shape[2]
        position = jnp.where(step < counts[:, None], length[:, None] + step, room)
        slot = jnp.arange(x.shape[0])[:, None]
        k, v = k.astype(cache["k"].dtype), v.astype(cache["v"].dtype)
        cache = {
            "k": cache["k"].at[slot, :, :, position].set(k, mode="drop"),
            "v": cache["v"].at[slot, :, position].set(v, mode="drop"),
        }
        out = cached_attention(
            q, cache["k"], cache["v"], length, counts, implementation=self.cfg.kernels.attention
        )
        return self._finish(out, gate), cache


class GatedDeltaNet(nnx.Module):
    """Gated delta rule with a short causal convolution in front and a gated norm behind."""

    def __init__(self, cfg: ModelConfig, declare: Declare):
        self.cfg = cfg
        width, value_heads, taps = cfg.hidden_size, cfg.linear_num_value_heads, (
            cfg.linear_conv_kernel_dim
        )
        project = fan_in(width)
        qkv = (cfg.linear_key_dim, cfg.linear_key_dim, cfg.linear_value_dim)
        self.in_proj_qkv = declare(
            (width, cfg.conv_dim), ("embed", "delta_qkv"), project, blocks=qkv
        )
        self.in_proj_z = declare((width, cfg.linear_value_dim), ("embed", "delta_value"), project)
        self.in_proj_a = declare(
            (width, value_heads), ("embed", "delta_heads"), project, wide=True
        )
        self.in_proj_b = declare(
            (width, value_heads), ("embed", "delta_heads"), project, wide=True
        )
        self.conv = declare((taps, cfg.conv_dim), (None, "delta_qkv"), fan_in(taps), blocks=qkv)
        self.a_log = declare((value_heads,), ("delta_heads",), log_uniform(1.0, 16.0))
        self.dt_bias = declare(
            (value_heads,), ("delta_heads",), inverse_softplus_time_step(1e-3, 1e-1)
        )
        self.norm = declare((cfg.linear_value_head_dim,), (None,), constant(1.0))
        self.out_proj = declare(
            (cfg.linear_value_dim, width),
            ("delta_value", "embed"),
            fan_in(cfg.linear_value_dim, (2 * cfg.num_layers) ** -0.5),
        )

    def _recur(self, x, mixed, valid, segment_ids, state):
        """From convolved `mixed [B, T, conv_dim]` to the layer's output and the final state."""
        cfg = self.cfg
        lead = x.shape[:2]
        key_dim = cfg.linear_key_dim // parts("tensor")
        q, k, v = jnp.split(jax.nn.silu(mixed), (key_dim, 2 * key_dim), axis=-1)
        q = l2_norm(q.reshape(*lead, -1, cfg.linear_key_head_dim))
        k = l2_norm(k.reshape(*lead, -1, cfg.linear_key_head_dim))
        v = v.reshape(*lead, -1, cfg.linear_value_head_dim)
        wide = x.astype(jnp.float32)
        beta = jax.nn.sigmoid(linear(wide, self.in_proj_b[...]))
        step = jax.nn.softplus(linear(wide, self.in_proj_a[...]) + self.dt_bias[...])
        log_decay = -jnp.exp(self.a_log[...]) * step
        if valid is not None:
            beta, log_decay = (jnp.where(valid[..., None], x, 0.0) for x in (beta, log_decay))
        out, state = gated_delta(
            q * cfg.linear_key_head_dim**-0.5,
            k,
            v,
            log_decay,
            beta,
            segment_ids,
            state,
            chunk=cfg.delta_chunk,
            implementation=cfg.kernels.gated_delta,
        )
        z = linear(x, self.in_proj_z[...]).reshape(out.shape)
        out = gated_rms_norm(out, z, self.norm[...], cfg.rms_norm_eps).astype(x.dtype)
        return linear(out.reshape(*lead, -1), self.out_proj[...]), state

    def __call__(self, x: jax.Array, rotary: Rotary, segment_ids: jax.Array) -> jax.Array:
        del rotary
        mixed = linear(x, self.in_proj_qkv[...])
        mixed = causal_conv(mixed, self.conv[...].astype(x.dtype), segment_ids)
        return self._recur(x, mixed, None, segment_ids, None)[0]

    def init_cache(self, slots: int, max_len: int) -> LayerCache:
        del max_len
        cfg = self.cfg
        state = (
            slots,
            cfg.linear_num_value_heads // parts("tensor"),
            cfg.linear_key_head_dim,
            cfg.linear_value_head_dim,
        )
        conv = (slots, cfg.linear_conv_kernel_dim - 1, cfg.conv_dim // parts("tensor"))
        return {"conv": jnp.zeros(conv, cfg.dtype), "state": jnp.zeros(state, jnp.float32)}

    def extend(
        self,
        x: jax.Array,
        rotary: Rotary,
        cache: LayerCache,
        length: jax.Array,
        counts: jax.Array,
    ) -> tuple[jax.Array, LayerCache]:
        del rotary, length
        mixed = linear(x, self.in_proj_qkv[...])
        conv = cache["conv"]
        window = jnp.concatenate([conv, mixed.astype(conv.dtype)], axis=1)
        # The last inputs before the next token end at `counts` of this call's tokens.
        taken = counts[:, None] + jnp.arange(conv.shape[1])[None, :]
        after = jnp.take_along_axis(window, taken[..., None], axis=1)
        mixed = causal_conv(mixed, self.conv[...].astype(x.dtype), None, conv)
        valid = jnp.arange(x.shape[1])[None, :] < counts[:, None]
        out, state = self._recur(x, mixed, valid, None, cache["state"])
        return out, {"conv": after, "state": state}
