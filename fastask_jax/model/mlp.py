"""The dense feed-forward layer: one gated (SwiGLU) perceptron, as in Llama and Qwen3."""

from __future__ import annotations

import jax
from flax import nnx

from fastask_jax.model.config import ModelConfig
from fastask_jax.model.layers import linear, swiglu
from fastask_jax.model.parameters import Declare, fan_in


class GatedMLP(nnx.Module):
    """`(silu(x @ gate) * (x @ up)) @ down`, `[..., D] -> [..., D]`."""

    def __init__(self, cfg: ModelConfig, declare: Declare):
        width, inner = cfg.hidden_size, cfg.intermediate_size
        residual = (2 * cfg.num_layers) ** -0.5
        self.gate = declare((width, inner), ("embed", "ffn"), fan_in(width))
        self.up = declare((width, inner), ("embed", "ffn"), fan_in(width))
        self.down = declare((inner, width), ("ffn", "embed"), fan_in(inner, residual))

    def __call__(self, x: jax.Array) -> jax.Array:
        inner = swiglu(linear(x, self.gate[...]), linear(x, self.up[...]))
        return linear(inner, self.down[...])
