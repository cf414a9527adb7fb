"""The chunked gated delta rule against the token-by-token definition."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import numpy as jnp

from kernels.gated_delta import causal_conv, gated_delta
from kernels.gated_delta.xla import unit_lower_inverse


def example(batch, length, key_heads=2, heads=4, width=8, value=12, seed=0):
    keys = jax.random.split(jax.random.key(seed), 7)
    q, k = (jax.random.normal(key, (batch, length, key_heads, width)) for key in keys[:2])
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    v = jax.random.normal(keys[2], (batch, length, heads, value))
    log_decay = -jnp.exp(jax.random.normal(keys[3], (batch, length, heads)) - 1.0)
    beta = jax.nn.sigmoid(jax.random.normal(keys[4], (batch, length, heads)))
    state = jax.random.normal(keys[5], (batch, heads, width, value))
    return (q, k, v, log_decay, beta), state, jax.random.normal(keys[6], v.shape)


def runs(batch, length, seed):
    random = np.random.default_rng(seed)
    return jnp.asarray(np.cumsum(random.random((batch, length)) < 0.08, axis=1), jnp.int32)


@pytest.mark.parametrize("chunk", [16, 32, 64])
@pytest.mark.parametrize("length", [1, 7, 32, 65, 130])
def test_values_and_gradients_equal_the_definition(length, chunk):
    inputs, state, cotangent = example(2, length)
    ids = runs(2, length, length)

    def objective(inputs, state, name):
        out, final = gated_delta(*inputs, ids, state, chunk=chunk, implementation=name)
        return jnp.vdot(out, cotangent) + jnp.sum(jnp.sin(final)), (out, final)

    grad = jax.value_and_grad(objective, (0, 1), has_aux=True)
    (_, expected), expected_grads = grad(inputs, state, "reference")
    (_, got), got_grads = grad(inputs, state, "xla")
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)
    for x, y in zip(jax.tree.leaves(got_grads), jax.tree.leaves(expected_grads), strict=True):
        assert jnp.linalg.norm(x - y) <= 2e-5 * jnp.linalg.norm(y) + 1e-6


@settings(max_examples=12, deadline=None)
@given(cuts=st.lists(st.integers(1, 79), max_size=5, unique=True), seed=st.integers(0, 9))
def test_segments_don_t_see_each_other(cuts, seed):
    inputs, _, _ = example(1, 80, seed=seed)
    bounds = [0, *sorted(cuts), 80]
    ids = jnp.asarray(np.searchsorted(bounds, np.arange(80), side="right"), jnp.int32)[None]
    packed, final = gated_delta(*inputs, ids)
    for start, stop in zip(bounds, bounds[1:], strict=False):
        alone, alone_final = gated_delta(*(x[:, start:stop] for x in inputs))
        np.testing.assert_allclose(packed[:, start:stop], alone, atol=1e-5)
    np.testing.assert_allclose(final, alone_final, atol=1e-5)


def test_every_token_its_own_segment():
    (q, k, v, log_decay, beta), state, _ = example(1, 40, key_heads=4)
    out, _ = gated_delta(q, k, v, log_decay, beta, jnp.arange(40)[None], state)
    expected = beta[..., None] * v * jnp.sum(q * k, axis=-1, keepdims=True)
    np.testing.assert_allclose(out[:, 1:], expected[:, 1:], atol=1e-5)


def test_pieces_continue_from_the_state():
    inputs, state, _ = example(2, 50)
    whole, final = gated_delta(*inputs, None, state)
    outputs = []
    for start, stop in ((0, 1), (1, 30), (30, 31), (31, 50)):
        out, state = gated_delta(*(x[:, start:stop] for x in inputs), None, state)
        outputs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), whole, atol=1e-5)
    np.testing.assert_allclose(state, final, atol=1e-5)


@pytest.mark.parametrize("length", [1, 20])
def test_a_token_without_gates_keeps_the_state(length):
    (q, k, v, log_decay, beta), state, _ = example(2, length)
    _, final = gated_delta(q, k, v, 0 * log_decay, 0 * beta, None, state)
    np.testing.assert_array_equal(final, state)


def test_repeated_keys_don_t_lose_digits():
    """High powers of the chunk's triangular system would be ~1e8 here and cancel."""
    (q, k, v, log_decay, beta), state, _ = example(1, 64, key_heads=4)
    k = jnp.broadcast_to(k[:, :1], k.shape)
    gates = (0 * log_decay, jnp.ones_like(beta))
    got, _ = gated_delta(q, k, v, *gates, None, state, chunk=64)
    expected, _ = gated_delta(q, k, v, *gates, None, state, implementation="reference")
    np.testing.assert_allclose(got, expected, atol=5e-5)


def test_strong_decay_has_finite_gradients():
    (q, k, v, log_decay, beta), _, _ = example(1, 70)
    grads = jax.grad(lambda g: gated_delta(q, k, v, g, beta, runs(1, 70, 1))[0].sum())(
        500.0 * log_decay
    )
    assert bool(jnp.isfinite(grads).all())


@pytest.mark.parametrize("size", [1, 5, 16, 24, 32, 64])
def test_inverse_of_a_unit_triangle_and_its_gradient(size):
    system = jnp.tril(jax.random.normal(jax.random.key(0), (3, size, size)), -1) / size**0.5
    np.testing.assert_allclose(
        unit_lower_inverse(system), jnp.linalg.inv(jnp.eye(size) + system), atol=2e-5
    )

    def objective(invert):
        return jax.grad(lambda a: jnp.sum(jnp.sin(invert(a))))(system)

    expected = objective(lambda a: jnp.linalg.inv(jnp.eye(size) + jnp.tril(a, -1)))
    np.testing.assert_allclose(objective(unit_lower_inverse), expected, atol=1e-4)


def test_convolution_against_its_sum_and_its_state():
    x = jax.random.normal(jax.random.key(0), (2, 30, 6))
    weight = jax.random.normal(jax.random.key(1), (4, 6))
    ids = runs(2, 30, 3)
    expected = np.zeros(x.shape, np.float32)
    for b in range(2):
        for t in range(30):
            for back in range(min(t, 3) + 1):
                if ids[b, t] == ids[b, t - back]:
                    expected[b, t] += np.asarray(weight[3 - back] * x[b, t - back])
    np.testing.assert_allclose(causal_conv(x, weight, ids), expected, atol=1e-5)
    whole = causal_conv(x, weight)
    tail = causal_conv(x[:, 10:], weight, None, x[:, 7:10])
    np.testing.assert_allclose(tail, whole[:, 10:], atol=1e-6)


def test_convolution_gradients_against_finite_sums():
    x = jax.random.normal(jax.random.key(0), (2, 20, 3))
    weight = jax.random.normal(jax.random.key(1), (4, 3))
    cotangent = jax.random.normal(jax.random.key(2), x.shape)
    ids = runs(2, 20, 5)
    # The convolution is linear in each argument, so unit vectors give its exact gradient.
    got_x, got_weight = jax.grad(
        lambda x, w: jnp.vdot(causal_conv(x, w, ids), cotangent), (0, 1)
    )(x, weight)
    units = jnp.eye(weight.size).reshape(-1, 4, 3)
    expected = jax.vmap(lambda w: jnp.vdot(causal_conv(x, w, ids), cotangent))(units)
    np.testing.assert_allclose(got_weight.ravel(), expected, atol=1e-4)
    units = jnp.eye(x.size).reshape(-1, *x.shape)
    expected = jax.vmap(lambda u: jnp.vdot(causal_conv(u, weight, ids), cotangent))(units)
    np.testing.assert_allclose(got_x.ravel(), expected, atol=1e-4)


def test_bad_arguments_are_refused():
    (q, k, v, log_decay, beta), state, _ = example(1, 8)
    with pytest.raises(ValueError, match="gated_delta shapes don't fit"):
        gated_delta(q[:, :4], k, v, log_decay, beta)
    with pytest.raises(ValueError, match="log_decay and beta must be"):
        gated_delta(q, k, v, log_decay[..., :1], beta)
    with pytest.raises(ValueError, match="unknown implementation 'pallas'"):
        gated_delta(q, k, v, log_decay, beta, implementation="pallas")
    with pytest.raises(ValueError, match="not both"):
        causal_conv(v[:, :, 0], jnp.ones((4, 12)), jnp.ones((1, 8)), jnp.zeros((1, 3, 12)))
