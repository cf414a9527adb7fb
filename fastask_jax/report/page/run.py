"""A run directory as its page needs it: curves, accuracies, a list of episodes, and their details.

Reads `traces.jsonl` (whole trajectories), `evals/` (a record per held-out task), `metrics.jsonl`
and `config.json`; any of them may be missing, and fields that runs of an earlier form lack are
left open.  The list of episodes stays in memory; a trajectory is read again from its place in the
file when it is asked for, so that a run of 10,000 costs megabytes and not gigabytes.

An episode is known by `id`, made of letters that need no escaping anywhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envs.fast_ask.outline import outline, recall
from fastask_jax.report import metrics as names
from fastask_jax.report.jsonl import lines, plain, read_jsonl
from fastask_jax.report.page.detail import detail, number, text
from fastask_jax.report.summary import summarize
from fastask_jax.report.traces import FILE as TRACES

# Bytes of the file that the trajectories of one data file come from, about.
CHUNK_BYTES = 192 * 1024
# Above this many tasks that only their ids are known of, questions are left to the details.
MAX_RECALLED = 2000
SERIES = (
    names.REWARD, names.ACCURACY, names.TURNS, "train/cells", "train/malformed_calls",
    names.TOKENS_PER_SECOND, names.WALL_SECONDS, names.EVAL_REWARD, names.EVAL_ACCURACY,
    names.EVAL_LOW, names.EVAL_HIGH, names.EVAL_TURNS, "eval/cells", "policy/staleness",
    "policy/entropy", "policy/log_ratio_abs", "train/with_signal", "time/learn", "time/eval",
    "time/rollout", "time/decode", "time/append", "time/pool", "time/idle",
)  # fmt: skip
_STEP = re.compile(r"step_(\d+)")
_WEIGHTS = ("correct", "efficiency", "concise")


@dataclass(frozen=True)
class Place:
    """Where an episode is kept: bytes of the traces' file, or a record in memory."""

    offset: int = 0
    length: int = 0
    record: Mapping[str, Any] | None = None


@dataclass
class Run:
    """What is known of a run.

    episodes: a plain dict each, in the order of the list.  places: where each is kept.
    chunks: (first, last + 1) episodes of each data file.
    """

    path: Path
    name: str
    overview: dict[str, Any]
    episodes: list[dict[str, Any]] = field(repr=False)
    places: list[Place] = field(repr=False)
    chunks: list[tuple[int, int]] = field(repr=False)

    def details(self, chunk: int) -> list[dict[str, Any]]:
        """The details of a chunk's episodes.  Raises ValueError where the file has changed since
        it was read."""
        first, end = self.chunks[chunk]
        out = []
        for place in self.places[first:end]:
            record = place.record
            if record is None:
                record = self._trace(place)
            out.append(detail(record, self._outline))
        return out

    def _trace(self, place: Place) -> dict[str, Any]:
        with (self.path / TRACES).open("rb") as file:
            file.seek(place.offset)
            line = file.read(place.length)
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise ValueError(f"{self.path / TRACES} has changed; open the run again")
        return record

    @staticmethod
    def _outline(task_id: str, truth: object) -> dict[str, Any] | None:
        task = recall(task_id, truth)
        return None if task is None else outline(task)


def read_run(path: Path, name: str) -> Run:
    """Reads a run directory.

    Raises FileNotFoundError where there is no run, and ValueError that names a damaged file.
    """
    kept = [TRACES, names.FILE, "evals"]
    if not any((path / part).exists() for part in kept):
        raise FileNotFoundError(
            f"{path} is no run directory: it holds none of {', '.join(kept)}; give the --run-dir "
            "of a training or an evaluation"
        )
    evals = dict(_evaluations(path))
    found = [*_traces(path)]
    traced = {(e["split"], e["step"], e["task"]) for e, _ in found}
    for policy, records in evals.items():
        step = _step_of(policy)
        for record in records:
            split = policy if step is None else "eval"
            episode = _episode({**record, "step": step or 0, "split": split})
            if (split, step, episode["task"]) not in traced:
                found.append((episode, Place(record={**record, "split": split})))
    episodes = [episode for episode, _ in found]
    _name(episodes)
    _recall_questions(episodes)
    places = [place for _, place in found]
    return Run(path, name, _overview(path, evals), episodes, places, _chunks(places))


def changes(path: Path) -> str:
    """A text that changes when the files of a run do."""
    files = [path / TRACES, path / names.FILE, path / "config.json"]
    files += sorted((path / "evals").glob("*.json"))
    stats = [(f.name, f.stat()) for f in files if f.exists()]
    return ";".join(f"{name},{stat.st_size},{stat.st_mtime_ns}" for name, stat in stats)


def _traces(path: Path) -> Iterator[tuple[dict[str, Any], Place]]:
    if not (path / TRACES).exists():
        return
    begin = 0
    for record, end in lines(path / TRACES):
        yield _episode(record), Place(begin, end - begin)
        begin = end


def _evaluations(path: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for file in sorted((path / "evals").glob("*.json")):
        try:
            records = json.loads(file.read_text("utf-8"))
        except ValueError:
            raise ValueError(f"{file} is not JSON") from None
        if not isinstance(records, list) or not all(isinstance(r, dict) for r in records):
            raise ValueError(f"{file} is not a list of records")
        if records:
            yield file.stem, records


def _step_of(name: str) -> int | None:
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def _episode(record: Mapping[str, Any]) -> dict[str, Any]:
    """What the list shows of a trace or a record."""
    info = record["info"] if isinstance(record.get("info"), dict) else record
    parts = record["parts"] if isinstance(record.get("parts"), dict) else {}
    right = record.get("correct", parts.get("correct"))
    failed = record.get("valid") is False
    turns = info.get("turns")
    return {
        "split": text(record.get("split") or "train", 40),
        "step": int(number(record.get("step")) or 0),
        "group": number(record.get("group")),
        "sample": number(record.get("sample")),
        "task": text(record.get("task") or info.get("task"), 200),
        "type": text(info.get("type"), 80),
        "family": text(info.get("family"), 80),
        "difficulty": text(info.get("difficulty"), 40),
        "outcome": "failed" if failed else _outcome(right),
        "answer": text(info.get("answer"), 200),
        "truth": text(info.get("truth"), 200),
        "stop": text("error" if failed else record.get("stop_reason"), 40),
        "reward": number(record.get("reward")),
        "turns": number(turns),
        "cells": number(info.get("cells")),
        "tokens": number(record.get("sampled", record.get("tokens"))),
        "question": text(record.get("question"), 400),
    }


def _outcome(right: Any) -> str:
    value = number(right)
    if value is None:
        return "unknown"
    return "right" if value >= 1 else "wrong"


def _name(episodes: Sequence[dict[str, Any]]) -> None:
    """Gives each episode its `id`: the same every time that the run is read."""
    seen: dict[str, int] = {}
    for episode in episodes:
        if episode["group"] is not None and episode["split"] == "train":
            parts = [f"s{episode['step']}", episode["group"], episode["sample"]]
        else:
            parts = [episode["split"], f"s{episode['step']}", episode["task"]]
        base = re.sub(r"[^A-Za-z0-9_.-]+", "_", "-".join(map(str, parts)))[:120]
        seen[base] = seen.get(base, 0) + 1
        episode["id"] = base if seen[base] == 1 else f"{base}.{seen[base]}"


def _recall_questions(episodes: Sequence[dict[str, Any]]) -> None:
    bare = {(e["task"], e["truth"]) for e in episodes if e["task"] and not e["question"]}
    if len(bare) > MAX_RECALLED:
        return
    tasks = {key: recall(*key) for key in bare}
    for episode in episodes:
        task = tasks.get((episode["task"], episode["truth"]))
        if not episode["question"] and task is not None:
            episode["question"] = text(task.question, 400)


def _chunks(places: Sequence[Place]) -> list[tuple[int, int]]:
    chunks, first, size = [], 0, 0
    for i, place in enumerate(places):
        if size and size + place.length > CHUNK_BYTES:
            chunks.append((first, i))
            first, size = i, 0
        size += place.length or 800  # a record's details, about
    return [*chunks, (first, len(places))] if places else []


def _overview(path: Path, evals: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Curves, accuracies and settings."""
    config = _config(path)
    found = read_jsonl(path / names.FILE) if (path / names.FILE).exists() else []
    series = {name: [number(line.get(name)) for line in found] for name in SERIES}
    return {
        "path": str(path),
        "steps": [int(number(line.get("step")) or 0) for line in found],
        "series": {k: v for k, v in series.items() if any(x is not None for x in v)},
        "accuracy": _accuracies(evals),
        "weights": _weights(config),
        "config": config,
    }


def _config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.exists():
        return {}
    try:
        config = json.loads(file.read_text("utf-8"), parse_constant=str)  # Infinity is a text
    except ValueError:
        raise ValueError(f"{file} is not JSON") from None
    return config if isinstance(config, dict) else {}


def _weights(config: Mapping[str, Any]) -> dict[str, Any]:
    """The weight of each part of the reward; a run of `experiments.evaluate` has them in the
    settings of its training."""
    train = config.get("train")
    env = config.get("env") or (train.get("env") if isinstance(train, dict) else None)
    if not isinstance(env, dict):
        return {}
    weights = {part: number(env.get(f"{part}_weight")) for part in _WEIGHTS}
    gated = bool(env.get("shaping_requires_correct"))
    return {"parts": {k: v for k, v in weights.items() if v is not None}, "gated": gated}


def _accuracies(evals: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Exact match of each policy, over all tasks and by type and difficulty, with intervals.

    Evaluations of a training come first, in order; `label` says what a policy is.
    """
    steps = sorted((s, name) for name in evals if (s := _step_of(name)) is not None)
    others = [name for name in evals if _step_of(name) is None]
    out = []
    for step, name in [*steps, *((None, name) for name in others)]:
        try:
            told = plain(summarize(evals[name]))
            families = {r["type"]: r["family"] for r in evals[name]}
        except KeyError as error:
            raise ValueError(f"evals/{name}.json: a record without {error}") from None
        except (TypeError, AttributeError, OverflowError, ValueError) as error:
            raise ValueError(f"evals/{name}.json: a damaged record ({error})") from None
        label = name if step is None else "base" if step == 0 else f"step {step}"
        groups = {key: told[key] for key in ("by_type", "by_difficulty")}
        total = {key: told[key] for key in ("exact_match", "low", "high", "tasks")}
        out.append(
            {"name": name, "label": label, "step": step, "all": total, "families": families}
            | groups
            | {key: told[key] for key in ("mean_reward", "turns", "cells")}
        )
    return out
