"""Cached decoding: any ragged sequence of appends equals one packed forward pass."""

import dataclasses

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from fastask_jax.model import (
    copy_slots,
    extend,
    forward,
    init_cache,
    reset_slots,
)

SLOTS, ROOM = 4, 40


@pytest.fixture(scope="module")
def params(small, jitted_init):
    return jitted_init(small, jax.random.key(0))


@pytest.fixture(scope="module", params=["stacked", "unrolled"])
def cfg(small, request):
    return dataclasses.replace(small, scan_unroll=2) if request.param == "unrolled" else small


@pytest.fixture(scope="module")
def append(params):
    compiled = jax.jit(extend, static_argnums=0)
    return lambda cfg, *arguments: compiled(cfg, params, *arguments)


@pytest.fixture(scope="module")
def texts(small):
    return np.random.default_rng(1).integers(0, small.vocab_size, (SLOTS, ROOM)).astype(np.int32)


@pytest.fixture(scope="module")
def expected(small, params, texts):
    positions = np.broadcast_to(np.arange(ROOM), texts.shape)
    ones = np.ones_like(texts)
    hidden, _ = jax.jit(forward, static_argnums=0)(small, params, texts, positions, ones)
    return np.asarray(hidden)


def feed(append, cfg, cache, texts, held, counts, width):
    """Appends the next `counts[s]` tokens of each text; returns the cache and hidden states."""
    tokens = np.full((SLOTS, width), 7, np.int32)  # padding that must not matter
    for s, n in enumerate(counts):
        tokens[s, :n] = texts[s, held[s] : held[s] + n]
    hidden, cache = append(cfg, cache, tokens, np.asarray(counts, np.int32))
    return cache, np.asarray(hidden)


def test_ragged_appends_equal_the_packed_pass(cfg, append, texts, expected):
    cache, held = init_cache(cfg, slots=SLOTS, max_len=ROOM), np.zeros(SLOTS, int)
    for width, counts in (
        (20, (13, 0, 20, 1)),
        (1, (1, 0, 1, 1)),
        (1, (0, 1, 1, 0)),
        (20, (3, 17, 0, 20)),
        (20, (2, 2, 18, 9)),
        (1, (1, 1, 0, 1)),
        (20, (20, 19, 0, 8)),
    ):
        cache, hidden = feed(append, cfg, cache, texts, held, counts, width)
        for s, n in enumerate(counts):
            np.testing.assert_allclose(
                hidden[s, :n], expected[s, held[s] : held[s] + n], atol=1e-4
            )
        held += counts
        np.testing.assert_array_equal(cache["length"], held)
    assert held.tolist() == [ROOM] * SLOTS


def slot(cache, index):
    """Every leaf of one slot."""
    return [
        np.asarray(leaf[:, index] if part == "stacked" else leaf[index])
        for part, leaves in cache.items()
        for leaf in jax.tree.leaves(leaves)
    ]


def same(one, other):
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(one, other, strict=True))


def test_a_slot_with_count_zero_is_unchanged(cfg, append, texts):
    cache = init_cache(cfg, slots=SLOTS, max_len=ROOM)
    cache, _ = feed(append, cfg, cache, texts, [0] * SLOTS, [5, 20, 11, 2], 20)
    for width in (1, 20):
        after, _ = feed(append, cfg, cache, texts, [5, 20, 11, 2], [1, 0, 1, 0], width)
        assert same(slot(after, 1), slot(cache, 1)) and same(slot(after, 3), slot(cache, 3))
        assert not same(slot(after, 0), slot(cache, 0))


def test_reset_leaves_nothing_behind_not_even_nan(cfg, append, texts, expected):
    cache = init_cache(cfg, slots=SLOTS, max_len=ROOM)
    cache = jax.tree.map(
        lambda x: jnp.full_like(x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x + 9,
        cache,
    )
    cache = reset_slots(cache, jnp.asarray([True, False, True, True]))
    np.testing.assert_array_equal(cache["length"], [0, 9, 0, 0])
    assert all(not leaf.any() for leaf in slot(cache, 0))
    _, hidden = feed(append, cfg, cache, texts, [0] * SLOTS, [20, 0, 3, 1], 20)
    np.testing.assert_allclose(hidden[0], expected[0, :20], atol=1e-4)
    np.testing.assert_allclose(hidden[3, :1], expected[3, :1], atol=1e-4)


def test_copies_continue_like_their_source(cfg, append, texts, expected):
    cache = init_cache(cfg, slots=SLOTS, max_len=ROOM)
    cache, _ = feed(append, cfg, cache, texts, [0] * SLOTS, [9, 0, 20, 4], 20)
    before = [slot(cache, s) for s in range(SLOTS)]
    # Slots 0 and 2 change places while 1 takes what 2 held: all at once, not one by one.
    copied = copy_slots(cache, jnp.asarray([2, 2, 0, 3]))
    for target, source in enumerate([2, 2, 0, 3]):
        assert same(slot(copied, target), before[source])
    shared = np.stack([texts[2], texts[2], texts[0], texts[3]])
    copied, hidden = feed(append, cfg, copied, shared, [20, 20, 9, 4], [20, 20, 20, 20], 20)
    np.testing.assert_allclose(hidden[1], expected[2, 20:40], atol=1e-4)
    np.testing.assert_allclose(hidden[2], expected[0, 9:29], atol=1e-4)


def test_overflow_is_loud_and_bad_sizes_are_refused(cfg, append, texts):
    cache = init_cache(cfg, slots=SLOTS, max_len=ROOM)
    cache["length"] = jnp.asarray([ROOM, ROOM - 1, 0, ROOM])
    _, hidden = feed(append, cfg, cache, texts, [0] * SLOTS, [1, 1, 1, 0], 1)
    np.testing.assert_array_equal(
        np.isnan(hidden).all(axis=(1, 2)), [True, False, False, False]
    )
    with pytest.raises(ValueError, match="slots and max_len"):
        init_cache(cfg, slots=0, max_len=ROOM)
