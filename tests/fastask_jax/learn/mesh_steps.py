"""Train steps on eight fake devices, run by `test_mesh.py` in a process of its own.

Prints one JSON object a line: what was compared, and the largest relative difference from one
device (by norm, per leaf).
"""

import json
import re
import sys
from dataclasses import replace
from functools import partial

import conftest as toy
import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

from fastask_jax.learn import Objective, OptimizerConfig, PackConfig, make_train_step, pack
from fastask_jax.learn import results as floats
from fastask_jax.learn.score import make_scorer, score_fn
from fastask_jax.model import (
    ModelConfig,
    extend,
    forward,
    init_cache,
    init_params,
    make_mesh,
    moe,
    param_shardings,
)
from fastask_jax.model.lora import TARGETS, LoraConfig, fingerprint, init_adapters
from fastask_jax.model.mesh import put
from kernels.choice import Kernels

MESHES = [(8, 1, 1, 1), (2, 2, 2, 1), (1, 2, 2, 2), (1, 4, 1, 2)]

# Every kind of layer, in forms that compile fast; one key/value head, so that `tensor` exceeds
# them.
CONFIG = ModelConfig(
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
    kernels=Kernels(attention="reference"),
    moe_implementation="sorted",
)
LLAMA = ModelConfig(
    vocab_size=64,
    hidden_size=16,
    num_layers=1,
    mixers=("full_attention",),
    feed_forwards=("dense",),
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate_size=24,
    tie_word_embeddings=False,
)

# With an epsilon far above the gradients, Adam's update is proportional to the gradient, so that
# rounding in entries near zero isn't blown up to a whole step; the rate makes updates as large as
# the weights, so that they can be read off them.
OPTIMIZER = OptimizerConfig(learning_rate=300.0, eps=1.0, weight_decay=1e-3)


def say(what, **values):
    print(json.dumps({"what": what, **values}), flush=True)


def apart(first, second):
    """Largest relative difference by norm over the leaves, and where it is."""
    worst = (0.0, "")
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(first), jax.tree.leaves(second), strict=True
    ):
        a, b = np.float64(jax.device_get(a)), np.float64(jax.device_get(b))
        error = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)
        worst = max(worst, (float(error), jax.tree_util.keystr(path)))
    return worst


def expected_specs():
    """The partition of every parameter of CONFIG where `tensor` is 2, written out."""
    norms = {"mixer_norm": P(None, None), "moe_norm": P(None, None)}
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
        **dict.fromkeys(
            ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"), P(None, "fsdp", "tensor")
        ),
        "conv": P(None, None, "tensor"),
        "a_log": P(None, "tensor"),
        "dt_bias": P(None, "tensor"),
        "norm": P(None, None),
        "out_proj": P(None, "tensor", "fsdp"),
    }
    attention = {
        "q_proj": P(None, "fsdp", "tensor", None),
        "k_proj": P(None, "fsdp", None, None),
        "v_proj": P(None, "fsdp", None, None),
        "o_proj": P(None, "tensor", None, "fsdp"),
        "q_norm": P(None, None),
        "k_norm": P(None, None),
    }
    return {
        "embedding": P("tensor", "fsdp"),
        "final_norm": P(None),
        "blocks": {
            "layer_0": {"mixer": delta, "moe": moe, **norms},
            "layer_1": {"mixer": attention, "moe": moe, **norms},
        },
    }


def check_specs(state, mesh):
    """Every leaf of parameters and optimizer state lies where the table says."""
    expected = expected_specs()
    if mesh.shape["tensor"] == 1:
        for name in ("k_proj", "v_proj"):  # one head divides over one device
            expected["blocks"]["layer_1"]["mixer"][name] = P(None, "fsdp", "tensor", None)
    moments = state.opt_state[1]
    for tree in (state.params, moments.mu, moments.nu):
        found = jax.tree.map(lambda leaf: leaf.sharding.spec, tree)
        assert found == expected, found
    for leaf in (state.step, state.version, moments.count):
        assert leaf.sharding.spec == P() and leaf.sharding.is_fully_replicated
    embedding = state.params["embedding"]
    share = mesh.shape["tensor"] * mesh.shape["fsdp"]
    assert embedding.addressable_shards[0].data.size * share == embedding.size
    assert len(jax.tree.leaves(state)) == 3 * len(jax.tree.leaves(state.params)) + 3


def collectives(text):
    """How often each collective stands in the compiled program, with the largest number of
    elements that it yields, by the operation it came from."""
    found = {}
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    for line in text.splitlines():
        match = re.search(rf"= (.*) ({kinds})(-start)?\(", line)
        if not match:
            continue
        name = re.search(r'op_name="([^"]*)"', line)
        source = name.group(1).rsplit("/", 1)[-1] if name else "?"
        shapes = re.findall(r"\w+\[([0-9,]*)\]", match.group(1))
        elements = max(int(np.prod([int(n) for n in s.split(",") if n])) for s in shapes)
        key = f"{match.group(2)} of {source}"
        count, largest = found.get(key, (0, 0))
        found[key] = (count + 1, max(largest, elements))
    return found


def train_steps():
    params = init_params(CONFIG, jax.random.key(0))
    items = [toy.trajectory(3 + 7 * n % 30, n, CONFIG.vocab_size) for n in range(16)]
    packed = pack(items, PackConfig((32,), micro_batch_rows=8, min_rows=16))
    assert 8 < packed.used_rows <= 16
    for shape in [(1, 1, 1, 1), *MESHES]:
        mesh = make_mesh(*shape)
        # On one of the meshes, experts take their pairs in several turns.
        moe._PAIRS = 64 if shape == (2, 2, 2, 1) else 1 << 17
        step = make_train_step(
            CONFIG, Objective(entropy_coef=0.1), OPTIMIZER, micro_batch_rows=8, mesh=mesh
        )
        state = step.init(params)
        if mesh.size > 1:
            check_specs(state, mesh)
        compiled = step.lower(state, *packed.batch.tokens.shape).compile()
        step._jitted = lambda *arguments, terms, compiled=compiled: compiled(*arguments)
        state, metrics = step(state, packed)
        metrics = floats(metrics)
        if mesh.size == 1:
            before, single, wanted = jax.device_get((params, state, metrics))
            continue
        check_specs(state, mesh)
        state = jax.device_get(state)
        move = partial(jax.tree.map, np.subtract)
        assert metrics.keys() == wanted.keys()
        say(
            "step",
            mesh=shape,
            loss=abs(metrics["loss/total"] / wanted["loss/total"] - 1),
            parameters=apart(state.params, single.params),
            updates=apart(move(state.params, before), move(single.params, before)),
            first_moments=apart(state.opt_state[1].mu, single.opt_state[1].mu),
            metrics=max(abs(metrics[k] - v) / max(abs(v), 1e-3) for k, v in wanted.items()),
            collectives=collectives(compiled.as_text()),
        )


def packed_rows(config, rows, length):
    """Tokens, positions, segment ids and mask of rows of two segments."""
    tokens = jax.random.randint(jax.random.key(1), (rows, length), 0, config.vocab_size)
    second = jnp.arange(length) >= 2 * length // 3
    positions = jnp.arange(length) - second * (2 * length // 3)
    mask = jax.random.bernoulli(jax.random.key(2), 0.5, (rows, length)) & (positions > 0)
    wide = (jnp.broadcast_to(x, (rows, length)) for x in (positions, second + 1))
    return tokens, *wide, mask


def scored(config, batch, mesh):
    """Value, scores and gradients of fresh weights on packed rows."""
    scores = score_fn(config, mesh)

    def loss(params):
        found = scores(params, *batch, 0.8)
        return jnp.sum(found.logprobs + 0.1 * found.entropy), found

    params = put(init_params(config, jax.random.key(0)), param_shardings(config, mesh))
    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


def rows_that_do_not_divide():
    """A dense model, and rows whose tokens can't be split over `tensor`."""
    batch = packed_rows(LLAMA, 4, 31)
    one, other = (scored(LLAMA, batch, mesh) for mesh in (make_mesh(), make_mesh(1, 2, 2, 2)))
    say("rows that don't divide", error=apart(other, one))


def split_experts():
    """Values and gradients with the experts over 4 and over 8 devices."""
    config = replace(CONFIG, num_experts=8)
    batch = packed_rows(config, 8, 16)
    one = scored(config, batch, make_mesh())
    for devices in (4, 8):
        split = scored(config, batch, make_mesh(8 // devices, 1, devices, 1))
        say(f"experts over {devices}", error=apart(split, one))


def forced_experts():
    """Router replay and the routing's sums on a mesh."""
    tokens, positions, segments, _ = packed_rows(CONFIG, 4, 32)
    params = init_params(CONFIG, jax.random.key(0))
    forced = jax.random.randint(jax.random.key(3), (2, 4, 32, 1), 0, 2)
    forced = jnp.concatenate([forced, forced + 2], axis=-1)
    results = []
    for mesh in (make_mesh(), make_mesh(1, 2, 2, 2)):
        run = jax.jit(partial(forward, CONFIG, return_expert_ids=True, mesh=mesh))
        placed = put(params, param_shardings(CONFIG, mesh))
        results.append(run(placed, tokens, positions, segments, forced))
    np.testing.assert_array_equal(results[1][1]["expert_ids"], forced)
    say("forced experts", error=apart(results[1], results[0]))


def decoding():
    """A prompt and a token more, slots and heads split, against the packed rows."""
    tokens, positions, segments, _ = packed_rows(CONFIG, 4, 8)
    segments = jnp.ones_like(segments)
    positions = jnp.broadcast_to(jnp.arange(8), positions.shape)
    mesh = make_mesh(1, 2, 2, 2)
    params = put(init_params(CONFIG, jax.random.key(0)), param_shardings(CONFIG, mesh))

    @jax.jit
    def run(params):
        packed, _ = forward(CONFIG, params, tokens, positions, segments, mesh=mesh)
        cache = init_cache(CONFIG, 4, 8, mesh=mesh)
        pieces = []
        for start, stop in ((0, 7), (7, 8)):
            counts = jnp.full(4, stop - start)
            hidden, cache = extend(
                CONFIG, params, cache, tokens[:, start:stop], counts, mesh=mesh
            )
            pieces.append(hidden)
        return packed, jnp.concatenate(pieces, axis=1), cache

    packed, decoded, cache = run(params)
    keys = cache["unrolled"]["block_0"]["layer_1"]["k"]
    assert keys.shape == (4, 2, 8, 8)  # the one key/value head, once per device of `tensor`
    assert keys.addressable_shards[0].data.shape == (1, 1, 8, 8)
    say("decoding", error=apart(decoded, packed))


def adapters():
    """A step of LoRA on every map, frozen weights and adapters spread like the maps."""
    lora = LoraConfig(rank=3, targets=TARGETS)
    weights = init_params(CONFIG, jax.random.key(0))
    start = init_adapters(CONFIG, lora, jax.random.key(1))
    start = jax.tree.map(lambda x: x + 0.05, start)
    items = [toy.trajectory(3 + 7 * n % 30, n, CONFIG.vocab_size) for n in range(8)]
    packed = pack(items, PackConfig((32,), micro_batch_rows=4, min_rows=8))
    states = []
    for mesh in (make_mesh(), make_mesh(1, 2, 2, 2)):
        step = make_train_step(
            CONFIG, Objective(), OPTIMIZER, micro_batch_rows=4, mesh=mesh, lora=lora,
            frozen=weights,
        )  # fmt: skip
        state, _ = step(step.init(start), packed)
        if mesh.size > 1:
            for tree in (state.params, state.opt_state[1].mu, state.opt_state[1].nu):
                found = jax.tree.map(lambda leaf: leaf.sharding.spec, tree)["blocks"]["layer_1"]
                assert found["mixer"]["q_proj"] == {
                    "a": P(None, "fsdp", None), "b": P(None, None, "tensor", None)
                }, found  # fmt: skip
                assert found["moe"]["down"] == {
                    "a": P(None, "expert", "tensor", None), "b": P(None, "expert", None, "fsdp")
                }, found  # fmt: skip
        states.append(state)
    assert int(fingerprint(step.frozen)) == int(fingerprint(weights))
    say("adapters", error=apart(states[1].opt_state[1].mu, states[0].opt_state[1].mu))


def bfloat16_gathers():
    """With bfloat16 compute, weights are cast before they are gathered."""
    mesh = make_mesh(1, 2, 2, 2)
    step = make_train_step(
        replace(CONFIG, dtype="bfloat16"), Objective(), OPTIMIZER, micro_batch_rows=8, mesh=mesh
    )
    params = jax.eval_shape(partial(init_params, CONFIG), jax.random.key(0))
    state = step.abstract(params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"float32"}
    text = step.lower(state, 8, 32).as_text()
    gathers = re.findall(r'"stablehlo.all_gather".*: \(tensor<([0-9x]+x)?(\w+)>\)', text)
    assert gathers
    say("bfloat16 gathers", operands=sorted({(shape, kind) for shape, kind in gathers}))


def toy_models():
    """A model without logical axes says how its parameters are partitioned."""
    items = [toy.trajectory(n, seed) for seed, n in enumerate([9, 12, 4, 16])]
    packed = pack(items, PackConfig((16,), micro_batch_rows=8, min_rows=8))
    mesh = make_mesh(2, 2, 2, 1)
    make = partial(make_train_step, toy.scores, Objective(), OPTIMIZER, micro_batch_rows=8)
    try:
        make(mesh=mesh)
        raise AssertionError("a toy model on a mesh was taken without its partition")
    except ValueError as error:
        assert "needs param_specs" in str(error)
    states = []
    for step in (
        make(),
        make(mesh=mesh, param_specs=P()),
        make(mesh=mesh, param_specs={"bias": P(), "table": P(None, None)}),
        make(mesh=make_mesh(1, 1, 1, 8), param_specs=P()),
    ):
        state, _ = step(step.init(toy.params()), packed)
        states.append(state.params)
    for state in states[1:]:
        say("toy model", error=apart(state, states[0]))
    scored = [
        make_scorer(toy.scores, micro_batch_rows=8, mesh=mesh)(toy.params(), packed)
        for mesh in (make_mesh(), mesh)
    ]
    say("toy scorer", error=apart(scored[1], scored[0]))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
