"""How a command line names policies: `NAME=KIND:TARGET`.

    base                              the weights that training starts from
    blind, oracle                     the scripts
    mine=checkpoint:runs/mine         a run directory or policy folder
    local=openai:MODEL@http://127.0.0.1:8000/v1
    claude=anthropic:MODEL            (@URL, where it isn't Anthropic's own)

Without `NAME=` a policy is called as its kind, a checkpoint as its folder.  Left out: what a
policy does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fastask_jax.policies.remote.config import Price

PLAIN = ("blind", "base", "oracle")
REMOTE = ("openai", "anthropic")
KINDS = (*PLAIN, "checkpoint", *REMOTE)
_HOW = (
    "a policy is written NAME=KIND:TARGET, such as base, mine=checkpoint:runs/mine, "
    "local=openai:MODEL@http://127.0.0.1:8000/v1 or claude=anthropic:MODEL"
)
# Names are file names and columns.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")


@dataclass(frozen=True)
class PolicySpec:
    """target: a checkpoint's path, or a model's name.  url: of its server, None for Anthropic's
    own."""

    name: str
    kind: str
    target: str = ""
    url: str | None = None

    @property
    def remote(self) -> bool:
        return self.kind in REMOTE


def parse_policy(text: str) -> PolicySpec:
    """Raises ValueError that says how a policy is written."""
    name, equals, rest = text.partition("=")
    # An address may hold "=" too.
    if not equals or not _NAME.fullmatch(name):
        if equals and ":" not in name:
            raise ValueError(f"{name!r} can't be a policy's name: letters, digits, '.', '_', '-'")
        name, rest = "", text
    kind, _, target = rest.partition(":")
    if kind not in KINDS:
        raise ValueError(f"{text!r} is of no known kind ({', '.join(KINDS)}); {_HOW}")
    if kind in PLAIN:
        if target:
            raise ValueError(f"{kind} takes no target, so not {target!r}; {_HOW}")
        return PolicySpec(name or kind, kind)
    if not target:
        raise ValueError(f"{text!r} has no target; {_HOW}")
    if kind == "checkpoint":
        return PolicySpec(name or _folder_name(target), kind, target)
    model, url = target, None
    if (at := re.search(r"@(?=https?://)", target)) is not None:
        model, url = target[: at.start()], target[at.end() :]
    if not model:
        raise ValueError(f"{text!r} names no model; {_HOW}")
    if kind == "openai" and url is None:
        raise ValueError(f"{text!r} has no address: {name or kind}=openai:{model}@http://HOST/v1")
    return PolicySpec(name or kind, kind, model, url)


def parse_checkpoint(text: str, alone: bool) -> PolicySpec:
    """`PATH` or `NAME=PATH` of `--checkpoint`; one alone without a name is called trained."""
    name, equals, path = text.partition("=")
    if equals and _NAME.fullmatch(name):
        return parse_policy(f"{name}=checkpoint:{path}")
    return parse_policy(f"{'trained' if alone else _folder_name(text)}=checkpoint:{text}")


def _folder_name(path: str) -> str:
    folder = Path(path)
    name = folder.parent.name if folder.name == "policy" else folder.name
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:40]
    return name or "checkpoint"


def distinct(specs: Iterable[PolicySpec]) -> tuple[PolicySpec, ...]:
    """All of them.  Raises ValueError where two have one name: records are kept by it."""
    found: dict[str, PolicySpec] = {}
    for spec in specs:
        if spec.name in found:
            raise ValueError(f"two policies are called {spec.name}: give one another NAME=")
        found[spec.name] = spec
    return tuple(found.values())


def parse_prices(texts: Iterable[str], names: Iterable[str]) -> dict[str, Price]:
    """`NAME=PROMPT/COMPLETION[/CACHED[/WRITTEN]]`, in US dollars for a million tokens.

    Raises ValueError for another form, or a name that no policy has."""
    known = list(names)
    found = {}
    for text in texts:
        name, _, rates = text.partition("=")
        if name not in known:
            raise ValueError(f"price {text!r} is for none of the policies {', '.join(known)}")
        try:
            values = [float(rate) for rate in rates.split("/")]
        except ValueError:
            values = []
        if not 2 <= len(values) <= 4:
            raise ValueError(
                f"price {text!r} should be NAME=PROMPT/COMPLETION[/CACHED[/WRITTEN]] in US "
                "dollars for a million tokens, such as claude=3/15"
            )
        found[name] = Price(*values)
    return found
