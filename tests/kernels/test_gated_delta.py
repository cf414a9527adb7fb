"""The chunked gated delta rule against the token-by-token definition."""

import functools
import sys

import jax
import jax.extend
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import numpy as jnp

from kernels.gated_delta import causal_conv, gated_delta, xla
from kernels.gated_delta.chunk import unit_lower_inverse


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


@pytest.mark.parametrize("form", ["by blocks", "by chunks"])
@pytest.mark.parametrize("length, chunk", [(1, 32), (7, 16), (32, 32), (65, 64), (130, 32)])
def test_values_and_gradients_equal_the_definition(length, chunk, form, monkeypatch):
    monkeypatch.setattr(xla, "WIDE_CPU", 0 if form == "by chunks" else sys.maxsize)
    inputs, state, cotangent = example(2, length)
    ids = runs(2, length, length)

    def objective(inputs, state, name):
        out, final = gated_delta(*inputs, ids, state, chunk=chunk, implementation=name)
        return jnp.vdot(out, cotangent) + jnp.sum(jnp.sin(final)), (out, final)

    grad = jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True), static_argnums=2)
    (_, expected), expected_grads = grad(inputs, state, "reference")
    (_, got), got_grads = grad(inputs, state, "xla")
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)
    for x, y in zip(jax.tree.leaves(got_grads), jax.tree.leaves(expected_grads), strict=True):
        assert jnp.linalg.norm(x - y) <= 2e-5 * jnp.linalg.norm(y) + 1e-6


@pytest.fixture(scope="module")
def whole_rows():
    """The op on rows of one shape, so that random packings compile once."""
    return jax.jit(gated_delta)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(cuts=st.lists(st.integers(1, 79), max_size=5, unique=True), seed=st.integers(0, 9))
def test_segments_don_t_see_each_other(whole_rows, cuts, seed):
    inputs, _, _ = example(1, 80, seed=seed)
    bounds = [0, *sorted(cuts), 80]
    ids = jnp.asarray(np.searchsorted(bounds, np.arange(80), side="right"), jnp.int32)[None]
    packed, final = whole_rows(*inputs, ids)
    for number, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False), 1):
        # The segment alone in a row, followed by tokens without gates, which change nothing.
        alone = [np.zeros(x.shape, np.float32) for x in inputs]
        for target, x in zip(alone, inputs, strict=True):
            target[:, : stop - start] = x[:, start:stop]
        out, alone_final = whole_rows(*alone, jnp.full((1, 80), number))
        np.testing.assert_allclose(packed[:, start:stop], out[:, : stop - start], atol=1e-5)
    np.testing.assert_allclose(final, alone_final, atol=1e-5)


def test_every_token_its_own_segment():
    (q, k, v, log_decay, beta), state, _ = example(1, 40, key_heads=4)
    out, _ = jax.jit(gated_delta)(q, k, v, log_decay, beta, jnp.arange(40)[None], state)
    expected = beta[..., None] * v * jnp.sum(q * k, axis=-1, keepdims=True)
    np.testing.assert_allclose(out[:, 1:], expected[:, 1:], atol=1e-5)


def test_pieces_continue_from_the_state():
    inputs, state, _ = example(2, 50)
    op = jax.jit(gated_delta)
    whole, final = op(*inputs, None, state)
    outputs = []
    for start, stop in ((0, 1), (1, 25), (25, 26), (26, 50)):
        out, state = op(*(x[:, start:stop] for x in inputs), None, state)
        outputs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), whole, atol=1e-5)
    np.testing.assert_allclose(state, final, atol=1e-5)


@pytest.mark.parametrize("length", [1, 20])
def test_a_token_without_gates_keeps_the_state(length):
    (q, k, v, log_decay, beta), state, _ = example(2, length)
    _, final = jax.jit(gated_delta)(q, k, v, 0 * log_decay, 0 * beta, None, state)
    np.testing.assert_array_equal(final, state)


def test_repeated_keys_don_t_lose_digits():
    """High powers of the chunk's triangular system would be ~1e8 here and cancel."""
    (q, k, v, log_decay, beta), state, _ = example(1, 64, key_heads=4)
    k = jnp.broadcast_to(k[:, :1], k.shape)
    gates = (0 * log_decay, jnp.ones_like(beta))
    op = jax.jit(gated_delta, static_argnames=("chunk", "implementation"))
    got, _ = op(q, k, v, *gates, None, state, chunk=64)
    expected, _ = op(q, k, v, *gates, None, state, implementation="reference")
    np.testing.assert_allclose(got, expected, atol=5e-5)


def test_strong_decay_has_finite_gradients():
    (q, k, v, log_decay, beta), _, _ = example(1, 70)
    grad = jax.grad(lambda g: gated_delta(q, k, v, g, beta, runs(1, 70, 1))[0].sum())
    grads = jax.jit(grad)(500.0 * log_decay)
    assert bool(jnp.isfinite(grads).all())


@pytest.mark.parametrize("size", [1, 5, 24, 64])
def test_inverse_of_a_unit_triangle_and_its_gradient(size):
    system = jnp.tril(jax.random.normal(jax.random.key(0), (3, size, size)), -1) / size**0.5
    np.testing.assert_allclose(
        unit_lower_inverse(system), jnp.linalg.inv(jnp.eye(size) + system), atol=2e-5
    )

    def objective(invert):
        return jax.jit(jax.grad(lambda a: jnp.sum(jnp.sin(invert(a)))))(system)

    expected = objective(lambda a: jnp.linalg.inv(jnp.eye(size) + jnp.tril(a, -1)))
    np.testing.assert_allclose(objective(unit_lower_inverse), expected, atol=1e-4)


def test_convolution_against_its_sum_and_its_state():
    x = jax.random.normal(jax.random.key(0), (2, 30, 6))
    weight = jax.random.normal(jax.random.key(1), (4, 6))
    ids = runs(2, 30, 3)
    expected = np.zeros(x.shape, np.float32)
    rows, taps, where = (np.asarray(a) for a in (x, weight, ids))
    for b in range(2):
        for t in range(30):
            for back in range(min(t, 3) + 1):
                if where[b, t] == where[b, t - back]:
                    expected[b, t] += taps[3 - back] * rows[b, t - back]
    conv = jax.jit(causal_conv)
    np.testing.assert_allclose(conv(x, weight, ids), expected, atol=1e-5)
    whole = conv(x, weight)
    tail = conv(x[:, 10:], weight, None, x[:, 7:10])
    np.testing.assert_allclose(tail, whole[:, 10:], atol=1e-6)


def test_convolution_gradients_against_finite_sums():
    x = jax.random.normal(jax.random.key(0), (2, 20, 3))
    weight = jax.random.normal(jax.random.key(1), (4, 3))
    cotangent = jax.random.normal(jax.random.key(2), x.shape)
    ids = runs(2, 20, 5)
    # The convolution is linear in each argument, so unit vectors give its exact gradient.
    def objective(x, weight):
        return jnp.vdot(causal_conv(x, weight, ids), cotangent)

    got_x, got_weight = jax.jit(jax.grad(objective, (0, 1)))(x, weight)
    units = jnp.eye(weight.size).reshape(-1, 4, 3)
    expected = jax.jit(jax.vmap(objective, (None, 0)))(x, units)
    np.testing.assert_allclose(got_weight.ravel(), expected, atol=1e-4)
    units = jnp.eye(x.size).reshape(-1, *x.shape)
    expected = jax.jit(jax.vmap(objective, (0, None)))(units, weight)
    np.testing.assert_allclose(got_x.ravel(), expected, atol=1e-4)


def test_bad_arguments_are_refused():
    (q, k, v, log_decay, beta), state, _ = example(1, 8)
    with pytest.raises(ValueError, match="gated_delta shapes don't fit"):
        gated_delta(q[:, :4], k, v, log_decay, beta)
    with pytest.raises(ValueError, match="log_decay and beta must be"):
        gated_delta(q, k, v, log_decay[..., :1], beta)
    with pytest.raises(ValueError, match="unknown implementation 'mosaic' of gated_delta"):
        gated_delta(q, k, v, log_decay, beta, implementation="mosaic")
    with pytest.raises(ValueError, match="not both"):
        causal_conv(v[:, :, 0], jnp.ones((4, 12)), jnp.ones((1, 8)), jnp.zeros((1, 3, 12)))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("width", [4, 64])
def test_a_decay_of_minus_infinity_is_a_reset(implementation, width):
    x = jnp.full((1, 4, 1, width), width**-0.5)
    beta = jnp.full((1, 4, 1), 0.5)
    decay = jnp.zeros((1, 4, 1)).at[0, 2].set(-jnp.inf)
    run = jax.value_and_grad(
        lambda x: jnp.sum(gated_delta(x, x, x, decay, beta, implementation=implementation)[0])
    )
    value, gradient = run(x)
    # In units of a token's value, the state holds 1/2, 3/4, and again 1/2, 3/4.
    np.testing.assert_allclose(value, 2 * (0.5 + 0.75) * width**0.5, rtol=1e-6)
    assert jnp.isfinite(gradient).all()


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_shapes_at_the_edge(implementation):
    inputs, state, _ = example(2, 8)
    op = functools.partial(gated_delta, implementation=implementation)
    for bad in (state[:1], state[:, :1], state[..., :1]):
        with pytest.raises(ValueError, match="initial_state must be"):
            op(*inputs, None, bad)
    with pytest.raises(ValueError, match="segment_ids must be"):
        op(*inputs, jnp.ones((2, 7), jnp.int32))
    with pytest.raises(ValueError, match="chunk must be at least 1"):
        op(*inputs, chunk=0)
    out, after = op(*(x[:, :0] for x in inputs), None, state)
    assert out.shape == (*inputs[2].shape[:1], 0, *inputs[2].shape[2:])
    np.testing.assert_array_equal(after, state)
    assert op(*(x[:0] for x in inputs))[1].shape == (0, *state.shape[1:])


def test_a_convolution_of_another_shape_is_refused():
    x, weight = jnp.ones((1, 5, 2)), jnp.ones((3, 2))
    for state in (jnp.zeros((1, 3, 2)), jnp.zeros((1, 1, 2)), jnp.zeros((2, 2, 2))):
        with pytest.raises(ValueError, match=r"the state must be \(1, 2, 2\)"):
            causal_conv(x, weight, None, state)
    with pytest.raises(ValueError, match="segment_ids must be"):
        causal_conv(x, weight, jnp.ones((1, 4)))
    with pytest.raises(ValueError, match="causal_conv needs"):
        causal_conv(x, weight[:, :1])


def test_products_are_exact_where_the_platform_would_round():
    """Accelerators multiply float32 in fewer bits unless told otherwise."""
    inputs, _, _ = example(1, 40)
    traced = jax.make_jaxpr(
        jax.grad(lambda v: gated_delta(*inputs[:2], v, *inputs[3:], implementation="xla")[0].sum())
    )(inputs[2])
    dots = [e for e in equations(traced.jaxpr) if e.primitive.name == "dot_general"]
    found = [equation.params["precision"] for equation in dots]
    assert len(found) > 10
    highest = jax.lax.Precision.HIGHEST
    assert all(precision == (highest, highest) for precision in found)


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner)
