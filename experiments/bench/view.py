"""How long the page of a large run takes to list its episodes, in a headless Chromium.

    python -m experiments.bench.view
    python -m experiments.bench.view --episodes 10000 --run-dir runs/quickstart

Writes a run of that many trajectories (or takes --run-dir), exports its page, opens the list from
disk, and measures the seconds from the address to the first rows; then those of a filter, and of
one trajectory.  A browser that has just started is part of no figure.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from experiments.bench.chromium import Browser, find_chromium, version
from experiments.bench.report import report
from experiments.bench.view_run import write_run
from experiments.config import option, parse, run_main
from fastask_jax.report.page import Site, write_site


@dataclass(frozen=True)
class Config:
    """What to measure."""

    episodes: int = option(10_000, "trajectories of the run that is written")
    run_dir: Path | None = option(None, "a run to open instead")
    runs: int = option(5, "times that the page is opened; the median counts")

    def __post_init__(self) -> None:
        if self.episodes < 1 or self.runs < 1:
            raise ValueError("episodes and runs are at least 1")


def measure(config: Config, scratch: Path, chromium: str) -> dict:
    run_dir = config.run_dir
    if run_dir is None:
        run_dir = scratch / "run"
        print(f"writing a run of {config.episodes:,} trajectories", flush=True)
        write_run(run_dir, config.episodes)
    began = time.perf_counter()
    Site([run_dir])
    read = time.perf_counter() - began
    index = write_site([run_dir], scratch / "page")
    written = time.perf_counter() - began - read
    listed, filtered, opened = [], [], []
    with Browser(chromium) as browser:
        for _ in range(config.runs):
            browser.open("about:blank")
            began = time.perf_counter()
            browser.open(f"{index.absolute().as_uri()}#/list")
            browser.wait("document.querySelector('.row')")
            listed.append(time.perf_counter() - began)
            total = browser.run("fastask.list.all().then(all => all.length)")
            filtered.append(browser.run(_FILTER) / 1000)
            began = time.perf_counter()
            browser.press("Enter")
            browser.wait("document.querySelector('#main').dataset.shown")
            opened.append(time.perf_counter() - began)
        problems = list(browser.problems)
    if problems:
        raise RuntimeError(f"the page failed: {problems[0]}")
    size = sum(file.stat().st_size for file in (scratch / "page").rglob("*"))
    return report(
        "view", "s", listed,
        episodes=total, filter_seconds=statistics.median(filtered),
        open_seconds=statistics.median(opened), read_seconds=read, export_seconds=written,
        page_megabytes=size / 1e6, browser=version(chromium),
    )  # fmt: skip


_FILTER = """(() => {
  const began = performance.now(), input = document.querySelector('input[name=q]');
  input.value = 'revenue'; input.dispatchEvent(new Event('input'));
  document.querySelector('.row').getBoundingClientRect();
  return performance.now() - began;
})()"""


def main(argv: list[str]) -> None:
    config = parse(Config, argv, prog="python -m experiments.bench.view")
    chromium = find_chromium()
    if chromium is None:
        raise FileNotFoundError("no Chromium on this machine: apt-get install chromium")
    with tempfile.TemporaryDirectory() as scratch:
        measure(config, Path(scratch), chromium)


if __name__ == "__main__":
    run_main(main)
