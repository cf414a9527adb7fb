"""The `fastask` command as a shell sees it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fastask_jax
from envs.sandbox import Layer
from fastask_jax import cli

ROOT = Path(__file__).parents[2]


def fastask(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fastask_jax.cli", *argv], capture_output=True, text=True, cwd=ROOT
    )


def test_version_and_help() -> None:
    assert fastask("--version").stdout == f"fastask {fastask_jax.__version__}\n"
    shown = fastask("--help")
    assert shown.returncode == 0
    assert "ask" in shown.stdout and "doctor" in shown.stdout
    assert "--checkpoint RUN" in fastask("ask", "--help").stdout


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["dctor"], "invalid choice: 'dctor'"),
        (["ask", "book.xlsx"], "ask a QUESTION, or give --questions FILE"),
        (["ask", "book.xlsx", "q", "--chekpoint", "x"], "unrecognized arguments"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(argv, text, capsys) -> None:
    assert cli.main(argv) == 2
    shown = capsys.readouterr().err
    assert text in shown and "--help" in shown and shown.count("\n") == 1


def test_an_error_can_not_move_the_cursor(capsys) -> None:
    assert cli.main(["ask", "\x1b[2Jno.csv", "q"]) == 1
    assert capsys.readouterr().err == "error: no such workbook: \\x1b[2Jno.csv\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_gone_is_nothing_to_speak_of(unbuffered, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, "-m", "fastask_jax.cli", "doctor"]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, cwd=ROOT)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_doctor_shows_versions_and_layers_and_imports_no_jax() -> None:
    code = (
        "import sys; from fastask_jax import cli; code = cli.main(['doctor']); "
        "print('jax' in sys.modules, 'transformers' in sys.modules, code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    lines = done.stdout.splitlines()
    jax_loaded, transformers_loaded, status = lines[-1].split()
    assert (jax_loaded, transformers_loaded) == ("False", "False"), done.stderr
    names = {line.split()[0] for line in lines if line.startswith("  ")}
    assert {"fastask-jax", "python", "jax", "torch", "seccomp", "limits", "uid"} <= names
    available = "run_python is available" in done.stdout
    assert status == ("0" if available else "1")


def test_doctor_fails_where_a_mandatory_layer_is_missing(monkeypatch, capsys) -> None:
    layers = [
        Layer("limits", "on", "", True),
        Layer("seccomp", "missing", "no seccomp in this kernel", True),
        Layer("landlock", "missing", "", False),
    ]
    monkeypatch.setattr("envs.sandbox.probe_layers", lambda: layers)
    assert cli.main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "no seccomp in this kernel" in shown
    assert shown.endswith("run_python is refused on this machine: seccomp missing\n")
