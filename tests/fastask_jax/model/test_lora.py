"""Low-rank adapters: the same model as with merged weights, in every form of the pass."""

import dataclasses

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from fastask_jax.model import ModelConfig, extend, forward, init_cache, init_params
from fastask_jax.model.lora import (
    TARGETS,
    LoraConfig,
    adapter_axes,
    attach,
    init_adapters,
    merge_adapters,
)

HYBRID = ModelConfig(
    vocab_size=64, hidden_size=24, num_layers=2, heads=4, kv_heads=2, head_dim=8,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=6, num_experts=4, moe_intermediate_size=12,
    shared_expert_intermediate_size=10, delta_chunk=16,
)
DENSE = dataclasses.replace(
    HYBRID, mixers=("full_attention",), feed_forwards=("dense",), intermediate_size=20,
    qk_norm=False, attention_gate=False,
)


def drawn(cfg, lora):
    """Weights and adapters that change something."""
    weights = init_params(cfg, jax.random.key(0))
    adapters = init_adapters(cfg, lora, jax.random.key(1))
    leaves, structure = jax.tree.flatten(adapters)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    pairs = zip(leaves, keys, strict=True)
    noisy = [x + 0.1 * jax.random.normal(k, x.shape) for x, k in pairs]
    return weights, jax.tree.unflatten(structure, noisy)


@pytest.mark.slow
@pytest.mark.parametrize("cfg", [HYBRID, DENSE], ids=["hybrid", "dense"])
def test_attached_equals_merged_in_values_gradients_and_decoding(cfg):
    lora = LoraConfig(rank=3, alpha=6.0, targets=TARGETS)
    weights, adapters = drawn(cfg, lora)
    tokens = jax.random.randint(jax.random.key(3), (2, 9), 0, cfg.vocab_size)
    positions = jnp.broadcast_to(jnp.arange(9), (2, 9))
    ids = jnp.ones((2, 9), jnp.int32)

    def hidden(params):
        return forward(cfg, params, tokens, positions, ids)[0]

    def objective(adapters, join):
        out = hidden(join(adapters))
        return jnp.sum(jnp.sin(out)), out

    def apart(adapters):
        return attach(lora, weights, adapters)

    def merged(adapters):
        return merge_adapters(cfg, lora, weights, adapters)

    grad = jax.jit(jax.grad(objective, has_aux=True), static_argnums=1)
    got_grads, got = grad(adapters, apart)
    expected_grads, expected = grad(adapters, merged)
    np.testing.assert_allclose(got, expected, atol=2e-5)
    assert float(jnp.abs(got - jax.jit(hidden)(weights)).max()) > 1e-2
    for x, y in zip(jax.tree.leaves(got_grads), jax.tree.leaves(expected_grads), strict=True):
        assert jnp.linalg.norm(x - y) <= 1e-4 * jnp.linalg.norm(y) + 1e-6
    cached, _ = jax.jit(extend, static_argnums=0)(
        cfg, apart(adapters), init_cache(cfg, 2, 16), tokens, jnp.full(2, 9)
    )
    np.testing.assert_allclose(cached, expected, atol=5e-5)


def test_fresh_adapters_change_nothing_and_have_axes():
    lora = LoraConfig(rank=2)
    weights = init_params(HYBRID, jax.random.key(0))
    adapters = init_adapters(HYBRID, lora, jax.random.key(1))
    merged = merge_adapters(HYBRID, lora, weights, adapters)
    jax.tree.map(np.testing.assert_array_equal, merged, weights)
    axes = adapter_axes(HYBRID, lora)
    is_axes = lambda x: isinstance(x, tuple)  # noqa: E731
    pairs = jax.tree.map(lambda x, a: x.ndim == len(a), adapters, axes, is_leaf=is_axes)
    assert all(jax.tree.leaves(pairs))
    # The routed experts aren't adapted unless they are asked for.
    assert set(adapters["blocks"]["layer_0"]["moe"]) == {"shared_gate", "shared_up", "shared_down"}
    o_proj = adapters["blocks"]["layer_1"]["mixer"]["o_proj"]
    assert o_proj["a"].shape == (1, 4, 8, 2) and o_proj["b"].shape == (1, 2, 24)


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="rank must be a whole number, 0 or more"):
        LoraConfig(rank=-1)
    with pytest.raises(ValueError, match="not mixer.router"):
        LoraConfig(rank=2, targets=("mixer.router",))
    with pytest.raises(ValueError, match="at least 1"):
        init_adapters(HYBRID, LoraConfig(), jax.random.key(0))
    with pytest.raises(ValueError, match="none of the lora targets"):
        init_adapters(DENSE, LoraConfig(rank=2, targets=("moe.down",)), jax.random.key(0))
