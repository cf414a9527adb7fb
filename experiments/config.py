"""Frozen dataclass configs to and from the command line and `config.json`.

    @dataclass(frozen=True)
    class Config:
        run_dir: str = option("runs/demo", "where the run is kept")
        optimizer: OptimizerConfig = option(OptimizerConfig(), "")

    config = parse(Config, argv, presets={"tiny": Config(...)})     # --optimizer.lr 1e-3

Every leaf field is an option (`--field value`, `--field=value`; dashes and underscores are the
same).  Types: bool, int, float, str, Path, Literal, Optional of these, tuples (comma separated)
and nested dataclasses.  Wrong input raises `UsageError` with one line; `run_main` turns that
into exit code 2.  Checks of values belong to the configs' own `__post_init__`.  Leaves out
positional arguments, lists of configs and unions of configs: an experiment needs none of them.
"""

from __future__ import annotations

import atexit
import dataclasses
import difflib
import json
import os
import shutil
import signal
import sys
import textwrap
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from experiments.fields import (
    TRUE,
    Leaf,
    default_of,
    describe,
    fields_of,
    from_dict,
    from_json,
    is_config,
    leaves_of,
    option,
    read_value,
    show_value,
    strip_optional,
    to_dict,
    to_json,
)
from fastask_jax import _exit
from fastask_jax._exit import Interrupted, UsageError, resumable

__all__ = [
    "Interrupted",
    "UsageError",
    "check_place",
    "format_config",
    "from_dict",
    "from_json",
    "load_config",
    "option",
    "parse",
    "resumable",
    "run_main",
    "save_config",
    "to_dict",
    "to_json",
]

C = TypeVar("C")
_RESERVED = ("help", "preset", "debug", "show_config")


def parse(
    config_class: type[C],
    argv: Sequence[str] | None = None,
    *,
    presets: Mapping[str, C] | None = None,
    preset: str | None = None,
    prog: str | None = None,
    description: str | None = None,
) -> C:
    """The config that `argv` (default: the process's) describes.

    presets: complete configs to start from, picked with `--preset NAME`; `preset` names the one
    taken without that option.  Otherwise the start is the class's own defaults.  `--help` prints
    every field, `--show-config` the resolved config as JSON; both exit 0.

    Raises UsageError with one line that says what to do.
    """
    presets = presets or {}
    leaves = {leaf.name: leaf for leaf in leaves_of(config_class)}
    taken = [n for n in _RESERVED if n in leaves]
    if taken:
        raise TypeError(f"{config_class.__name__}.{taken[0]} is a reserved option name")
    texts, wants_help = _split(sys.argv[1:] if argv is None else argv, leaves, config_class)
    preset = texts.pop("preset", preset)
    texts.pop("debug", None)  # taken by run_main; let through where `main` reads the process's argv
    shows = texts.pop("show_config", "false").lower() in TRUE
    if preset is not None and preset not in presets:
        if not presets:
            raise UsageError("--preset: this experiment has no presets; leave the option out")
        raise UsageError(f"--preset: expected one of {', '.join(presets)}, got {preset!r}")
    base = presets[preset] if preset is not None else None
    if wants_help:
        print(_help(config_class, leaves, presets, preset, prog, description))
        raise SystemExit(0)
    values: dict[str, Any] = {}
    for name, text in texts.items():
        try:
            values[name] = read_value(leaves[name].type, text)
        except ValueError as error:
            raise UsageError(f"{leaves[name].flag}: {error}") from None
    config = typing.cast(C, _build(config_class, base, values, ""))
    if shows:
        print(to_json(config), end="")
        raise SystemExit(0)
    return config


def _split(
    argv: Sequence[str], leaves: Mapping[str, Leaf], cls: type
) -> tuple[dict[str, str], bool]:
    """Option texts by field name; the last one given wins."""
    texts: dict[str, str] = {}
    wants_help = False
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word in ("-h", "--help"):
            wants_help = True
            continue
        if not word.startswith("--") or word == "--":
            raise UsageError(f"unexpected {word!r}: options are written --field value")
        flag, equals, text = word.partition("=")
        name = flag[2:].replace("-", "_")
        if name not in leaves and name not in _RESERVED:
            raise UsageError(_unknown(flag, name, leaves))
        if not equals:
            if rest and not rest[0].startswith("--"):
                text = rest.pop(0)
            elif name in ("debug", "show_config") or (
                name in leaves and strip_optional(leaves[name].type)[0] is bool
            ):
                text = "true"
            else:
                kind = describe(leaves[name].type) if name in leaves else "NAME"
                raise UsageError(f"{flag} needs a value ({kind})")
        texts[name] = text
    return texts, wants_help


def _unknown(flag: str, name: str, leaves: Mapping[str, Leaf]) -> str:
    inside = [leaf.flag for leaf in leaves.values() if leaf.name.startswith(name + ".")]
    if inside:
        return f"{flag} is a group of fields; set one of them: {', '.join(inside[:4])}"
    close = difflib.get_close_matches(name, leaves, n=3, cutoff=0.6)
    # `--lr` for `--optimizer.lr`: the last part alone is what people remember.
    tails: dict[str, list[str]] = {}
    for full in leaves:
        tails.setdefault(full.rpartition(".")[2], []).append(full)
    for tail in difflib.get_close_matches(name.rpartition(".")[2], tails, n=2, cutoff=0.8):
        close.extend(full for full in tails[tail] if full not in close)
    flags = ", ".join(leaves[n].flag for n in close[:3])
    hint = f"; did you mean {flags}?" if flags else ""
    return f"unknown field {flag}{hint} (--help lists every field)"


def _build(cls: type, base: Any, values: Mapping[str, Any], prefix: str) -> Any:
    """`base` (or the defaults) with `values`, all set at once, so that `__post_init__` sees
    only the final combination."""
    kwargs: dict[str, Any] = {}
    missing: list[str] = []
    for field, kind in fields_of(cls):
        name = prefix + field.name
        inner, _ = strip_optional(kind)
        if is_config(inner):
            below = {k: v for k, v in values.items() if k.startswith(name + ".")}
            start = getattr(base, field.name) if base is not None else default_of(field)
            if below or start is MISSING:
                kwargs[field.name] = _build(
                    inner, None if start is MISSING else start, below, name + "."
                )
        elif name in values:
            kwargs[field.name] = values[name]
        elif base is None and default_of(field) is MISSING:
            missing.append("--" + name.replace("_", "-"))
    if missing:
        raise UsageError(f"missing {', '.join(missing)} (--help lists every field)")
    try:
        return cls(**kwargs) if base is None else dataclasses.replace(base, **kwargs)
    except ValueError as error:
        named = not prefix or str(error).startswith(prefix)
        raise UsageError(str(error) if named else f"{prefix[:-1]}: {error}") from error


def _value_at(base: Any, cls: type, dotted: str) -> Any:
    """The value of a leaf in `base`, or the default of its class; MISSING where required."""
    head, _, rest = dotted.partition(".")
    field, kind = next((f, k) for f, k in fields_of(cls) if f.name == head)
    value = getattr(base, head) if base is not None else default_of(field)
    if not rest:
        return value
    inner, _ = strip_optional(kind)
    return _value_at(None if value is MISSING else value, inner, rest)


def _help(
    cls: type,
    leaves: Mapping[str, Leaf],
    presets: Mapping[str, Any],
    preset: str | None,
    prog: str | None,
    description: str | None,
) -> str:
    width = min(100, max(72, shutil.get_terminal_size((100, 24)).columns))
    lines = [f"usage: {prog or _program()} [--field value ...]", ""]
    text = description if description is not None else (cls.__doc__ or "")
    if text and not text.startswith(f"{cls.__name__}("):  # the signature that dataclass writes
        first = text.strip().split("\n\n")[0]
        lines += [*textwrap.wrap(" ".join(first.split()), width), ""]
    rows = [
        ("--help", "show this text"),
        ("--show-config", "show the resolved config as JSON and stop"),
        ("--debug", "show the traceback of a failure"),
    ]
    if presets:
        chosen = f"; default {preset}" if preset else ""
        rows.append(("--preset NAME", f"start from one of {', '.join(presets)}{chosen}"))
    column = 2 + max(len(left) for left in [*(leaf.flag for leaf in leaves.values()), rows[-1][0]])
    column = min(column, 34)
    for leaf in leaves.values():
        value = _value_at(presets[preset] if preset else None, cls, leaf.name)
        default = "required" if value is MISSING else f"default {show_value(value) or repr('')}"
        notes = f"({describe(leaf.type)}; {default})"
        rows.append((leaf.flag, f"{leaf.help} {notes}".strip()))
    for left, right in rows:
        wrapped = textwrap.wrap(right, width - column - 2, break_on_hyphens=False)
        if len(left) > column - 2:
            lines.append(f"  {left}")
            left = ""
        for i, part in enumerate(wrapped):
            lines.append(f"  {left if i == 0 else '':<{column}}{part}")
    return "\n".join(lines)


def _program() -> str:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name:
        return f"python -m {spec.name.removesuffix('.__main__')}"
    return os.path.basename(sys.argv[0]) or "python"


def format_config(
    config: Any, title: str = "config", width: int = 100, changed: Collection[str] = ()
) -> str:
    """The resolved config, short: a line a field, nested configs on wrapped lines.

    changed: fields that are shown only where they differ from their default.
    """
    rows: list[tuple[str, str]] = []
    for field, kind in fields_of(type(config)):
        value = getattr(config, field.name)
        inner, _ = strip_optional(kind)
        if is_config(inner) and value is not None:
            flat = _leaf_values(value)
            if field.name in changed:
                default = _leaf_values(field.default)
                flat = {k: v for k, v in flat.items() if v != default.get(k)}
                if not flat:
                    rows.append((field.name, "as by default"))
                    continue
            rows.append((field.name, "  ".join(f"{k}={show_value(v)}" for k, v in flat.items())))
        else:
            rows.append((field.name, show_value(value)))
    column = max((len(name) for name, _ in rows), default=0) + 2
    lines = [title]
    for name, text in rows:
        wrapped = textwrap.wrap(
            text, width - column - 2, break_on_hyphens=False, break_long_words=False
        )
        for i, part in enumerate(wrapped or [""]):
            lines.append(f"  {name if i == 0 else '':<{column}}{part}".rstrip())
    return "\n".join(lines)


def _leaf_values(config: Any, prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for field, kind in fields_of(type(config)):
        value = getattr(config, field.name)
        inner, _ = strip_optional(kind)
        if is_config(inner) and value is not None:
            out.update(_leaf_values(value, f"{prefix}{field.name}."))
        else:
            out[prefix + field.name] = value
    return out


def check_place(config: Any, run_dir: str | Path) -> None:
    """Raises FileExistsError where `run_dir` holds what this config's experiment would replace:
    a training run, unless the config resumes it, or the run of an experiment with other fields.
    """
    folder = Path(run_dir)
    resume = getattr(config, "resume", None)
    lines = folder / "metrics.jsonl"
    if not resume and lines.exists() and lines.stat().st_size:
        go_on = "" if resume is None else "continue it with --resume true, or "
        raise FileExistsError(f"{folder} holds an earlier run: {go_on}give another --run-dir")
    try:
        held = json.loads((folder / "config.json").read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return
    known = {field.name for field, _ in fields_of(type(config))}
    if isinstance(held, dict) and not set(held) <= known:
        raise FileExistsError(f"{folder} holds another experiment's run: give another --run-dir")


def save_config(config: Any, run_dir: str | Path) -> Path:
    """Writes `run_dir/config.json`, making the folder; atomic, so a crash leaves no half file.

    Raises FileExistsError where `check_place` does.
    """
    check_place(config, run_dir)
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    scratch = folder / "config.json.part"
    scratch.write_text(to_json(config), "utf-8")
    os.replace(scratch, path)
    return path


def load_config(cls: type[C], run_dir: str | Path) -> C:
    """The config saved with a run.  Raises UsageError where there is none, or none that fits."""
    path = Path(run_dir) / "config.json"
    try:
        return from_json(cls, path.read_text("utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{run_dir} is not a run directory: it has no config.json") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


def run_main(
    main: Callable[[list[str]], int | None], argv: Sequence[str] | None = None
) -> NoReturn:
    """Runs an experiment's `main(argv)` and exits: 0 done, 1 failed, 2 wrong usage, 130
    interrupted.  Errors are one line on stderr; `--debug true` adds the traceback."""
    debug, words = _exit.take_debug(sys.argv[1:] if argv is None else argv)
    code = _exit.run(lambda: main(words), debug)
    # Nothing is left to save: Ctrl-C while libraries clean up ends the process, and no traceback.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)
