"""Fields of config.json: of the right kind or refused by name, and rotary positions wherever
`transformers` looks for them."""

import importlib
import json

import jax.numpy as jnp
import numpy as np
import pytest

from fastask_jax.model.config import Llama3Rope
from fastask_jax.model.families import from_hf_config
from fastask_jax.model.layers import rotary_table

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
}
QWEN3 = LLAMA | {"model_type": "qwen3"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
QWEN3_MOE = LLAMA | EXPERTS | {"model_type": "qwen3_moe"}
QWEN3_5 = LLAMA | {
    "model_type": "qwen3_5_text",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
STRETCHED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
DEFAULT = {"rope_type": "default", "rope_theta": 5_000.0}
NAN = float("nan")


@pytest.mark.parametrize(
    "base, change, message",
    [
        (LLAMA, {"hidden_size": "32"}, "config.json: hidden_size must be a whole number, got '32'"),
        (
            LLAMA,
            {"num_attention_heads": 4.0},
            "num_attention_heads must be a whole number, got 4.0",
        ),
        (LLAMA, {"num_hidden_layers": "2"}, "num_hidden_layers must be a whole number, got '2'"),
        (LLAMA, {"num_key_value_heads": True}, "num_key_value_heads must be a whole number"),
        (
            LLAMA,
            {"num_attention_heads": 0, "head_dim": None},
            "num_attention_heads must be at least",
        ),
        (LLAMA, {"head_dim": 0}, "head_dim must be at least 1"),
        (LLAMA, {"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a finite number, got '1e-6'"),
        (LLAMA, {"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false"),
        (LLAMA, {"model_type": ["llama"]}, "model_type must be a string"),
        (LLAMA, {"rope_parameters": [1]}, r"rope_parameters must be an object, got \[1\]"),
        (LLAMA, {"rope_parameters": "linear"}, "rope_parameters must be an object, got 'linear'"),
        (LLAMA, {"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
        (LLAMA, {"rope_theta": "10000"}, "rope_theta must be a finite number, got '10000'"),
        (LLAMA, {"rope_theta": 10**400}, "rope_theta must be a finite number"),
        (LLAMA, {"rope_theta": 0}, "rope_theta must be a positive number, got 0.0"),
        (
            LLAMA,
            {"rope_scaling": STRETCHED | {"factor": "8"}},
            "rope_scaling.factor must be a fini",
        ),
        (
            LLAMA,
            {"rope_scaling": STRETCHED | {"factor": NAN}},
            "rope_scaling.factor must be a fini",
        ),
        (
            LLAMA,
            {"rope_scaling": STRETCHED | {"rope_type": 3}},
            "rope_scaling.rope_type must be a s",
        ),
        (QWEN3, {"layer_types": ["full_attention"] * 3}, "layer_types lists 3 layers, num_hidden"),
        (QWEN3_MOE, {"mlp_only_layers": 3}, "mlp_only_layers must be a list of whole numbers"),
        (QWEN3_MOE, {"norm_topk_prob": "false"}, "norm_topk_prob must be true or false"),
        (QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step must be at least 1, got 0"),
        (QWEN3_5, {"layer_types": 3}, "layer_types must be a list of strings, got 3"),
        (QWEN3_5, {"layer_types": [{}, "full_attention"]}, "layer_types must be a list of strings"),
        (
            QWEN3_5,
            {"layer_types": None, "full_attention_interval": 0},
            "interval must be at least 1",
        ),
        (QWEN3_5, {"attn_output_gate": 0}, "attn_output_gate must be true or false, got 0"),
        # Given, a null is no factor of its own: transformers fails on it too.
        (
            QWEN3_5,
            {"rope_parameters": {"partial_rotary_factor": None}},
            "positive number, got None",
        ),
    ],
)
def test_fields_of_another_kind_are_named(base, change, message):
    with pytest.raises(ValueError, match=message):
        from_hf_config(base | change)


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "lacks text_config, which model_type 'qwen3_5' needs"),
        ([1], r"text_config must be an object, got \[1\]"),
        (
            QWEN3_5 | {"hidden_size": "32"},
            "text_config.hidden_size must be a whole number, got '32'",
        ),
        (QWEN3_5 | {"quantization_config": {"quant_method": "fp8"}}, "quantised checkpoints"),
    ],
)
def test_fields_of_the_language_model_inside_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        from_hf_config({"model_type": "qwen3_5", "text_config": text})


def test_a_null_is_an_absent_field():
    names = ("tie_word_embeddings", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
    nulls = dict.fromkeys((*names, "initializer_range", "rope_theta", "rope_scaling"))
    cfg = from_hf_config(QWEN3_MOE | nulls)
    assert cfg == from_hf_config(QWEN3_MOE)
    assert cfg.tie_word_embeddings is False and cfg.norm_topk_prob is False


def test_rope_scaling_stands_in_for_rope_parameters():
    cfg = from_hf_config(LLAMA | {"rope_parameters": DEFAULT, "rope_scaling": STRETCHED})
    # The theta of rope_parameters doesn't count then.
    assert cfg.rope_scaling == Llama3Rope(8.0, 1.0, 4.0, 32) and cfg.rope_theta == 10_000.0
    for kind in (LLAMA, QWEN3):
        both = kind | {"rope_parameters": DEFAULT, "rope_scaling": YARN}
        with pytest.raises(ValueError, match="rope_scaling.rope_type 'yarn' isn't supported"):
            from_hf_config(both)
        empty = from_hf_config(both | {"rope_scaling": {}})
        assert empty.rope_theta == 5_000.0 and empty.rope_scaling is None
    theta = from_hf_config(LLAMA | {"rope_parameters": DEFAULT, "rope_scaling": {"rope_theta": 77}})
    assert theta.rope_theta == 77.0


ROTARY = {
    "beside": {"rope_theta": 500.0},
    "stretched over default": {"rope_parameters": DEFAULT, "rope_scaling": STRETCHED},
    "stretched, theta beside": {
        "rope_parameters": DEFAULT,
        "rope_scaling": STRETCHED,
        "rope_theta": 300.0,
    },
    "default over stretched": {"rope_parameters": STRETCHED, "rope_scaling": DEFAULT},
    "another theta": {"rope_parameters": DEFAULT, "rope_scaling": DEFAULT | {"rope_theta": 77.0}},
    "the older key": {"rope_scaling": {"type": "llama3"} | dict(list(STRETCHED.items())[1:])},
    "length beside": {"rope_scaling": STRETCHED, "original_max_position_embeddings": 64},
    "no length": {"rope_scaling": dict(list(STRETCHED.items())[:-1])},
}
PARTIAL = {
    "absent": {},
    "null": {"partial_rotary_factor": None},
    "null beside an object": {"partial_rotary_factor": None, "rope_parameters": DEFAULT},
    "beside": {"partial_rotary_factor": 0.5},
    "both": {
        "partial_rotary_factor": 0.5,
        "rope_parameters": DEFAULT | {"partial_rotary_factor": 0.75},
    },
}
CLASSES = {
    "llama": "LlamaRotaryEmbedding",
    "qwen3": "Qwen3RotaryEmbedding",
    "qwen3_5": "Qwen3_5TextRotaryEmbedding",
}


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize(
    "base, change",
    [
        *(pytest.param(LLAMA, change, id=f"llama {name}") for name, change in ROTARY.items()),
        *(pytest.param(QWEN3, change, id=f"qwen3 {name}") for name, change in ROTARY.items()),
        *(pytest.param(QWEN3_5, change, id=f"qwen3_5 {name}") for name, change in PARTIAL.items()),
    ],
)
def test_frequencies_are_those_of_transformers(base, change):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = json.loads(json.dumps(base | change))
    family = base["model_type"].removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    theirs = transformers.CONFIG_MAPPING[base["model_type"]].from_dict(config)
    expected = getattr(module, CLASSES[family])(theirs).inv_freq.numpy()
    cfg = from_hf_config(base | change)
    cos, sin = rotary_table(jnp.ones((), int), cfg.rotary_dim, cfg.rope_theta, cfg.rope_scaling)
    np.testing.assert_allclose(np.arctan2(sin, cos), expected, rtol=1e-5, atol=1e-7)
