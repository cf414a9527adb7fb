"""Weights in and out, as safetensors with the tensor names of `transformers` (Qwen3.5-MoE).

A directory holds `config.json` and `model.safetensors`; `transformers` loads the same directory
with `AutoModelForCausalLM.from_pretrained`.  Tensors are read one by one.  Sharded checkpoints,
other families and reading straight into a sharding are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fastask_jax.model.config import FULL, ModelConfig
from fastask_jax.model.decoder import Params, init_params

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"

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


def _table(cfg: ModelConfig) -> Iterator[tuple[tuple[str, ...], int | None, str, Map, Map]]:
    """`(path in the parameters, block or None, Hugging Face name, out, in)` for every tensor."""
    yield ("embedding",), None, "model.embed_tokens.weight", _same, _same
    for index in range(cfg.num_layers):
        block, place = divmod(index, len(cfg.block_types))
        for path, suffix, out, into in _entries(cfg, index):
            where = ("blocks", f"layer_{place}", *path)
            yield where, block, f"model.layers.{index}.{suffix}", out, into
    yield ("final_norm",), None, "model.norm.weight", _same, _same
    if not cfg.tie_word_embeddings:
        yield ("head",), None, "lm_head.weight", _swap, _swap


def _get(tree: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def to_hf_tensors(cfg: ModelConfig, params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """`(name, float32 array)` of every tensor, named and laid out as in `transformers`."""
    for path, block, name, out, _ in _table(cfg):
        value = np.asarray(_get(params, path), np.float32)
        yield name, np.ascontiguousarray(out(value if block is None else value[block]))


def save_params(
    directory: str | Path, cfg: ModelConfig, params: Params, dtype: str = "float32"
) -> None:
    """Writes `config.json` and `model.safetensors`, so that `transformers` can load them.

    `dtype` is "float32" or "bfloat16"; norms, decay rates and biases stay float32.

    Raises:
      ValueError: another `dtype`.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype must be float32 or bfloat16, got {dtype!r}")
    kind = np.dtype(np.float32 if dtype == "float32" else ml_dtypes.bfloat16)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.astype(kind) if value.ndim > 1 else value
        for name, value in to_hf_tensors(cfg, params)
    }
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    config = to_hf_config(cfg) | {"dtype": dtype}
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def load_params(directory: str | Path, **overrides: Any) -> tuple[ModelConfig, Params]:
    """Reads a directory written by `save_params` or `transformers`; parameters are float32.

    `overrides` set config fields that a Hugging Face config doesn't have.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: an unsupported config, an unreadable file, or a tensor that is missing,
        surplus or of the wrong shape (named).
    """
    directory = Path(directory)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (directory / name).is_file():
            raise FileNotFoundError(
                f"{directory / name} is missing; a model directory holds {CONFIG_FILE} and "
                f"{WEIGHTS_FILE}"
            )
    try:
        config = json.loads((directory / CONFIG_FILE).read_text())
    except ValueError as error:
        raise ValueError(f"{directory / CONFIG_FILE} isn't valid JSON: {error}") from None
    cfg = from_hf_config(config, **overrides)
    try:
        with safe_open(str(directory / WEIGHTS_FILE), framework="np") as file:
            return cfg, from_hf_tensors(cfg, set(file.keys()), file.get_tensor)
    except SafetensorError as error:
        raise ValueError(f"{directory / WEIGHTS_FILE} can't be read: {error}") from None


def from_hf_tensors(
    cfg: ModelConfig, names: set[str], get: Callable[[str], np.ndarray]
) -> Params:
    """Parameters from Hugging Face tensors, asked for one by one.

    Raises:
      ValueError: missing, surplus or wrongly shaped tensors, by name.
    """
    table = list(_table(cfg))
    wanted = {name for _, _, name, _, _ in table}
    if wanted - names:
        raise ValueError(f"missing tensors: {_listed(wanted - names)}")
    # A tied head may be stored all the same; it must then be the embedding.
    surplus = names - wanted - ({"lm_head.weight"} if cfg.tie_word_embeddings else set())
    if surplus:
        raise ValueError(f"surplus tensors: {_listed(surplus)}")
    abstract = jax.eval_shape(lambda: init_params(cfg, jax.random.key(0)))
    params = jax.tree.map(lambda leaf: np.empty(leaf.shape, np.float32), abstract)
    for path, block, name, out, into in table:
        target = _get(params, path)
        target = target if block is None else target[block]
        value = np.asarray(get(name), np.float32)
        expected = out(target).shape
        if value.shape != expected:
            raise ValueError(f"tensor {name} has shape {value.shape}, expected {expected}")
        target[...] = into(value)
    if cfg.tie_word_embeddings and "lm_head.weight" in names:
        if not np.array_equal(np.asarray(get("lm_head.weight"), np.float32), params["embedding"]):
            raise ValueError("lm_head.weight differs from the embedding that it is tied to")
    return jax.tree.map(jax.numpy.asarray, params)


def _listed(names: set[str]) -> str:
    shown = sorted(names)
    more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    return ", ".join(shown[:8]) + more
