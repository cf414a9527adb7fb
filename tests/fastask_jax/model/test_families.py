"""Configs and tensor names of every family, as published and as `transformers` writes them; and
packing and decoding of every family."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from fastask_jax.model import PRESETS, ModelConfig, extend, forward, init_cache, init_params
from fastask_jax.model.config import DELTA, DENSE, FULL, MOE, Llama3Rope
from fastask_jax.model.families import FAMILIES, family_of, from_hf_config, to_hf_config
from fastask_jax.model.tensors import find_tensors, tensor_table

LABELS = ("llama3_rope", "qwen3", "qwen3_moe", "qwen3_moe_no_pattern", "qwen3_5", "wide_pattern")

# The parts of published config.json files that say something about the model.
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49152,
}
LLAMA_3_2_1B = {
    "attention_bias": False,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
QWEN3_30B_A3B = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_5_35B_A3B = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "image_token_id": 248056,
    "tie_word_embeddings": False,
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "layer_types": [DELTA, DELTA, DELTA, FULL] * 10,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512,
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "shared_expert_intermediate_size": 512,
        "vocab_size": 248320,
    },
    "vision_config": {"depth": 27, "hidden_size": 1152},
}


def overrides(cfg):
    """The fields that a Hugging Face config doesn't hold."""
    names = ("dtype", "delta_chunk", "moe_implementation", "scan_unroll", "remat")
    return {name: getattr(cfg, name) for name in names}


def test_published_configs_are_read():
    assert from_hf_config(SMOLLM2) == PRESETS["smollm2-135m"]
    big = PRESETS["qwen3.5-35b-a3b"]
    assert from_hf_config(QWEN3_5_35B_A3B, **overrides(big)) == big
    llama = from_hf_config(LLAMA_3_2_1B)
    assert llama.rope_scaling == Llama3Rope(32.0, 1.0, 4.0, 8192) and llama.rope_theta == 5e5
    assert not llama.qk_norm and not llama.attention_gate and llama.rotary_dim == 64
    moe = from_hf_config(QWEN3_30B_A3B)
    assert moe.feed_forward_types == (MOE,) * 48 and moe.num_experts == 128
    assert moe.qk_norm and moe.norm_topk_prob and not moe.shared_expert_intermediate_size
    assert not moe.zero_centered_norms and moe.dtype == "float32"


def test_feed_forwards_of_qwen3_moe():
    def kinds(**fields):
        return from_hf_config(
            QWEN3_30B_A3B | {"num_hidden_layers": 6} | fields
        ).feed_forward_types  # fmt: skip

    assert kinds(decoder_sparse_step=2) == (DENSE, MOE) * 3
    assert kinds(mlp_only_layers=[0, 5]) == (DENSE, MOE, MOE, MOE, MOE, DENSE)
    assert kinds(mlp_only_layers=[1], decoder_sparse_step=2) == (DENSE, DENSE, DENSE, MOE) + (
        DENSE,
        MOE,
    )
    # As `transformers` 5 writes the number of experts.
    renamed = {k: v for k, v in QWEN3_30B_A3B.items() if k != "num_experts"}
    assert from_hf_config(renamed | {"num_local_experts": 16}).num_experts == 16


def test_any_order_of_mixers_is_one_block_or_several(references):
    config = to_hf_config(references.CONFIGS["qwen3_5"]) | {"num_hidden_layers": 6}
    uneven = [DELTA, DELTA, FULL, DELTA, FULL, FULL]
    cfg = from_hf_config(config | {"layer_types": uneven})
    assert cfg.layer_types == tuple(uneven) and cfg.num_blocks == 1
    for absent in ({"layer_types": None}, {"layer_types": []}):
        every_third = from_hf_config(config | absent | {"full_attention_interval": 3})
        assert every_third.mixers == (DELTA, DELTA, FULL) and every_third.num_blocks == 2


def test_configs_round_trip(references):
    for cfg in (*references.CONFIGS.values(), *PRESETS.values()):
        config = to_hf_config(cfg)
        assert from_hf_config(config, **overrides(cfg)) == cfg
        # The multimodal checkpoints nest the language model's config.
        assert from_hf_config({"text_config": config}, **overrides(cfg)) == cfg
    kinds = {family_of(cfg) for cfg in references.CONFIGS.values()}
    assert kinds == set(FAMILIES)


def test_a_mix_that_transformers_lacks_is_refused(references):
    cfg = dataclasses.replace(references.CONFIGS["qwen3"], zero_centered_norms=True)
    with pytest.raises(ValueError, match="no architecture with .*'zero_centered_norms': True"):
        to_hf_config(cfg)
    with pytest.raises(ValueError, match="to be a multiple of num_attention_heads"):
        to_hf_config(dataclasses.replace(references.CONFIGS["llama"], heads=6))


@pytest.mark.parametrize(
    "base, change, message",
    [
        (SMOLLM2, {"model_type": "mamba"}, "model_type 'mamba' isn't supported; supported are ll"),
        (SMOLLM2, {"model_type": None}, "model_type None isn't supported"),
        (SMOLLM2, {"attention_bias": True}, "attention_bias is set"),
        (SMOLLM2, {"mlp_bias": True}, "mlp_bias is set"),
        (SMOLLM2, {"attention_dropout": 0.1}, "dropout isn't supported"),
        (SMOLLM2, {"hidden_act": "gelu"}, "hidden_act 'gelu' isn't supported; only silu is"),
        (SMOLLM2, {"vocab_size": None}, "config.json lacks vocab_size"),
        (SMOLLM2, {"rope_scaling": {"type": "yarn"}}, "rope_type 'yarn' isn't supported; only def"),
        (SMOLLM2, {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "lacks low_freq_factor"),
        (SMOLLM2, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 isn't supported"),
        (SMOLLM2, {"rope_parameters": {FULL: {}}}, "for each kind of layer"),
        (SMOLLM2, {"quantization_config": {"bits": 4}}, "quantised checkpoints"),
        (QWEN3_30B_A3B, {"use_sliding_window": True}, "sliding windows"),
        (QWEN3_30B_A3B, {"num_experts": None}, "config.json lacks num_experts"),
    ],
)
def test_unsupported_configs_are_refused(base, change, message):
    with pytest.raises(ValueError, match=message):
        from_hf_config(base | change)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"layer_types": [FULL, "sliding_attention"] * 20}, "sliding windows"),
        ({"layer_types": ["chunked_attention"] * 40}, "mixers must list .* got chunked_attention"),
        ({"layer_types": [FULL]}, "layer_types lists 1 layers, num_hidden_layers is 40"),
        ({"attn_output_gate": False}, "attn_output_gate is off"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers isn't supported for qwen3_5_moe_text"),
        ({"model_type": "llama"}, "'qwen3_5_moe' around 'llama' isn't supported"),
    ],
)
def test_unsupported_language_models_are_refused(change, message):
    text = QWEN3_5_35B_A3B["text_config"] | change
    with pytest.raises(ValueError, match=message):
        from_hf_config(QWEN3_5_35B_A3B | {"text_config": text})


def test_both_layouts_of_experts_hold_the_same(references):
    cfg = references.CONFIGS["qwen3_moe"]
    random = np.random.default_rng(0)
    abstract = jax.eval_shape(lambda: init_params(cfg, jax.random.key(0)))
    params = jax.tree.map(lambda leaf: random.normal(size=leaf.shape), abstract)
    layouts = []
    for separate in (False, True):
        tensors = {}
        for path, index, name, out, _ in tensor_table(cfg, separate):
            leaf = params
            for key in path:
                leaf = leaf[key]
            tensors[name] = out(leaf if index is None else leaf[index])
        layouts.append(tensors)
    fused, apart = layouts
    assert [t.name for t in tensor_table(cfg)] == list(apart)
    for layer in (1, 3):
        experts = f"model.layers.{layer}.mlp.experts."
        both = fused.pop(experts + "gate_up_proj")
        down = fused.pop(experts + "down_proj")
        for e in range(cfg.num_experts):
            gate, up = (apart.pop(f"{experts}{e}.{x}_proj.weight") for x in ("gate", "up"))
            np.testing.assert_array_equal(both[e], np.concatenate([gate, up]))
            np.testing.assert_array_equal(down[e], apart.pop(f"{experts}{e}.down_proj.weight"))
    assert fused.keys() == apart.keys()


def test_tensors_of_multimodal_checkpoints_are_found(references):
    cfg = references.CONFIGS["tiny"]
    for separate in (False, True):
        plain = [tensor.name for tensor in tensor_table(cfg, separate)]
        inner = [name.replace("model.", "model.language_model.") for name in plain]
        extra = ["model.visual.pos_embed.weight", "mtp.layers.0.mlp.experts.0.up_proj.weight"]
        table, skipped = find_tensors(cfg, inner + extra)
        assert [tensor.name for tensor in table] == inner and skipped == sorted(extra)
        assert [tensor[:2] for tensor in table] == [t[:2] for t in tensor_table(cfg, separate)]
        assert find_tensors(cfg, plain)[1] == []
    # Only families whose checkpoints have such tensors may have them.
    llama = references.CONFIGS["llama"]
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert find_tensors(llama, [*extra, buffer])[1] == [buffer]


@pytest.mark.slow
@pytest.mark.parity
def test_transformers_has_and_writes_the_same_tensors(references, tmp_path):
    pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors")
    for label, cfg in references.CONFIGS.items():
        model, _ = references.torch_model(cfg)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        table = list(tensor_table(cfg, separate_experts=False))
        assert {tensor.name for tensor in table} == shapes.keys(), label
        model.save_pretrained(tmp_path / label)
        with safetensors.safe_open(tmp_path / label / "model.safetensors", "np") as file:
            names = set(file.keys())
        found, skipped = find_tensors(cfg, names)
        assert {tensor.name for tensor in found} == names and not skipped, label
        saved = (tmp_path / label / "config.json").read_text()
        assert from_hf_config(json.loads(saved), **overrides(cfg)) == cfg


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize("label, outer", [("qwen3_5", "qwen3_5"), ("tiny", "qwen3_5_moe")])
def test_multimodal_checkpoints_of_transformers(references, tmp_path, label, outer):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors")
    cfg = references.CONFIGS[label]
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    config = transformers.AutoConfig.for_model(
        outer,
        text_config=to_hf_config(cfg),
        vision_config=vision | {"out_hidden_size": cfg.hidden_size, "num_position_embeddings": 16},
        tie_word_embeddings=cfg.tie_word_embeddings,
    )
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert from_hf_config(saved, **overrides(cfg)) == cfg
    with safetensors.safe_open(tmp_path / "model.safetensors", "np") as file:
        names = set(file.keys())
    found, skipped = find_tensors(cfg, names)
    assert {tensor.name for tensor in found} == names - set(skipped)
    assert skipped and all(name.startswith("model.visual.") for name in skipped)


@pytest.mark.slow
@pytest.mark.parametrize("label", [*LABELS, "delta_only"])
def test_packed_rows_and_one_token_decoding(references, jitted_init, label):
    """Both equal the same texts run apart, one to a row; values only."""
    if label == "delta_only":
        cfg = ModelConfig(**references.SMALL, mixers=(DELTA,), feed_forwards=(DENSE,))
    else:
        cfg = references.CONFIGS[label]
    lengths = (23, 1, 8)  # of three texts; packed they fill a row of 32
    room = sum(lengths)
    random = np.random.default_rng(0)
    texts = [random.integers(0, cfg.vocab_size, n) for n in lengths]
    tokens, positions, segments = np.zeros((3, 4, room), np.int32)
    start = 0
    for row, text in enumerate(texts):
        n = len(text)
        for where in ((row, slice(n)), (3, slice(start, start + n))):
            tokens[where], positions[where], segments[where] = text, np.arange(n), row + 1
        start += n
    params = jitted_init(cfg, jax.random.key(0))
    hidden, _ = jax.jit(forward, static_argnums=0)(cfg, params, tokens, positions, segments)
    hidden, start = np.asarray(hidden), 0
    for row, n in enumerate(lengths):
        np.testing.assert_allclose(hidden[3, start : start + n], hidden[row, :n], atol=1e-5)
        start += n
    decode = jax.jit(extend, static_argnums=0)
    cache = init_cache(cfg, slots=3, max_len=room)
    for t in range(max(lengths)):
        counts = np.asarray([t < n for n in lengths], np.int32)
        step, cache = decode(cfg, params, cache, jnp.asarray(tokens[:3, t : t + 1]), counts)
        real = counts == 1
        np.testing.assert_allclose(step[real, 0], hidden[:3][real, t], atol=1e-4)
