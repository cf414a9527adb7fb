"""Metrics merge by their own rule, whatever the split into micro-batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastask_jax.learn.masked import masked_max, masked_mean, masked_sum, segment_totals
from fastask_jax.learn.metrics import (
    Busiest,
    Max,
    SampleSize,
    Sum,
    Total,
    empty_like,
    merge,
    results,
)


def measure(values, mask):
    values, mask = jnp.asarray(values, jnp.float32), jnp.asarray(mask, bool)
    return {
        "mean": Sum.of(values, mask),
        "max": Max.of(values, mask),
        "size": SampleSize.of(values, mask),
        "count": Total.of(mask),
    }


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.floats(0.125, 10), st.booleans()), min_size=2, max_size=30),
    st.data(),
)
def test_any_split_gives_the_same_results(items, data):
    values, mask = (np.array(column) for column in zip(*items, strict=True))
    cut = data.draw(st.integers(0, len(items)))
    whole = measure(values, mask)
    parts = merge(measure(values[:cut], mask[:cut]), measure(values[cut:], mask[cut:]))
    assert results(merge(empty_like(whole), whole)) == results(whole)
    assert results(parts) == pytest.approx(results(whole), rel=1e-5)


def test_a_maximum_is_not_averaged_and_uneven_means_are_weighted():
    first, second = measure([1.0, 1.0, 1.0], [1, 1, 1]), measure([5.0], [1])
    merged = results(merge(first, second))
    assert merged["max"] == 5.0 and merged["mean"] == 2.0 and merged["count"] == 4.0
    assert merged["size"] == pytest.approx(64 / (4 * 28))


def test_what_saw_nothing_is_left_out():
    assert results(measure([np.nan, np.inf], [0, 0])) == {"count": 0.0}


def test_names_must_agree():
    with pytest.raises(KeyError, match="differ in"):
        merge({"a": Total.of(jnp.ones(1))}, {"b": Total.of(jnp.ones(1))})


def test_masked_reductions_ignore_poison_and_survive_an_empty_mask():
    values, mask = jnp.array([1.0, np.nan, 3.0, np.inf]), jnp.array([True, False, True, False])
    assert (masked_sum(values, mask), masked_mean(values, mask), masked_max(values, mask)) == (
        4,
        2,
        3,
    )
    nothing = jnp.zeros(4, bool)
    assert (masked_sum(values, nothing), masked_mean(values, nothing)) == (0, 0)
    assert masked_max(values, nothing) == -jnp.inf
    np.testing.assert_array_equal(jax.grad(masked_mean)(values, mask), [0.5, 0, 0.5, 0])


def test_segment_totals_stay_in_their_row():
    ids = jnp.array([[1, 1, 2, 0], [1, 2, 2, 2]])
    mask = jnp.array([[True, True, True, False], [True, False, True, True]])
    totals = segment_totals(jnp.arange(8.0).reshape(2, 4), mask, ids)
    np.testing.assert_array_equal(totals, [[1, 1, 2, 0], [4, 13, 13, 13]])


def test_the_busiest_place_is_found_after_merging():
    first = {"share": Busiest(jnp.array([[3.0, 1.0], [2.0, 2.0]]), jnp.array(4.0))}
    second = {"share": Busiest(jnp.array([[0.0, 4.0], [1.0, 3.0]]), jnp.array(4.0))}
    assert results(merge(empty_like(first), merge(first, second)))["share"] == 5 / 8
