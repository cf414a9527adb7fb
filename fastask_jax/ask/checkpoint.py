"""Which weights answer: the shipped ones, a training run's, or those in a folder.

A policy folder is what `fastask_jax.model.save_params` writes: config.json and
model.safetensors (or parts of it and their index), with the model's tokenizer.json.  A run of
`experiments.fast_ask` keeps its trained policy in RUN/policy and its settings in
RUN/config.json.  Only looks at files: loading them needs JAX and is `asker`'s.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.fast_ask.env import FastAskConfig
from fastask_jax.ask.answer import AskError

SHIPPED = Path(__file__).parents[1] / "model" / "weights" / "tiny"
_WHAT = (
    "a checkpoint is the run directory of a finished training (it holds policy/) or a folder "
    f"with config.json and model.safetensors; without --checkpoint the weights in {SHIPPED} answer"
)


@dataclass(frozen=True)
class PolicyFolder:
    """Where the weights lie, and how they were trained to be asked.  assumed: nothing says so,
    and the tiny policy's way is taken."""

    path: Path
    env: FastAskConfig
    tools_in_prompt: bool = False
    assumed: bool = False


def find_policy(checkpoint: str | Path | None) -> PolicyFolder:
    """The policy of a run directory or a policy folder; None takes the shipped weights.

    Raises AskError, which says what a checkpoint is, when there is none.
    """
    if checkpoint is None:
        if not _is_policy(SHIPPED):
            raise AskError(
                f"this installation has no weights in {SHIPPED}; train some with `python -m "
                "experiments.fast_ask --run-dir RUN` and ask with --checkpoint RUN"
            )
        return PolicyFolder(SHIPPED, FastAskConfig(prompt="short"))
    run = Path(checkpoint)
    for folder in (run / "policy", run):
        if _is_policy(folder):
            return PolicyFolder(folder, *_settings(folder))
    if not run.exists():
        raise AskError(f"no checkpoint at {run}: {_WHAT}")
    if (run / "checkpoints").is_dir():
        raise AskError(
            f"the training in {run} hasn't ended, so it has no policy yet: finish it with "
            f"--run-dir {run} --resume true, then ask again"
        )
    raise AskError(f"{run} holds no checkpoint: {_WHAT}")


def _is_policy(folder: Path) -> bool:
    weights = ("model.safetensors", "model.safetensors.index.json")  # large ones come in parts
    return (folder / "config.json").is_file() and any((folder / w).is_file() for w in weights)


def _settings(folder: Path) -> tuple[FastAskConfig, bool, bool]:
    """How the run that `folder` belongs to puts its questions (and whether it shows the tools
    in the prompt); as the tiny policy's training does where it belongs to none, which the last
    one tells."""
    path = folder.parent / "config.json"
    if folder.name != "policy" or not path.is_file():
        return FastAskConfig(prompt="short"), False, folder.resolve() != SHIPPED.resolve()
    try:
        saved: dict[str, Any] = json.loads(path.read_text("utf-8"))
        kinds = {"prompt": str, "list_sheets": bool, "max_turns": int, "max_calls": int}
        env = {name: _typed(saved["env"], name, kind) for name, kind in kinds.items()}
        return FastAskConfig(**env), _typed(saved["rollout"], "tools_in_prompt", bool), False
    except (KeyError, TypeError, ValueError) as error:
        raise AskError(
            f"{path} isn't the config of a training run ({error!r}); to ask this policy without "
            "its run's settings, copy the policy folder to another place"
        ) from None


def _typed(section: dict[str, Any], name: str, kind: type) -> Any:
    """`section[name]`; TypeError where JSON has it in another type."""
    value = section[name]
    if type(value) is not kind:
        raise TypeError(f"{name} is {value!r}, not of type {kind.__name__}")
    return value
