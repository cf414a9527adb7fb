"""Faults are tried again and are never answers."""

import json
import threading
import time

import pytest

from envs.core import Score
from envs.fast_ask import StreamConfig, TaskStream
from envs.fast_ask.env import FastAskConfig
from envs.sandbox import SandboxConfig
from fastask_jax.evaluation.play import Outcome, Threads, finish
from fastask_jax.evaluation.players import ScriptEpisode, remote_player, script_player
from fastask_jax.policies.remote import Refused, RemoteConfig, open_policy
from tests.fastask_jax.policies.remote.scripted import Script, Turn, listening, refuse

TASKS = TaskStream(StreamConfig("heldout")).take(6)
JOBS = [(task, rollout) for rollout in range(2) for task in TASKS]
NAMES = ("task", "type", "family", "difficulty", "truth", "answer", "turns", "cells",
         "tool_calls", "malformed")  # fmt: skip


def episode(task, error=None) -> ScriptEpisode:
    info = dict.fromkeys(NAMES, 0) | {"task": task.id}
    score = None if error else Score(1.0, {"correct": 1.0}, info)
    return ScriptEpisode(task.id, score, "answered", error, 0.1)


def play(run, **settings):
    kept = []
    keep = lambda task, rollout, record: kept.append((task.id, rollout, record))  # noqa: E731
    return finish(Threads(run, 3), JOBS, keep, **settings), kept


def test_all_are_played_once_side_by_side() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def run(task, rollout):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1
        return episode(task)

    outcome, kept = play(run)
    assert outcome == Outcome(0) and most == 3
    assert sorted(k[:2] for k in kept) == sorted((t.id, n) for t, n in JOBS)


def test_a_fault_is_tried_again_and_one_that_stays_has_no_record() -> None:
    tries = []

    def run(task, rollout):
        tries.append((task.id, rollout))
        once = task is TASKS[1] and tries.count((task.id, rollout)) == 1
        always = task is TASKS[2] and rollout == 1
        return episode(task, "the worker died" if once or always else None)

    outcome, kept = play(run)
    assert outcome == Outcome(1, f"{TASKS[2].id}: the worker died")
    assert len(kept) == 11 and all(record["correct"] for *_, record in kept)
    assert tries.count((TASKS[1].id, 0)) == 2 and tries.count((TASKS[2].id, 1)) == 3


def test_a_lost_server_is_not_asked_for_ever() -> None:
    tries = []

    def run(task, rollout):
        tries.append(task)
        time.sleep(0.02)
        return episode(task, "lost")

    outcome, kept = play(run, in_a_row=4)
    assert outcome.left == 12 and not kept and len(tries) < 10
    assert outcome.why.startswith("4 episodes failed in a row, the last was ")


def test_a_refusal_ends_the_policy_and_another_error_the_command() -> None:
    def refuse(task, rollout):
        raise Refused("wrong key", 401)

    outcome, kept = play(refuse)
    assert outcome == Outcome(12, "wrong key") and not kept

    def fail(task, rollout):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        play(fail)


def test_a_conversation_that_is_refused_leaves_the_others_to_be_played() -> None:
    """By a server's filter, say: at each try, of its task alone."""
    filtered = json.dumps(TASKS[0].question, ensure_ascii=False)[1:-1]

    class Filter(Script):
        async def answer(self, request, *others):
            if filtered in (await request.body()).decode():
                return refuse(400, "content filtered")
            return await super().answer(request, *others)

    kept = []
    with listening(Filter([Turn("ANSWER: 1")], key=None).app()) as url:
        policy = open_policy("openai", url + "/v1", RemoteConfig("scripted"), None)
        with remote_player(policy, FastAskConfig(), SandboxConfig(), 1) as player:
            jobs = [(task, 0) for task in TASKS]
            outcome = finish(player, jobs, lambda *found: kept.append(found[0].id))
    assert outcome.left == 1 and "content filtered" in outcome.why
    assert kept == [task.id for task in TASKS[1:]]


def test_the_oracle_plays_the_real_environment() -> None:
    kept = []
    with script_player("oracle", "tiny", FastAskConfig(), SandboxConfig()) as player:
        jobs = [(task, 0) for task in TASKS[:2]]
        outcome = finish(player, jobs, lambda *found: kept.append(found))
    assert outcome.left == 0
    assert all(r["correct"] and r["turns"] > 1 and r["seconds"] > 0 for *_, r in kept)
