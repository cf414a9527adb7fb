"""The service alone, on a real engine: any order of requests, cancellations and weights."""

import dataclasses
import queue
import threading

import jax
import numpy as np
import pytest

from fastask_jax.rollout.engine import Engine, EngineConfig, Turn
from fastask_jax.rollout.sampling import episode_key
from fastask_jax.serve.service import Busy, Cancelled, Order, Outdated, Piece, Service, Stopping

CONFIG = EngineConfig(
    slots=3, max_len=128, append_rows=2, append_buckets=(16,), decode_rows=3,
    attend_buckets=(128,), decode_steps=4,
)  # fmt: skip


@pytest.fixture(scope="module")
def engines(tiny_model, chat):
    """One that the service has, and one to compare with."""
    return [Engine(tiny_model, CONFIG, chat.stop_id) for _ in range(2)]


@pytest.fixture
def service(engines, tiny_params):
    found = Service(engines[0], tiny_params, queue=100)
    yield found
    found.stop()


def order(number, ids, **other):
    wants = {"max_tokens": 5 + number % 9, "temperature": (1.0, 0.6, 0.0)[number % 3]}
    return Order(ids, key=episode_key(0, "order", 0, number), **(wants | other))


def submit(service, wanted):
    told = queue.SimpleQueue()
    return service.submit(wanted, told.put), told


def result(told):
    """Pieces of a request, or the error that has ended it."""
    pieces = []
    while True:
        item = told.get(timeout=60)
        if isinstance(item, Exception):
            return item
        pieces.append(item)
        if item.ended is not None:
            return pieces


def joined(pieces):
    return [i for p in pieces for i in p.ids], [x for p in pieces for x in p.logprobs]


def alone(engine, params, wanted):
    engine.append(params, {0: wanted.ids}, fresh=True)
    ids, logprobs, ended = [], [], None
    while ended is None:
        turn = Turn(wanted.key, wanted.max_tokens - len(ids))
        got = engine.decode(params, {0: turn}, wanted.temperature)[0]
        ids, logprobs, ended = ids + got.ids, logprobs + got.logprobs, got.ended
    return ids, logprobs


def test_conversations_in_any_order_sample_what_each_does_alone(engines, service, tiny_params):
    random = np.random.default_rng(0)
    talks = [random.integers(3, 300, random.integers(1, 30)).tolist() for _ in range(8)]
    talks[1] = list(talks[0])  # two begin alike
    service.start()
    done, reused = [], 0
    for turn in range(3):
        asked = []
        for number in random.permutation(8):
            wanted = order(int(number) + 10 * turn, talks[number])
            asked.append((number, wanted, *submit(service, wanted)))
            if random.random() < 0.3:  # someone else, who goes at once
                ticket, told = submit(service, order(99, talks[number], max_tokens=60))
                service.cancel(ticket)
                service.cancel(ticket)
                assert isinstance(result(told), (Cancelled, list))
        for number, wanted, ticket, told in asked:
            pieces = result(told)
            assert all(isinstance(piece, Piece) and piece.version == -1 for piece in pieces)
            ids, logprobs = joined(pieces)
            done.append((wanted, ids, logprobs))
            reused += ticket.reused
            talks[number] = wanted.ids + ids + random.integers(3, 300, 3).tolist()
    assert reused > 0 and service.tokens["reused"] >= reused
    for wanted, ids, logprobs in done:
        expected = alone(engines[1], tiny_params, wanted)
        assert ids == expected[0]
        np.testing.assert_allclose(logprobs, expected[1], atol=1e-4)
    assert service.load["running"] == service.load["waiting"] == 0


def test_equal_texts_are_fed_once(engines, service, tiny_params):
    wanted = [order(n, [7, 8, 9, 10], max_tokens=8) for n in range(3)]
    told = [submit(service, one)[1] for one in wanted]
    service.start()
    for one, pieces in zip(wanted, map(result, told), strict=True):
        assert joined(pieces) == alone(engines[1], tiny_params, one)
    assert service.tokens["fed"] == 4 and service.tokens["shared"] == 8


def test_a_long_text_holds_up_no_other_request(engines, service, tiny_params, monkeypatch):
    """With `append_calls`, between two pieces of an answer lies one part of another's text."""
    engine = engines[0]
    monkeypatch.setattr(engine, "config", dataclasses.replace(CONFIG, append_calls=1))
    calls, feed, decode = [], engine.feed, engine.decode
    monkeypatch.setattr(engine, "feed", lambda *a: (calls.append("feed"), feed(*a))[1])
    monkeypatch.setattr(engine, "decode", lambda *a: (calls.append("decode"), decode(*a))[1])
    brief, long = order(1, [7, 8, 9], max_tokens=24), order(2, [5] * 90, max_tokens=4)
    told = [submit(service, one)[1] for one in (brief, long)]
    service.start()
    for one, pieces in zip((brief, long), map(result, told), strict=True):
        assert joined(pieces) == alone(engines[1], tiny_params, one)
    first = calls.index("decode")
    assert calls[:first] == ["feed"]  # the brief one decodes at once, the long one has begun
    assert calls[first:].count("feed") == 5 and "feed feed" not in " ".join(calls[first:])


def test_a_state_of_other_weights_is_of_no_use(engines, service, tiny_params):
    newer = jax.tree.map(lambda x: x * 1.05, tiny_params)
    service.start()
    first = order(0, [5, 6, 7], max_tokens=6)
    ids, _ = joined(result(submit(service, first)[1]))
    service.set_weights(newer, 4)
    second = order(1, first.ids + ids + [9], max_tokens=6, version=4)
    ticket, told = submit(service, second)
    pieces = result(told)
    assert ticket.reused == 0 and {piece.version for piece in pieces} == {4}
    assert joined(pieces) == alone(engines[1], newer, second)
    with pytest.raises(Outdated, match="weights 5 are wanted and these are 4"):
        submit(service, order(2, [5], version=5))


def test_a_full_queue_and_an_ending_service_refuse(engines, tiny_params):
    service = Service(engines[0], tiny_params, queue=2)
    told = [submit(service, order(n, [5, 6]))[1] for n in range(5)]  # 3 slots, 2 wait
    with pytest.raises(Busy, match="5 requests wait already"):
        submit(service, order(5, [5]))
    service.drain()
    assert all(isinstance(result(one), Stopping) for one in told)
    with pytest.raises(Stopping, match="shutting down"):
        submit(service, order(6, [5]))
    service.stop()


def test_an_error_of_the_engine_reaches_everyone(engines, tiny_params):
    failed = threading.Event()
    broken = jax.tree.map(lambda x: x[..., :1], tiny_params)
    service = Service(engines[0], broken, on_failure=failed.set)
    told = [submit(service, order(n, [5, 6]))[1] for n in range(5)]
    service.start()
    for one in told:
        error = result(one)
        assert isinstance(error, Stopping) and "the engine has failed" in str(error)
    assert failed.wait(10) and service.failure is not None
    with pytest.raises(Stopping):
        service.check_alive()
    service.stop()


@pytest.mark.parametrize(
    "ids, max_tokens, said",
    [
        ([], 1, "ids is empty"),
        ([5], 0, "max_tokens must be at least 1"),
        ([-1], 1, "ids must be from 0"),
        ([10**6], 1, "ids must be from 0"),
        ([5] * 100, 29, "more than the 128 tokens"),
    ],
)
def test_orders_that_no_slot_can_carry_out(service, ids, max_tokens, said):
    with pytest.raises(ValueError, match=said):
        submit(service, order(0, ids, max_tokens=max_tokens))
