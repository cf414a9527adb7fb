"""The sharding table: what it refuses, the spec of every leaf, and results that don't change."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import PartitionSpec as P

from fastask_jax.model import PRESETS, make_mesh
from fastask_jax.model.sharding import RULES, logical_axes, partition_spec

ROOT = Path(__file__).resolve().parents[3]
MESH = {"data": 1, "fsdp": 2, "expert": 2, "tensor": 2}

# Runs on eight fake devices, so in a process of its own.
ON_EIGHT_DEVICES = """
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
import numpy as np
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P
from fastask_jax.model import (
    ModelConfig, PRESETS, forward, init_params, make_mesh, param_shardings, unembedding
)
from fastask_jax.model.sharding import param_specs, row_sharding
from kernels.linear_logprob import linear_logprob

moe = {
    "router": P(None, "fsdp", None),
    "gate_up": P(None, "expert", "fsdp", "tensor"),
    "down": P(None, "expert", "tensor", "fsdp"),
    "shared_gate": P(None, "fsdp", "tensor"),
    "shared_up": P(None, "fsdp", "tensor"),
    "shared_down": P(None, "tensor", "fsdp"),
    "shared_router": P(None, "fsdp", None),
}
delta = {
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
attention = {
    "q_proj": P(None, "fsdp", "tensor", None),
    "k_proj": P(None, "fsdp", "tensor", None),
    "v_proj": P(None, "fsdp", "tensor", None),
    "o_proj": P(None, "tensor", None, "fsdp"),
    "q_norm": P(None, None),
    "k_norm": P(None, None),
}
norms = {"mixer_norm": P(None, None), "moe_norm": P(None, None)}

def expected(cfg):
    layers = [delta if mixer == "linear_attention" else attention for mixer in cfg.mixers]
    tree = {
        "embedding": P("tensor", "fsdp"),
        "final_norm": P(None),
        "blocks": {
            f"layer_{i}": {"mixer": mixer, "moe": moe, **norms} for i, mixer in enumerate(layers)
        },
    }
    return tree if cfg.tie_word_embeddings else tree | {"head": P("fsdp", "tensor")}

mesh = make_mesh(1, 2, 2, 2)
for cfg in (PRESETS["tiny"], PRESETS["qwen3.5-35b-a3b"]):
    assert param_specs(cfg, mesh) == expected(cfg), cfg

# Two key/value heads on four tensor shards: each shard keeps both.
wide = make_mesh(1, 1, 2, 4)
specs = param_specs(PRESETS["qwen3.5-35b-a3b"], wide)
assert specs["blocks"]["layer_3"]["mixer"]["k_proj"] == P(None, "fsdp", None, None)
assert specs["blocks"]["layer_3"]["mixer"]["q_proj"] == P(None, "fsdp", "tensor", None)

cfg = ModelConfig(
    vocab_size=64, hidden_size=32, head_dim=8, linear_key_head_dim=8, linear_value_head_dim=8,
    moe_intermediate_size=16, shared_expert_intermediate_size=16, delta_chunk=16,
)
params = init_params(cfg, jax.random.key(0))
tokens = jax.random.randint(jax.random.key(1), (4, 48), 0, 64)
positions = jnp.broadcast_to(jnp.arange(48) % 30, (4, 48))
segments = jnp.broadcast_to(jnp.arange(48) // 30 + 1, (4, 48))

def loss(params, tokens, positions, segments):
    hidden, _ = forward(cfg, params, tokens, positions, segments)
    return -linear_logprob(hidden[:, :-1], unembedding(params), tokens[:, 1:])[0].mean()

step = jax.jit(jax.value_and_grad(loss))
single_loss, single_grads = step(params, tokens, positions, segments)
mesh = make_mesh(1, 2, 2, 2)
shardings = param_shardings(cfg, mesh)
rows = row_sharding(mesh)
sharded = jax.device_put(params, shardings)
for leaf, sharding in zip(jax.tree.leaves(sharded), jax.tree.leaves(shardings)):
    assert leaf.sharding == sharding
batch = jax.device_put((tokens, positions, segments), rows)
step = jax.jit(jax.value_and_grad(loss), out_shardings=(None, shardings))
many_loss, many_grads = step(sharded, *batch)
assert abs(float(many_loss) - float(single_loss)) < 1e-5 * abs(float(single_loss))
for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(many_grads), jax.tree.leaves(single_grads)
):
    error = np.linalg.norm(np.asarray(a) - np.asarray(b))
    assert error <= 2e-5 * np.linalg.norm(np.asarray(b)) + 1e-6, (path, error)
print("eight devices agree")
"""


@pytest.mark.slow
def test_specs_of_every_leaf_and_equal_gradients_on_eight_devices():
    done = subprocess.run(
        [sys.executable, "-c", ON_EIGHT_DEVICES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "eight devices agree"


def test_unmapped_colliding_absent_and_uneven_axes_raise():
    assert partition_spec(("embed", None), (8, 3), MESH) == P("fsdp", None)
    with pytest.raises(ValueError, match="logical axis 'mystery' has no sharding rule"):
        partition_spec(("embed", "mystery"), (8, 8), MESH)
    with pytest.raises(ValueError, match="put two dimensions on mesh axis 'tensor'"):
        partition_spec(("heads", "ffn"), (8, 8), MESH)
    with pytest.raises(ValueError, match="mesh axis 'fsdp', but the mesh has only"):
        partition_spec(("embed",), (8,), {"data": 8})
    with pytest.raises(ValueError, match="'ffn' of size 7 doesn't divide"):
        partition_spec(("ffn",), (7,), MESH)
    assert partition_spec(("kv_heads",), (1,), MESH) == P(None)


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
