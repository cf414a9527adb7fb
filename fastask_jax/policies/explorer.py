"""A noisy scripted explorer of Fast Ask: the teacher of the tiny base model's format.

It wanders, misreads, forgets refunds or statuses, copies the wrong region or month, trusts
half a helper, reports something else than it computed, and often simply guesses.  Three in
ten of its episodes end right.  The base model learns from its transcripts how turns, tools
and copying work; which of its habits pay is left for reinforcement learning to find.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from random import Random

from envs.core import Message, Reply, ToolCall, ToolSpec
from envs.fast_ask import vocab
from envs.fast_ask.programs import Program, helper_program, source_program
from envs.fast_ask.questions import FAMILIES, KINDS, Ask
from envs.fast_ask.tasks import Task

HELPERS = (
    "RegionalPnL FxExposure OrderMonthNet OpenItems Settlements PaidInvoices PaymentChecks "
    "SpendSummary VendorSpend DeptSpend ReversalLog"
).split()

# What a careless analyst leaves out of a program: (text in the code, what stands instead).
LAPSES = (
    ("-sum(t.refund_cents for t in Returns if t.order in k and a<=str(t.return_date)[:7]<=b)", ""),
    ("for t in Returns:\n if a<=str(t.return_date)[:7]<=b:\n"
     "  n[w[t.order]]=n.get(w[t.order],0)-t.refund_cents\n", ""),
    ("for t in Returns:\n k=str(t.return_date)[:7]\n n[k]=n.get(k,0)-t.refund_cents\n", ""),
    ("+sum(x.amount_cents for x in Adjustments if x.entry in k and a<=str(x.date)[:7]<=b)", ""),
    ("Ledger+Adjustments", "Ledger"),
    (' and p.status=="Settled"', ""),
    ("-sum(x.amount_cents for x in Adjustments if x.invoice==i and str(x.date)<=d)", ""),
    ("*f[c.month,c.currency]", ""),
    (" if e.entry in k)", ")"),
    ("n>=t", "n<t"),
    ("n>t", "n<=t"),
    ("n<=0", "n>0"),
    ("print(d)", "print(c)"),
    ("max(", "min("),
    ("print(j[q.ref])", "print(q.ref)"),
    ("s.add(k)", "s.add(p)"),
    ("=={}".format('"Duplicate"'), '=="Fine"'),
)  # fmt: skip


@dataclass(frozen=True)
class Habits:
    """Chances of the explorer's habits, each between 0 and 1."""

    guess: float = 0.12
    metadata: float = 0.5
    wander: float = 0.3
    same_reply: float = 0.2
    helper_if_easy: float = 0.5
    helper_if_medium: float = 0.2
    helper_if_hard: float = 0.05
    miss_read: float = 0.15
    wrong_slot: float = 0.25
    lapse: float = 0.55
    other_type: float = 0.1
    recover: float = 0.5
    repeat: float = 0.1
    misreport: float = 0.25
    no_answer_line: float = 0.2


class ExplorerPolicy:
    """Plays one episode at a time; every choice comes from `rng`."""

    def __init__(self, rng: Random, habits: Habits | None = None) -> None:
        self.rng = rng
        self.habits = habits or Habits()

    def start(self, messages: list[Message], tools: tuple[ToolSpec, ...], task: Task) -> Reply:
        sheets = messages[-1].content.split("\nSheets: ")[1].split(", ")
        self._script = self._explore(task, sheets)
        return next(self._script)

    def reply(self, messages: tuple[Message, ...]) -> Reply:
        return self._script.send([m.content for m in messages])

    def _chance(self, share: float) -> bool:
        return self.rng.random() < share

    def _explore(self, task: Task, sheets: list[str]) -> Generator[Reply, list[str], None]:
        habits = self.habits
        if self._chance(habits.guess):
            yield self._answer(self._guess(task))
            return
        if self._chance(habits.metadata):
            yield _say(ToolCall("get_workbook_metadata"))
        while self._chance(habits.wander):
            sheet = self.rng.choice(sheets)
            yield _say(_read([f"{sheet}!A:{self.rng.choice('CDE')}"], self.rng.choice((1, 2))))
        trust = {
            "easy": habits.helper_if_easy,
            "medium": habits.helper_if_medium,
            "hard": habits.helper_if_hard,
        }
        text = None
        if self._chance(trust[task.difficulty]):
            text = yield from self._attempt(helper_program, task)
            if text is None and self._chance(1 - habits.recover):
                yield self._answer(self._guess(task))
                return
        if text is None:
            text = yield from self._attempt(source_program, task)
        if text is None or self._chance(habits.misreport):
            text = self._guess(task)
        yield self._answer(text)

    def _attempt(
        self, solve: Callable[[str, Ask], Program], task: Task
    ) -> Generator[Reply, list[str], str | None]:
        """Runs a program, more or less the right one; returns what it printed, or None."""
        habits = self.habits
        kind, ask = task.type, task.ask
        if self._chance(habits.wrong_slot):
            ask = self._confuse(ask)
        if solve is source_program and self._chance(habits.other_type):
            kind = self._other_type(kind, ask)
        program: Program = solve(kind, ask)
        code = self._lapse(program.code) if self._chance(habits.lapse) else program.code
        reads = [f"{sheet}!{first}:{last}" for sheet, first, last in program.reads]
        missed = None
        if len(reads) > 1 and self._chance(habits.miss_read):
            missed = reads.pop(self.rng.randrange(len(reads)))
        run = ToolCall("run_python", {"code": code})
        if self._chance(habits.same_reply):
            said = yield _say(_read(reads, 0), run)
            text = said[-1]
        else:
            said = yield _say(_read(reads, 0))
            if said[0].startswith("error"):
                return None
            text = (yield _say(run))[0]
        if "error: " in text and missed and self._chance(habits.recover):
            said = yield _say(_read([missed], 0), run)
            text = said[-1]
        elif self._chance(habits.repeat):
            text = (yield _say(run))[0]
        text = text.strip()
        return None if "error: " in text or "(no output" in text or not text else text

    def _lapse(self, code: str) -> str:
        lapses = [pair for pair in LAPSES if pair[0] in code]
        return code.replace(*self.rng.choice(lapses)) if lapses else code

    def _other_type(self, kind: str, ask: Ask) -> str:
        """A type of the same family that the question's parameters would fit."""
        fitting = []
        for other in FAMILIES[KINDS[kind].family]:
            try:
                source_program(other, ask)
            except KeyError:
                continue
            fitting.append(other)
        return self.rng.choice(fitting)

    def _confuse(self, ask: Ask) -> Ask:
        """The parameters with one of them misread."""
        slots = [key for key in ask if key != "by"]
        if not slots:
            return ask
        key = self.rng.choice(slots)
        return {**ask, key: self._misread(key, ask[key])}

    def _misread(self, key: str, value: object) -> object:
        words = {
            "region": vocab.REGIONS,
            "tier": vocab.TIERS,
            "category": vocab.CATEGORIES,
            "department": vocab.DEPARTMENTS,
            "customer": vocab.CUSTOMERS,
            "method": vocab.METHODS,
            "source": vocab.SOURCES,
        }
        if key in words:
            return self.rng.choice(words[key])
        if isinstance(value, int):
            return max(1, value + self.rng.choice((-100, -10, 10, 100, 1000)))
        text = str(value)
        if key in ("invoice", "payment"):
            head = text.rstrip("0123456789")
            return f"{head}{self.rng.randrange(100, 1000)}"
        return f"{text[:5]}{self.rng.randint(1, 12):02d}{text[7:]}"

    def _guess(self, task: Task) -> str:
        rng, year = self.rng, self.rng.choice((2022, 2023, 2024, 2025))
        month = f"{year}-{rng.randint(1, 12):02d}"
        return {
            "cents": str(rng.randrange(100, 40000)),
            "name": rng.choice(vocab.CUSTOMERS if task.family == "revenue" else vocab.VENDORS),
            "yes_no": rng.choice(("yes", "no")),
            "month": month,
            "invoice": f"INV-{rng.randrange(100, 1000)}",
            "date": f"{month}-{rng.randint(1, 28):02d}",
            "row": f"{'Ledger' if task.family == 'spend' else 'Payments'}!{rng.randint(3, 25)}",
        }[task.answer_type]

    def _answer(self, text: str) -> Reply:
        if self._chance(self.habits.no_answer_line):
            return Reply(f"The answer is {text}.", tokens=8)
        return Reply(f"ANSWER: {text}", tokens=8)


def _say(*calls: ToolCall) -> Reply:
    return Reply("", calls, tokens=32)


def _read(ranges: list[str], show: int) -> ToolCall:
    return ToolCall("read_ranges", {"ranges": ranges, "show": show})
