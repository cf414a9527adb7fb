"""The three ledgers that questions are asked about, and the truths computed from them.

A world is plain records drawn from one random generator; it knows nothing of sheets,
helpers, wording or tools.  All money is whole cents.  The definitions that `notes` in
`sheets.py` prints in each workbook are the ones computed here:

* An order is recognized in the month in which it shipped; its revenue is quantity times
  unit price over its lines.  Net revenue subtracts refunds in the month of the return.
* An invoice's open balance on a date is its amount less settled payments and adjustments
  dated on or before that date.  It is fully paid when the balance is zero.
* Net spend is ledger amounts plus adjustments (negative numbers), each by its own date.
"""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import attrgetter, itemgetter
from random import Random
from typing import Any, NamedTuple

from envs.fast_ask import vocab
from envs.fast_ask.vocab import Scale

ONE_DAY = dt.timedelta(days=1)


@lru_cache(maxsize=4096)
def month_of(date: dt.date) -> str:
    """2025-03-14 -> "2025-03"."""
    return date.isoformat()[:7]


class Calendar:
    """`count` months from the first day of quarter `start`, counted from January 2022.

    `day[n]` is the date n days after the first; it goes two months past the end, because
    shipments and refunds follow their orders.
    """

    def __init__(self, start: int, count: int) -> None:
        first = dt.date(2022 + start // 4, 1 + 3 * (start % 4), 1)
        starts = [first]
        for _ in range(count + 2):
            starts.append((starts[-1] + 31 * ONE_DAY).replace(day=1))
        self.months: tuple[str, ...] = tuple(month_of(day) for day in starts[:count])
        self.days = (starts[count] - first).days
        total = (starts[count + 2] - first).days
        self.day: tuple[dt.date, ...] = tuple(first + dt.timedelta(days=n) for n in range(total))
        self.month_ends: tuple[dt.date, ...] = tuple(s - ONE_DAY for s in starts[1 : count + 1])
        # (first month, last month) of each whole quarter
        self.quarters = [(self.months[i], self.months[i + 2]) for i in range(0, count - 2, 3)]

    def span(self, first: str, last: str) -> tuple[str, ...]:
        """The months from `first` to `last`, both included."""
        return self.months[self.months.index(first) : self.months.index(last) + 1]


@lru_cache(maxsize=64)
def _calendar(start: int, count: int) -> Calendar:
    return Calendar(start, count)


def draw_calendar(rng: Random, count: int) -> Calendar:
    """One that begins between 2022 and 2025."""
    return _calendar(rng.randrange(16), count)


Table = dict[tuple[str, str], int]  # (name, month) -> cents


class Monthly:
    """Sums of dated amounts by a field of their records and by month.

    additions, deductions: (record, month, cents) of what adds to the gross figure, and of what
    changes it to the net one.
    """

    additions: list[tuple[Any, str, int]]
    deductions: list[tuple[Any, str, int]]

    @cached_property
    def _tables(self) -> dict[tuple[str, bool], Table]:
        return {}

    def key(self, by: str) -> Callable[[Any], str]:
        """Reads field `by` of a record; "" puts all records under one name."""
        return attrgetter(by) if by else lambda record: ""

    def gross(self, by: str) -> Table:
        """(field, month) -> cents before deductions.  Shared: not to be changed."""
        return self._table(by, False)

    def net(self, by: str) -> Table:
        """(field, month) -> cents after deductions.  Shared: not to be changed."""
        return self._table(by, True)

    def _table(self, by: str, net: bool) -> Table:
        table = self._tables.get((by, net))
        if table is None:
            key = self.key(by)
            table = defaultdict(int, self.gross(by)) if net else defaultdict(int)
            for record, month, cents in self.deductions if net else self.additions:
                table[key(record), month] += cents
            self._tables[by, net] = table
        return table


class Order(NamedTuple):
    order: str
    customer: str
    region: str
    date: dt.date
    shipped: dt.date | None
    lines: tuple[tuple[str, int, int], ...]  # sku, quantity, unit price in cents
    cents: int  # of all lines


class Refund(NamedTuple):
    order: int  # position in orders
    date: dt.date
    cents: int


class Contract(NamedTuple):
    contract: str
    customer: str
    tier: str
    currency: str
    month: str
    cents: int  # in the contract's currency, whole hundreds so that every rate is exact


@dataclass
class RevenueWorld(Monthly):
    calendar: Calendar
    customers: list[str]
    regions: list[str]
    orders: list[Order]
    refunds: list[Refund]
    contracts: list[Contract]
    rates: dict[tuple[str, str], int]  # (month, currency) -> US cents for 100 local cents
    targets: dict[tuple[str, str], int]  # (region, month) -> cents

    @classmethod
    def draw(cls, rng: Random, scale: Scale) -> RevenueWorld:
        calendar = draw_calendar(rng, scale.months)
        customers = rng.sample(vocab.CUSTOMERS, scale.customers)
        regions = rng.sample(vocab.REGIONS, scale.regions)
        random, days, day = rng.random, calendar.days, calendar.day
        skus, some_skus = vocab.SKUS, len(vocab.SKUS)
        some_customers, some_regions = len(customers), len(regions)
        orders, refunds = [], []
        count = rng.randint(*scale.orders)
        for i, offset in enumerate(sorted([int(random() * days) for _ in range(count)])):
            lines, cents = [], 0
            for _ in range(1 + int(random() * scale.lines_per_order)):
                sku = skus[int(random() * some_skus)]
                quantity, unit = 1 + int(random() * 9), 100 + int(random() * 900)
                lines.append((sku, quantity, unit))
                cents += quantity * unit
            late = offset + int(random() * 25)
            shipped = day[late] if random() < 0.85 else None
            customer = customers[int(random() * some_customers)]
            region = regions[int(random() * some_regions)]
            orders.append(
                Order(
                    f"O{scale.first_id + i}",
                    customer,
                    region,
                    day[offset],
                    shipped,
                    tuple(lines),
                    cents,
                )
            )
            if shipped and random() < 0.35:
                refund = max(1, int(cents * (0.05 + 0.6 * random())))
                refunds.append(Refund(i, day[late + int(random() * 30)], refund))
        refunds.sort(key=itemgetter(1))
        currencies = vocab.CURRENCIES[: scale.currencies]
        rates = {
            (month, currency): 100 if currency == "USD" else 80 + int(random() * 60)
            for month in calendar.months
            for currency in currencies
        }
        contracts = [
            Contract(
                f"C{scale.first_id + i}",
                customers[int(random() * len(customers))],
                vocab.TIERS[int(random() * len(vocab.TIERS))],
                currencies[int(random() * len(currencies))],
                calendar.months[int(random() * len(calendar.months))],
                100 * (1 + int(random() * 99)),
            )
            for i in range(rng.randint(*scale.contracts))
        ]
        world = cls(calendar, customers, regions, orders, refunds, contracts, rates, {})
        by_region = world.net("region")
        for region in regions:
            for month in calendar.months:
                near = max(by_region.get((region, month), 0), 1000)
                world.targets[region, month] = 10 * max(1, int(near * (0.6 + 0.8 * random())) // 10)
        return world

    @cached_property
    def additions(self) -> list[tuple[Order, str, int]]:  # type: ignore[override]
        return [(o, month_of(o.shipped), o.cents) for o in self.orders if o.shipped]

    @cached_property
    def deductions(self) -> list[tuple[Order, str, int]]:  # type: ignore[override]
        return [(self.orders[r.order], month_of(r.date), -r.cents) for r in self.refunds]

    def local_by_tier(self) -> Table:
        """(tier, month) -> recognized cents, currencies added as if they were one."""
        local: dict[tuple[str, str], int] = defaultdict(int)
        for c in self.contracts:
            local[c.tier, c.month] += c.cents
        return local

    def usd_by_tier(self) -> Table:
        """(tier, month) -> recognized US cents."""
        usd: dict[tuple[str, str], int] = defaultdict(int)
        for c in self.contracts:
            usd[c.tier, c.month] += c.cents // 100 * self.rates[c.month, c.currency]
        return usd


class Payment(NamedTuple):
    payment: str
    ref: str
    invoice: int  # position in invoices
    date: dt.date
    method: str
    source: str
    cents: int
    status: str


class Adjustment(NamedTuple):
    adjustment: str
    target: int  # position of the invoice or ledger entry
    date: dt.date
    reason: str
    cents: int


class Invoice(NamedTuple):
    invoice: str
    customer: str
    date: dt.date
    due: dt.date
    cents: int


@dataclass
class InvoiceWorld:
    calendar: Calendar
    invoices: list[Invoice]
    payments: list[Payment]  # in sheet order
    adjustments: list[Adjustment]

    @classmethod
    def draw(cls, rng: Random, scale: Scale, duplicate: bool) -> InvoiceWorld:
        """With `duplicate`, exactly one payment stands twice; otherwise none does."""
        calendar = draw_calendar(rng, scale.months)
        customers = rng.sample(vocab.CUSTOMERS, scale.customers)
        random = rng.random
        count = rng.randint(*scale.invoices)
        numbers = rng.sample(range(10 * count if scale.first_id > 999 else 900), count)
        base = scale.first_id if scale.first_id > 999 else 100
        invoices, payments, adjustments = [], [], []
        last, day = calendar.days - 1, calendar.day
        some = len(customers)
        for i, number in enumerate(sorted(numbers)):
            start = int(random() * last * 0.6)
            cents = 10 * (50 + int(random() * 900))
            customer = customers[int(random() * some)]
            due = day[start + (15, 30, 45)[int(random() * 3)]]
            invoices.append(Invoice(f"INV-{base + number}", customer, day[start], due, cents))
            # Half of the invoices get paid in full, most others in part.
            events = 1 + int(random() * 2.2)
            days = _distinct(rng, start + 1, last + 1, min(events, last - start))
            left, full = cents, random() < 0.55
            for k, offset in enumerate(days):
                final = k == len(days) - 1
                part = left if final and full else max(1, int(left * (0.2 + 0.5 * random())))
                left -= part
                if k and random() < 0.4:
                    reason = vocab.REASONS[int(random() * len(vocab.REASONS))]
                    adjustments.append((i, day[offset], reason, part))
                else:
                    method = vocab.METHODS[int(random() * 4)]
                    source = vocab.SOURCES[int(random() * 4)]
                    status = vocab.STATUSES[int(random() < 0.15)]
                    payments.append((i, day[offset], method, source, part, status))
        if duplicate:
            settled = [p for p in payments if p[5] == "Settled"]
            payments.append(settled[int(random() * len(settled))])
        payments.sort(key=itemgetter(1))
        adjustments.sort(key=itemgetter(1))
        refs = rng.sample(range(100, 1000 if len(payments) < 800 else 10_000), len(payments))
        same: dict[tuple, str] = {}
        return cls(
            calendar,
            invoices,
            [
                Payment(f"P{scale.first_id + i}", same.setdefault(p, f"R{refs[i]}"), *p)
                for i, p in enumerate(payments)
            ],
            [Adjustment(f"A{scale.first_id + i}", *a) for i, a in enumerate(adjustments)],
        )

    @cached_property
    def events(self) -> list[list[tuple[dt.date, int]]]:
        """Per invoice: (date, cents) of what reduces its balance, by date."""
        events: list[list[tuple[dt.date, int]]] = [[] for _ in self.invoices]
        for p in self.payments:
            if p.status == "Settled":
                events[p.invoice].append((p.date, p.cents))
        for a in self.adjustments:
            events[a.target].append((a.date, a.cents))
        for found in events:
            found.sort()
        return events

    def balance(self, invoice: int, date: dt.date) -> int:
        left = self.invoices[invoice].cents
        for day, cents in self.events[invoice]:
            if day <= date:
                left -= cents
        return left

    def paid_on(self, invoice: int) -> dt.date | None:
        left = self.invoices[invoice].cents
        for day, cents in self.events[invoice]:
            left -= cents
            if left <= 0:
                return day
        return None


def _distinct(rng: Random, low: int, high: int, count: int) -> list[int]:
    """`count` distinct numbers from low to high - 1, in order; for few of many numbers."""
    span, getrandbits = high - low, rng.getrandbits
    bits = span.bit_length()
    chosen: set[int] = set()
    while len(chosen) < count:
        number = getrandbits(bits)
        if number < span:
            chosen.add(low + number)
    return sorted(chosen)


class Entry(NamedTuple):
    entry: str
    date: dt.date
    vendor: str
    department: str
    source: str
    cents: int


@dataclass
class SpendWorld(Monthly):
    calendar: Calendar
    categories: dict[str, str]  # vendor -> category
    entries: list[Entry]  # in sheet order
    adjustments: list[Adjustment]
    budgets: dict[tuple[str, str], int]  # (department, first month of the quarter) -> cents

    @classmethod
    def draw(cls, rng: Random, scale: Scale) -> SpendWorld:
        calendar = draw_calendar(rng, scale.months)
        random = rng.random
        vendors = rng.sample(vocab.VENDORS, scale.vendors)
        names = vocab.CATEGORIES[: 3 if scale.vendors < 10 else 6]
        categories = {
            vendor: names[i if i < len(names) else int(random() * len(names))]
            for i, vendor in enumerate(vendors)
        }
        departments = rng.sample(vocab.DEPARTMENTS, scale.departments)
        entries = [
            Entry(
                f"E{scale.first_id + i}",
                calendar.day[offset],
                vendors[int(random() * len(vendors))],
                departments[int(random() * len(departments))],
                vocab.ENTRY_SOURCES[int(random() * 4)],
                10 * (10 + int(random() * 900)),
            )
            for i, offset in enumerate(
                sorted(int(random() * calendar.days) for _ in range(rng.randint(*scale.ledger)))
            )
        ]
        adjustments = []
        for i, entry in enumerate(entries):
            draw = random()
            if draw < 0.3:
                day = entry.date + int(random() * 30) * ONE_DAY
                if draw < 0.14:
                    reason, cents = "Reversal", entry.cents
                else:
                    reason = vocab.SPEND_REASONS[int(random() * 3)]
                    cents = max(1, int(entry.cents * (0.05 + 0.5 * random())))
                adjustments.append((i, day, reason, -cents))
        adjustments.sort(key=itemgetter(1))
        numbered = [Adjustment(f"A{scale.first_id + i}", *a) for i, a in enumerate(adjustments)]
        world = cls(calendar, categories, entries, numbered, {})
        net = world.net("department")
        for department in departments:
            for first, last in calendar.quarters:
                spent = sum(net.get((department, month), 0) for month in calendar.span(first, last))
                near = max(spent, 1000)
                budget = 10 * max(1, int(near * (0.6 + 0.8 * random())) // 10)
                world.budgets[department, first] = budget
        return world

    @cached_property
    def additions(self) -> list[tuple[Entry, str, int]]:  # type: ignore[override]
        return [(e, month_of(e.date), e.cents) for e in self.entries]

    @cached_property
    def deductions(self) -> list[tuple[Entry, str, int]]:  # type: ignore[override]
        """Adjustments count in their own month."""
        return [(self.entries[a.target], month_of(a.date), a.cents) for a in self.adjustments]

    def key(self, by: str) -> Callable[[Entry], str]:
        """As `Monthly.key`; "category" is that of the entry's vendor."""
        return (lambda e: self.categories[e.vendor]) if by == "category" else super().key(by)


World = RevenueWorld | InvoiceWorld | SpendWorld
