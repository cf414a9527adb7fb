"""Chunked token scores against the plain softmax."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from kernels.linear_logprob import linear_logprob, xla

ROOT = Path(__file__).resolve().parents[2]


def example(tokens, width, vocab, scale=1.0, seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    hidden = scale * jax.random.normal(keys[0], (tokens, width))
    head = jax.random.normal(keys[1], (width, vocab))
    ids = jax.random.randint(keys[2], (tokens,), 0, vocab)
    weights = jax.random.normal(keys[3], (3, tokens))
    return hidden, head, ids, weights


def objective(hidden, head, ids, weights, temperature, implementation, mask=None):
    outputs = linear_logprob(hidden, head, ids, temperature, mask, implementation=implementation)
    return sum(jnp.vdot(w, x) for w, x in zip(weights, outputs, strict=True)), outputs


GRAD = jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True), static_argnums=5)


@pytest.mark.parametrize("wanted", [None, 1.0, 0.3, 0.0])
@pytest.mark.parametrize(
    "tokens, vocab, temperature", [(1, 300, 1.0), (65, 1000, 0.1), (600, 2049, 2.0)]
)
def test_values_and_gradients_equal_the_reference(tokens, vocab, temperature, wanted):
    hidden, head, ids, weights = example(tokens, 24, vocab, scale=0.3)
    mask = None
    if wanted is not None:
        mask = jax.random.uniform(jax.random.key(9), (tokens,)) < wanted
    results = {
        name: GRAD(hidden, head, ids, weights, temperature, name, mask)
        for name in ("reference", "xla")
    }
    (_, expected), expected_grads = results["reference"]
    (_, got), got_grads = results["xla"]
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-5)
    if mask is not None:
        assert not np.asarray(got)[:, ~mask].any() and not np.asarray(got_grads[0])[~mask].any()
    for x, y in zip(got_grads, expected_grads, strict=True):
        assert jnp.linalg.norm(x - y) <= 1e-5 * jnp.linalg.norm(y)


@pytest.mark.parametrize("kept", [0, 256 * 130, 1 << 20])
@pytest.mark.parametrize("vocab", [257, 512, 700, 2049])
def test_blocks_of_words_equal_the_reference(vocab, kept, monkeypatch):
    """Several blocks of words and of tokens, the last ones overlapping the ones before; logits of
    none, of two and of all blocks kept."""
    blocks = xla.Sizes(words=256, elements=256 * 24, kept=kept)
    monkeypatch.setitem(xla.SIZES, "cpu", blocks)
    hidden, head, ids, weights = example(60, 16, vocab)
    mask = jax.random.uniform(jax.random.key(9), (60,)) < 0.8

    def grad(name):
        step = jax.value_and_grad(objective, (0, 1), has_aux=True)
        return jax.jit(step, static_argnums=5)(hidden, head, ids, weights, 0.7, name, mask)

    for x, y in zip(jax.tree.leaves(grad("xla")), jax.tree.leaves(grad("reference")), strict=True):
        assert jnp.linalg.norm(x - y) <= 1e-5 * jnp.linalg.norm(y)


def test_a_column_of_every_block_may_be_the_largest(monkeypatch):
    monkeypatch.setitem(xla.SIZES, "cpu", xla.Sizes(words=256, elements=1 << 21, kept=0))
    hidden, ids = jnp.ones((6, 1)), jnp.asarray([0, 255, 256, 511, 512, 699])
    logits = -1e4 * jnp.ones((6, 700))
    for token, column in enumerate(ids.tolist()):
        logits = logits.at[token, column].set(1e4)
    for token in range(6):
        score = linear_logprob(hidden[:1], logits[token][None], ids[token : token + 1])
        np.testing.assert_allclose(np.asarray(score).ravel(), [0.0, 0.0, 1e4])


def test_masked_tokens_may_hold_anything():
    hidden, head, ids, weights = example(50, 8, 40)
    mask = jnp.arange(50) % 3 == 0
    wild = jnp.where(mask[:, None], hidden, jnp.nan)
    expected = GRAD(hidden, head, ids, weights, 1.0, "xla", mask)
    got = GRAD(wild, head, jnp.where(mask, ids, 10**6), weights, 1.0, "xla", mask)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_temperature_may_differ_by_token():
    hidden, head, ids, _ = example(9, 8, 50)
    temperature = jnp.linspace(0.5, 2.0, 9)
    score = jax.jit(linear_logprob)
    together = score(hidden, head, ids, temperature)
    for t in range(9):
        alone = score(hidden[t : t + 1], head, ids[t : t + 1], temperature[t])
        for x, y in zip(together, alone, strict=True):
            np.testing.assert_allclose(x[t], y[0], rtol=1e-6, atol=1e-6)


def test_hand_worked_case():
    # logits (0, ln 3): probabilities 1/4 and 3/4
    logprob, entropy, lse = linear_logprob(
        jnp.ones((1, 1)), jnp.asarray([[0.0, np.log(3.0)]]), jnp.asarray([1])
    )
    np.testing.assert_allclose(logprob, [np.log(0.75)], rtol=1e-6)
    np.testing.assert_allclose(entropy, [-0.25 * np.log(0.25) - 0.75 * np.log(0.75)], rtol=1e-6)
    np.testing.assert_allclose(lse, [np.log(4.0)], rtol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_huge_logits_stay_finite_and_logprobs_never_positive(implementation):
    hidden, head, ids, weights = example(40, 16, 333, scale=1e3)
    ids = jnp.argmax(hidden @ head, axis=-1)
    (_, outputs), grads = GRAD(hidden, head, ids, weights, 1.0, implementation)
    assert all(bool(jnp.isfinite(x).all()) for x in (*outputs, *grads))
    assert float(outputs[0].max()) <= 0.0
    assert float(outputs[1].min()) >= -1e-6


def test_bfloat16_inputs_accumulate_in_float32():
    hidden, head, ids, _ = example(64, 64, 1000, scale=0.1)
    low = linear_logprob(hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16), ids)
    upcast = linear_logprob(
        hidden.astype(jnp.bfloat16).astype(jnp.float32),
        head.astype(jnp.bfloat16).astype(jnp.float32),
        ids,
    )
    for x, y in zip(low, upcast, strict=True):
        assert x.dtype == jnp.float32
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("tokens, kept", [(4096, 0), (4096, 1 << 22), (16_384, None)])
def test_memory_is_one_block_and_what_is_kept(tokens, kept, monkeypatch):
    if kept is not None:
        monkeypatch.setitem(xla.SIZES, "cpu", xla.SIZES["cpu"]._replace(kept=kept))
    vocab = 16_384
    hidden, head, ids, weights = example(tokens, 8, vocab)
    compiled = (
        jax.jit(jax.grad(lambda h, w: objective(h, w, ids, weights, 1.0, "xla")[0], (0, 1)))
        .lower(hidden, head)
        .compile()
    )
    beyond = compiled.memory_analysis().temp_size_in_bytes - 4 * xla.SIZES["cpu"].kept
    assert beyond < 4 * 4096 * vocab / 4


def test_leading_axes_are_kept_and_bad_shapes_are_refused():
    hidden, head, ids, _ = example(12, 8, 20)
    outputs = linear_logprob(hidden.reshape(3, 4, 8), head, ids.reshape(3, 4))
    assert all(x.shape == (3, 4) for x in outputs)
    with pytest.raises(ValueError, match=r"needs hidden \[..., D\]"):
        linear_logprob(hidden, head.T, ids)
    with pytest.raises(ValueError, match="mask must be"):
        linear_logprob(hidden, head, ids, mask=jnp.ones(3, bool))
    with pytest.raises(ValueError, match="unknown implementation 'tpu'"):
        linear_logprob(hidden, head, ids, implementation="tpu")


# The vocabulary over four fake devices, so in a process of its own; prints the largest error.
SPLIT = """
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
from functools import partial
from jax import numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P
from kernels.linear_logprob import linear_logprob, xla

keys = jax.random.split(jax.random.key(0), 5)
hidden = 0.3 * jax.random.normal(keys[0], (2, 70, 24))
# Each device's words are several blocks, the first of them kept.
xla.SIZES["cpu"] = xla.Sizes(words=128, elements=1 << 21, kept=128 * 150)
head = jax.random.normal(keys[1], (24, 2400))
ids = jax.random.randint(keys[2], (2, 70), 0, 2400)
weights = jax.random.normal(keys[3], (3, 2, 70))
# Rows with different numbers of wanted tokens: devices of different rows loop differently often.
mask = jax.random.uniform(keys[4], (2, 70)) < jnp.asarray([[0.1], [0.9]])

def value(hidden, head, implementation, mesh):
    def score(hidden, head, ids, mask):
        return linear_logprob(
            hidden, head, ids, 0.7, mask, axis_name="vocab" if mesh else None,
            implementation=implementation,
        )
    if mesh:
        rows = P("rows")
        score = jax.shard_map(
            score, mesh=mesh, in_specs=(rows, P(None, "vocab"), rows, rows),
            out_specs=(rows, rows, rows), check_vma=False,
        )
    outputs = score(hidden, head, ids, mask)
    return sum(jnp.vdot(w, x) for w, x in zip(weights, outputs)), outputs

def run(*static):
    step = jax.jit(
        jax.value_and_grad(partial(value, implementation=static[0], mesh=static[1]),
        (0, 1), has_aux=True)
    )
    (_, outputs), grads = step(hidden, head)
    return jax.device_get((*outputs, *grads))

expected = run("reference", None)
for shape in ((2, 2), (1, 4), (1, 8)):
    devices = jax.devices()[: shape[0] * shape[1]]
    mesh = jax.make_mesh(
        shape, ("rows", "vocab"), axis_types=(AxisType.Auto,) * 2, devices=devices
    )
    for implementation in ("xla", "reference"):
        for got, wanted in zip(run(implementation, mesh), expected):
            print(jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted))
"""


@pytest.mark.slow
def test_a_split_vocabulary_gives_the_whole_one_s_values_and_gradients():
    done = subprocess.run(
        [sys.executable, "-c", SPLIT], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    errors = [float(line) for line in done.stdout.split()]
    assert len(errors) == 30 and max(errors) < 1e-6, errors


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_what_isn_t_wanted_may_hold_anything(implementation):
    hidden, head, ids, _ = example(6, 8, 20)
    mask = jnp.arange(6) % 2 == 0
    heat = jnp.where(mask, 0.7, jnp.asarray([1, 0, 1, jnp.nan, 1, 1e-40]))

    def loss(hidden, head, ids, heat, mask):
        logprob, entropy, lse = linear_logprob(
            hidden, head, ids, heat, mask, implementation=implementation
        )
        return jnp.sum(logprob + entropy + 0.1 * lse)

    dirty = jnp.where(mask[:, None], hidden, jnp.nan)
    got = jax.value_and_grad(loss, (0, 1))(dirty, head, jnp.where(mask, ids, -5), heat, mask)
    wanted = jax.value_and_grad(loss, (0, 1))(hidden[::2], head, ids[::2], 0.7, None)
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-6)
    np.testing.assert_allclose(got[1][0][::2], wanted[1][0], atol=1e-6)
    np.testing.assert_allclose(got[1][1], wanted[1][1], atol=1e-6)
    assert not jnp.any(got[1][0][1::2])


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_an_id_outside_of_the_vocabulary_has_no_logprob(implementation):
    hidden, head, _, _ = example(4, 8, 20)
    ids = np.asarray([20, -1, 19, 0])  # not yet on a device
    run = jax.jit(lambda hidden: linear_logprob(hidden, head, ids, implementation=implementation))
    logprob, entropy, _ = run(hidden)
    assert jnp.isnan(logprob).tolist() == [True, True, False, False]
    assert jnp.isfinite(entropy).all()


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_sizes_at_the_edge(implementation):
    hidden, head, ids, _ = example(4, 8, 20)
    for shape in ((0,), (2, 0)):
        found = linear_logprob(
            jnp.ones((*shape, 8)), head, jnp.zeros(shape, jnp.int32), implementation=implementation
        )
        assert [x.shape for x in found] == [shape] * 3
    for bad in ((hidden, head[:, :0]), (hidden[:, :0], head[:0])):
        with pytest.raises(ValueError, match="linear_logprob needs"):
            linear_logprob(*bad, ids, implementation=implementation)
