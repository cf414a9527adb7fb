"""What a decoder is called in `transformers`: its config, and the name and layout of every tensor.

`to_hf_config` and `from_hf_config` translate configs, `tensor_table` lists the tensors.  Reading
and writing files is left to `hugging_face.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from fastask_jax.model.config import FULL, ModelConfig

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "linear_num_key_heads": "linear_num_key_heads",
    "linear_num_value_heads": "linear_num_value_heads",
    "linear_key_head_dim": "linear_key_head_dim",
    "linear_value_head_dim": "linear_value_head_dim",
    "linear_conv_kernel_dim": "linear_conv_kernel_dim",
    "num_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "moe_intermediate_size": "moe_intermediate_size",
    "shared_expert_intermediate_size": "shared_expert_intermediate_size",
    "rms_norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
    "max_position_embeddings": "max_position_embeddings",
    "initializer_range": "initializer_range",
}


def to_hf_config(cfg: ModelConfig) -> dict[str, Any]:
    """The `config.json` of this model for `transformers`."""
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "hidden_act": "silu",
        "attention_bias": False,
        **{theirs: getattr(cfg, ours) for ours, theirs in _SIZES.items()},
        "layer_types": list(cfg.layer_types),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": cfg.rope_theta,
            "partial_rotary_factor": cfg.partial_rotary_factor,
        },
    }


def from_hf_config(config: dict[str, Any], **overrides: Any) -> ModelConfig:
    """A `ModelConfig` from the contents of a text model's `config.json`.

    `overrides` set fields that a Hugging Face config doesn't have (`scan_unroll`, `dtype`, ...).

    Raises:
      ValueError: another architecture, or a feature that this decoder doesn't have.
    """
    config = config.get("text_config", config)
    kind = config.get("model_type")
    if kind != "qwen3_5_moe_text":
        raise ValueError(f"model_type {kind!r} isn't supported; only qwen3_5_moe_text is")
    if config.get("attention_bias") or config.get("hidden_act", "silu") != "silu":
        raise ValueError("attention_bias and activations other than silu aren't supported")
    missing = [theirs for theirs in _SIZES.values() if theirs not in config]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    types = config.get("layer_types")
    if types:
        interval = types.index(FULL) + 1 if FULL in types else 0
    else:
        interval = config.get("full_attention_interval", 4)
    rope = config.get("rope_parameters") or config
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rope_type {rope['rope_type']!r} isn't supported; only default is")
    if not interval:
        raise ValueError("layer_types has no full_attention layer")
    values = {ours: config[theirs] for ours, theirs in _SIZES.items()}
    values |= {
        "full_attention_interval": interval,
        "rope_theta": float(rope["rope_theta"]),
        "partial_rotary_factor": rope.get("partial_rotary_factor", 0.25),
    }
    cfg = ModelConfig(**(values | overrides))
    if types and list(cfg.layer_types) != list(types):
        raise ValueError("layer_types must repeat one pattern that ends in full_attention")
    return cfg


Map = Callable[[np.ndarray], np.ndarray]


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _swap(x: np.ndarray) -> np.ndarray:
    return np.swapaxes(x, -1, -2)


def _entries(cfg: ModelConfig, index: int) -> Iterator[tuple[tuple[str, ...], str, Map, Map]]:
    """`(path within a layer, Hugging Face suffix, ours -> theirs, theirs -> ours)`."""
    width, size = cfg.hidden_size, cfg.head_dim

    def head_in(*heads: int) -> tuple[Map, Map]:
        """`[D, heads, K]` here, `[heads * K, D]` there."""
        return lambda x: x.reshape(width, -1).T, lambda x: x.T.reshape(width, *heads)

    yield ("mixer_norm",), "input_layernorm.weight", _same, _same
    yield ("moe_norm",), "post_attention_layernorm.weight", _same, _same
    if cfg.layer_types[index] == FULL:
        for name, heads in (
            ("q_proj", (cfg.heads, 2 * size)),
            ("k_proj", (cfg.kv_heads, size)),
            ("v_proj", (cfg.kv_heads, size)),
        ):
            yield ("mixer", name), f"self_attn.{name}.weight", *head_in(*heads)
        yield (
            ("mixer", "o_proj"),
            "self_attn.o_proj.weight",
            lambda x: x.reshape(-1, width).T,
            lambda x: x.T.reshape(cfg.heads, size, width),
        )
        for name in ("q_norm", "k_norm"):
            yield ("mixer", name), f"self_attn.{name}.weight", _same, _same
    else:
        for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"):
            yield ("mixer", name), f"linear_attn.{name}.weight", _swap, _swap
        yield (
            ("mixer", "conv"),
            "linear_attn.conv1d.weight",
            lambda x: x.T[:, None, :],
            lambda x: x[:, 0, :].T,
        )
        yield ("mixer", "a_log"), "linear_attn.A_log", _same, _same
        yield ("mixer", "dt_bias"), "linear_attn.dt_bias", _same, _same
        yield ("mixer", "norm"), "linear_attn.norm.weight", _same, _same
    for name, theirs in (
        ("router", "gate.weight"),
        ("gate_up", "experts.gate_up_proj"),
        ("down", "experts.down_proj"),
        ("shared_gate", "shared_expert.gate_proj.weight"),
        ("shared_up", "shared_expert.up_proj.weight"),
        ("shared_down", "shared_expert.down_proj.weight"),
        ("shared_router", "shared_expert_gate.weight"),
    ):
        yield ("moe", name), f"mlp.{theirs}", _swap, _swap


class Tensor(NamedTuple):
    """One tensor of a checkpoint.

    path, block: where it lies in the parameters; `block` indexes the leading axis of a stacked
    leaf, None for a leaf that isn't stacked.  name: in `transformers`.  out, into: from our
    layout to theirs and back.
    """

    path: tuple[str, ...]
    block: int | None
    name: str
    out: Map
    into: Map


def tensor_table(cfg: ModelConfig) -> Iterator[Tensor]:
    """Every tensor of a checkpoint of this config."""
    yield Tensor(("embedding",), None, "model.embed_tokens.weight", _same, _same)
    for index in range(cfg.num_layers):
        block, place = divmod(index, len(cfg.block_types))
        for path, suffix, out, into in _entries(cfg, index):
            where = ("blocks", f"layer_{place}", *path)
            yield Tensor(where, block, f"model.layers.{index}.{suffix}", out, into)
    yield Tensor(("final_norm",), None, "model.norm.weight", _same, _same)
    if not cfg.tie_word_embeddings:
        yield Tensor(("head",), None, "lm_head.weight", _swap, _swap)
