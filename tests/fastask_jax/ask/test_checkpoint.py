"""Which folder a checkpoint means; needs no weights, only files."""

import json

import pytest

from fastask_jax.ask import AskError, checkpoint
from fastask_jax.ask.checkpoint import find_policy


def policy(folder):
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


def settings(prompt="full", tools=True):
    env = {"prompt": prompt, "list_sheets": False, "max_turns": 7, "max_calls": 2, "other": 1}
    return json.dumps({"env": env, "rollout": {"tools_in_prompt": tools}})


def test_a_run_means_its_policy_and_how_it_was_trained(tmp_path) -> None:
    folder = policy(tmp_path / "run" / "policy")
    (tmp_path / "run" / "config.json").write_text(settings())
    found = find_policy(tmp_path / "run")
    assert found == find_policy(str(folder))
    assert (found.path, found.tools_in_prompt) == (folder, True)
    env = found.env
    assert (env.prompt, env.list_sheets, env.max_turns, env.max_calls) == ("full", False, 7, 2)


def test_a_folder_of_its_own_is_asked_as_the_tiny_policy_is(tmp_path) -> None:
    (tmp_path / "config.json").write_text("not of a run")
    found = find_policy(policy(tmp_path / "mine"))
    assert (found.path, found.env.prompt, found.tools_in_prompt) == (
        tmp_path / "mine",
        "short",
        False,
    )


def test_a_run_with_a_strange_config_is_refused(tmp_path) -> None:
    policy(tmp_path / "policy")
    (tmp_path / "config.json").write_text(settings(prompt="sly"))
    with pytest.raises(AskError, match="isn't the config of a training run.*copy the policy"):
        find_policy(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("prompt", None, "str"),
        ("list_sheets", "no", "bool"),
        ("max_turns", 2.5, "int"),
        ("max_calls", True, "int"),
        ("tools_in_prompt", 1, "bool"),
    ],
)
def test_a_setting_of_another_type_is_refused(tmp_path, name, value, kind) -> None:
    policy(tmp_path / "policy")
    saved = json.loads(settings())
    saved["rollout" if name == "tools_in_prompt" else "env"][name] = value
    (tmp_path / "config.json").write_text(json.dumps(saved))
    with pytest.raises(AskError, match=f"{name} is {value!r}, not of type {kind}"):
        find_policy(tmp_path)


def test_what_is_no_checkpoint_says_what_is(tmp_path) -> None:
    with pytest.raises(AskError, match="no checkpoint at .*run directory of a finished training"):
        find_policy(tmp_path / "typo")
    with pytest.raises(AskError, match=r"holds no checkpoint: .*without --checkpoint the weights"):
        find_policy(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(AskError, match="hasn't ended.*--resume true"):
        find_policy(tmp_path)


def test_none_means_the_shipped_weights(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint, "SHIPPED", policy(tmp_path / "tiny"))
    found = find_policy(None)
    assert (found.path, found.env.prompt) == (tmp_path / "tiny", "short")
    monkeypatch.setattr(checkpoint, "SHIPPED", tmp_path / "none")
    with pytest.raises(AskError, match="no weights.*experiments.fast_ask --run-dir RUN"):
        find_policy(None)
