"""Small pieces of the layers, against numbers worked by hand and their plain forms."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from fastask_jax.model.layers import rotary_table, rotate, swiglu


def test_swiglu_by_hand():
    gate, up = jnp.array([0.0, 1.0, -2.0]), jnp.array([3.0, 2.0, 0.5])
    sigmoid = [0.5, 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(2))]
    expected = [0.0, 2 * sigmoid[1], -1.0 * sigmoid[2]]
    np.testing.assert_allclose(swiglu(gate, up), expected, rtol=1e-6)

    d_gate, d_up = jax.grad(lambda *x: jnp.sum(swiglu(*x)), argnums=(0, 1))(gate, up)
    # silu(x) = x s(x), silu'(x) = s(x) (1 + x (1 - s(x)))
    slope = [s * (1 + g * (1 - s)) for s, g in zip(sigmoid, gate.tolist(), strict=True)]
    np.testing.assert_allclose(d_gate, np.multiply(slope, up), rtol=1e-5)
    np.testing.assert_allclose(d_up, [0.0, sigmoid[1], -2 * sigmoid[2]], rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_swiglu_has_the_gradient_of_its_plain_form(dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    gate, up, weight = (4 * jax.random.normal(key, (5, 7)).astype(dtype) for key in keys)

    def gradients(form):
        total = lambda *x: jnp.sum((form(*x) * weight).astype(jnp.float32))  # noqa: E731
        return jax.jit(jax.grad(total, argnums=(0, 1)))(gate, up)

    plain = gradients(lambda gate, up: jax.nn.silu(gate) * up)
    for ours, theirs in zip(gradients(swiglu), plain, strict=True):
        assert ours.dtype == dtype
        np.testing.assert_allclose(
            ours.astype(jnp.float32), theirs.astype(jnp.float32),
            rtol=1e-5 if dtype == "float32" else 0.03, atol=1e-5 if dtype == "float32" else 0.1,
        )  # fmt: skip


def test_swiglu_is_finite_far_out():
    gate = jnp.array([-1e4, -100.0, 100.0, 1e4])
    d_gate, d_up = jax.grad(lambda *x: jnp.sum(swiglu(*x)), argnums=(0, 1))(gate, jnp.ones(4))
    np.testing.assert_allclose(d_gate, [0, 0, 1, 1], atol=1e-6)
    np.testing.assert_allclose(d_up, [0, 0, 100, 1e4], atol=1e-6)


def test_angles_are_computed_once_however_often_they_turn_something():
    def turned(positions, x):
        table = rotary_table(positions, 8, 10_000.0)
        for _ in range(3):  # each behind a barrier of its own, as matrix products are
            x = jax.lax.optimization_barrier(rotate(x, table))
        return x

    positions, x = jnp.arange(6)[None], jnp.ones((1, 6, 2, 8))
    text = jax.jit(turned).lower(positions, x).compile().as_text()
    assert text.count(" cosine(") == 1
