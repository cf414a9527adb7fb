import pytest

from envs.core import Message
from fastask_jax.policies import run_episode
from fastask_jax.policies.engine import EnginePolicy
from fastask_jax.rollout.engine import EngineConfig
from fastask_jax.rollout.scheduler import RolloutConfig

ENGINE = EngineConfig(slots=1, max_len=256, append_rows=1, append_buckets=(32,))
CONFIG = RolloutConfig(temperature=1.0, max_turn_tokens=10)


@pytest.fixture(scope="module")
def policy(tiny_model, tiny_params, chat):
    return EnginePolicy(
        tiny_model, tiny_params, chat, version=4, config=CONFIG, engine=ENGINE, seed=1
    )


def test_turn_by_turn_equals_a_whole_run(policy, echo):
    task = echo.Task("t", turns=3)
    env = echo.Env(stubborn=True)
    score = run_episode(policy, env, task)
    stepped = policy.trajectory
    whole = policy.run(echo.Env(stubborn=True), task)
    assert whole.score == score
    assert whole.stop_reason == "answered"
    assert whole.turns == 3
    assert whole.ids.tolist() == stepped.ids.tolist()
    assert whole.logprobs.tolist() == stepped.logprobs.tolist()
    assert set(whole.versions[whole.mask]) == {4}
    assert [r.tokens for r in env.replies] == [
        span.end - span.start for span in whole.spans if span.kind == "reply"
    ]


def test_a_full_context_ends_in_a_length_reply(policy, echo):
    policy.start([Message("user", "Hello")], echo.TOOLS)
    replies = [policy.reply([Message("tool", "12345 " * 8)]) for _ in range(12)]
    assert (replies[-1].content, replies[-1].stop_reason) == ("", "length")
    assert len(policy.trajectory) <= ENGINE.max_len


def test_environment_faults_and_misuse(policy, echo, tiny_model, tiny_params, chat):
    trajectory = policy.run(echo.Env(), echo.Task("t", fault="reset"))
    assert trajectory.error == "RuntimeError: no workbook"
    fresh = EnginePolicy(tiny_model, tiny_params, chat, engine=ENGINE)
    assert fresh.config.temperature == 0.0
    with pytest.raises(ValueError, match="start an episode first"):
        fresh.reply([Message("tool", "x")])
    with pytest.raises(ValueError, match="don't fit"):
        fresh.start([Message("user", "x " * 500)], ())
