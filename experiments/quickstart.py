"""The main job, small: train the tiny policy, watch the reward climb, ask a workbook.

    python -m experiments.quickstart
    python -m experiments.quickstart --seed 1 --run-dir runs/quickstart-1

Takes the shipped base policy, trains it with the Fast Ask post's reward and objective on generated
workbooks for a quarter of an hour on two CPU cores, prints the closing table of blind, base,
trained and oracle, and asks the trained policy about a held-out workbook file.  A thin layer
over `experiments.fast_ask` with its preset `tiny`; use that one to change anything.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from envs.fast_ask import build_workbook
from envs.workbook import write_xlsx
from experiments.config import format_config, option, parse, run_main
from experiments.fast_ask import PRESET_CONFIGS, Config
from experiments.training import show, train


@dataclass(frozen=True)
class Quickstart:
    """The few things to choose."""

    run_dir: Path = option(Path("runs/quickstart"), "where everything is kept")
    resume: bool = option(False, "go on from the last committed checkpoint, if there is one")
    seed: int = option(0, "seed of training tasks and sampling")
    steps: int = option(PRESET_CONFIGS["tiny"].loop.steps, "updates")
    eval_tasks: int = option(128, "held-out tasks of an evaluation")

    def __post_init__(self) -> None:
        self.config()  # checks the numbers

    def config(self) -> Config:
        tiny = PRESET_CONFIGS["tiny"]
        return dataclasses.replace(
            tiny,
            run_dir=self.run_dir,
            resume=self.resume,
            tasks=dataclasses.replace(tiny.tasks, seed=self.seed),
            loop=dataclasses.replace(
                tiny.loop, steps=self.steps, seed=self.seed, eval_tasks=self.eval_tasks
            ),
            optimizer=dataclasses.replace(
                tiny.optimizer,
                warmup_steps=min(tiny.optimizer.warmup_steps, self.steps),
                decay_steps=self.steps,
            ),
        )


def main(argv: list[str]) -> None:
    chosen = parse(Quickstart, argv, prog="python -m experiments.quickstart")
    config = chosen.config()
    print(format_config(chosen), flush=True)
    policies = train(config)
    show(policies)
    # A held-out task that no evaluation used, as a file on disk.
    stream = config.tasks.stream("heldout", seed=1)
    task = stream.take(1)[0]
    book = config.run_dir / "example.xlsx"
    write_xlsx(build_workbook(task), book)
    from fastask_jax import ask

    print(f'\n$ fastask ask {book} "{task.question}" --checkpoint {config.run_dir}', flush=True)
    try:
        ask.main(str(book), [task.question], ask.PolicyChoice(checkpoint=str(config.run_dir)))
    except ask.AskError as error:  # an example that fails doesn't make the training a failure
        print(error)
    print(f"(the true answer is {task.truth})")
    print(f"\nrun directory: {config.run_dir} (reward.png, metrics.jsonl, traces.jsonl, policy/)")


if __name__ == "__main__":
    run_main(main)
