"""How policies and prices are written on the command line."""

import pytest

from fastask_jax.evaluation.specs import (
    PolicySpec,
    distinct,
    parse_checkpoint,
    parse_policy,
    parse_prices,
)
from fastask_jax.policies.remote import Price


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("base", PolicySpec("base", "base")),
        ("first=base", PolicySpec("first", "base")),
        ("checkpoint:runs/a", PolicySpec("a", "checkpoint", "runs/a")),
        ("checkpoint:runs/a/policy", PolicySpec("a", "checkpoint", "runs/a/policy")),
        ("mine=checkpoint:runs/a=1", PolicySpec("mine", "checkpoint", "runs/a=1")),
        ("claude=anthropic:m-1", PolicySpec("claude", "anthropic", "m-1")),
        ("anthropic:m@https://h/v1", PolicySpec("anthropic", "anthropic", "m", "https://h/v1")),
        (
            "l=openai:org/m:free@http://h:1/v1?a=b",
            PolicySpec("l", "openai", "org/m:free", "http://h:1/v1?a=b"),
        ),
        ("openai:m@http://h/v1?a=b", PolicySpec("openai", "openai", "m", "http://h/v1?a=b")),
    ],
)
def test_forms(text, spec) -> None:
    assert parse_policy(text) == spec


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpt", "of no known kind"),
        ("base:x", "takes no target"),
        ("a/b=base", "can't be a policy's name"),
        ("x=checkpoint", "has no target"),
        ("x=openai:m", "has no address: x=openai:m@http://HOST/v1"),
        ("x=openai:@http://h", "names no model"),
    ],
)
def test_wrong_forms_say_what_to_write(text, said) -> None:
    with pytest.raises(ValueError, match=said):
        parse_policy(text)


def test_checkpoints_are_called_trained_or_as_their_folders() -> None:
    assert parse_checkpoint("runs/a", alone=True).name == "trained"
    assert parse_checkpoint("runs/a", alone=False).name == "a"
    assert parse_checkpoint("b=runs/a", alone=True).name == "b"
    with pytest.raises(ValueError, match="two policies are called a: give one another NAME="):
        distinct([parse_checkpoint(text, alone=False) for text in ("x/a", "y/a")])


def test_prices() -> None:
    assert parse_prices(["a=3/15", "b=1/2/0.1/1.25"], ["a", "b"]) == {
        "a": Price(3, 15),
        "b": Price(1, 2, 0.1, 1.25),
    }
    for text, said in [("c=1/2", "none of the policies a"), ("a=1", "NAME=PROMPT/COMPLETION"),
                       ("a=x/y", "NAME=PROMPT"), ("a=-1/2", "0 or more")]:  # fmt: skip
        with pytest.raises(ValueError, match=said):
            parse_prices([text], ["a"])
