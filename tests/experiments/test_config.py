"""Configs on the command line: values, messages, help, JSON, exit codes."""

import dataclasses
import errno
import math
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import fast_ask
from experiments.config import (
    UsageError,
    format_config,
    from_json,
    load_config,
    option,
    parse,
    resumable,
    run_main,
    save_config,
    to_json,
)
from experiments.fields import leaves_of
from fastask_jax.learn.losses import LOSSES
from kernels.choice import NAMES

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Optimizer:
    """An optimizer."""

    lr: float = option(1e-3, "peak learning rate")
    betas: tuple[float, float] = option((0.9, 0.95), "moment decays")
    clip: float | None = option(1.0, "gradient norm bound")

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError("lr must be above 0")


@dataclass(frozen=True)
class Config:
    """Trains something small.

    More that the help leaves out.
    """

    run_dir: Path = option(Path("runs/x"), "where the run is kept")
    batch: int = option(128, "rollouts a step")
    group_size: int = option(8, "rollouts of one task")
    loss: Literal["aipo_clip", "ppo"] = option("aipo_clip", "per-token loss")
    resume: bool = option(False, "go on from the last checkpoint")
    families: tuple[str, ...] = option(("revenue", "spend"), "task families")
    note: str | None = option(None, "free text")
    optimizer: Optimizer = option(Optimizer())

    def __post_init__(self) -> None:
        if self.batch % self.group_size:
            raise ValueError(
                f"batch ({self.batch}) must be a multiple of group_size ({self.group_size})"
            )


PRESETS = {"tiny": Config(batch=16), "large": Config(batch=256, optimizer=Optimizer(lr=1e-5))}


def test_defaults_and_every_kind_of_value() -> None:
    assert parse(Config, []) == Config()
    got = parse(
        Config,
        "--run-dir out --batch=6e1 --group_size 4 --loss ppo --resume --families a,b,c "
        "--note=none --optimizer.lr 3e-4 --optimizer.betas 0.8,0.9 --optimizer.clip none".split(),
    )
    assert got == Config(
        run_dir=Path("out"),
        batch=60,
        group_size=4,
        loss="ppo",
        resume=True,
        families=("a", "b", "c"),
        note=None,
        optimizer=Optimizer(lr=3e-4, betas=(0.8, 0.9), clip=None),
    )
    assert parse(Config, ["--resume", "false", "--batch", "8", "--batch", "16"]).batch == 16


def test_presets_are_the_start_and_overrides_apply_on_top() -> None:
    assert parse(Config, [], presets=PRESETS, preset="tiny") == PRESETS["tiny"]
    got = parse(Config, ["--optimizer.clip", "2", "--preset", "large"], presets=PRESETS)
    assert got.batch == 256
    assert got.optimizer == Optimizer(lr=1e-5, clip=2.0)


def test_checks_see_the_final_combination_only() -> None:
    # 12 is no multiple of the default group size 8; both together are fine.
    assert parse(Config, ["--batch", "12", "--group-size", "3"]).batch == 12


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ("--optimzer.lr 1", "did you mean --optimizer.lr"),
        ("--lr 1", "did you mean --optimizer.lr"),
        ("--learning 1", "unknown field --learning (--help lists every field)"),
        ("--optimizer 1", "is a group of fields; set one of them: --optimizer.lr"),
        ("--batch ten", "--batch: expected an integer, got 'ten'"),
        ("--batch 1.5", "--batch: expected an integer"),
        ("--optimizer.lr fast", "--optimizer.lr: expected a number"),
        ("--resume maybe", "--resume: expected true or false"),
        ("--loss pppo", "--loss: expected one of aipo_clip, ppo, got 'pppo'"),
        ("--optimizer.betas 0.9", "--optimizer.betas: expected 2 values"),
        ("--batch", "--batch needs a value (integer)"),
        ("--batch --loss ppo", "--batch needs a value"),
        ("stray", "unexpected 'stray'"),
        ("--preset huge", "--preset: expected one of tiny, large, got 'huge'"),
        ("--batch 100", "batch (100) must be a multiple of group_size (8)"),
        ("--optimizer.lr 0", "optimizer: lr must be above 0"),
    ],
)
def test_wrong_input_is_one_line_that_says_what_to_do(argv: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(Config, argv.split(), presets=PRESETS)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_required_fields() -> None:
    @dataclass(frozen=True)
    class Needs:
        checkpoint: str = option(help="run directory to load")
        tasks: int = option(128)

    assert parse(Needs, ["--checkpoint", "r"]) == Needs("r")
    with pytest.raises(UsageError, match="missing --checkpoint"):
        parse(Needs, [])


def test_unsupported_types_are_the_programmers_error() -> None:
    @dataclass(frozen=True)
    class Bad:
        table: dict[str, int] = dataclasses.field(default_factory=dict)

    with pytest.raises(TypeError, match="no command-line form"):
        parse(Bad, [])


def test_help_lists_every_field_with_type_default_and_text(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(Config, ["--preset", "large", "--help"], presets=PRESETS, prog="python -m x")
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: python -m x")
    flat = " ".join(shown.split())
    assert "Trains something small." in flat and "leaves out" not in flat
    assert "--optimizer.lr peak learning rate (number; default 1e-05)" in flat
    assert "--loss per-token loss (aipo_clip|ppo; default aipo_clip)" in flat
    assert "--optimizer.clip gradient norm bound (number or none; default 1.0)" in flat
    assert "--preset NAME start from one of tiny, large; default large" in flat
    assert max(map(len, shown.splitlines())) <= 100
    for flag in ("--run-dir", "--batch", "--group-size", "--resume", "--families", "--note"):
        assert f"  {flag} " in shown


def test_show_config_prints_json_and_stops(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(Config, ["--show-config", "--preset", "large", "--batch=64"], presets=PRESETS)
    assert caught.value.code == 0
    assert from_json(Config, capsys.readouterr().out) == dataclasses.replace(
        PRESETS["large"], batch=64
    )


def test_resolved_config_is_short_and_aligned() -> None:
    lines = format_config(PRESETS["large"]).splitlines()
    assert lines[0] == "config"
    assert "  batch       256" in lines
    assert "  optimizer   lr=1e-05  betas=0.9,0.95  clip=1.0" in lines
    assert len(lines) == 1 + len(dataclasses.fields(Config))
    told = format_config(PRESETS["large"], changed=("optimizer",)).splitlines()
    assert "  optimizer   lr=1e-05" in told
    assert "  optimizer   as by default" in format_config(Config(), changed=("optimizer",))


@given(
    lr=st.floats(min_value=1e-300, allow_nan=False),
    groups=st.integers(1, 10**12),
    note=st.none() | st.text(),
    families=st.lists(st.text()).map(tuple),
    clip=st.none() | st.floats(allow_nan=False),
)
def test_json_round_trip_is_exact(lr, groups, note, families, clip) -> None:
    config = Config(
        batch=8 * groups, note=note, families=families, optimizer=Optimizer(lr=lr, clip=clip)
    )
    back = from_json(Config, to_json(config))
    assert back == config
    assert isinstance(back.run_dir, Path) and isinstance(back.families, tuple)


def test_saved_config_comes_back_and_errors_name_the_file(tmp_path) -> None:
    save_config(PRESETS["large"], tmp_path / "run")
    assert load_config(Config, tmp_path / "run") == PRESETS["large"]
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["config.json"]
    with pytest.raises(UsageError, match="is not a run directory"):
        load_config(Config, tmp_path / "nothing")
    path = tmp_path / "run" / "config.json"
    path.write_text(path.read_text().replace('"batch": 256', '"batch": "many"'))
    with pytest.raises(UsageError, match=r"config.json: batch: expected integer, got 'many'"):
        load_config(Config, tmp_path / "run")
    with pytest.raises(ValueError, match=r"optimizer.beta \(did you mean optimizer.betas"):
        from_json(Config, '{"optimizer": {"beta": 1.0}}')
    path.write_text("{")
    with pytest.raises(UsageError, match=r"config.json: "):
        load_config(Config, tmp_path / "run")


def test_the_config_of_an_earlier_run_is_kept(tmp_path) -> None:
    """A start that forgot --resume is refused before it has changed anything."""

    @dataclass(frozen=True)
    class Resumable:
        resume: bool = False
        lr: float = 1.0

    save_config(Resumable(), tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")  # stopped before its first line: start anew
    save_config(Resumable(lr=2.0), tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(FileExistsError, match="holds an earlier run.*--resume true"):
        save_config(Resumable(lr=3.0), tmp_path)
    assert load_config(Resumable, tmp_path).lr == 2.0
    save_config(Resumable(resume=True, lr=2.0), tmp_path)


def _exit_of(main, capsys, argv=()) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        run_main(main, list(argv))
    return caught.value.code, capsys.readouterr().err


def _raise(error: BaseException):
    def main(argv: list[str]) -> None:
        raise error

    return main


def test_exit_codes_and_lines(capsys) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "runs/x/metrics.jsonl")
    wrapped = RuntimeError("checkpoint failed")
    wrapped.__cause__ = ValueError("UNKNOWN: Error writing: No space left on device [tensorstore]")
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory", "book.xlsx")
    denied = PermissionError(errno.EACCES, "Permission denied", "/root/x")
    cases = [
        (UsageError("unknown field --x"), 2, "error: unknown field --x\n"),
        (missing, 1, "error: no such file or directory: book.xlsx\n"),
        (denied, 1, "error: permission denied: /root/x\n"),
        (ValueError("bad\n  workbook"), 1, "error: bad workbook\n"),
        (ZeroDivisionError("division by zero"), 1, "error: ZeroDivisionError: division by zero"),
        (AssertionError(), 1, "error: AssertionError (--debug true shows where)\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ]
    for error, code, line in cases:
        got, shown = _exit_of(_raise(error), capsys)
        assert got == code, error
        assert shown.startswith(line) and shown.count("\n") == 1
    for error in (full, wrapped):
        code, shown = _exit_of(_raise(error), capsys)
        assert code == 1 and shown.count("\n") == 1
        assert shown.lower().startswith("error: disk full: ")
        assert "free some space" in shown


def test_success_and_returned_codes(capsys) -> None:
    assert _exit_of(lambda argv: None, capsys) == (0, "")
    assert _exit_of(lambda argv: 1, capsys) == (1, "")


def test_interrupt_in_training_says_how_to_resume(capsys) -> None:
    def main(argv: list[str]) -> None:
        with resumable("runs/x"):
            raise KeyboardInterrupt

    code, shown = _exit_of(main, capsys)
    assert (code, shown) == (130, "interrupted; resume with --run-dir runs/x --resume true\n")


@pytest.mark.parametrize(
    "argv", [["--debug", "true"], ["--debug=true"], ["--batch", "8", "--debug"]]
)
def test_debug_shows_the_traceback_and_parse_lets_it_through(argv, capsys) -> None:
    def main(words: list[str]) -> None:
        parse(Config, words)
        math.sqrt(-1)

    code, shown = _exit_of(main, capsys, argv)
    assert code == 1 and "Traceback" in shown and "math.sqrt(-1)" in shown
    code, shown = _exit_of(main, capsys, ["--debug", "false"])
    assert code == 1 and "Traceback" not in shown


def test_a_real_process_exits_2_with_one_line(tmp_path) -> None:
    script = tmp_path / "demo.py"
    script.write_text(
        textwrap.dedent(
            """
            from __future__ import annotations
            from dataclasses import dataclass
            from experiments.config import option, parse, run_main

            @dataclass(frozen=True)
            class Config:
                batch: int = option(8, "rollouts")

            def main(argv):
                print(parse(Config, argv).batch)

            run_main(main)
            """
        )
    )
    command = [sys.executable, str(script)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}

    def call(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *argv], capture_output=True, text=True, env=environment, cwd=tmp_path
        )

    good = call("--batch", "16")
    assert (good.returncode, good.stdout, good.stderr) == (0, "16\n", "")
    bad = call("--batches", "16")
    assert bad.returncode == 2 and bad.stdout == ""
    assert bad.stderr == (
        "error: unknown field --batches; did you mean --batch? (--help lists every field)\n"
    )


def test_an_interrupt_while_the_process_ends_is_no_traceback(tmp_path) -> None:
    script = tmp_path / "slow_to_end.py"
    script.write_text(
        textwrap.dedent(
            """
            import atexit, signal, time
            atexit.register(lambda: (signal.raise_signal(signal.SIGINT), time.sleep(60)))
            from experiments.config import run_main
            run_main(lambda argv: 0)
            """
        )
    )
    root = str(Path(__file__).parents[2])
    ended = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, "PYTHONPATH": root},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


def test_help_comes_from_docstrings_where_a_field_has_none() -> None:
    @dataclass(frozen=True)
    class Inner:
        """What it is.

        size: of a thing, i.e. its length (in m).  More on it.
        low, high: bounds.  name: what
            it is called.

        Prose about the rest.
        """

        size: int = 1
        low: int = 1
        high: int = 1
        name: str = ""
        other: int = 1
        own: int = option(1, "its own")

    assert {leaf.name: leaf.help for leaf in leaves_of(Inner)} == {
        "size": "of a thing, i.e. its length (in m)",
        "low": "bounds",
        "high": "bounds",
        "name": "what it is called",
        "other": "",
        "own": "its own",
    }


def test_every_option_of_training_says_what_it_is() -> None:
    leaves = {leaf.name: leaf.help for leaf in leaves_of(fast_ask.Config)}
    assert not [name for name, text in leaves.items() if not text]
    for operation, names in NAMES.items():
        assert all(name in leaves[f"kernels.{operation}"] for name in ("auto", *names))
    assert all(name in leaves["objective.loss"] for name in LOSSES)
