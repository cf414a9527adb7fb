import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.core import Score
from fastask_jax.rollout.transcript import Trajectory

IDS = st.lists(st.integers(0, 399), min_size=1, max_size=6)
TURN = st.tuples(st.lists(IDS, min_size=1, max_size=3), IDS)


@settings(max_examples=100, deadline=None)
@given(IDS, st.lists(TURN, max_size=5))
def test_ids_only_grow_and_only_sampled_tokens_carry_the_mask(prompt, turns):
    trajectory = Trajectory("t", 0, 0)
    trajectory.add_prompt(prompt)
    expected, mask, versions = list(prompt), [False] * len(prompt), [-1] * len(prompt)
    for version, (pieces, observation) in enumerate(turns):
        before = trajectory.ids
        for piece in pieces:
            trajectory.add_sampled(piece, [-0.5] * len(piece), version)
        completion = sum(pieces, [])
        expected += completion
        mask += [True] * len(completion)
        versions += [version] * len(completion)
        trajectory.add_observation(observation)
        expected += observation
        mask += [False] * len(observation)
        versions += [-1] * len(observation)
        # what the next turn sees begins with what this turn saw plus what it sampled
        seen = [*before, *completion]
        assert trajectory.ids[: len(seen)].tolist() == seen
    assert trajectory.ids.tolist() == expected
    assert trajectory.mask.tolist() == mask
    assert trajectory.versions.tolist() == versions
    assert (trajectory.logprobs[~trajectory.mask] == 0).all()
    assert (trajectory.logprobs[trajectory.mask] == -0.5).all()
    assert trajectory.turns == len(turns)
    assert trajectory.sampled == sum(mask)
    starts = [span.start for span in trajectory.spans]
    assert starts == [0, *(span.end for span in trajectory.spans[:-1])]


def test_dtypes_are_those_of_the_learner():
    trajectory = Trajectory("t", 0, 0)
    trajectory.add_prompt([1])
    trajectory.add_sampled([2], [-1.25], 3)
    assert trajectory.ids.dtype == np.int32
    assert trajectory.mask.dtype == np.bool_
    assert trajectory.logprobs.dtype == np.float32
    assert trajectory.versions.dtype == np.int32


def test_out_of_order_pieces_are_refused():
    trajectory = Trajectory("t", 0, 0)
    with pytest.raises(ValueError, match="begins with its prompt"):
        trajectory.add_sampled([1], [0.0], 0)
    with pytest.raises(ValueError, match="no tokens"):
        trajectory.add_prompt([])
    trajectory.add_prompt([1])
    with pytest.raises(ValueError, match="one prompt"):
        trajectory.add_prompt([1])
    with pytest.raises(ValueError, match="follows a reply"):
        trajectory.add_observation([1])
    with pytest.raises(ValueError, match="2 sampled ids but 1 logprobs"):
        trajectory.add_sampled([1, 2], [0.0], 0)


def test_validity_and_reward():
    trajectory = Trajectory("t", 0, 0)
    assert not trajectory.valid
    trajectory.score = Score(1.15, {"correct": 1.0})
    assert trajectory.valid
    assert trajectory.reward == 1.15
    trajectory.error = "worker died"
    assert not trajectory.valid
    assert trajectory.reward == 0.0


def test_json_line_holds_text_and_outcome(chat):
    trajectory = Trajectory("t7", 1, 2)
    trajectory.add_prompt(chat.encode_text("hello"))
    trajectory.add_sampled([*chat.encode_text("ANSWER: 1"), chat.stop_id], [-0.5] * (
        len(chat.encode_text("ANSWER: 1")) + 1
    ), 4)
    trajectory.score = Score(0.5, {"correct": 0.5}, {"family": "revenue"})
    trajectory.stop_reason = "answered"
    line = json.loads(json.dumps(trajectory.to_json(chat)))
    assert [t["role"] for t in line["turns"]] == ["prompt", "reply"]
    assert line["turns"][1]["text"] == "ANSWER: 1<|im_end|>"
    assert line["turns"][1]["versions"] == [4]
    assert line["turns"][1]["logprob"] == -0.5 * line["sampled"]
    assert line["turns"][1]["logprobs"] == [-0.5] * line["sampled"]
    assert line["turns"][1]["chars"][-1] == len("<|im_end|>")
    assert sum(line["turns"][1]["chars"]) == len("ANSWER: 1<|im_end|>")
    assert (line["task"], line["group"], line["sample"]) == ("t7", 1, 2)
    assert (line["reward"], line["parts"]) == (0.5, {"correct": 0.5})
    assert line["info"] == {"family": "revenue"}
    assert line["valid"] is True
