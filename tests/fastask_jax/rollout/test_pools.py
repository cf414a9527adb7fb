import dataclasses

import pytest

from envs.core import Reply
from envs.fast_ask import KINDS, make_task
from envs.fast_ask.env import FastAskConfig, FastAskEnv, make_env
from envs.pool import EnvPool, PoolConfig
from envs.sandbox import SandboxConfig
from fastask_jax.rollout.pools import InlinePool
from fastask_jax.rollout.scheduler import RolloutConfig, rollout

CONFIG = RolloutConfig(max_turn_tokens=10)


def played(trajectories):
    timeless = []
    for t in trajectories:
        info = {k: v for k, v in t.score.info.items() if k != "seconds"}
        timeless.append((t.ids.tolist(), t.logprobs.tolist(), t.score.parts, info, t.stop_reason))
    return timeless


def test_worker_processes_give_the_same_trajectories(tiny_params, engine, chat):
    tasks = [make_task(seed, type) for seed, type in enumerate(list(KINDS)[:3])]
    settings = (FastAskConfig(prompt="short"), SandboxConfig())

    def run(pool):
        return rollout(
            engine, tiny_params, 0, tasks, 2, pool, chat, seed=0, config=CONFIG,
            tools=FastAskEnv.tools,
        )  # fmt: skip

    with EnvPool("envs.fast_ask.env:make_env", settings, PoolConfig(workers=1)) as pool:
        remote = run(pool)
        assert pool.stats()["live"] == 0

    maker = make_env(settings)
    try:
        inl = played(run(InlinePool(maker)))
        assert inl == played(remote)
    finally:
        maker.close()
    assert [t.task_id for t in remote] == [task.id for task in tasks for _ in range(2)]
    assert all(t.valid for t in remote)


def test_inline_pool_answers_like_the_process_pool(echo):
    made = []

    def make(_):
        made.append(echo.Env())
        return made[-1]

    pool = InlinePool(make)
    pool.reset("a", echo.Task("t", turns=1))
    with pytest.raises(ValueError, match="live already"):
        pool.reset("a", echo.Task("t"))
    [event] = pool.poll()
    assert (event.episode_id, event.step, event.done) == ("a", None, False)
    pool.step("a", Reply("x"))
    [event] = pool.poll(1.0)
    assert event.done
    assert event.score is not None
    assert made[0].closed
    with pytest.raises(KeyError, match="isn't live"):
        pool.step("a", Reply("x"))
    pool.reset("b", echo.Task("t", fault="reset"))
    [event] = pool.poll()
    assert (event.error, event.done) == ("RuntimeError: no workbook", True)
    pool.reset("c", echo.Task("t"))
    pool.drop("c")
    assert pool.poll() == []
    assert dataclasses.replace(event, error=None).done is False
    assert all(env.closed for env in made)
