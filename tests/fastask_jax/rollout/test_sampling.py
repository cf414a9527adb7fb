import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastask_jax.rollout.sampling import episode_key, sample

jitted = jax.jit(sample)


def keys(count, seed=0):
    return np.random.default_rng(seed).integers(0, 2**32, (count, 2), dtype=np.uint32)


@pytest.mark.parametrize("vocab", [5, 64, 200])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_draws_follow_the_scaled_softmax(vocab, temperature):
    count = 40_000
    logits = np.random.default_rng(1).normal(size=vocab).astype(np.float32) * 2
    rows = jnp.broadcast_to(logits, (count, vocab))
    tokens, logprobs = jitted(rows, keys(count), jnp.arange(count), temperature)
    expected = np.asarray(jax.nn.log_softmax(logits.astype(np.float64) / temperature))
    np.testing.assert_allclose(logprobs, expected[tokens], atol=2e-6)
    found = np.bincount(tokens, minlength=vocab)
    wanted = np.exp(expected) * count
    common = wanted > 20
    chi2 = np.sum((found - wanted)[common] ** 2 / wanted[common])
    freedom = common.sum() - 1
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom)


def test_impossible_tokens_are_never_drawn():
    count, vocab = 20_000, 130
    logits = np.full(vocab, -np.inf, np.float32)
    logits[[3, 64, 127]] = [0.0, 1.0, -3.0]
    logits[5] = -60.0
    rows = jnp.broadcast_to(logits, (count, vocab))
    tokens, logprobs = jitted(rows, keys(count), jnp.arange(count), 1.0)
    assert set(np.unique(tokens)) == {3, 64, 127}
    assert np.isfinite(logprobs).all()
    assert (np.asarray(logprobs) <= 0).all()


def test_extreme_logits_stay_finite():
    logits = jnp.asarray([[1e30, 0, -1e30], [1e4, 1e4, 0], [-1e30, -1e30, -1e30]], jnp.float32)
    tokens, logprobs = jitted(logits, keys(3), jnp.arange(3), 1.0)
    assert np.isfinite(logprobs).all()
    assert tokens[0] == 0
    assert tokens[1] in (0, 1)


def test_temperature_zero_is_greedy():
    logits = jax.random.normal(jax.random.key(0), (50, 70))
    tokens, logprobs = jitted(logits, keys(50), jnp.arange(50), 0.0)
    np.testing.assert_array_equal(tokens, jnp.argmax(logits, -1))
    np.testing.assert_allclose(logprobs, jax.nn.log_softmax(logits).max(-1), atol=1e-6)


def test_a_draw_depends_on_key_and_position_alone():
    logits = jax.random.normal(jax.random.key(0), (1, 300))
    rows = jnp.broadcast_to(logits, (8, 300))
    key = np.broadcast_to(keys(1), (8, 2))
    same, _ = jitted(rows, key, jnp.full(8, 7), 1.0)
    assert len(set(np.asarray(same).tolist())) == 1
    moved, _ = jitted(rows, key, jnp.arange(8), 1.0)
    assert len(set(np.asarray(moved).tolist())) > 1


def test_episode_keys_are_stable_and_distinct():
    assert episode_key(0, "task", 0, 0).tolist() == [655095953, 2557890319]
    made = {
        tuple(episode_key(seed, task, occurrence, copy))
        for seed in (0, "0/1", 1)
        for task in ("a", "b")
        for occurrence in (0, 1)
        for copy in range(4)
    }
    assert len(made) == 48


def test_each_slot_may_have_a_temperature_of_its_own():
    logits = jax.random.normal(jax.random.key(0), (60, 70))
    mixed = jnp.asarray([0.0, 0.5, 1.0] * 20)
    tokens, logprobs = jitted(logits, keys(60), jnp.arange(60), mixed)
    for place, temperature in enumerate((0.0, 0.5, 1.0)):
        same, told = jitted(logits, keys(60), jnp.arange(60), temperature)
        np.testing.assert_array_equal(tokens[place::3], same[place::3])
        np.testing.assert_array_equal(logprobs[place::3], told[place::3])


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-10, 1e-20, 1e-37])
def test_a_tiny_temperature_takes_the_best(temperature):
    """Compiled, the largest logit divided by it needn't be the largest quotient."""
    logits = jax.random.normal(jax.random.key(0), (50, 300)) * 4
    tokens, logprobs = jitted(logits, keys(50), jnp.arange(50), jnp.full(50, temperature))
    chosen = jnp.take_along_axis(logits, tokens[:, None], -1)[:, 0]
    assert (logits.max(-1) - chosen < 20 * temperature).all()
    assert np.isfinite(logprobs).all() and (np.asarray(logprobs) <= 0).all()
