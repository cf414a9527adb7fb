"""The packed forward pass: packing changes nothing, and equivalent configs agree."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from jax import numpy as jnp

from fastask_jax.model import ModelConfig, forward, init_params, load_balance_loss, unembedding
from fastask_jax.model.config import DENSE, FULL, MOE
from fastask_jax.model.moe import MixtureOfExperts
from fastask_jax.model.parameters import Declare


@pytest.fixture(scope="module")
def params(small, jitted_init):
    return jitted_init(small, jax.random.key(0))


@pytest.fixture(scope="module")
def run():
    """`(cfg, params, tokens, positions, segment_ids, cotangent) -> (hidden, aux, gradients)`."""

    def objective(cfg, params, tokens, positions, segment_ids, cotangent):
        hidden, aux = forward(cfg, params, tokens, positions, segment_ids)
        return jnp.vdot(hidden, cotangent), (hidden, aux)

    compiled = jax.jit(jax.value_and_grad(objective, 1, has_aux=True), static_argnums=0)

    def call(*arguments):
        (_, (hidden, aux)), grads = compiled(*arguments)
        return hidden, aux, grads

    return call


LENGTHS = (37, 1, 20, 22)  # of the segments of a row of 96 tokens; the rest is padding


@pytest.fixture(scope="module")
def example(small):
    random = np.random.default_rng(0)
    tokens = random.integers(0, small.vocab_size, (2, 96)).astype(np.int32)
    ids, positions = np.zeros_like(tokens), np.zeros_like(tokens)
    start = 0
    for number, length in enumerate(LENGTHS, 1):
        ids[:, start : start + length] = number
        positions[:, start : start + length] = np.arange(length)
        start += length
    cotangent = random.normal(size=(2, 96, small.hidden_size)).astype(np.float32)
    return tokens, positions, ids, cotangent * (ids > 0)[..., None]


def close(x, y, tolerance=1e-5):
    """Every leaf, relative to its norm; where a leaf is less than a hundredth of the whole tree,
    its terms have cancelled, and the rounding of the terms is that of a hundredth of the whole."""
    whole = max(float(jnp.linalg.norm(leaf)) for leaf in jax.tree.leaves(y))
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(x), jax.tree.leaves(y), strict=True
    ):
        error = float(jnp.linalg.norm(a - b))
        error /= max(float(jnp.linalg.norm(b)), 1e-2 * whole, 1e-6)
        assert error <= tolerance, (jax.tree_util.keystr(path), error)


def test_packed_equals_unpacked_for_values_and_every_gradient(small, params, run, example):
    tokens, positions, ids, cotangent = example
    hidden, aux, grads = run(small, params, *example)
    # The same segments, one to a row, padded to a common length: one more compilation.
    longest = max(LENGTHS)
    rows = [(b, n) for b in range(2) for n in range(1, 5)]
    alone = [np.zeros((len(rows), longest, *x.shape[2:]), x.dtype) for x in example]
    for row, (b, n) in enumerate(rows):
        where = ids[b] == n
        for target, x in zip(alone, example, strict=True):
            target[row, : where.sum()] = x[b][where]
    alone_hidden, alone_aux, alone_grads = run(small, params, *alone)
    for row, (b, n) in enumerate(rows):
        where = ids[b] == n
        close(hidden[b][where], alone_hidden[row, : where.sum()])
    close(grads, alone_grads)
    close(aux, alone_aux)


def test_other_segments_and_padding_have_no_influence(small, params, run, example):
    tokens, positions, ids, cotangent = example
    only = ids == 3
    changed = np.where(only, tokens, (tokens + 7) % small.vocab_size).astype(np.int32)
    arguments = positions, ids, cotangent * only[..., None]
    hidden, _, grads = run(small, params, tokens, *arguments)
    other_hidden, _, other_grads = run(small, params, changed, *arguments)
    np.testing.assert_array_equal(hidden[only], other_hidden[only])
    # The embedding's gradient stays with the tokens of the segment.
    close(grads["blocks"], other_grads["blocks"], 1e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"scan_unroll": 2},
        {"remat": "block"},
        {"remat": "dots"},
        {"moe_implementation": "sorted"},
        {"delta_chunk": 32},
    ],
    ids=str,
)
def test_equivalent_configs_agree(small, params, run, example, change):
    expected = run(small, params, *example)
    got = run(dataclasses.replace(small, **change), params, *example)
    close(got, expected)


def test_remat_policies_recompute_more_or_less(small, params, example):
    def products(remat):
        cfg = dataclasses.replace(small, remat=remat)

        def objective(params):
            return jnp.vdot(forward(cfg, params, *example[:3])[0], example[3])

        return str(jax.make_jaxpr(jax.grad(objective))(params)).count("dot_general")

    assert products("none") < products("dots") < products("block")


def test_bfloat16_activations_stay_near_float32(small, params, run, example):
    hidden, _, _ = run(small, params, *example)
    low, _ = jax.jit(forward, static_argnums=0)(
        dataclasses.replace(small, dtype="bfloat16"), params, *example[:3]
    )
    assert low.dtype == jnp.bfloat16
    real = example[2] > 0
    one, other = np.asarray(low, np.float32)[real], np.asarray(hidden)[real]
    # Rounding moves a few tokens to another expert, so only the whole is compared.
    assert np.vdot(one, other) / (np.linalg.norm(one) * np.linalg.norm(other)) > 0.95


def test_router_sums_count_real_tokens_only(small, params, run, example):
    _, aux, _ = run(small, params, *example)
    real = 2 * sum(LENGTHS)
    assert aux["expert_counts"].shape == (small.num_layers, small.num_experts)
    assert float(aux["tokens"]) == real
    np.testing.assert_allclose(
        aux["expert_counts"].sum(axis=-1), real * small.num_experts_per_tok
    )
    np.testing.assert_allclose(aux["router_probs"].sum(axis=-1), real, rtol=1e-5)


def test_load_balance_of_even_and_of_collapsed_routing(small):
    shape = (small.num_layers, small.num_experts)
    even = {
        "expert_counts": jnp.full(shape, 50.0),
        "router_probs": jnp.full(shape, 25.0),
        "tokens": jnp.float32(100.0),
    }
    np.testing.assert_allclose(load_balance_loss(small, even), small.num_experts_per_tok)
    one = jnp.zeros(shape).at[:, 0].set(100.0)
    collapsed = {"expert_counts": one, "router_probs": one, "tokens": jnp.float32(100.0)}
    np.testing.assert_allclose(load_balance_loss(small, collapsed), small.num_experts)


def test_parameters_are_plain_and_seeded(small, params, jitted_init):
    assert type(params) is dict and type(params["blocks"]["layer_0"]["mixer"]) is dict
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
    again, other = (jitted_init(small, jax.random.key(seed)) for seed in (0, 1))
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, params, again)))
    assert not np.array_equal(params["embedding"], other["embedding"])
    # Stacked copies of a layer differ from each other.
    router = params["blocks"]["layer_0"]["moe"]["router"]
    assert router.shape[0] == small.num_blocks and not np.array_equal(router[0], router[1])


def test_untied_head(small, params, jitted_init):
    untied = jitted_init(dataclasses.replace(small, tie_word_embeddings=False), jax.random.key(0))
    assert unembedding(untied) is untied["head"]
    np.testing.assert_array_equal(unembedding(params), params["embedding"].T)


@pytest.fixture(scope="module")
def routed():
    """Dense and routed feed-forwards in turn, behind plain attention."""
    return ModelConfig(
        vocab_size=53,
        hidden_size=24,
        head_dim=8,
        mixers=(FULL,),
        feed_forwards=(DENSE, MOE),
        qk_norm=False,
        attention_gate=False,
        intermediate_size=32,
        num_experts=6,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=0,
    )


def test_replayed_experts_are_used_and_weighed_by_the_router(
    routed, example, jitted_init
):
    params = jitted_init(routed, jax.random.key(0))
    tokens, _, ids, cotangent = example

    def objective(params, expert_ids):
        hidden, aux = forward(
            routed, params, *example[:3], expert_ids=expert_ids, return_expert_ids=True
        )
        return jnp.vdot(hidden, cotangent), (hidden, aux)

    compiled = jax.jit(jax.value_and_grad(objective, has_aux=True))
    free = compiled(params, None)
    chosen = free[0][1][1]["expert_ids"]
    assert chosen.shape == (2, *tokens.shape, 2) and chosen.dtype == jnp.int32
    close(compiled(params, chosen), free, 1e-6)
    forced = (chosen + 1) % routed.num_experts
    (_, (hidden, aux)), grads = compiled(params, forced)
    np.testing.assert_array_equal(aux["expert_ids"], forced)
    for layer in range(2):
        counts = np.bincount(np.asarray(forced)[layer][ids > 0].reshape(-1), minlength=6)
        np.testing.assert_array_equal(aux["expert_counts"][layer], counts)
    assert not np.allclose(hidden, free[0][1][0], atol=1e-2)
    assert float(jnp.linalg.norm(grads["blocks"]["layer_1"]["moe"]["router"])) > 1e-3


def by_definition(moe, cfg, x, ids):
    """The output of experts `ids [N, K]` for `x [N, D]`, token by token."""
    leaf = {name: np.asarray(value[...], np.float64) for name, value in nnx.state(moe).items()}

    def feed_forward(x, gate, up, down):
        return (x @ gate / (1 + np.exp(-x @ gate)) * (x @ up)) @ down

    rows = []
    for token, chosen in zip(x, ids, strict=True):
        logits = token @ leaf["router"]
        weights = (np.exp(logits) / np.exp(logits).sum())[chosen]
        if cfg.norm_topk_prob:
            weights /= weights.sum()
        gate_up = [np.split(leaf["gate_up"][e], 2, axis=1) for e in chosen]
        rows.append(
            sum(
                weight * feed_forward(token, *parts, leaf["down"][e])
                for weight, parts, e in zip(weights, gate_up, chosen, strict=True)
            )
        )
        if cfg.shared_expert_intermediate_size:
            shared = (leaf[f"shared_{name}"] for name in ("gate", "up", "down"))
            gate = 1 / (1 + np.exp(-token @ leaf["shared_router"]))
            rows[-1] = rows[-1] + gate * feed_forward(token, *shared)
    return np.asarray(rows)


@pytest.mark.parametrize(
    "implementation, norm, shared, experts",
    [
        ("dense", True, 0, 6),
        ("dense", False, 8, 40),
        ("sorted", False, 0, 6),
        ("sorted", True, 8, 40),
    ],
)
def test_experts_are_what_their_definition_says(
    routed, implementation, norm, shared, experts
):
    cfg = dataclasses.replace(
        routed,
        moe_implementation=implementation,
        norm_topk_prob=norm,
        shared_expert_intermediate_size=shared,
        num_experts=experts,
    )
    moe = MixtureOfExperts(cfg, Declare(nnx.Rngs(params=0)))
    random = np.random.default_rng(0)
    x = random.normal(size=(1, 9, cfg.hidden_size)).astype(np.float32)
    forced = random.permuted(np.tile(np.arange(experts), (1, 9, 1)), axis=-1)[..., :2]
    out, load = jax.jit(lambda x, ids: moe(x, forced=ids))(x, forced)
    assert load == {}
    np.testing.assert_allclose(out[0], by_definition(moe, cfg, x[0], forced[0]), atol=1e-5)
    # Without an order, those with the largest logits.
    best = np.argsort(-x[0] @ np.asarray(moe.router[...]), axis=-1)[:, :2]
    out, load = jax.jit(lambda x: moe(x, return_chosen=True))(x)
    np.testing.assert_array_equal(load["expert_ids"][0], best)
    np.testing.assert_allclose(out[0], by_definition(moe, cfg, x[0], best), atol=1e-5)


def test_a_model_without_experts_has_no_load(routed, example):
    def run(cfg, *extra, **options):
        return jax.eval_shape(
            lambda: forward(
                cfg, init_params(cfg, jax.random.key(0)), *example[:3], *extra, **options
            )
        )

    cfg = dataclasses.replace(routed, feed_forwards=(DENSE,))
    hidden, aux = run(cfg)
    assert hidden.shape == (2, 96, 24) and aux.keys() == {"tokens"}
    with pytest.raises(ValueError, match="no load to balance"):
        load_balance_loss(cfg, aux)
    with pytest.raises(ValueError, match="no expert ids"):
        run(cfg, return_expert_ids=True)
    with pytest.raises(ValueError, match=r"shape \(1, 2, 96, 2\), expected \(2, 2, 96, 2\)"):
        run(routed, jnp.zeros((1, 2, 96, 2), jnp.int32))
