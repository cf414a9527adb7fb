import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastask_jax.model import forward, unembedding
from fastask_jax.rollout.engine import Engine, EngineConfig, Turn
from fastask_jax.rollout.sampling import episode_key

PROMPT = [7, 31, 45, 99, 100, 12, 200, 301, 15, 16, 17, 18]
OTHER = [5, 6, 7, 8, 9, 10]


def key(number):
    return episode_key(0, "task", 0, number)


def sample_turn(engine, params, slots, budget, temperature=1.0, others=()):
    """Decodes until the given slots are done; returns slot -> (ids, logprobs, ended)."""
    results = {slot: ([], [], None) for slot in (*slots, *others)}
    while any(results[slot][2] is None for slot in slots):
        turns = {
            slot: Turn(key(slot), budget - len(ids))
            for slot, (ids, _, ended) in results.items()
            if ended is None
        }
        for slot, got in engine.decode(params, turns, temperature).items():
            ids, logprobs, _ = results[slot]
            results[slot] = (ids + got.ids, logprobs + got.logprobs, got.ended)
    return results


@pytest.fixture(scope="module")
def learner(model, params):
    """Log-softmax of every next token under the packed forward pass: ids -> [n, vocab]."""

    @jax.jit
    def scores(tokens, segments):
        positions = jnp.arange(tokens.shape[1])[None]
        hidden, _ = forward(model, params, tokens, positions, segments)
        return jax.nn.log_softmax((hidden[0] @ unembedding(params)).astype(jnp.float32))

    def call(ids):
        tokens = np.zeros((1, 128), np.int32)
        tokens[0, : len(ids)] = ids
        return np.asarray(scores(tokens, np.arange(128)[None] < len(ids)))[: len(ids)]

    return call


def learner_logprobs(learner, ids):
    return learner(ids)[np.arange(len(ids) - 1), ids[1:]]


def test_logprobs_are_those_of_the_full_forward_pass(engine, params, learner):
    engine.append(params, {0: PROMPT, 3: OTHER}, fresh=True)
    results = sample_turn(engine, params, [0, 3], 20)
    for slot, prompt in ((0, PROMPT), (3, OTHER)):
        ids, logprobs, ended = results[slot]
        assert ended in ("stop", "length")
        expected = learner_logprobs(learner, prompt + ids)[-len(ids) :]
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)
        assert engine.lengths[slot] == len(prompt) + len(ids)


def test_greedy_takes_the_most_likely_token(engine, params, learner):
    engine.append(params, {1: PROMPT}, fresh=True)
    ids, _, _ = sample_turn(engine, params, [1], 6, temperature=0.0)[1]
    for index in range(len(ids)):
        assert int(np.argmax(learner(PROMPT + ids[:index])[-1])) == ids[index]


def test_a_slot_does_not_depend_on_its_company(engine, params):
    engine.append(params, {2: PROMPT}, fresh=True)
    alone = sample_turn(engine, params, [2], 30)[2]
    busy = {0: OTHER, 1: PROMPT, 2: PROMPT, 3: OTHER * 6, 4: OTHER, 5: PROMPT * 3}
    engine.append(params, busy, fresh=True)
    assert sample_turn(engine, params, [2], 30, others=(0, 1, 3, 4, 5))[2] == alone
    # and not on the slot itself, only on its key
    engine.append(params, {5: PROMPT}, fresh=True)
    got = engine.decode(params, {5: Turn(key(2), 30)}, 1.0)[5]
    assert got.ids == alone[0][: len(got.ids)]
    assert got.logprobs == alone[1][: len(got.logprobs)]


def test_shared_prompts_equal_prompts_of_their_own(engine, params):
    engine.append(params, {s: PROMPT for s in range(4)}, fresh=True)
    expected = sample_turn(engine, params, [0, 1, 2, 3], 20)
    engine.append(params, {0: PROMPT, 4: OTHER}, fresh=True)
    engine.share({1: 0, 2: 0, 3: 0})
    assert sample_turn(engine, params, [0, 1, 2, 3], 20, others=[4]) == {
        **expected,
        4: sample_turn_alone(engine, params, 4, OTHER, 20),
    }


def sample_turn_alone(engine, params, slot, prompt, budget):
    engine.append(params, {slot: prompt}, fresh=True)
    return sample_turn(engine, params, [slot], budget)[slot]


@pytest.mark.parametrize("cut", [1, 8, 11])
def test_text_in_pieces_equals_text_at_once(engine, params, learner, cut):
    text = (PROMPT * 4)[:45]  # over the largest bucket: fed in two pieces
    engine.append(params, {0: text[:cut]}, fresh=True)
    engine.append(params, {0: text[cut:]})
    ids, logprobs, _ = sample_turn(engine, params, [0], 8)[0]
    expected = learner_logprobs(learner, text + ids)[-len(ids) :]
    np.testing.assert_allclose(logprobs, expected, atol=1e-4)


def test_a_parked_slot_keeps_its_state(engine, params, learner):
    engine.append(params, {0: PROMPT, 1: OTHER}, fresh=True)
    first = sample_turn(engine, params, [0], 5)[0]
    sample_turn(engine, params, [1], 25)
    engine.append(params, {0: OTHER})
    second = sample_turn(engine, params, [0], 5)[0]
    ids = PROMPT + first[0] + OTHER + second[0]
    expected = learner_logprobs(learner, ids)
    np.testing.assert_allclose(second[1], expected[-len(second[0]) :], atol=1e-4)


def test_a_fresh_slot_holds_nothing_of_its_last_episode(engine, params):
    engine.append(params, {0: OTHER * 5}, fresh=True)
    sample_turn(engine, params, [0], 10)
    engine.append(params, {0: [9]}, fresh=True)  # one token: nothing to feed but the reset
    first = sample_turn(engine, params, [0], 12)[0]
    engine.append(params, {0: PROMPT}, fresh=True)
    sample_turn(engine, params, [0], 30)
    engine.append(params, {0: [9]}, fresh=True)
    assert sample_turn(engine, params, [0], 12)[0] == first


def test_steps_per_round_trip_change_nothing(engine, model, params, chat):
    config = dataclasses.replace(engine.config, decode_steps=3)
    results = []
    for one in (engine, Engine(model, config, chat.stop_id)):
        one.append(params, {0: PROMPT, 1: OTHER}, fresh=True)
        results.append(sample_turn(one, params, [0, 1], 24))
    assert results[0] == results[1]


def test_turns_end_at_the_stop_token(engine, params):
    stop = engine.stop_id
    # Tied embeddings: a long row is an extreme logit, often the largest.
    biased = {**params, "embedding": params["embedding"].at[stop].multiply(20.0)}
    engine.append(biased, {s: [*PROMPT, s] for s in range(6)}, fresh=True)
    row_steps = engine.row_steps
    turns = {s: Turn(key(s), 200 if s else 3) for s in range(6)}
    results = engine.decode(biased, turns, 1.0)
    assert any(got.ended == "stop" for got in results.values())
    for slot, got in results.items():
        assert (got.ended == "stop") == (got.ids[-1] == stop)
        assert stop not in got.ids[:-1]
        assert len(got.ids) <= turns[slot].budget
    # a call of two rows runs until both have ended
    lengths = [len(results[s].ids) for s in range(6)]
    expected = sum(2 * max(lengths[s : s + 2]) for s in (0, 2, 4))
    assert engine.row_steps - row_steps == expected


@pytest.mark.slow
def test_how_many_slots_run_and_how_far_they_are_changes_no_bit():
    """At the shapes and with the weights of the quickstart: small products hide what large ones
    round differently."""
    from dataclasses import replace

    from fastask_jax.model import PRESETS, load_params
    from fastask_jax.model.tokenizers import shipped_weights

    model, params = load_params(shipped_weights("tiny"))
    wanted = PRESETS["tiny"]
    model = replace(model, scan_unroll=wanted.scan_unroll, delta_chunk=wanted.delta_chunk)
    config = EngineConfig(slots=64, max_len=768, append_buckets=(64,), attend_buckets=(128,))
    engine = Engine(model, config, 2)
    prompts = {s: [(17 * s + 31 * i) % 2000 + 300 for i in range(40)] for s in range(63)}
    orders = {s: Turn(key(s), 16) for s in prompts}

    def decode(slots, neighbour=40):
        engine.append(params, prompts | {63: [300] * neighbour}, fresh=True)
        turns = {s: orders[s] for s in slots} | {63: Turn(key(63), 16)}
        found = engine.decode(params, turns, 1.0)
        return {s: (found[s].ids, found[s].logprobs) for s in slots}

    everyone = decode(prompts)
    few = (0, 7, 30)
    assert decode(few) == {s: everyone[s] for s in few}
    assert decode(prompts, neighbour=300) == everyone  # beyond the first attended length
    assert engine.traces["decode"] == 2


def test_only_a_bounded_number_of_programs(engine, params):
    slots_of = engine.config.slots
    random = np.random.default_rng(0)
    for _ in range(40):
        slots = random.permutation(slots_of)[: random.integers(1, slots_of + 1)].tolist()
        texts = {s: random.integers(3, 300, random.integers(1, 60)).tolist() for s in slots}
        fresh = bool(random.integers(2)) or min(engine.lengths[slots]) == 0
        fresh |= any(len(t) + 8 > engine.room(s) for s, t in texts.items())
        engine.append(params, texts, fresh=fresh)
        if fresh and len(slots) > 1:
            engine.share({slots[1]: slots[0]})
        turns = {s: Turn(key(s), int(random.integers(1, 8))) for s in slots}
        engine.decode(params, turns, float(random.integers(2)))
    assert engine.config.attend_buckets == (128, 384)
    assert engine.traces == {"append": 2, "share": 1, "decode": 2}


def test_the_cache_is_donated(engine, params):
    before = jax.tree.leaves(engine._cache)
    engine.append(params, {0: PROMPT}, fresh=True)
    engine.decode(params, {0: Turn(key(0), 2)}, 1.0)
    assert all(leaf.is_deleted() for leaf in before)


@pytest.mark.parametrize("append_length", [40, 120, 200])
def test_whole_rounds_agree_bit_for_bit_in_any_company(engine, params, append_length):
    """Many contexts around the edge between two attend buckets, in mixed calls and alone."""
    random = np.random.default_rng(append_length)
    prompts = [
        random.integers(3, 400, append_length + random.integers(0, 40)).tolist() for _ in range(6)
    ]
    engine.append(params, dict(enumerate(prompts)), fresh=True)
    together = sample_turn(engine, params, range(6), 40)
    for number in range(6):
        slot = int(random.integers(6))
        engine.append(params, {slot: prompts[number]}, fresh=True)
        alone = ([], [], None)
        while alone[2] is None:
            turn = Turn(key(number), 40 - len(alone[0]))
            got = engine.decode(params, {slot: turn}, 1.0)[slot]
            alone = (alone[0] + got.ids, alone[1] + got.logprobs, got.ended)
        assert alone == together[number]


def test_default_shapes_are_few():
    config = EngineConfig(slots=128, max_len=768)
    assert config.attend_buckets == (128, 256, 384, 768)
    config = EngineConfig(slots=1, max_len=100)
    assert (config.attend_buckets, config.decode_rows, config.append_rows) == ((100,), 1, 1)
    assert len(EngineConfig(slots=256, max_len=32_768).attend_buckets) == 4


def test_misuse_gets_a_clear_error(engine, model, params):
    with pytest.raises(ValueError, match="don't fit slot 0"):
        engine.append(params, {0: [1] * 400}, fresh=True)
    with pytest.raises(ValueError, match="don't fit slot 0"):
        engine.append(params, {0: []}, fresh=True)
    engine.append(params, {0: [1] * 378}, fresh=True)
    with pytest.raises(ValueError, match="room for 6 tokens"):
        engine.decode(params, {0: Turn(key(0), 7)}, 1.0)
    with pytest.raises(ValueError, match="don't fit slot 0"):
        engine.append(params, {0: [1] * 7})
    with pytest.raises(ValueError, match="outside of the model's vocabulary"):
        Engine(model, EngineConfig(slots=1), model.vocab_size)
    with pytest.raises(ValueError, match="append_buckets must rise"):
        EngineConfig(append_buckets=(64, 16))
    with pytest.raises(ValueError, match="decode_rows must be at least 1"):
        EngineConfig(decode_rows=0)
    with pytest.raises(ValueError, match="slots must be at least 1"):
        EngineConfig(slots=0)
