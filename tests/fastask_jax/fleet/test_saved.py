"""Trajectories to JSON and back."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from envs.core import Score
from fastask_jax.fleet.saved import from_json, to_json
from fastask_jax.rollout.transcript import Trajectory

IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8)
TURN = st.lists(
    st.tuples(st.integers(0, 300_000), st.floats(-50, 0, width=32), st.integers(0, 3)),
    min_size=1,
    max_size=8,
)


@given(prompt=IDS, turns=st.lists(st.tuples(TURN, IDS), max_size=4), scored=st.booleans())
def test_every_field_comes_back(prompt, turns, scored):
    trajectory = Trajectory("a task", 17, 3, task="the task")
    trajectory.add_prompt(prompt)
    for tokens, observation in turns:
        for token, logprob, version in tokens:
            trajectory.add_sampled([token], [logprob], version)
        trajectory.add_observation(observation)
    trajectory.advantage, trajectory.seconds = 0.1 + 0.2, 1.5
    trajectory.stop_reason = "answered"
    if scored:
        trajectory.score = Score(1.15, {"correct": 1.0}, {"task": "a task", "answer": "é\ud800"})
    else:
        trajectory.error = "sandbox died"
    back = from_json(json.loads(json.dumps(to_json(trajectory))))
    assert back.task is None
    for name in ("ids", "mask", "logprobs", "versions"):
        found, expected = getattr(back, name), getattr(trajectory, name)
        assert found.dtype == expected.dtype and np.array_equal(found, expected)
    back.task = trajectory.task
    assert back == trajectory
