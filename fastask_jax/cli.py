"""The `fastask` command: ask a workbook a question, look at what this machine offers.

    fastask ask BOOK.xlsx "question" ... [--checkpoint RUN | --openai URL --model M] [--json]
    fastask serve [--checkpoint RUN] [--port N]
    fastask view RUN [RUN2] [--export DIR]
    fastask mcp DIR [--http]
    fastask doctor
    fastask --version

Only parses and dispatches; imports no JAX until a question is asked or a model served.  Exit codes:
0 done, 1 failed (for `doctor`: run_python is refused here), 2 wrong usage, 3 a question got no
answer, 130 interrupted.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from fastask_jax import __version__, _exit
from fastask_jax.ask.choice import add_choice

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
    parser, ask = _parser()
    if words and words[0] == "ask":  # questions may stand before, between and behind options
        return _ask(ask.parse_intermixed_args(words[1:]))
    args = parser.parse_args(words)
    if args.command == "doctor":
        return doctor()
    if args.command == "mcp":
        _mcp(args)
        return None
    if args.command == "view":
        _view(args)
        return None
    assert args.command == "serve"
    _serve(args)
    return None


def _parser() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """That of the command, and that of `ask`."""
    parser = _Parser(
        prog="fastask",
        description="Answers narrow questions about workbooks with a small trained model.",
        epilog="--debug shows the full traceback of a failure.",
    )
    parser.add_argument("--version", action="version", version=f"fastask {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    ask = commands.add_parser(
        "ask",
        help="answer questions about a workbook",
        description="Prints each answer and the ranges that were read for it.  Exit code 3: the "
        "model gave no answer.",
    )
    ask.add_argument("book", metavar="BOOK", help="a workbook file: docs/readers.md")
    ask.add_argument(
        "questions", nargs="*", metavar="QUESTION", help="a question, in quotes; several are fine"
    )
    ask.add_argument(
        "--questions", dest="file", metavar="FILE", help="a question a line; - is stdin"
    )
    ask.add_argument("--json", action="store_true", help="print one JSON object a question")
    ask.add_argument(
        "--trace", metavar="FILE", help="append the whole conversations, as JSON lines"
    )
    add_choice(ask)
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP, token ids in and out",
        description="Serves a model over HTTP until SIGTERM or Ctrl-C (docs/serving.md).",
    )
    serve.add_argument(
        "--checkpoint", metavar="RUN", help="run directory of a training (default: shipped weights)"
    )
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    serve.add_argument(
        "--port", type=int, default=8000, metavar="N", help="port; 0 takes a free one (8000)"
    )
    serve.add_argument(
        "--slots", type=int, default=64, metavar="N", help="requests sampled at a time (64)"
    )
    serve.add_argument(
        "--queue", type=int, default=256, metavar="N", help="requests that may wait (256)"
    )
    serve.add_argument(
        "--max-len", type=int, default=2048, metavar="N", help="tokens of a whole text (2048)"
    )
    serve.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32",
        help="type to compute in (float32)",
    )  # fmt: skip
    serve.add_argument(
        "--api-key-file", metavar="FILE", help="file whose only line clients have to send"
    )
    serve.add_argument(
        "--weights-from", metavar="DIR", help="take new weights from folders below DIR"
    )
    serve.add_argument(
        "--deadline", type=float, default=600.0, metavar="S", help="seconds of a request (600)"
    )
    serve.add_argument(
        "--grace", type=float, default=30.0, metavar="S",
        help="seconds that running requests have left after SIGTERM (30)",
    )  # fmt: skip
    view = commands.add_parser(
        "view",
        help="look at a run: curves, accuracies, every episode that it kept",
        description="Serves the page of a run, or of two side by side, until Ctrl-C; with "
        "--export it is written instead, as files that open from disk (docs/view.md).",
    )
    view.add_argument("runs", metavar="RUN", nargs="+", help="one run directory, or two to compare")
    view.add_argument("--export", metavar="DIR", help="write the page to a folder and end")
    view.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    view.add_argument(
        "--port", type=int, default=8100, metavar="N", help="port; 0 takes a free one (8100)"
    )
    view.add_argument("--open", action="store_true", help="show the page in a browser")
    serve.add_argument(
        "--asks", type=int, default=64, metavar="N", help="asks at a time; 0 takes none (64)"
    )
    serve.add_argument(
        "--ask-megabytes", type=float, default=32.0, metavar="M", help="of a workbook (32)"
    )
    serve.add_argument(
        "--ask-turns", type=int, default=15, metavar="N", help="turns of an ask (15)"
    )
    serve.add_argument(
        "--ask-seconds", type=float, default=120.0, metavar="S", help="seconds of an ask (120)"
    )
    mcp = commands.add_parser(
        "mcp",
        help="offer ask_workbook to agents that speak MCP",
        description="Offers the tool ask_workbook(path, question) over stdin and stdout, or HTTP.",
    )
    mcp.add_argument("folders", nargs="+", metavar="DIR", help="a folder that may be read")
    mcp.add_argument("--http", action="store_true", help="serve it over streamable HTTP")
    mcp.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    mcp.add_argument(
        "--port", type=int, default=8200, metavar="N", help="port; 0 takes a free one (8200)"
    )
    mcp.add_argument(
        "--client-key-file", metavar="FILE", help="file whose only line clients have to send"
    )
    add_choice(mcp)
    commands.add_parser(
        "doctor",
        help="show versions and the layers of the Python sandbox",
        description="Shows versions and which layers of the Python sandbox hold on this machine.",
    )
    return parser, ask


def _ask(args: argparse.Namespace) -> int:
    from fastask_jax.ask.choice import take_choice

    values = vars(args)
    try:
        choice = take_choice(values)
    except ValueError as error:
        raise _exit.UsageError(f"{error} (see fastask ask --help)") from None
    if not args.questions and args.file is None:
        raise _exit.UsageError("ask a QUESTION, or give --questions FILE (see fastask ask --help)")
    from fastask_jax.ask.command import main, read_questions

    questions: Iterable[str] = args.questions
    if args.file is not None:
        questions = itertools.chain(questions, read_questions(args.file))
    several = args.file is not None or len(args.questions) > 1
    return main(
        args.book, questions, choice, as_json=args.json, trace=args.trace, several=several
    )


def _serve(args: argparse.Namespace) -> None:
    from fastask_jax.serve.settings import ServeConfig

    values = {name: value for name, value in vars(args).items() if name != "command"}
    try:
        config = ServeConfig(**values)
    except ValueError as error:
        raise _exit.UsageError(f"{error} (see fastask serve --help)") from None
    try:
        from fastask_jax.serve.server import serve
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn", "prometheus_client", "python_multipart"):
            raise
        raise ModuleNotFoundError(
            "fastask serve needs its extra: pip install '.[serve]'", name=error.name
        ) from None
    serve(config)


def _view(args: argparse.Namespace) -> None:
    from fastask_jax.report.page import Site, serve, write_site

    runs = [Path(run) for run in args.runs]
    if len(runs) > 2:
        raise _exit.UsageError(f"fastask view takes one run or two, not {len(runs)}")
    if not 0 <= args.port < 65536:
        raise _exit.UsageError(f"--port is 0 to 65535, not {args.port}")
    if args.export is not None:
        index = write_site(runs, Path(args.export))
        print(f"open {index} in a browser")
        if args.open:
            import webbrowser

            webbrowser.open(index.absolute().as_uri())
        return
    serve(Site(runs), args.host, args.port, args.open)


def _mcp(args: argparse.Namespace) -> None:
    from fastask_jax.ask.choice import take_choice

    values = vars(args)
    try:
        choice = take_choice(values)
        from fastask_jax.ask.mcp_server import McpConfig, serve_mcp

        config = McpConfig(
            tuple(args.folders), args.http, args.host, args.port, args.client_key_file
        )
    except ModuleNotFoundError as error:
        if error.name not in ("mcp", "uvicorn", "pydantic", "anyio"):
            raise
        raise ModuleNotFoundError(
            "fastask mcp needs its extra: pip install '.[mcp]'", name=error.name
        ) from None
    except ValueError as error:
        raise _exit.UsageError(f"{error} (see fastask mcp --help)") from None
    serve_mcp(config, choice)


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
