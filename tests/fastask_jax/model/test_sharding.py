"""The sharding table: what it refuses, and the spec of every leaf of every preset.

Results on a mesh are compared in `tests/fastask_jax/learn/test_mesh.py`.
"""

import jax
import pytest
from jax import numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from fastask_jax.model import PRESETS, ModelConfig, forward, init_params, make_mesh
from fastask_jax.model.config import FULL, MOE
from fastask_jax.model.mesh import MESH_AXES, RULES
from fastask_jax.model.sharding import (
    cache_specs,
    init_cache,
    logical_axes,
    param_specs,
    partition_spec,
)

MESH = AbstractMesh((1, 2, 2, 2), MESH_AXES)
ROWS = ("data", "fsdp", "expert")

EXPERTS = {
    "router": P(None, "fsdp", None),
    "gate_up": P(None, "expert", "fsdp", "tensor"),
    "down": P(None, "expert", "tensor", "fsdp"),
    "shared_gate": P(None, "fsdp", "tensor"),
    "shared_up": P(None, "fsdp", "tensor"),
    "shared_down": P(None, "tensor", "fsdp"),
    "shared_router": P(None, "fsdp", None),
}
DENSE = {
    "gate": P(None, "fsdp", "tensor"),
    "up": P(None, "fsdp", "tensor"),
    "down": P(None, "tensor", "fsdp"),
}
DELTA = {
    "in_proj_qkv": P(None, "fsdp", "tensor"),
    "in_proj_z": P(None, "fsdp", "tensor"),
    "in_proj_a": P(None, "fsdp", "tensor"),
    "in_proj_b": P(None, "fsdp", "tensor"),
    "conv": P(None, None, "tensor"),
    "a_log": P(None, "tensor"),
    "dt_bias": P(None, "tensor"),
    "norm": P(None, None),
    "out_proj": P(None, "tensor", "fsdp"),
}
ATTENTION = {
    "q_proj": P(None, "fsdp", "tensor", None),
    "k_proj": P(None, "fsdp", "tensor", None),
    "v_proj": P(None, "fsdp", "tensor", None),
    "o_proj": P(None, "tensor", None, "fsdp"),
}
HEAD_NORMS = {"q_norm": P(None, None), "k_norm": P(None, None)}


def expected(cfg, attention=ATTENTION):
    blocks = {}
    for i, (mixer, feed_forward) in enumerate(cfg.block_layers):
        blocks[f"layer_{i}"] = {
            "mixer_norm": P(None, None),
            "mixer": attention | (HEAD_NORMS if cfg.qk_norm else {}) if mixer == FULL else DELTA,
        } | (
            {"moe": EXPERTS, "moe_norm": P(None, None)}
            if feed_forward == MOE
            else {"mlp": DENSE, "mlp_norm": P(None, None)}
        )
    tree = {"embedding": P("tensor", "fsdp"), "final_norm": P(None), "blocks": blocks}
    return tree if cfg.tie_word_embeddings else tree | {"head": P("fsdp", "tensor")}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_specs_of_every_leaf(name):
    cfg = PRESETS[name]
    if cfg.heads % 2:  # smollm2 has nine heads of three groups
        mesh, attention = AbstractMesh((1, 2, 2, 3), MESH_AXES), ATTENTION
        with pytest.raises(ValueError, match="'heads' of size 9 doesn't divide"):
            param_specs(cfg, MESH)
    else:
        # Two key/value heads on four devices of `tensor`: each keeps both.
        mesh = AbstractMesh((2, 1, 2, 4), MESH_AXES)
        whole = P(None, "fsdp", None, None)
        attention = ATTENTION | {"k_proj": whole, "v_proj": whole}
        assert param_specs(cfg, MESH) == expected(cfg)
    assert param_specs(cfg, mesh) == expected(cfg, attention)


def test_unmapped_colliding_absent_and_uneven_axes_raise():
    assert partition_spec(("embed", None), (8, 3), MESH.shape) == P("fsdp", None)
    with pytest.raises(ValueError, match="logical axis 'mystery' has no sharding rule"):
        partition_spec(("embed", "mystery"), (8, 8), MESH.shape)
    with pytest.raises(ValueError, match="put two dimensions on mesh axis 'tensor'"):
        partition_spec(("heads", "ffn"), (8, 8), MESH.shape)
    with pytest.raises(ValueError, match="mesh axis 'fsdp', but the mesh has only"):
        partition_spec(("embed",), (8,), {"data": 8})
    with pytest.raises(ValueError, match="'ffn' of size 7 doesn't divide"):
        partition_spec(("ffn",), (7,), MESH.shape)
    assert partition_spec(("kv_heads",), (1,), MESH.shape) == P(None)


def test_every_declared_axis_has_a_rule_and_every_rule_a_use():
    used = {
        axis
        for cfg in PRESETS.values()
        for axes in jax.tree.leaves(logical_axes(cfg), is_leaf=lambda x: isinstance(x, tuple))
        for axis in axes
        if axis is not None
    }
    assert used == set(RULES)


def test_a_mesh_must_use_every_device():
    with pytest.raises(ValueError, match="needs 64 devices"):
        make_mesh(data=64)


def lowered(cfg, rows, mesh, length=8):
    """Traces the forward pass over a mesh that needn't exist."""
    params = jax.eval_shape(lambda: init_params(cfg, jax.random.key(0)))
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    return jax.eval_shape(
        lambda params, ids: forward(cfg, params, ids, ids, ids, mesh=mesh), params, ids
    )


def test_rows_heads_and_experts_that_do_not_divide_are_refused(small):
    hidden, _ = lowered(small, 8, AbstractMesh((2, 2, 2, 1), MESH_AXES))
    assert hidden.shape == (8, 8, small.hidden_size)
    with pytest.raises(ValueError, match="6 rows don't divide over the 4 parts"):
        lowered(small, 6, AbstractMesh((1, 2, 2, 1), MESH_AXES))
    with pytest.raises(ValueError, match="'experts' of size 4 doesn't divide"):
        lowered(small, 8, AbstractMesh((1, 1, 8, 1), MESH_AXES))
    wide = ModelConfig(linear_num_key_heads=2, linear_num_value_heads=4)
    with pytest.raises(ValueError, match=r"linear_num_key_heads \(2\) doesn't divide"):
        lowered(wide, 4, AbstractMesh((1, 1, 1, 4), MESH_AXES))
    dense = ModelConfig(moe_implementation="dense")
    with pytest.raises(ValueError, match="dense can't split experts"):
        lowered(dense, 4, AbstractMesh((1, 1, 2, 1), MESH_AXES))


def test_a_cache_holds_slots_by_rows_and_heads_by_tensor():
    cfg = ModelConfig(kv_heads=1, linear_num_key_heads=2)
    cache = jax.eval_shape(lambda: init_cache(cfg, 8, 16, mesh=MESH))
    delta, full = (cache["stacked"][f"layer_{i}"] for i in range(2))
    # One key/value head, once for each device of `tensor`.
    assert full["k"].shape == (2, 8, 2, cfg.head_dim, 16)
    assert full["v"].shape == (2, 8, 2, 16, cfg.head_dim)
    assert delta["state"].shape[1:3] == (8, 4) and delta["conv"].shape[-1] == cfg.conv_dim
    specs = cache_specs(cfg)
    assert specs["length"] == P(ROWS)
    assert specs["stacked"]["layer_1"]["v"] == P(None, ROWS, "tensor")
    assert specs["stacked"]["layer_0"]["conv"] == P(None, ROWS, None, "tensor")
    with pytest.raises(ValueError, match="6 rows don't divide"):
        jax.eval_shape(lambda: init_cache(cfg, 6, 16, mesh=MESH))
