"""Evaluating a checkpoint: what would make its numbers those of something else is refused."""

from dataclasses import replace

import pytest

from experiments.evaluate import check_asked_as_trained
from experiments.fast_ask import PRESET_CONFIGS
from fastask_jax.ask.checkpoint import PolicyFolder

TINY = PRESET_CONFIGS["tiny"]


def test_a_policy_is_evaluated_as_it_was_trained_or_not_at_all(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    place = tmp_path / "policy"
    as_tiny = PolicyFolder(place, TINY.env)
    check_asked_as_trained(as_tiny, TINY)
    full = PolicyFolder(place, replace(TINY.env, prompt="full", max_turns=7), tools_in_prompt=True)
    with pytest.raises(ValueError, match="trained with other settings") as caught:
        check_asked_as_trained(full, TINY)
    assert str(caught.value).endswith(
        "add --train.env.prompt full --train.env.max_turns 7 --train.rollout.tools_in_prompt true"
    )
    followed = replace(
        TINY,
        env=replace(TINY.env, prompt="full", max_turns=7),
        rollout=replace(TINY.rollout, tools_in_prompt=True),
    )
    check_asked_as_trained(full, followed)
    alone = replace(full, path=tmp_path / "mine")  # of no run: nothing is known of it
    check_asked_as_trained(alone, TINY)
