"""How fast a large workbook opens: workload W4, against openpyxl and python-calamine.

    python -m experiments.bench.open_workbook            both files, three runs
    python -m experiments.bench.open_workbook --quick    5,000 rows, one run

Measured, each reader in a process of its own, in turns, medians: seconds to the names, states,
tab colours and used ranges of all sheets; to a block of 1,000 cells from the middle with values,
kinds, formats and formulas; both again with the block store; a read on the open workbook; peak
memory, of both processes together for ours.  The values are checked against the generator.  The
last line is that of the worse file, for the first measure against openpyxl's normal load.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.bench import w4
from experiments.bench.report import report
from experiments.config import UsageError, option, parse, run_main

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Config:
    """What to measure."""

    quick: bool = option(False, "5,000 rows and one run")
    runs: int = option(3, "repetitions, in turns; medians count")
    directory: str = option("", "where the files are kept; empty: a folder that goes")

    def __post_init__(self) -> None:
        if self.runs < 1:
            raise ValueError("runs must be at least 1")

    @property
    def rows(self) -> int:
        return 5_000 if self.quick else 50_000


def play(role: str, path: Path, rows: int, store: str = "") -> dict[str, Any]:
    """One reader on one file.  Raises RuntimeError with its last words where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "experiments.bench.w4_roles", role, str(path), str(rows), store],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{role} failed on {path.name}: {done.stderr[-500:]}")
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def measure(path: Path, config: Config, folder: Path) -> dict[str, Any]:
    """All readers on one file: medians, and whether they read what was written."""
    rows, runs = config.rows, 1 if config.quick else config.runs
    top, wanted = w4.block(rows)
    texts = [[w4.text(v) for v in row] for row in wanted]
    found: dict[str, list[dict[str, Any]]] = {}
    for run in range(runs):
        store = folder / f"store-{path.stem}-{run}"
        turns = [("openpyxl", ""), ("ours", ""), ("openpyxl-stream", ""), ("calamine", "")]
        for role, place in [*turns, ("ours", str(store)), ("ours", str(store))]:
            said = play(role, path, rows, place)
            name = role if not place else "again" if said["from_store"] else "keeping"
            found.setdefault(name, []).append(said)
            if said["values"] != texts:
                raise RuntimeError(f"{role} doesn't read what was written to {path.name}")
            if role == "ours" and said["used"] != w4.used_ranges(rows):
                raise RuntimeError(f"used ranges of {path.name}: {said['used']}")

    def of(name: str, key: str) -> list[float]:
        return [said[key] for said in found[name]]

    def median(name: str, key: str) -> float:
        return statistics.median(of(name, key))

    return {
        "outline_runs": of("ours", "outline"),
        "openpyxl_runs": of("openpyxl", "outline"),
        "outline": median("ours", "outline"),
        "openpyxl": median("openpyxl", "outline"),
        "block": median("ours", "block"),
        "openpyxl_block": median("openpyxl-stream", "block"),
        "calamine_block": median("calamine", "block"),
        "again": median("again", "block"),
        "read_ms": 1000 * max(median("ours", "read"), median("again", "read")),
        "peak_mib": median("ours", "peak") / 2**20,
        "openpyxl_peak_mib": median("openpyxl", "peak") / 2**20,
    }


def ratios(m: dict[str, Any]) -> dict[str, float]:
    """What is asked for; above 1 ours is better, except for calamine: times its seconds."""
    return {
        "outline_ratio": m["openpyxl"] / m["outline"],
        "block_ratio": m["openpyxl_block"] / m["block"],
        "times_calamine": m["block"] / m["calamine_block"],
        "again_ratio": m["openpyxl"] / m["again"],
        "memory_ratio": m["openpyxl_peak_mib"] / m["peak_mib"],
    }


def main(config: Config) -> int:
    try:
        import python_calamine  # noqa: F401
        import xlsxwriter  # noqa: F401
    except ImportError as error:
        raise UsageError(f"the peers need pip install 'fastask-jax[workbooks]': {error}") from error
    with tempfile.TemporaryDirectory() as made:
        folder = Path(config.directory or made)
        folder.mkdir(parents=True, exist_ok=True)
        results = {}
        writers = {"openpyxl": w4.write_openpyxl, "xlsxwriter": w4.write_xlsxwriter}
        for writer, write in writers.items():
            path = folder / f"{writer}-{config.rows}.xlsx"
            if not path.exists():
                write(path, config.rows)
            m = results[writer] = measure(path, config, Path(made))
            r = ratios(m)
            print(
                f"file by {writer}: outline {m['outline']:.3f} s, {r['outline_ratio']:.0f} times "
                f"faster than openpyxl ({m['openpyxl']:.2f} s); block {m['block']:.3f} s, "
                f"{r['block_ratio']:.1f} times faster than openpyxl ({m['openpyxl_block']:.2f} s), "
                f"{r['times_calamine']:.2f} times calamine ({m['calamine_block']:.3f} s); again "
                f"{m['again']:.3f} s, {r['again_ratio']:.0f} times faster; a read "
                f"{m['read_ms']:.1f} ms; {m['peak_mib']:.0f} MiB, openpyxl "
                f"{m['openpyxl_peak_mib']:.0f}",
                flush=True,
            )
    worse = min(results, key=lambda name: ratios(results[name])["outline_ratio"])
    numbers = {}
    for name, m in results.items():
        kept = {k: v for k, v in m.items() if not k.endswith("_runs")}
        entries = (kept | ratios(m)).items()
        numbers[name] = {k: float(f"{v:.4g}") for k, v in entries}
    report(
        "open_workbook",
        "s to names, states, colours and used ranges",
        results[worse]["outline_runs"],
        peer="openpyxl",
        peer_runs=results[worse]["openpyxl_runs"],
        higher_is_better=False,
        rows=config.rows,
        files=numbers,
    )
    return 0


if __name__ == "__main__":
    run_main(lambda argv: main(parse(Config, argv, description=__doc__)))
