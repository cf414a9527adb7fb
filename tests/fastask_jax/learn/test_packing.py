"""Packing keeps every token, apart and in order, in few shapes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastask_jax.learn.packing import PackConfig, TrainableTokens, micro_batches, pack


def trajectory(n, seed=0, advantage=1.0):
    """n tokens with a random mask; numbers off the mask are poison that must not get through."""
    rng = np.random.default_rng(seed)
    mask = rng.random(n) < 0.5
    mask[0] = False
    return TrainableTokens(
        ids=rng.integers(1, 1000, n).astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, -rng.random(n) * 5, np.nan).astype(np.float32),
        advantage=advantage,
        versions=np.where(mask, rng.integers(0, 9, n), -7).astype(np.int32),
    )


lengths = st.lists(st.integers(1, 64), min_size=1, max_size=30)


@settings(deadline=None, max_examples=60)
@given(lengths, st.integers(1, 5))
def test_round_trip(sizes, rows):
    items = [trajectory(n, seed, advantage=seed - 1.5) for seed, n in enumerate(sizes)]
    packed = pack(items, PackConfig(row_lengths=(32, 64), micro_batch_rows=rows, min_rows=1))
    batch = packed.batch
    for field in ("ids:tokens", "mask:mask"):
        source, target = field.split(":")
        for item, piece in zip(items, packed.unpack(getattr(batch, target)), strict=True):
            np.testing.assert_array_equal(piece, getattr(item, source))
    for index, item in enumerate(items):
        span = (
            packed.rows[index],
            slice(packed.starts[index], packed.starts[index] + len(item.ids)),
        )
        np.testing.assert_array_equal(batch.positions[span], np.arange(len(item.ids)))
        assert len(set(batch.segment_ids[span].tolist())) == 1
        np.testing.assert_array_equal(
            batch.behaviour_logprobs[span], np.where(item.mask, item.logprobs, 0)
        )
        np.testing.assert_array_equal(
            batch.advantages[span], np.where(item.mask, np.float32(item.advantage), 0)
        )
        np.testing.assert_array_equal(batch.versions[span], np.where(item.mask, item.versions, 0))
    # Nothing overlaps, nothing is added, and segments count 1, 2, 3 ... along each row.
    assert (batch.segment_ids > 0).sum() == sum(sizes)
    for row in batch.segment_ids:
        present = row[row > 0]
        assert (np.diff(present) >= 0).all() and set(present) == set(
            range(1, present.max(initial=0) + 1)
        )
        assert (row[len(present) :] == 0).all()
    assert not (batch.mask & (batch.positions == 0)).any()


@settings(deadline=None, max_examples=60)
@given(lengths)
def test_same_input_same_packing_and_rows_are_well_filled(sizes):
    items = [trajectory(n) for n in sizes]
    config = PackConfig(row_lengths=(64,), micro_batch_rows=1, min_rows=1)
    first, second = pack(items, config), pack(items, config)
    np.testing.assert_array_equal(first.batch.tokens, second.batch.tokens)
    # First-fit decreasing uses at most 11/9 of the optimum plus one row.
    assert first.used_rows <= 11 / 9 * np.ceil(sum(sizes) / 64) + sum(n > 32 for n in sizes) + 1
    assert first.fill == pytest.approx(sum(sizes) / (first.used_rows * 64))


def test_few_shapes_over_many_batches():
    rng = np.random.default_rng(0)
    config = PackConfig(row_lengths=(128, 256), micro_batch_rows=4, min_rows=64)
    shapes = {
        pack([trajectory(int(n)) for n in rng.integers(4, 250, count)], config).batch.tokens.shape
        for count in range(1, 120)
    }
    assert {length for _, length in shapes} <= {128, 256}
    assert {rows for rows, _ in shapes} <= {64, 128}


def test_the_shortest_row_that_fits_is_taken():
    config = PackConfig(row_lengths=(16, 32, 64), micro_batch_rows=1, min_rows=1)
    assert pack([trajectory(17)], config).batch.tokens.shape == (1, 32)
    assert pack([], config).batch.tokens.shape == (1, 16)
    assert pack([], config).fill == 0.0


def test_too_long_a_trajectory_names_the_field_to_raise():
    with pytest.raises(
        ValueError,
        match="trajectory 1 has 65 tokens and the longest row holds 64: "
        "raise PackConfig.row_lengths",
    ):
        pack([trajectory(3), trajectory(65)], PackConfig(row_lengths=(64,)))


def changed(**fields):
    base = dict(
        ids=np.arange(3),
        mask=np.array([0, 1, 1]),
        logprobs=np.array([0, -1.0, -2.0]),
        advantage=1.0,
    )
    return TrainableTokens(**(base | fields))


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (changed(ids=np.zeros(0, int)), "trajectory 0 has no tokens"),
        (changed(mask=np.array([0, 1])), "has 3 ids but 2 mask"),
        (changed(mask=np.array([1, 1, 1])), "marks its first token as sampled"),
        (changed(logprobs=np.array([0, np.nan, -1])), "has the logprob nan at sampled token 1"),
        (changed(logprobs=np.array([0, -1, -np.inf])), "has the logprob -inf at sampled token 2"),
        (changed(logprobs=np.array([0, 0.5, -1])), "has the logprob 0.5 at sampled token 1"),
        (changed(advantage=np.inf), "has the advantage inf"),
        (changed(advantage=1e39), "has the advantage 1e[+]39"),
        (changed(ids=np.array([1, 2.5, 3])), "has ids of type float64"),
    ],
)
def test_unusable_trajectories_are_refused(item, message):
    with pytest.raises(ValueError, match=message):
        pack([item], PackConfig(row_lengths=(8,)))


def test_micro_batches_keep_rows_and_refuse_what_does_not_divide():
    packed = pack(
        [trajectory(9, i) for i in range(5)], PackConfig((16,), micro_batch_rows=2, min_rows=1)
    )
    micro = micro_batches(packed.batch, 2)
    assert micro.tokens.shape == (4, 2, 16) and micro.proximal_logprobs is None
    np.testing.assert_array_equal(micro.tokens.reshape(8, 16), packed.batch.tokens)
    with pytest.raises(ValueError, match="8 rows don't divide into micro-batches of 3 rows"):
        micro_batches(packed.batch, 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"row_lengths": ()}, "positive lengths"),
        ({"row_lengths": (64, 32)}, "must rise"),
        ({"micro_batch_rows": 0}, "micro_batch_rows must be at least 1"),
        ({"min_rows": 0}, "min_rows must be at least 1"),
    ],
)
def test_bad_shapes_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        PackConfig(**fields)
