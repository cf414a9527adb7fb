"""Evaluates policies on held-out tasks and prints the table.

    python -m experiments.evaluate --checkpoint runs/quickstart
    python -m experiments.evaluate --policies base,trained --checkpoint runs/tiny --tasks 512

`base` is the shipped base policy (or --train.weights), `trained` a run's policy; both sample at
the training temperature unless --temperature says otherwise (0 is greedy).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.config import check_place, format_config, option, parse, run_main, save_config
from experiments.fast_ask import PRESET_CONFIGS, Config, build, show
from fastask_jax.ask.checkpoint import PolicyFolder, find_policy
from fastask_jax.loop import Record, write_records
from fastask_jax.policies.baselines import baseline_records
from fastask_jax.report.summary import write_summary

POLICIES = ("blind", "base", "trained", "oracle")


@dataclass(frozen=True)
class EvaluateConfig:
    """What is evaluated on which tasks."""

    run_dir: Path = option(Path("runs/evaluate"), "where config, records and summary are kept")
    policies: tuple[str, ...] = option(
        (), f"of {', '.join(POLICIES)}; by default all, trained only with a checkpoint"
    )
    checkpoint: Path | None = option(None, "run directory or policy folder of `trained`")
    tasks: int = option(128, "held-out tasks")
    temperature: float | None = option(None, "of sampling; none takes the run's, 0 is greedy")
    train: Config = option(PRESET_CONFIGS["tiny"], "the run's settings: tasks, budgets, engine")

    def __post_init__(self) -> None:
        if not self.policies:
            had = tuple(name for name in POLICIES if name != "trained" or self.checkpoint)
            object.__setattr__(self, "policies", had)
        if any(name not in POLICIES for name in self.policies):
            raise ValueError(f"policies are of {', '.join(POLICIES)}, not {self.policies}")
        if len(set(self.policies)) < len(self.policies):
            raise ValueError(f"policies names one twice: {', '.join(self.policies)}")
        if "trained" in self.policies and self.checkpoint is None:
            raise ValueError("policy trained needs --checkpoint RUN")
        if "trained" not in self.policies and self.checkpoint is not None:
            raise ValueError("a checkpoint is for the policy trained; add it to --policies")
        if self.tasks < 1:
            raise ValueError("tasks must be at least 1")
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 or more and finite, not {self.temperature}")


def evaluate(config: EvaluateConfig) -> dict[str, list[Record]]:
    """Records of each policy on the same tasks."""
    run = config.train
    tasks = run.tasks.stream("heldout", seed=0).take(config.tasks)
    found = {}
    for name in config.policies:
        print(f"evaluating {name} on {len(tasks)} tasks", flush=True)
        if name in ("blind", "oracle"):
            found[name] = baseline_records(name, tasks, run.env, run.sandbox)
            continue
        weights = run.weights
        if name == "trained" and config.checkpoint is not None:
            folder = find_policy(config.checkpoint)
            check_asked_as_trained(folder, run)
            weights = folder.path
        with build(replace(run, weights=weights)) as built:
            found[name] = built.actor.evaluate(built.params, 0, tasks, config.temperature)
    return found


def check_asked_as_trained(folder: PolicyFolder, run: Config) -> None:
    """Raises ValueError where the run would put its questions otherwise than the training did:
    the policy would look worse than it is.  A folder that belongs to no run says nothing."""
    if folder.path.name != "policy" or not (folder.path.parent / "config.json").is_file():
        return
    pairs = {
        f"env.{name}": (getattr(folder.env, name), getattr(run.env, name))
        for name in ("prompt", "list_sheets", "max_turns", "max_calls")
    }
    pairs["rollout.tools_in_prompt"] = (folder.tools_in_prompt, run.rollout.tools_in_prompt)
    wanted = [f"--train.{name} {was}".lower() for name, (was, is_) in pairs.items() if was != is_]
    if wanted:
        raise ValueError(f"{folder.path} was trained with other settings; add {' '.join(wanted)}")


def main(argv: list[str]) -> None:
    config = parse(EvaluateConfig, argv, prog="python -m experiments.evaluate")
    print(format_config(config), flush=True)
    check_place(config, config.run_dir)
    began = time.monotonic()
    found = evaluate(config)
    show(found)
    save_config(config, config.run_dir)
    for name, records in found.items():
        write_records(config.run_dir, name, records)
    write_summary(config.run_dir, found, steps=0, wall_seconds=time.monotonic() - began)


if __name__ == "__main__":
    run_main(main)
