"""Engines on eight fake devices, run by `test_engine_mesh.py` in a process of its own.

Prints one JSON object a line: the ids that each mesh sampled and their logprobs, over two turns
with a shared prompt and parked slots; the first line is of one device.
"""

import json

import jax
import numpy as np

from fastask_jax.model import ModelConfig, init_params, make_mesh
from fastask_jax.rollout.engine import Engine, EngineConfig, Turn

MESHES = [(8, 1, 1, 1), (1, 2, 2, 2), (1, 4, 1, 2)]

# One key/value head, so that `tensor` exceeds them.
MODEL = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    heads=4,
    kv_heads=1,
    head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    initializer_range=0.3,
    rms_norm_eps=1e-3,
    delta_chunk=8,
    moe_implementation="sorted",
)
SLOTS = 16


def text(slot, length):
    return [(7 * slot + 3 * i) % 61 + 3 for i in range(length)]


def episode(engine, params):
    """Two turns: 0 to 11 begin, 12 to 15 copy slot 0, and every third slot sits out the second."""
    params = engine.place(params, alias=False)
    engine.append(params, {s: text(s, 5 + s % 4) for s in range(12)}, fresh=True)
    engine.share(dict.fromkeys(range(12, SLOTS), 0))
    first = engine.decode(params, turns(range(SLOTS), 6), 1.0)
    going = [s for s in range(SLOTS) if s % 3]
    engine.append(params, {s: text(s + 20, 4) for s in going[::2]})
    second = engine.decode(params, turns(going, 8), 1.0)
    third = engine.decode(params, turns(range(SLOTS), 3), 1.0)
    return [[found[s].ids, found[s].logprobs] for found in (first, second, third) for s in found]


def turns(slots, budget):
    return {s: Turn(np.asarray([s, 5], np.uint32), budget) for s in slots}


def main():
    params = init_params(MODEL, jax.random.key(1))
    cases = [(None, SLOTS), *((mesh, SLOTS) for mesh in MESHES), ((2, 2, 2, 1), 8)]
    for shape, rows in cases:
        config = EngineConfig(
            SLOTS, 48, append_rows=8, append_buckets=(8,), decode_rows=rows, decode_steps=4,
            attend_buckets=(32,),
        )  # fmt: skip
        mesh = None if shape is None else make_mesh(*shape)
        engine = Engine(MODEL, config, 2, mesh)
        found = episode(engine, params)
        leaf = jax.tree.leaves(engine._cache)[-1]
        held = leaf.addressable_shards[0].data.size / leaf.size
        print(json.dumps({"mesh": shape, "rows": rows, "found": found, "held": held}), flush=True)
    try:
        Engine(MODEL, EngineConfig(12, 48), 2, make_mesh(8))
    except ValueError as error:
        print(json.dumps({"said": str(error)}))


if __name__ == "__main__":
    main()
