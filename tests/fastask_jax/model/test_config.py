"""Configs are checked when they are made, and the presets have the right sizes."""

import jax
import pytest

from fastask_jax.model import PRESETS, ModelConfig, init_params


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_layers": 3}, "multiple of the length of mixers"),
        ({"heads": 3}, "multiple of kv_heads"),
        ({"linear_num_key_heads": 3}, "multiple of linear_num_key_heads"),
        ({"num_experts_per_tok": 5}, "must not exceed num_experts"),
        ({"hidden_size": 0}, "hidden_size must be at least 1"),
        ({"head_dim": 6, "partial_rotary_factor": 0.5}, "must be even"),
        ({"moe_implementation": "capacity"}, "moe_implementation must be"),
        ({"remat": "all"}, "remat must be one of"),
        ({"dtype": "float16"}, "dtype must be"),
    ],
)
def test_misfits_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**fields)


def count(cfg):
    abstract = jax.eval_shape(lambda: init_params(cfg, jax.random.key(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(abstract))


def test_the_35b_preset_has_its_size_without_allocating_it():
    cfg = PRESETS["qwen3.5-35b-a3b"]
    # Worked from the published shapes: embedding and head, 30 delta and 10 attention mixers,
    # 40 times router, experts, shared expert and norms.
    width, vocab, expert = 2048, 248_320, 3 * 2048 * 512
    delta = width * (2 * 2048 + 4096) + width * 4096 * 2 + 2 * width * 32 + 4 * 8192 + 64 + 128
    attention = width * 16 * 512 + 2 * width * 2 * 256 + 16 * 256 * width + 2 * 256
    layer = width * 256 + 256 * expert + expert + width + 2 * width
    expected = 2 * vocab * width + 30 * delta + 10 * attention + 40 * layer + width
    assert count(cfg) == expected
    assert 34.5e9 < expected < 35.5e9
    assert cfg.layer_types.count("full_attention") == 10


def test_the_tiny_preset_is_the_same_family_and_small():
    tiny, big = PRESETS["tiny"], PRESETS["qwen3.5-35b-a3b"]
    assert 0.3e6 < count(tiny) < 1.5e6
    assert set(tiny.layer_types) == set(big.layer_types)
    assert hash(tiny) == hash(ModelConfig(**vars(tiny)))
