"""Segments packed into a row give what each gives alone: values and every gradient."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import numpy as jnp

from kernels.attention import attention
from kernels.gated_delta import causal_conv, gated_delta

LENGTH = 150


def attend(q, k, v, ids, implementation):
    return attention(q, k, v, ids, implementation=implementation)


def delta(q, k, v, log_decay, beta, ids, chunk):
    return gated_delta(q, k, v, log_decay, beta, ids, chunk=chunk)[0]


def convolve(x, ids):
    weight = jnp.asarray([[0.3], [-1.0], [0.5], [2.0]]) * jnp.ones((4, 3))
    return causal_conv(x, weight, ids)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal((1, LENGTH, *shape)).astype(np.float32)


def tokens(kind):
    if kind == "attention":
        return normal(0, 4, 8), normal(1, 2, 8), normal(2, 2, 8)
    if kind == "conv":
        return (normal(0, 3),)
    k = normal(1, 2, 8)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    gates = -np.exp(normal(3, 4) - 1), 1 / (1 + np.exp(-normal(4, 4)))
    return normal(0, 2, 8), k, normal(2, 4, 8), *gates


OPERATIONS = {
    "attention, xla": ("attention", functools.partial(attend, implementation="xla")),
    "attention, blocks": ("attention", functools.partial(attend, implementation="blocks")),
    "gated_delta, chunks of 16": ("gated_delta", functools.partial(delta, chunk=16)),
    "gated_delta, chunks of 64": ("gated_delta", functools.partial(delta, chunk=64)),
    "conv": ("conv", convolve),
}


@functools.cache
def compiled(name):
    """Output and gradients of one row, in one compilation for all packings."""
    kind, operation = OPERATIONS[name]
    inputs = tokens(kind)
    cotangent = normal(9, *jax.eval_shape(operation, *inputs, np.ones((1, LENGTH), int)).shape[2:])

    def objective(inputs, ids, cotangent):
        out = operation(*inputs, ids)
        return jnp.vdot(out, cotangent), out

    return jax.jit(jax.grad(objective, has_aux=True)), inputs, cotangent


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(cuts=st.lists(st.integers(1, LENGTH - 1), max_size=6, unique=True))
def test_a_packed_segment_is_as_if_alone(name, cuts):
    step, inputs, cotangent = compiled(name)
    bounds = [0, *sorted(cuts), LENGTH]
    ids = np.searchsorted(bounds, np.arange(LENGTH), side="right").astype(np.int32)[None]
    packed_grads, packed = step(inputs, ids, cotangent)
    for start, stop in zip(bounds, bounds[1:], strict=False):
        # The segment at the front of a row of zeros, which are another segment.
        n = stop - start
        alone = [np.zeros_like(x) for x in (*inputs, cotangent)]
        for target, source in zip(alone, (*inputs, cotangent), strict=True):
            target[:, :n] = source[:, start:stop]
        own = (np.arange(LENGTH) < n).astype(np.int32)[None]
        grads, out = step(tuple(alone[:-1]), own, alone[-1])
        np.testing.assert_allclose(out[:, :n], packed[:, start:stop], atol=2e-5)
        for a, b in zip(grads, packed_grads, strict=True):
            np.testing.assert_allclose(a[:, :n], b[:, start:stop], rtol=1e-4, atol=2e-5)
