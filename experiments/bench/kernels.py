"""Speed, accuracy and memory of the operations in `kernels`.

    python -m experiments.bench.kernels                      # speed: one JSON line an operation
    python -m experiments.bench.kernels --only attention
    python -m experiments.bench.kernels --accuracy           # errors against float64 definitions
    python -m experiments.bench.kernels --memory             # compiled for a TPU v5p: '.[aot]'

The last two write their tables into docs/kernels.md (unless `--only` leaves some out).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

from experiments.config import option, parse, run_main
from kernels.choice import NAMES

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"


@dataclass(frozen=True)
class Config:
    accuracy: bool = option(False, "errors against float64, into docs/kernels.md")
    memory: bool = option(False, "memory, bytes and operations on a TPU v5p, into docs/kernels.md")
    only: str | None = option(None, f"one operation: {', '.join(NAMES)}")
    runs: int = option(9, "timed runs of each side")

    def __post_init__(self) -> None:
        if self.only is not None and self.only not in NAMES:
            raise ValueError(f"only must be one of {', '.join(NAMES)}, not {self.only!r}")
        if self.runs < 1:
            raise ValueError(f"runs must be at least 1, not {self.runs}")


def write_table(name: str, lines: list[str]) -> None:
    """Replaces what stands between the markers of a table in docs/kernels.md."""
    begin = f"<!-- {name}: python -m experiments.bench.kernels --{name} -->"
    end = f"<!-- {name} end -->"
    before, _, rest = PAGE.read_text("utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{PAGE} has no place for the table {name!r} ({begin})")
    PAGE.write_text("\n".join([before + begin, *lines, end]) + after, "utf-8")


def main(argv: list[str]) -> None:
    config = parse(Config, argv, prog="python -m experiments.bench.kernels", description=__doc__)
    jax.config.update("jax_platforms", "cpu")

    def progress(line: str) -> None:
        print(line, flush=True)

    tables: dict[str, Callable[..., list[str]]] = {}
    if config.accuracy:
        from experiments.bench import kernel_accuracy

        tables["accuracy"] = kernel_accuracy.table
    if config.memory:
        from experiments.bench import kernel_memory

        tables["memory"] = kernel_memory.table
    for name, make in tables.items():
        lines = make(progress, config.only)
        if config.only is None:
            write_table(name, lines)
        else:
            print("\n".join(lines))
    if not tables:
        from experiments.bench import kernel_speed

        for name in kernel_speed.PEERS:
            if config.only in (None, name):
                kernel_speed.measure(name, config.runs)


if __name__ == "__main__":
    run_main(main)
