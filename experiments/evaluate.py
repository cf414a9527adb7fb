"""Evaluates any policies on one frozen set of held-out tasks, and says what tells them apart.

    python -m experiments.evaluate --checkpoint runs/quickstart
    python -m experiments.evaluate --checkpoint first=runs/a,second=runs/b --rollouts 4
    python -m experiments.evaluate --policy base --policy gpt=openai:MODEL@http://127.0.0.1:8000/v1

Every episode is kept as it ends: after a kill the same command goes on where it was, and a later
one with more policies or rollouts plays those alone (docs/evaluation.md).  Leaves evaluation.json,
.md and .png, summary.json, evals/ and records.jsonl.  Exit code 1 where a policy couldn't be
finished; its records are kept.

`base` is the shipped base policy (or --train.weights); it and checkpoints sample at the training
temperature unless --temperature says otherwise (0 is greedy).
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from envs.fast_ask.tools import TOOLS
from experiments.config import (
    Interrupted,
    check_place,
    format_config,
    option,
    parse,
    run_main,
    save_config,
)
from experiments.fast_ask import PRESET_CONFIGS, Config
from experiments.rollouts import environments
from experiments.training import load
from fastask_jax import __version__
from fastask_jax.actor import Actor
from fastask_jax.ask.checkpoint import PolicyFolder, find_policy
from fastask_jax.evaluation.play import Ended, Job, Outcome, Player, finish
from fastask_jax.evaluation.players import remote_player, script_player
from fastask_jax.evaluation.specs import (
    PLAIN,
    PolicySpec,
    distinct,
    parse_checkpoint,
    parse_policy,
    parse_prices,
)
from fastask_jax.evaluation.store import Record, RecordStore
from fastask_jax.evaluation.tasks import freeze
from fastask_jax.loop import write_records
from fastask_jax.policies.remote import RemoteConfig, RemotePolicy, find_key, open_policy
from fastask_jax.policies.remote.anthropic_messages import URL as ANTHROPIC
from fastask_jax.report.comparison import compare
from fastask_jax.report.comparison_plot import plot_evaluation
from fastask_jax.report.comparison_tables import page, partial_lines, text
from fastask_jax.report.jsonl import plain
from fastask_jax.report.summary import write_summary
from fastask_jax.report.tables import group_table
from fastask_jax.rollout.engine import Engine
from fastask_jax.rollout.scheduler import rollout

TRAINED = "trained"  # stands for the checkpoints in --policies
_NEWS = 10.0  # seconds between two lines about one policy


@dataclass(frozen=True)
class RemoteSettings:
    """Of the policies that others serve, all of them.

    prompt: "full" explains the answer's form, which no model knows by itself.
    temperature: None leaves it to the server.
    max_turn_tokens: per turn, thoughts included.  max_tokens: per episode; None: no bound.
    deadline: seconds that an episode may take, waiting for a busy server left out.
    silence: seconds after which a try without an answer counts as lost.
    retry: seconds for which a request that fails is tried again.
    requests_per_minute: of one policy; None: no bound.  concurrency: its episodes at a time.
    api_key_file: else the vendor's own variable (OPENAI_API_KEY, ANTHROPIC_API_KEY).
    """

    prompt: str = "full"
    temperature: float | None = None
    max_turn_tokens: int = 4096
    max_tokens: int | None = None
    deadline: float = 600.0
    silence: float = 120.0
    retry: float = 120.0
    requests_per_minute: float | None = None
    concurrency: int = 4
    api_key_file: Path | None = None

    def of(self, spec: PolicySpec) -> RemoteConfig:
        """Raises ValueError for values that can't be."""
        return RemoteConfig(
            model=spec.target,
            temperature=self.temperature,
            max_turn_tokens=self.max_turn_tokens,
            max_tokens=self.max_tokens,
            deadline=self.deadline,
            silence=self.silence,
            retry=self.retry,
            requests_per_minute=self.requests_per_minute,
            connections=self.concurrency,
        )

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"remote.concurrency must be at least 1, not {self.concurrency}")
        if self.prompt not in ("full", "short"):
            raise ValueError(f"remote.prompt is full or short, not {self.prompt!r}")
        self.of(PolicySpec("any", "openai", "any"))


@dataclass(frozen=True)
class EvaluateConfig:
    """What is evaluated on which tasks."""

    run_dir: Path = option(Path("runs/evaluate"), "where records and results are kept")
    policies: tuple[str, ...] = option(
        (), f"of {', '.join((*PLAIN, TRAINED))}; all by default, where no --policy is given"
    )
    checkpoint: tuple[str, ...] = option(
        (), "run directories or policy folders, or NAME=PATH; one alone is called trained"
    )
    policy: tuple[str, ...] = option(
        (),
        "NAME=KIND:TARGET, may be repeated: checkpoint:PATH, openai:MODEL@URL, anthropic:MODEL, or "
        "one of the plain names",
    )
    tasks: int = option(128, "held-out tasks")
    task_seed: int = option(0, "of the set")
    rollouts: int = option(1, "per task")
    reference: str | None = option(
        None, "policy whose seconds are 1 and to which the others are compared; by default base"
    )
    price: tuple[str, ...] = option(
        (), "NAME=PROMPT/COMPLETION[/CACHED[/WRITTEN]]: US dollars for a million tokens"
    )
    temperature: float | None = option(None, "of sampling; none takes the run's, 0 is greedy")
    warm_up: int = option(16, "training tasks played first, so that no record has compiling in it")
    attempts: int = option(3, "of an episode that a fault of the machinery ends")
    remote: RemoteSettings = option(RemoteSettings(), "")
    train: Config = option(PRESET_CONFIGS["tiny"], "the run's settings: tasks, budgets, engine")

    def __post_init__(self) -> None:
        for name, least in (("tasks", 1), ("rollouts", 1), ("attempts", 1), ("warm_up", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 or more and finite, not {self.temperature}")
        names = [spec.name for spec in self.specs]
        parse_prices(self.price, names)
        if self.reference is not None and self.reference not in names:
            raise ValueError(f"reference {self.reference!r} is none of {', '.join(names)}")

    @property
    def specs(self) -> tuple[PolicySpec, ...]:
        """The policies, in the order of tables.  Raises ValueError for what can't be."""
        every = (*PLAIN[:2], TRAINED, *PLAIN[2:])
        names = list(self.policies) or ([] if self.policy else list(every))
        if unknown := [name for name in names if name not in every]:
            raise ValueError(f"policies are of {', '.join(every)}, not {', '.join(unknown)}")
        if TRAINED in self.policies and not self.checkpoint:
            raise ValueError("policy trained needs --checkpoint RUN")
        if self.checkpoint and TRAINED not in names:
            names.insert(names.index("oracle") if "oracle" in names else len(names), TRAINED)
        found: list[PolicySpec] = []
        for name in names:
            if name == TRAINED:
                alone = len(self.checkpoint) == 1
                found += [parse_checkpoint(text, alone) for text in self.checkpoint]
            else:
                found.append(PolicySpec(name, name))
        return distinct([*found, *map(parse_policy, self.policy)])

    @property
    def compared_to(self) -> str:
        names = [spec.name for spec in self.specs]
        return self.reference or ("base" if "base" in names else names[0])


@dataclass(frozen=True)
class Chosen:
    """A policy that can be opened.  setup: what its records depend on.  run: of an engine
    policy, how it is asked.  remote: the client of one that others serve."""

    spec: PolicySpec
    setup: dict[str, Any]
    run: Config
    remote: RemotePolicy | None = None


def choose(config: EvaluateConfig, spec: PolicySpec) -> Chosen:
    """Finds what the policy is made of.  Raises FileNotFoundError or ValueError where that is
    missing, or couldn't be asked like the others."""
    run = config.train
    setup: dict[str, Any] = {"kind": spec.kind}
    if spec.remote:
        settings = config.remote.of(spec)
        key = find_key(spec.kind, spec.url or ANTHROPIC, config.remote.api_key_file)
        setup |= {"model": spec.target, "url": spec.url, "prompt": config.remote.prompt}
        names = ("temperature", "max_turn_tokens", "max_tokens", "deadline")
        setup |= {name: getattr(settings, name) for name in names}
        run = replace(run, env=replace(run.env, prompt=config.remote.prompt))
        return Chosen(spec, setup, run, open_policy(spec.kind, spec.url, settings, key))
    if spec.kind in ("base", "checkpoint"):
        if spec.kind == "checkpoint":
            run = as_trained(find_policy(spec.target), run)
        temperature = run.rollout.temperature if config.temperature is None else config.temperature
        setup |= {"weights": fingerprint(run.source), "temperature": temperature}
        setup |= {name: getattr(run.env, name) for name in ("prompt", "list_sheets")}
        names = ("tools_in_prompt", "max_turn_tokens", "max_tokens", "max_turns")
        setup |= {name: getattr(run.rollout, name) for name in names}
        setup["max_len"] = run.engine.max_len
    return Chosen(spec, setup, run)


def as_trained(folder: PolicyFolder, run: Config) -> Config:
    """The run's settings with the checkpoint's weights, asked in the words that it was trained
    with.  A folder that belongs to no run is asked as `run` says.

    Raises ValueError where it was trained with other budgets, which are the task's: among
    policies with those of `run` it would look worse, or better, than it is.
    """
    run = replace(run, weights=folder.path)
    saved = folder.path.parent / "config.json"
    if folder.path.name != "policy" or not saved.is_file():
        return run
    wanted = [
        f"--train.env.{name} {getattr(folder.env, name)}"
        for name in ("max_turns", "max_calls")
        if getattr(folder.env, name) != getattr(run.env, name)
    ]
    if wanted:
        raise ValueError(
            f"{folder.path} was trained with other budgets; add {' '.join(wanted)}, for all "
            "policies"
        )
    words = {name: getattr(folder.env, name) for name in ("prompt", "list_sheets")}
    shown = replace(run.rollout, tools_in_prompt=folder.tools_in_prompt)
    model = json.loads(saved.read_text("utf-8")).get("model", run.model)
    return replace(run, model=model, env=replace(run.env, **words), rollout=shown)


def fingerprint(source: Path) -> str:
    """Sixteen digits over the weights, their config and their tokenizer."""
    if not source.exists():
        raise FileNotFoundError(f"no weights at {source}")
    files = [source]
    if source.is_dir():
        files = sorted(f for f in source.iterdir() if f.suffix in (".safetensors", ".json"))
    found = hashlib.sha256()
    for file in files:
        if source.is_dir():
            found.update(f"{file.name}\0".encode())
        with file.open("rb") as stream:
            found.update(hashlib.file_digest(stream, "sha256").digest())
    return found.hexdigest()[:16]


class EnginePlayer:
    """Our engine as a player: as many episodes at a time as it has slots."""

    def __init__(self, actor: Actor, params: Any, temperature: float, warm_up: list[Any]) -> None:
        self._actor, self._params, self._warm_up = actor, params, warm_up
        self._config = replace(actor.config, temperature=temperature)

    def play(self, jobs: Sequence[Job], ended: Ended) -> None:
        """What a rollout samples depends on weights, task and its number alone; number 0 is the
        one that a training's evaluations play."""
        self._rollout(self._warm_up, "warm-up", lambda trajectory: None)
        self._warm_up = []
        for number in sorted({number for _, number in jobs}):
            self._rollout(
                [task for task, own in jobs if own == number],
                f"evaluation/{number}" if number else "evaluation",
                lambda trajectory, number=number: ended(trajectory.task, number, trajectory),
            )

    def _rollout(self, tasks: Sequence[Any], seed: str, on_finish: Any) -> None:
        actor = self._actor
        rollout(
            actor.engine, self._params, 0, tasks, 1, actor.pool, actor.chat,
            seed=seed, config=self._config, tools=actor.tools, on_finish=on_finish,
        )  # fmt: skip


class Players:
    """Opens policies one after another.  The engine of the last one is kept: weights of the same
    shape go on with it, without compiling anew."""

    def __init__(self, config: EvaluateConfig) -> None:
        self._config = config
        self._shape: Any = None
        self._engine: Engine | None = None

    @contextmanager
    def open(self, chosen: Chosen) -> Iterator[Player]:
        """The policy's player, which ends with the block."""
        run, kind = chosen.run, chosen.spec.kind
        if chosen.remote is not None:
            at_a_time = self._config.remote.concurrency
            with remote_player(chosen.remote, run.env, run.sandbox, at_a_time) as threads:
                yield threads
        elif kind in ("base", "checkpoint"):
            model, params, chat = load(run)
            warm_up = run.tasks.stream("train").take(self._config.warm_up)
            with environments(run) as pool:
                engine = self._engine_for(model, run.engine, chat.stop_id)
                actor = Actor(engine, chat, pool, TOOLS, run.rollout)
                yield EnginePlayer(actor, params, chosen.setup["temperature"], warm_up)
        else:
            with script_player(kind, run.tasks.scale, run.env, run.sandbox) as threads:
                yield threads

    def _engine_for(self, *shape: Any) -> Engine:
        if self._engine is None or self._shape != shape:
            self._engine = None  # its memory first
            self._shape, self._engine = shape, Engine(*shape)
        return self._engine


def evaluate(config: EvaluateConfig) -> tuple[dict[str, Any], dict[str, list[Record]]]:
    """Plays what has no record yet and writes the results; returns evaluation.json's object and
    the records of each policy."""
    began = time.monotonic()
    tasks, named = freeze(
        config.train.tasks.stream("heldout", config.task_seed).config, config.tasks
    )
    with ExitStack() as stack:
        policies = [choose(config, spec) for spec in config.specs]
        for chosen in policies:
            if chosen.remote is not None:
                stack.callback(chosen.remote.close)
        setups = {chosen.spec.name: chosen.setup for chosen in policies}
        store = RecordStore(config.run_dir, named, settings_of(config), setups)
        with store:
            save_config(config, config.run_dir)
            players = Players(config)
            outcomes = {c.spec.name: _play(config, players, c, tasks, store) for c in policies}
            ids = [task.id for task in tasks]
            records = {name: store.of(name, ids, config.rollouts) for name in setups}
    evaluation = write_results(config, named, records, outcomes, time.monotonic() - began)
    return evaluation, records


def settings_of(config: EvaluateConfig) -> dict[str, Any]:
    """What every policy's records depend on."""
    run = config.train
    env = {f"env.{name}": value for name, value in asdict(run.env).items()}
    for own in ("env.prompt", "env.list_sheets"):  # each policy's own
        del env[own]
    sandbox = {
        f"sandbox.{name}": getattr(run.sandbox, name) for name in ("output_chars", "code_chars")
    }
    return {"version": __version__, **env, **sandbox}


def _play(
    config: EvaluateConfig,
    players: Players,
    chosen: Chosen,
    tasks: Sequence[Any],
    store: RecordStore,
) -> Outcome:
    name, ids = chosen.spec.name, [task.id for task in tasks]
    missing = store.missing(name, ids, config.rollouts)
    whole = len(ids) * config.rollouts
    kept = f", {whole - len(missing)} of them kept" if len(missing) < whole else ""
    print(f"evaluating {name}: {whole} rollouts{kept}", flush=True)
    if not missing:
        return Outcome(0)
    told, done = time.monotonic(), whole - len(missing)

    def keep(task: Any, number: int, record: Record) -> None:
        nonlocal told, done
        store.add(name, task.id, number, record)
        done += 1
        if time.monotonic() - told > _NEWS:
            told = time.monotonic()
            print(f"  {name}: {done} of {whole}", flush=True)

    jobs = [(tasks[place], number) for place, number in missing]
    with players.open(chosen) as player:
        return finish(player, jobs, keep, config.attempts)


def write_results(
    config: EvaluateConfig,
    named: Mapping[str, Any],
    records: Mapping[str, list[Record]],
    outcomes: Mapping[str, Outcome],
    seconds: float,
) -> dict[str, Any]:
    """evaluation.json, .md and .png, summary.json and evals/; returns the first's object."""
    specs, run_dir = config.specs, config.run_dir
    whole = config.tasks * config.rollouts
    partial = {
        n: {"left": o.left, "wanted": whole, "why": o.why} for n, o in outcomes.items() if o.left
    }
    prices = parse_prices(config.price, [spec.name for spec in specs])
    evaluation = compare(
        records,
        config.compared_to,
        prices={name: asdict(price) for name, price in prices.items()},
        tasks=named,
        rollouts=config.rollouts,
        partial=partial,
        targets={
            spec.name: " at ".join(filter(None, (spec.target or spec.kind, spec.url)))
            for spec in specs
        },
    )
    (run_dir / "evaluation.json").write_text(
        json.dumps(plain(evaluation), indent=2) + "\n", "utf-8"
    )
    found = {name: own for name, own in records.items() if own}
    if found:
        title = f"Fast Ask, {named['scale']} workbooks, {named['count']} held-out tasks"
        plot = plot_evaluation(evaluation, run_dir / "evaluation.png", title=title)
        (run_dir / "evaluation.md").write_text(page(evaluation, title, plot.name), "utf-8")
        for name, own in found.items():
            write_records(run_dir, name, own)
        write_summary(run_dir, found, steps=0, wall_seconds=seconds)
    return evaluation


def show(evaluation: Mapping[str, Any], records: Mapping[str, Sequence[Record]]) -> None:
    """Prints the tables."""
    found = {name: own for name, own in records.items() if own}
    if not found:
        print(*partial_lines(evaluation), sep="\n")
        return
    print("", text(evaluation), group_table(found).text(), sep="\n\n")


def main(argv: list[str]) -> int:
    words = merged(argv, ("policy", "price"))
    config = parse(EvaluateConfig, words, prog="python -m experiments.evaluate")
    print(format_config(config, changed=("remote", "train")), flush=True)
    check_place(config, config.run_dir)
    try:
        evaluation, records = evaluate(config)
    except KeyboardInterrupt as error:
        raise Interrupted("the same command goes on") from error
    show(evaluation, records)
    print(f"\nrun directory: {config.run_dir} (evaluation.md, .png and .json, records.jsonl)")
    return 1 if evaluation["partial"] else 0


def merged(argv: Sequence[str], names: Sequence[str]) -> list[str]:
    """Options that were repeated, as one with commas, which is how a tuple is read."""
    words, texts, rest = list(argv), dict[str, list[str]](), list[str]()
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if flag.removeprefix("--") in names and flag.startswith("--"):
            if not equals and words and not words[0].startswith("--"):
                value = words.pop(0)
            texts.setdefault(flag, []).append(value)
        else:
            rest.append(word)
    return rest + [f"{flag}={','.join(values)}" for flag, values in texts.items()]


if __name__ == "__main__":
    run_main(main)
