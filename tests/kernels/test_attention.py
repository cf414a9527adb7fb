"""Packed attention: every implementation against the definition, and the cached form."""

import functools

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from kernels.attention import attention, cached_attention


def example(batch, length, heads=4, groups=2, width=16, seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    q = jax.random.normal(keys[0], (batch, length, heads, width))
    k, v = (jax.random.normal(key, (batch, length, groups, width)) for key in keys[1:3])
    return q, k, v, jax.random.normal(keys[3], q.shape)


def segments(batch, length, seed=0):
    """Rows of random segments, the last of a row being padding (0)."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(batch):
        cuts = np.sort(random.integers(0, length + 1, 3))
        ids = np.searchsorted(cuts, np.arange(length), side="right") + 1
        rows.append(np.where(ids == 4, 0, ids))
    return jnp.asarray(np.stack(rows), jnp.int32)


@pytest.mark.parametrize("implementation", ["xla", "blocks"])
@pytest.mark.parametrize("length", [1, 64, 65, 300])
def test_values_and_gradients_equal_the_reference(implementation, length):
    q, k, v, cotangent = example(2, length)
    ids = segments(2, length)

    def objective(q, k, v, name):
        out = attention(q, k, v, ids, implementation=name)
        return jnp.vdot(out, cotangent), out

    grad = jax.jit(jax.value_and_grad(objective, (0, 1, 2), has_aux=True), static_argnums=3)
    (_, expected), expected_grads = grad(q, k, v, "reference")
    (_, got), got_grads = grad(q, k, v, implementation)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    for x, y in zip(got_grads, expected_grads, strict=True):
        # At length 1 the gradients of queries and keys are zero but for rounding.
        assert jnp.linalg.norm(x - y) <= 1e-5 * jnp.linalg.norm(y) + 1e-5


@pytest.mark.parametrize("implementation", ["reference", "xla", "blocks"])
def test_a_segment_ignores_the_rest_of_its_row(implementation):
    q, k, v, _ = example(1, 150)
    ids = jnp.where(jnp.arange(150) < 90, 3, 7)[None]
    op = jax.jit(functools.partial(attention, implementation=implementation))
    packed = op(q, k, v, ids)
    for part in (slice(0, 90), slice(90, 150)):
        alone = op(q[:, part], k[:, part], v[:, part], ids[:, part])
        np.testing.assert_allclose(packed[:, part], alone, atol=1e-6)
    disturbed = op(q, k.at[:, :90].mul(50.0), v.at[:, :90].add(9.0), ids)
    np.testing.assert_array_equal(disturbed[:, 90:], packed[:, 90:])


def test_large_scores_stay_finite():
    q, k, v, cotangent = example(1, 130)
    ids = segments(1, 130)
    grad = jax.grad(
        lambda q, k: jnp.vdot(attention(q, k, v, ids, implementation="blocks"), cotangent), (0, 1)
    )
    grads = jax.jit(grad)(300.0 * q, 300.0 * k)
    assert all(bool(jnp.isfinite(g).all()) for g in grads)


def test_memory_of_blocks_is_linear_in_the_row():
    def temporaries(length):
        q, k, v, _ = example(1, length, heads=1, groups=1)
        ids = jnp.ones((1, length), jnp.int32)
        compiled = (
            jax.jit(jax.grad(lambda q: attention(q, k, v, ids, implementation="blocks").sum()))
            .lower(q)
            .compile()
        )
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(4096) < 5 * temporaries(1024)


CACHED = ("reference", "xla", "blocks")


def cached(start, tokens, size):
    """Packed rows of one segment each, and the same as a cache with `tokens` new tokens behind
    the first `start[s]`: what the packed form gives for them, and the arguments."""
    q, k, v, _ = example(len(start), size)
    full = attention(q, k, v, jnp.ones((len(start), size), jnp.int32), implementation="reference")
    new = [np.s_[s, n : n + tokens] for s, n in enumerate(start)]
    expected = jnp.stack([full[at] for at in new])
    take = jnp.stack([q[at] for at in new])
    keys, values = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
    return expected, (take, keys, values, jnp.asarray(start))


@pytest.mark.parametrize("implementation", [None, *CACHED])
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_cached_attention_equals_packed(implementation, tokens):
    expected, arguments = cached([0, 9, 14, 64, 130], tokens, 200)
    got = cached_attention(*arguments, implementation=implementation)
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("implementation", CACHED)
def test_cached_attention_over_blocks_of_keys(implementation):
    """A cache of several blocks, the last one ragged; what a row gets doesn't depend on how far
    the others make it go, bit for bit."""
    expected, arguments = cached([0, 254, 590], 7, 600)
    form = functools.partial(cached_attention, implementation=implementation)
    got = form(*arguments)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    others = form(*arguments[:3], arguments[3].at[2].set(3))
    assert (others[:2] == got[:2]).all()
    # Nor on which of its own tokens are padding, or on what padding is.
    counts = jnp.asarray([7, 0, 3])
    fewer = form(arguments[0].at[2, 3:].set(1e4), *arguments[1:], counts)
    assert (fewer[0] == got[0]).all() and (fewer[2, :3] == got[2, :3]).all()
    assert np.isfinite(fewer).all()


def test_bad_arguments_are_refused():
    q, k, v, _ = example(1, 8)
    ids = jnp.ones((1, 8), jnp.int32)
    with pytest.raises(ValueError, match="attention shapes don't fit"):
        attention(q[:, :, :3], k, v, ids)
    with pytest.raises(ValueError, match="segment_ids must be"):
        attention(q, k, v, ids[:, :4])
    with pytest.raises(ValueError, match="unknown implementation 'paged'"):
        attention(q, k, v, ids, implementation="paged")


@pytest.mark.parametrize("implementation", [None, "reference", "xla"])
def test_shapes_at_the_edge(implementation):
    q, k, v, _ = example(1, 8)
    ids = jnp.ones((1, 8), jnp.int32)
    wide = jnp.ones((1, 8, 2, 32))
    for other in ((wide, wide), (k[0], v[0]), (k[:, :, :0], v[:, :, :0])):
        with pytest.raises(ValueError, match="attention shapes don't fit"):
            attention(q, *other, ids, implementation=implementation)
    for part in (np.s_[:0], np.s_[:, :0]):
        empty = [x[part] for x in (q, k, v, ids)]
        assert attention(*empty, implementation=implementation).shape == q[part].shape


def test_a_cache_of_another_shape_is_refused():
    q = jnp.ones((2, 1, 4, 8))
    k, v, length = jnp.ones((2, 2, 8, 16)), jnp.ones((2, 2, 16, 8)), jnp.zeros(2, jnp.int32)
    assert cached_attention(q, k, v, length).shape == q.shape
    for bad in (
        (q, k, v, length[:1]), (q, v, v, length), (q, k, v[:, :, :9], length),
        (q, k[..., :0], v[:, :, :0], length), (q[:, :, :3], k, v, length),
        (q, k, v, length, length[:1]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="cached_attention shapes don't fit"):
            cached_attention(*bad)
