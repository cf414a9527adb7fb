"""Asks through `fastask serve`: how long the slowest wait beside the usual, none lost at the end.

`python -m experiments.bench.asks`: as many asks at once as `--asks` says, each with a workbook of
its own from the held-out tasks, over the shipped tiny policy or `--checkpoint RUN`, in several
rounds.  `value` is p95 over p50 of the seconds of an ask, the median of the rounds.  Then one
round more, and SIGTERM while all of it is under way: `lost` counts asks that got no answer.
Leaves out whether answers are right, which is `experiments.evaluate`'s; `right` tells it beside.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.fast_ask import StreamConfig, Task, TaskStream, answers, build_workbook
from envs.workbook import write_xlsx
from experiments.bench.report import report
from experiments.bench.served import Running, served
from experiments.config import UsageError, option, parse, run_main


@dataclass(frozen=True)
class Config:
    asks: int = option(64, "asks at a time, and workbooks")
    rounds: int = option(5, "measured rounds, after one that isn't")
    checkpoint: str | None = option(None, "run directory of the policy; none: the shipped one")

    def __post_init__(self) -> None:
        if not (2 <= self.asks <= 256 and self.rounds >= 1):
            raise ValueError("asks is 2 to 256, and rounds at least 1")


@dataclass(frozen=True)
class Case:
    task: Task
    book: bytes


def cases(count: int) -> list[Case]:
    """Held-out tasks and their workbooks as files."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "book.xlsx"
        for task in TaskStream(StreamConfig("heldout", "tiny")).take(count):
            write_xlsx(build_workbook(task), path)
            found.append(Case(task, path.read_bytes()))
    return found


async def ask_all(client: Any, given: Sequence[Case]) -> list[tuple[float, dict[str, Any] | str]]:
    """Seconds and the answer of each, or why there is none; all at once."""

    async def one(case: Case) -> tuple[float, dict[str, Any] | str]:
        value: dict[str, Any] | str
        began = time.perf_counter()
        try:
            answer = await client.post(
                "/v1/ask", files={"file": ("book.xlsx", case.book)},
                data={"question": case.task.question},
            )  # fmt: skip
            value = answer.json() if answer.status_code == 200 else answer.text
        except client.errors as error:
            value = f"{type(error).__name__}: {error}"
        return time.perf_counter() - began, value

    return await asyncio.gather(*map(one, given))


def client_of(server: Running, connections: int) -> Any:
    import httpx

    client = httpx.AsyncClient(
        base_url=server.url, timeout=300, trust_env=False,
        limits=httpx.Limits(max_connections=connections + 1),
    )  # fmt: skip
    client.errors = httpx.HTTPError  # type: ignore[attr-defined]
    return client


async def measure(server: Running, config: Config, given: Sequence[Case]) -> dict[str, Any]:
    """The measured rounds."""
    rounds, right, answered = [], 0, 0
    async with client_of(server, config.asks) as client:
        await ask_all(client, given)
        for _ in range(config.rounds):
            began = time.perf_counter()
            found = await ask_all(client, given)
            took = time.perf_counter() - began
            seconds = [s for s, _ in found]
            failed = [value for _, value in found if isinstance(value, str)]
            if failed:
                raise OSError(f"{len(failed)} of {len(found)} asks failed: {failed[0]}")
            cut = statistics.quantiles(seconds, n=100, method="inclusive")
            rounds.append((cut[94] / cut[49], cut[49], cut[94], len(found) / took))
            for case, (_, value) in zip(given, found, strict=True):
                assert isinstance(value, dict)
                answered += value["answer"] is not None
                task = case.task
                right += answers.is_right(value["answer"], task.truth, task.answer_type)
    ratios, p50, p95, rates = zip(*rounds, strict=True)
    total = len(given) * config.rounds
    return {
        "ratios": ratios,
        "p50_seconds": statistics.median(p50),
        "p95_seconds": statistics.median(p95),
        "asks_per_second": statistics.median(rates),
        "answered": answered / total,
        "right": right / total,
    }


async def end_under_load(server: Running, given: Sequence[Case]) -> int:
    """How many asks are lost when SIGTERM comes while all are under way."""
    async with client_of(server, len(given)) as client:
        asking = asyncio.create_task(ask_all(client, given))
        running = 0
        while running < len(given) and not asking.done():
            await asyncio.sleep(0.02)
            text = (await client.get("/metrics")).text
            found = [line for line in text.splitlines() if line.startswith("fastask_asks_running")]
            running = int(float(found[0].split()[-1]))
        if asking.done():
            raise OSError("the asks ended before all were under way: ask more, or slower ones")
        code, said = await asyncio.to_thread(server.end)
        if code or said:
            raise OSError(f"the server ended with {code}: {said.strip()}")
        return sum(isinstance(value, str) for _, value in await asking)


def run(config: Config) -> dict[str, Any]:
    given = cases(config.asks)
    flags: list[object] = ["--slots", config.asks, "--asks", config.asks, "--grace", 120]
    if config.checkpoint is not None:
        flags += ["--checkpoint", config.checkpoint]
    with served(*flags) as server:
        found = asyncio.run(measure(server, config, given))
        found["lost"] = asyncio.run(end_under_load(server, given))
    return found


def main(argv: list[str] | None = None) -> None:
    config = parse(Config, argv, description=__doc__)
    try:
        import httpx  # noqa: F401
    except ModuleNotFoundError:
        raise UsageError("this benchmark needs httpx: pip install '.[serve,http]'") from None
    found = run(config)
    ratios = found.pop("ratios")
    report("asks", "p95 over p50", ratios, higher_is_better=False, asks=config.asks, **found)


if __name__ == "__main__":
    run_main(main)
