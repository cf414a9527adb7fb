"""Configs are checked when they are made, and the presets have the right sizes."""

import jax
import pytest

from fastask_jax.model import PRESETS, ModelConfig, init_params
from fastask_jax.model.config import DELTA, DENSE, FULL, MOE, Llama3Rope


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_layers": 3}, "multiple of the length of mixers"),
        ({"mixers": ("attention", FULL)}, "mixers must list linear_attention or full_attention"),
        ({"mixers": ()}, "mixers must list .* got nothing"),
        ({"feed_forwards": (FULL,)}, "feed_forwards must list dense or moe, got full_attention"),
        ({"heads": 3}, "multiple of kv_heads"),
        ({"linear_num_key_heads": 3}, "multiple of linear_num_key_heads"),
        ({"num_experts_per_tok": 5}, "must not exceed num_experts"),
        ({"hidden_size": 0}, "hidden_size must be at least 1"),
        ({"shared_expert_intermediate_size": -1}, "must be at least 0"),
        ({"rms_norm_eps": -5}, "rms_norm_eps must be a positive number, got -5"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps must be a positive number, got 0.0"),
        ({"rope_theta": float("nan")}, "rope_theta must be a positive number, got nan"),
        ({"initializer_range": float("inf")}, "initializer_range must be a positive number"),
        ({"partial_rotary_factor": "half"}, "partial_rotary_factor must be a positive number"),
        ({"rms_norm_eps": True}, "rms_norm_eps must be a positive number, got True"),
        ({"heads": 4.0}, "heads must be a whole number, got 4.0"),
        ({"hidden_size": "128"}, "hidden_size must be a whole number, got '128'"),
        ({"kv_heads": True}, "kv_heads must be a whole number, got True"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false"),
        ({"head_dim": 6, "partial_rotary_factor": 0.5}, "must be even"),
        ({"moe_implementation": "capacity"}, "moe_implementation must be"),
        ({"remat": "all"}, "remat must be one of none, block, dots"),
        ({"dtype": "float16"}, "dtype must be"),
    ],
)
def test_misfits_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**fields)


@pytest.mark.parametrize(
    "factors",
    [(8.0, 4.0, 1.0, 64), (0.0, 1.0, 4.0, 64), (float("nan"), 1.0, 4.0, 64), ("8", 1.0, 4.0, 64)],
)
def test_a_senseless_rope_is_refused(factors):
    with pytest.raises(ValueError, match="high_freq_factor above low_freq_factor"):
        Llama3Rope(*factors)


@pytest.mark.parametrize(
    "mixers, feed_forwards, block",
    [
        ((FULL,), (DENSE,), 1),
        ((DELTA, FULL) * 3, (MOE,) * 6, 2),
        ((DELTA, FULL), (DENSE, DENSE, MOE), 6),
        ((DELTA, DELTA, DELTA, FULL, DELTA, FULL), (DENSE,), 6),
        ((FULL,), (DENSE, MOE, MOE, DENSE, MOE, MOE), 3),
    ],
)
def test_blocks_are_the_smallest_unit_that_repeats(mixers, feed_forwards, block):
    cfg = ModelConfig(num_layers=12, mixers=mixers, feed_forwards=feed_forwards)
    assert cfg.layer_types == mixers * (12 // len(mixers))
    assert cfg.feed_forward_types == feed_forwards * (12 // len(feed_forwards))
    assert len(cfg.block_layers) == block and cfg.num_blocks == 12 // block
    # However a pattern is written, the config is the same.
    full = ModelConfig(
        num_layers=12, mixers=cfg.layer_types, feed_forwards=list(cfg.feed_forward_types)
    )
    assert full == cfg and hash(full) == hash(cfg)


def count(cfg):
    abstract = jax.eval_shape(lambda: init_params(cfg, jax.random.key(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(abstract))


def qwen3_5_moe(cfg):
    """Worked from the shapes of the architecture: embedding and head, mixers, and in every layer
    router, experts, shared expert and norms."""
    width, size = cfg.hidden_size, cfg.head_dim
    keys, values = 128 * cfg.linear_num_key_heads, 128 * cfg.linear_num_value_heads
    delta = width * (2 * keys + values) + 2 * width * values + 4 * (2 * keys + values)
    delta += 2 * width * cfg.linear_num_value_heads + 2 * cfg.linear_num_value_heads + 128
    attention = 3 * width * cfg.heads * size + 2 * width * cfg.kv_heads * size + 2 * size
    expert = 3 * width * cfg.moe_intermediate_size
    layer = (cfg.num_experts + 1) * (width + expert) + 2 * width
    mixers = 3 * (cfg.num_layers // 4) * delta + cfg.num_layers // 4 * attention
    return (2 * cfg.vocab_size + 1) * width + mixers + cfg.num_layers * layer


def test_presets_have_their_sizes_without_being_allocated():
    for name, low, high in (
        ("qwen3.5-35b-a3b", 34.5e9, 35.5e9),
        ("qwen3.5-122b-a10b", 121.5e9, 122.5e9),
    ):
        cfg = PRESETS[name]
        assert count(cfg) == qwen3_5_moe(cfg)
        assert low < count(cfg) < high
        assert cfg.layer_types.count(FULL) == cfg.num_layers // 4
    attention, perceptron = 2 * 576 * 576 + 2 * 576 * 192, 3 * 576 * 1536
    layer = attention + perceptron + 2 * 576
    assert count(PRESETS["smollm2-135m"]) == 49_152 * 576 + 30 * layer + 576 == 134_515_008


def test_the_tiny_preset_is_the_same_family_and_small():
    tiny, big = PRESETS["tiny"], PRESETS["qwen3.5-35b-a3b"]
    assert 0.3e6 < count(tiny) < 1.5e6
    assert set(tiny.layer_types) == set(big.layer_types)
    assert hash(tiny) == hash(ModelConfig(**vars(tiny)))
