"""Tasks: a question, its truth and the seed that its workbook is rebuilt from.

Everything follows from `(scale, type, difficulty, seed)`: any process, any hash seed, the
same task.  The stream deals types in balanced round robin, as the Fast Ask post does, and
its seeds never meet those of another split.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

from envs.fast_ask import answers, sheets
from envs.fast_ask.questions import KINDS, Drawn, word
from envs.fast_ask.vocab import SCALES, Scale
from envs.fast_ask.world import InvoiceWorld, RevenueWorld, SpendWorld, World
from envs.workbook import Workbook

DIFFICULTIES = ("easy", "medium", "hard")
SPLITS = ("train", "heldout")
_MAX_ATTEMPTS = 400


@dataclass(frozen=True)
class Task:
    """One question.  `truth` is written as the model should write it; `ask` holds the
    parameters behind the words (for oracles and logs, never shown to a policy)."""

    id: str
    seed: int
    type: str
    family: str
    difficulty: str
    scale: str
    question: str
    answer_type: str
    truth: str
    ask: dict[str, Any]
    attempt: int


def _draw_world(rng: Random, kind: str, scale: Scale) -> World:
    family = KINDS[kind].family
    if family == "revenue":
        return RevenueWorld.draw(rng, scale)
    if family == "reconciliation":
        return InvoiceWorld.draw(rng, scale, duplicate=kind == "duplicate_row")
    return SpendWorld.draw(rng, scale)


def _check(value: str, known: tuple[str, ...] | dict, what: str) -> None:
    if value not in known:
        raise ValueError(f"unknown {what} {value!r}; one of: {', '.join(known)}")


class _Parts(NamedTuple):
    """The world of one attempt with its question; shared by the task and its workbook."""

    world: World
    tops: dict[str, int]
    drawn: Drawn
    wording: int
    key: str


@functools.lru_cache(maxsize=4)  # more would only give the garbage collector work
def _parts(scale: str, kind: str, difficulty: str, seed: int, attempt: int) -> _Parts:
    key = f"{scale}/{kind}/{difficulty}/{seed}/{attempt}"
    rng = Random(key)
    world = _draw_world(rng, kind, SCALES[scale])
    tops = sheets.first_rows(rng)
    # Several questions are tried on one world: worlds are dear, questions are cheap.
    drawn = None
    for _ in range(6):
        drawn = drawn or KINDS[kind].draw(rng, world, difficulty != "easy", bool(seed & 1))
    return _Parts(world, tops, drawn, rng.randrange(3), key)


def make_task(seed: int, type: str, difficulty: str = "easy", scale: str = "tiny") -> Task:
    """The task of a seed.  An odd seed makes the answer of a yes/no type yes.

    Raises ValueError for an unknown type, difficulty or scale, or a negative seed.
    """
    _check(type, KINDS, "task type")
    _check(difficulty, DIFFICULTIES, "difficulty")
    _check(scale, SCALES, "scale")
    if seed < 0:
        raise ValueError(f"a task seed is 0 or more, not {seed}")
    kind = KINDS[type]
    for attempt in range(_MAX_ATTEMPTS):
        _, tops, drawn, wording, _ = _parts(scale, type, difficulty, seed, attempt)
        if drawn is None:
            continue
        ask, truth = drawn
        if kind.answer_type == "row":
            sheet, position = truth
            truth = (sheet, tops[sheet] + 1 + position)
        return Task(
            id=f"{scale}-{difficulty}-{type}-{seed}",
            seed=seed,
            type=type,
            family=kind.family,
            difficulty=difficulty,
            scale=scale,
            question=word(kind, ask, wording),
            answer_type=kind.answer_type,
            truth=answers.write(truth, kind.answer_type),
            ask=ask,
            attempt=attempt,
        )
    raise RuntimeError(f"no {type} question in {_MAX_ATTEMPTS} worlds of seed {seed}")


def build_workbook(task: Task) -> Workbook:
    """The workbook that the task asks about."""
    world, tops, drawn, _, key = _parts(
        task.scale, task.type, task.difficulty, task.seed, task.attempt
    )
    # A yes or no must not reach the decoys: True == 1 would keep every 1 out of them.
    truth = drawn[1] if drawn and type(drawn[1]) in (int, str) else None
    rng = Random(key + "/sheets")
    return sheets.build(world, task.type, task.difficulty, SCALES[task.scale], tops, rng, truth)


@dataclass(frozen=True)
class StreamConfig:
    """Which tasks a stream deals.  `difficulties` are dealt in equal shares."""

    split: str = "train"
    scale: str = "tiny"
    difficulties: tuple[str, ...] = DIFFICULTIES
    types: tuple[str, ...] = tuple(KINDS)
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self.split, SPLITS, "split")
        _check(self.scale, SCALES, "scale")
        if not self.difficulties or not self.types:
            raise ValueError("a task stream needs at least one difficulty and one type")
        for difficulty in self.difficulties:
            _check(difficulty, DIFFICULTIES, "difficulty")
        for kind in self.types:
            _check(kind, KINDS, "task type")


class TaskStream:
    """Balanced round robin: each pass shuffles all types and deals each once.

    Task number n is a function of the config and n alone, so the cursor is the whole state.
    Seeds: bit 0 balances yes and no over passes, bit 1 is the split.
    """

    def __init__(self, config: StreamConfig, cursor: int = 0) -> None:
        self.config = config
        self.cursor = cursor

    def task(self, n: int) -> Task:
        c = self.config
        turn, place = divmod(n, len(c.types))
        rng = Random(f"{c.split}/{c.seed}/{turn}")
        order = list(c.types)
        rng.shuffle(order)
        kind = order[place]
        salt = rng.getrandbits(28)
        position = c.types.index(kind)
        want = (turn + position) & 1
        difficulty = c.difficulties[(turn + position) // 2 % len(c.difficulties)]
        seed = (salt << 2) | (SPLITS.index(c.split) << 1) | want
        return make_task(seed, kind, difficulty, c.scale)

    def take(self, count: int) -> list[Task]:
        """The next `count` tasks."""
        tasks = [self.task(n) for n in range(self.cursor, self.cursor + count)]
        self.cursor += count
        return tasks

    def __iter__(self) -> Iterator[Task]:
        while True:
            yield self.take(1)[0]
