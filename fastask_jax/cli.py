"""The `fastask` command: ask a workbook a question, look at what this machine offers.

    fastask ask BOOK.xlsx "question" [--checkpoint RUN] [--json]
    fastask doctor
    fastask --version

Only parses and dispatches; imports no JAX until a question is asked.  Exit codes: 0 done, 1
failed (for `doctor`: run_python is refused here), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from fastask_jax import __version__, _exit

_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "transformers",
    "tokenizers",
    "numpy",
    "openpyxl",
    "torch",
)
_OPTIONAL = ("torch",)


class _Parser(argparse.ArgumentParser):
    """Reports wrong usage as one line, like every other command of the project."""

    def error(self, message: str) -> NoReturn:
        raise _exit.UsageError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code; `--help` and `--version` raise SystemExit."""
    debug, words = _exit.take_debug(sys.argv[1:] if argv is None else argv)
    return _exit.run(lambda: _dispatch(words), debug)


def _dispatch(words: Sequence[str]) -> int | None:
    args = _parser().parse_args(words)
    if args.command == "doctor":
        return doctor()
    from fastask_jax.ask import main as ask  # imports JAX

    return ask(args.book, args.question, checkpoint=args.checkpoint, as_json=args.json)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fastask",
        description="Answers narrow questions about workbooks with a small trained model.",
        epilog="--debug shows the full traceback of a failure.",
    )
    parser.add_argument("--version", action="version", version=f"fastask {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    ask = commands.add_parser(
        "ask",
        help="answer a question about a workbook",
        description="Prints the answer and the ranges that were read for it.",
    )
    ask.add_argument("book", metavar="BOOK", help="an .xlsx file")
    ask.add_argument("question", metavar="QUESTION", help="one question, in quotes")
    ask.add_argument(
        "--checkpoint", metavar="RUN", help="run directory of a training (default: shipped weights)"
    )
    ask.add_argument("--json", action="store_true", help="print one JSON object")
    commands.add_parser(
        "doctor",
        help="show versions and the layers of the Python sandbox",
        description="Shows versions and which layers of the Python sandbox hold on this machine.",
    )
    return parser


def doctor() -> int:
    """Prints versions and sandbox layers; 0 when `run_python` is available, else 1."""
    from envs.sandbox import available, probe_layers

    rows = [("fastask-jax", __version__), ("python", platform.python_version())]
    rows += [(name, _version(name)) for name in _PACKAGES]
    rows.append(("system", f"{platform.system()} {platform.release()} {platform.machine()}"))
    print("versions")
    for name, text in rows:
        print(f"  {name:<18}{text}")
    layers = probe_layers()
    print("\nsandbox of run_python")
    for layer in layers:
        need = "required" if layer.mandatory else "optional"
        print(f"  {layer.name:<18}{layer.state:<9}{need:<10}{layer.detail}".rstrip())
    if available(layers):
        print("\nrun_python is available")
        return _exit.DONE
    missing = ", ".join(x.name for x in layers if x.mandatory and x.state == "missing")
    print(f"\nrun_python is refused on this machine: {missing} missing")
    return _exit.FAILED


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed" + (" (optional)" if name in _OPTIONAL else "")


if __name__ == "__main__":
    sys.exit(main())
