"""Texts that are fed a few calls at a time, in any company, equal texts fed at once."""

import dataclasses
import random

import numpy as np
import pytest

from fastask_jax.rollout.engine import Turn
from fastask_jax.rollout.feeding import Feeder
from fastask_jax.rollout.sampling import episode_key


def sampled(engine, params, slot):
    """A few tokens of a slot, by a key that doesn't depend on it."""
    got = engine.decode(params, {slot: Turn(episode_key(0, "task", 0, 0), 5)}, 1.0)[slot]
    return got.ids, got.logprobs


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_texts_calls_and_cancellations_gives_the_same_state(engine, params, seed):
    """Slots are emptied, get more, copy each other, lose their text and decode in between."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 300) for _ in range(n)] for n in (1, 5, 40, 70, 100)]
    feeder, held, copied = Feeder(engine), {}, 0
    for _ in range(60):
        slot = rng.randrange(6)
        if rng.random() < 0.4:
            texts = {s: rng.choice(prompts) for s in rng.sample(range(6), rng.randint(1, 4))}
            copied += len(feeder.put(texts, fresh=True))
            held |= {s: list(text) for s, text in texts.items()}
        elif slot in held and slot not in feeder and len(held[slot]) < 200:
            more = [rng.randrange(3, 300) for _ in range(rng.choice((1, 7, 50)))]
            feeder.put({slot: more})
            held[slot] += more
        elif rng.random() < 0.3:
            if slot in feeder:  # only a part of its text is there
                held.pop(slot)
            feeder.drop(slot)
        feeder.run(params, rng.choice((0, 1, 1, 2)))
        ready = [s for s in held if s not in feeder]
        if ready and rng.random() < 0.3:
            slot = rng.choice(ready)
            ids, _ = sampled(engine, params, slot)
            held[slot] += ids
    assert copied > 5
    feeder.run(params)
    assert not feeder and not any(slot in feeder for slot in range(6))
    found = {slot: sampled(engine, params, slot) for slot in held}
    for slot, text in held.items():
        assert engine.lengths[slot] == len(text) + len(found[slot][0])
        engine.append(params, {slot: text}, fresh=True)
        ids, logprobs = sampled(engine, params, slot)
        assert ids == found[slot][0]
        # Equal but for rounding: where a slot got its text in parts, the cuts are elsewhere.
        np.testing.assert_allclose(logprobs, found[slot][1], atol=1e-4)


def test_a_long_text_lets_short_ones_pass_and_takes_its_own_number_of_calls(engine, params):
    feeder, long = Feeder(engine), [7] * 200  # 199 fed tokens: seven calls of 32
    feeder.put({0: long}, fresh=True)
    feeder.run(params, 2)
    feeder.put({1: [5, 6, 7]}, fresh=True)
    calls = 0
    while 1 in feeder:
        feeder.run(params, 1)
        calls += 1
    assert 0 in feeder and calls <= 2
    sampled(engine, params, 1)
    while 0 in feeder:
        feeder.run(params, 1)
        calls += 1
    assert calls == 6  # five of the long text's, one of the short one's
    expected = sampled(engine, params, 0)
    engine.append(params, {0: long}, fresh=True)
    assert sampled(engine, params, 0) == expected


def test_a_text_that_others_wait_for_outlives_its_slot(engine, params):
    feeder, text = Feeder(engine), [9, 8, 7] * 20
    assert feeder.put({0: text, 1: text, 2: text}, fresh=True) == {1, 2}
    feeder.run(params, 1)
    assert feeder.put({3: text}, fresh=True) == {3}  # it is under way still
    feeder.drop(0)
    assert 0 not in feeder and all(slot in feeder for slot in (1, 2, 3))
    feeder.run(params)
    engine.append(params, {0: text}, fresh=True)
    expected = sampled(engine, params, 0)
    assert [sampled(engine, params, slot) for slot in (1, 2, 3)] == [expected] * 3


def test_misuse_gets_a_clear_error(engine, params):
    feeder = Feeder(engine)
    feeder.put({0: [5, 6, 7], 1: [5, 6, 7]}, fresh=True)
    with pytest.raises(ValueError, match="slot 1 doesn't hold all of its text yet"):
        feeder.put({1: [8]})
    with pytest.raises(ValueError, match="don't fit slot 2"):
        feeder.put({2: [5] * 400}, fresh=True)
    with pytest.raises(ValueError, match="append_calls must be at least 1, or None, not 0"):
        dataclasses.replace(engine.config, append_calls=0)
