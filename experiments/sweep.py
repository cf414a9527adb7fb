"""A grid over any fields of an experiment's config: a table, a CSV file and a plot.

    python -m experiments.sweep EXPERIMENT --grid FIELD=V1,V2 [--grid ...] [--field value ...]

Each combination runs as a process of its own (`python -m experiments.EXPERIMENT`), one after
the other, in a run directory below the sweep's.  A failed run is shown with its error line and
the rest go on.  The same command again skips the runs that are done and goes on with a run that
was cut off.  Values that hold commas themselves are separated by semicolons.  Leaves out
parallel runs and clever search: a run already uses every core.
"""

from __future__ import annotations

import csv
import difflib
import importlib.util
import itertools
import json
import pkgutil
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import experiments
from experiments.config import Interrupted, UsageError, run_main
from fastask_jax.report.plots import plot_sweep
from fastask_jax.report.summary import read_summary
from fastask_jax.report.tables import Table

USAGE = """\
usage: python -m experiments.sweep EXPERIMENT --grid FIELD=V1,V2 [--grid ...] [--field value ...]

Runs an experiment for every combination of the grid, one after the other.

  --grid FIELD=V1,V2  values of one config field; semicolons separate values that hold commas
  --run-dir DIR       where the sweep is kept (default runs/sweep-EXPERIMENT)
  --policy NAME       whose numbers to show (default trained, or the last one of the summary)
  --field value       any other option goes to every run
  --debug             show the traceback of a failure

Writes sweep.txt, sweep.csv and sweep.png; each run has its directory and its log there.
The same command again skips finished runs."""

NUMBERS = ("exact_match", "low", "high", "mean_reward", "turns", "turns_correct", "cells")
# Fields that differ between a first start and a resumed one, or name the place alone.
_PLACE = ("run_dir", "resume")
_GRACE = 60.0  # seconds that an interrupted run has to save what it holds


@dataclass(frozen=True)
class Sweep:
    """What to run: a module, the grid, options for every run, where, and whose numbers."""

    module: str
    grid: tuple[tuple[str, tuple[str, ...]], ...]
    fixed: tuple[str, ...]
    run_dir: Path
    policy: str | None = None

    @property
    def fields(self) -> list[str]:
        return [field for field, _ in self.grid]

    def combinations(self) -> list[dict[str, str]]:
        values = itertools.product(*(v for _, v in self.grid))
        return [dict(zip(self.fields, v, strict=True)) for v in values]


def main(argv: list[str]) -> int:
    """Runs the sweep; 1 when any run failed."""
    if not argv or "-h" in argv or "--help" in argv:
        print(USAGE)
        return 0 if argv else 2
    sweep = parse_sweep(argv)
    combinations = sweep.combinations()
    print(f"sweep of {sweep.module}: {len(combinations)} runs in {sweep.run_dir}", flush=True)
    configs = [resolve(sweep, values) for values in combinations]
    wrong = [c for c in configs if isinstance(c, str)]
    if len(wrong) == len(configs):
        raise UsageError(wrong[0])  # a misspelt field, most likely: nothing can run
    rows = []
    for i, (values, config) in enumerate(zip(combinations, configs, strict=True), start=1):
        label = ", ".join(f"{k}={v}" for k, v in values.items())
        print(f"[{i}/{len(combinations)}] {label}", flush=True)
        rows.append(run_one(sweep, values, config))
        print(f"    {outcome(rows[-1])}", flush=True)
    report(sweep, rows)
    failed = sum(r["status"] == "failed" for r in rows)
    if failed:
        print(f"{failed} of {len(rows)} runs failed", file=sys.stderr)
    return 1 if failed else 0


def parse_sweep(argv: Sequence[str]) -> Sweep:
    """Raises UsageError on an unknown experiment or a grid that isn't FIELD=V1,V2."""
    words = list(argv)
    if words[0].startswith("-"):
        raise UsageError("name the experiment first: python -m experiments.sweep EXPERIMENT ...")
    name = words.pop(0)
    module = _module(name)
    grid: dict[str, tuple[str, ...]] = {}
    own: dict[str, str] = {}
    fixed: list[str] = []
    while words:
        flag, equals, value = words.pop(0).partition("=")
        flag = flag.replace("_", "-")
        if flag not in ("--grid", "--run-dir", "--policy"):
            fixed.append(flag + equals + value)
            continue
        if not equals:
            if not words:
                raise UsageError(f"{flag} needs a value")
            value = words.pop(0)
        if not value.strip():
            raise UsageError(f"{flag} needs a value")
        if flag == "--grid":
            field, values = _grid(value)
            grid[field] = values
        else:
            own[flag] = value
    if not grid:
        raise UsageError("give at least one --grid FIELD=V1,V2")
    run_dir = Path(own.get("--run-dir", f"runs/sweep-{name.rpartition('.')[2]}"))
    return Sweep(module, tuple(grid.items()), tuple(fixed), run_dir, own.get("--policy"))


def _module(name: str) -> str:
    """`fast_ask` is experiments.fast_ask; any other importable module is taken as it is."""
    for module in (f"experiments.{name}", name):
        try:
            if re.fullmatch(r"\w+(\.\w+)*", module) and importlib.util.find_spec(module):
                return module
        except ModuleNotFoundError:
            continue
    known = [m.name for m in pkgutil.iter_modules(experiments.__path__)]
    close = difflib.get_close_matches(name, known, n=2)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise UsageError(f"no experiment named {name!r}{hint}")


def _grid(text: str) -> tuple[str, tuple[str, ...]]:
    field, equals, values = text.partition("=")
    parts = [v.strip() for v in values.split(";" if ";" in values else ",")]
    if not equals or not field or not all(parts):
        raise UsageError(f"--grid {text}: expected FIELD=V1,V2")
    return field.strip().lstrip("-").replace("-", "_"), tuple(dict.fromkeys(parts))


def _command(sweep: Sweep, values: Mapping[str, str]) -> list[str]:
    options = [f"--{field}={value}" for field, value in values.items()]
    place = f"--run-dir={sweep.run_dir / _folder(values)}"
    return [sys.executable, "-m", sweep.module, *sweep.fixed, *options, place]


def resolve(sweep: Sweep, values: Mapping[str, str]) -> dict[str, Any] | str:
    """The whole config of one combination as the experiment itself resolves it, or its error."""
    command = [*_command(sweep, values), "--show-config"]
    shown = subprocess.run(command, capture_output=True, text=True)
    if shown.returncode:
        return _last_line(shown.stderr)
    try:
        config = json.loads(shown.stdout)
    except ValueError:
        config = None
    if isinstance(config, dict):
        return config
    return f"{sweep.module} doesn't take its config from experiments.config.parse"


def run_one(
    sweep: Sweep, values: Mapping[str, str], wanted: dict[str, Any] | str
) -> dict[str, Any]:
    """One combination with its resolved config (or the error of resolving it): skipped where
    done, else run.  Returns its row of the table."""
    name = _folder(values)
    run_dir = sweep.run_dir / name
    row: dict[str, Any] = {**values, "run_dir": str(run_dir)}
    if isinstance(wanted, str):
        return {**row, "status": "failed", "error": wanted}
    command = _command(sweep, values)
    held = _held_config(run_dir)
    different = [k for k in wanted if k not in _PLACE and not _same((held or {}).get(k), wanted[k])]
    if held is not None and (different or set(held) - set(wanted)):
        error = f"{run_dir} holds a run with other settings ({', '.join(different) or 'fields'})"
        return {**row, "status": "failed", "error": f"{error}; give another --run-dir"}
    if held is not None and (run_dir / "summary.json").exists():
        return _finished(sweep, row, run_dir, "done before")
    checkpoints = run_dir / "checkpoints"
    if held is not None and "resume" in wanted and _has_files(checkpoints):
        command.append("--resume=true")
    elif run_dir.exists():
        shutil.rmtree(run_dir)  # cut off before its first checkpoint: nothing to go on from
    log = sweep.run_dir / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    code = _call(command, log)
    row["wall_seconds"] = time.monotonic() - began
    if code:
        error = _last_line(log.read_text("utf-8", "replace")) or f"exit code {code}"
        return {**row, "status": "failed", "error": f"{error} (log: {log})"}
    return _finished(sweep, row, run_dir, "done")


def _call(command: Sequence[str], log: Path) -> int:
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            return process.wait()
        except KeyboardInterrupt:
            # Ctrl-C in a terminal reaches the run too: let it commit its last step.
            try:
                process.wait(_GRACE)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                process.terminate()
                process.wait()
            raise Interrupted("the same command goes on where the sweep stopped") from None


def _finished(sweep: Sweep, row: dict[str, Any], run_dir: Path, status: str) -> dict[str, Any]:
    try:
        summary = read_summary(run_dir)
    except (FileNotFoundError, ValueError) as error:
        return {**row, "status": "failed", "error": f"no usable summary: {error}"}
    policies = summary["policies"]
    default = "trained" if "trained" in policies else next(reversed(policies), None)
    policy = sweep.policy or default
    if policy not in policies:
        known = ", ".join(policies) or "none"
        return {**row, "status": "failed", "error": f"no policy {policy!r} (there are: {known})"}
    row |= {n: policies[policy].get(n) for n in NUMBERS}
    row["wall_seconds"] = summary.get("wall_seconds", row.get("wall_seconds"))
    return {**row, "status": status, "policy": policy, "steps": summary.get("steps")}


def _held_config(run_dir: Path) -> dict[str, Any] | None:
    try:
        held = json.loads((run_dir / "config.json").read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return held if isinstance(held, dict) else None


def _same(held: Any, wanted: Any) -> bool:
    """Whether a run has what is wanted; what was left to it ("auto") may have become anything."""
    if isinstance(held, dict) and isinstance(wanted, dict):
        return held.keys() == wanted.keys() and all(_same(held[k], wanted[k]) for k in held)
    return held == wanted or (wanted == "auto" and isinstance(held, str))


def _has_files(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _folder(values: Mapping[str, str]) -> str:
    """A folder name that shows the values and stays distinct for distinct ones."""
    return ",".join(
        f"{field}={re.sub(r'[^A-Za-z0-9._+-]', lambda m: f'%{ord(m[0]):02x}', value)}"
        for field, value in values.items()
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else ""


def outcome(row: Mapping[str, Any]) -> str:
    """How a run has ended, in a few words."""
    if row["status"] == "failed":
        return f"failed: {row['error']}"
    return f"{row['status']}: exact match {_percent(row)}"


def _percent(row: Mapping[str, Any]) -> str:
    if row.get("exact_match") is None:
        return "-"
    text = f"{100 * row['exact_match']:.1f} %"
    if row.get("low") is not None and row.get("high") is not None:
        text += f" ({100 * row['low']:.0f}-{100 * row['high']:.0f})"
    return text


def report(sweep: Sweep, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes sweep.csv, sweep.txt and, where a run has numbers, sweep.png; prints the table."""
    sweep.run_dir.mkdir(parents=True, exist_ok=True)
    columns = [*sweep.fields, "status", "policy", *NUMBERS, "steps", "wall_seconds"]
    with (sweep.run_dir / "sweep.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*columns, "run_dir", "error"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    text = table(sweep, rows).text()
    (sweep.run_dir / "sweep.txt").write_text(text + "\n", "utf-8")
    print("\n" + text)
    places = ["sweep.txt", "sweep.csv"]
    if any(r.get("exact_match") is not None for r in rows):
        plot_sweep(rows, sweep.fields, sweep.run_dir / "sweep.png")
        places.append("sweep.png")
    print(f"{', '.join(places)} are in {sweep.run_dir}", flush=True)


def table(sweep: Sweep, rows: Sequence[Mapping[str, Any]]) -> Table:
    """One row a combination; errors stand below, in order."""

    def number(row: Mapping[str, Any], name: str, form: str) -> str:
        return "-" if row.get(name) is None else form.format(row[name])

    header = (*sweep.fields, "run", "exact match\n(95 %)", "mean\nreward", "turns", "minutes")
    body = []
    notes = []
    for i, row in enumerate(rows, start=1):
        minutes = None if row.get("wall_seconds") is None else row["wall_seconds"] / 60
        body.append(
            (
                *(row[f] for f in sweep.fields),
                "failed" if row["status"] == "failed" else "done",
                _percent(row),
                number(row, "mean_reward", "{:.3f}"),
                number(row, "turns", "{:.1f}"),
                number({"minutes": minutes}, "minutes", "{:.1f}"),
            )
        )
        if row["status"] == "failed":
            notes.append(f"run {i} failed: {row['error']}")
    return Table(f"sweep of {sweep.module}", header, tuple(body), tuple(notes))


if __name__ == "__main__":
    run_main(main)
