import pytest

from envs.core import ToolSpec
from fastask_jax.policies import Policy, run_episode
from fastask_jax.policies.random import RandomPolicy

SCHEMA = {
    "type": "object",
    "properties": {
        "ranges": {"type": "array", "items": {"type": "string"}},
        "show": {"type": "integer"},
        "exact": {"type": "boolean"},
        "ratio": {"type": "number"},
        "mode": {"enum": ["a", "b"]},
        "options": {"type": "object"},
        "either": {"type": ["string", "integer"]},
    },
    "required": ["ranges"],
}
TOOLS = (ToolSpec("read", "", SCHEMA), ToolSpec("meta", "", {"type": "object"}))
TYPES = {
    "ranges": list,
    "show": int,
    "exact": bool,
    "ratio": float,
    "mode": str,
    "options": dict,
    "either": (str, int),
}


def replies(seed, count=300):
    policy: Policy = RandomPolicy(seed)
    return [policy.start([], TOOLS, None), *(policy.reply(()) for _ in range(count - 1))]


def test_replies_follow_the_schema_and_cover_every_kind():
    said = replies(0)
    calls = [call for reply in said for call in reply.tool_calls]
    good = [call for call in calls if call.error is None]
    assert {call.name for call in good} == {"read", "meta"}
    assert any(call.error for call in calls)
    assert any(reply.content.startswith("ANSWER: ") for reply in said)
    for call in good:
        if call.name == "read":
            assert isinstance(call.arguments["ranges"], list)
        for key, value in call.arguments.items():
            assert isinstance(value, TYPES[key])
    assert {key for call in good for key in call.arguments} == set(TYPES)


def test_a_seed_decides_everything():
    assert replies(3) == replies(3)
    assert replies(3) != replies(4)


def test_it_plays_episodes(echo):
    env = echo.Env()
    score = run_episode(RandomPolicy(1, answer_rate=0.5), env, echo.Task("t", turns=4))
    assert len(env.replies) == 4
    assert score.total == score.parts["correct"]
    assert env.closed


def test_rates_are_checked():
    with pytest.raises(ValueError, match="answer_rate"):
        RandomPolicy(answer_rate=1.5)
