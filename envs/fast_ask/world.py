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
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from envs.fast_ask import vocab
from envs.fast_ask.vocab import Scale

ONE_DAY = dt.timedelta(days=1)


def month_of(date: dt.date) -> str:
    """2025-03-14 -> "2025-03"."""
    return date.isoformat()[:7]


class Calendar:
    """`count` months from the first day of a quarter between 2022 and 2025."""

    def __init__(self, rng: Random, count: int) -> None:
        start = rng.randrange(16)
        self.first = dt.date(2022 + start // 4, 1 + 3 * (start % 4), 1)
        names, day = [], self.first
        for _ in range(count):
            names.append(month_of(day))
            day = (day + 31 * ONE_DAY).replace(day=1)
        self.months: tuple[str, ...] = tuple(names)
        self.days = (day - self.first).days

    def day(self, offset: int) -> dt.date:
        return self.first + dt.timedelta(days=offset)

    def quarters(self) -> list[tuple[str, str]]:
        """(first month, last month) of each whole quarter."""
        return [(self.months[i], self.months[i + 2]) for i in range(0, len(self.months) - 2, 3)]

    def month_ends(self) -> list[dt.date]:
        starts = [dt.date.fromisoformat(m + "-01") for m in self.months]
        return [(s + 31 * ONE_DAY).replace(day=1) - ONE_DAY for s in starts]


class Order(NamedTuple):
    order: str
    customer: str
    region: str
    date: dt.date
    shipped: dt.date | None
    lines: tuple[tuple[str, int, int], ...]  # sku, quantity, unit price in cents

    @property
    def cents(self) -> int:
        return sum(quantity * unit for _, quantity, unit in self.lines)


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
class RevenueWorld:
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
        calendar = Calendar(rng, scale.months)
        customers = rng.sample(vocab.CUSTOMERS, scale.customers)
        regions = rng.sample(vocab.REGIONS, scale.regions)
        random, days = rng.random, calendar.days
        orders, refunds = [], []
        count = rng.randint(*scale.orders)
        for i, offset in enumerate(sorted(int(random() * days) for _ in range(count))):
            lines = tuple(
                (
                    vocab.SKUS[int(random() * len(vocab.SKUS))],
                    1 + int(random() * 9),
                    100 + int(random() * 900),
                )
                for _ in range(1 + int(random() * scale.lines_per_order))
            )
            late = offset + int(random() * 25)
            shipped = calendar.day(late) if random() < 0.85 else None
            orders.append(
                Order(
                    f"O{scale.first_id + i}",
                    customers[int(random() * len(customers))],
                    regions[int(random() * len(regions))],
                    calendar.day(offset),
                    shipped,
                    lines,
                )
            )
            if shipped and random() < 0.35:
                refund = max(1, int(orders[-1].cents * (0.05 + 0.6 * random())))
                refunds.append(Refund(i, calendar.day(late + int(random() * 30)), refund))
        refunds.sort(key=lambda r: r.date)
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
        by_region = world.net_by(lambda order: order.region)
        for region in regions:
            for month in calendar.months:
                near = max(by_region.get((region, month), 0), 1000)
                world.targets[region, month] = 10 * max(1, int(near * (0.6 + 0.8 * random())) // 10)
        return world

    def net_by(self, key) -> dict[tuple[str, str], int]:
        """(key(order), month) -> net recognized cents."""
        net: dict[tuple[str, str], int] = defaultdict(int)
        for order in self.orders:
            if order.shipped:
                net[key(order), month_of(order.shipped)] += order.cents
        for refund in self.refunds:
            net[key(self.orders[refund.order]), month_of(refund.date)] -= refund.cents
        return net

    def gross_by(self, key) -> dict[tuple[str, str], int]:
        gross: dict[tuple[str, str], int] = defaultdict(int)
        for order in self.orders:
            if order.shipped:
                gross[key(order), month_of(order.shipped)] += order.cents
        return gross

    def usd_by_tier(self) -> dict[tuple[str, str], int]:
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
        calendar = Calendar(rng, scale.months)
        customers = rng.sample(vocab.CUSTOMERS, scale.customers)
        random = rng.random
        count = rng.randint(*scale.invoices)
        numbers = rng.sample(range(10 * count if scale.first_id > 999 else 900), count)
        base = scale.first_id if scale.first_id > 999 else 100
        invoices, payments, adjustments = [], [], []
        last = calendar.days - 1
        for i, number in enumerate(sorted(numbers)):
            start = int(random() * last * 0.6)
            cents = 10 * (50 + int(random() * 900))
            invoices.append(
                Invoice(
                    f"INV-{base + number}",
                    customers[int(random() * len(customers))],
                    calendar.day(start),
                    calendar.day(start + (15, 30, 45)[int(random() * 3)]),
                    cents,
                )
            )
            # Half of the invoices get paid in full, most others in part.
            events = 1 + int(random() * 2.2)
            days = sorted(rng.sample(range(start + 1, last + 1), min(events, last - start)))
            left, full = cents, random() < 0.55
            for k, day in enumerate(days):
                final = k == len(days) - 1
                part = left if final and full else max(1, int(left * (0.2 + 0.5 * random())))
                left -= part
                if k and random() < 0.4:
                    reason = vocab.REASONS[int(random() * len(vocab.REASONS))]
                    adjustments.append(Adjustment("", i, calendar.day(day), reason, part))
                else:
                    payments.append(_payment(random, i, calendar.day(day), part))
        if duplicate:
            settled = [p for p in payments if p.status == "Settled"]
            payments.append(settled[int(random() * len(settled))])
        payments.sort(key=lambda p: p.date)
        adjustments.sort(key=lambda a: a.date)
        refs = rng.sample(range(100, 1000 if len(payments) < 800 else 10_000), len(payments))
        same: dict[tuple, str] = {}
        for i, p in enumerate(payments):
            ref = same.setdefault(p[2:], f"R{refs[i]}")
            payments[i] = p._replace(payment=f"P{scale.first_id + i}", ref=ref)
        adjustments = [
            a._replace(adjustment=f"A{scale.first_id + i}") for i, a in enumerate(adjustments)
        ]
        return cls(calendar, invoices, payments, adjustments)

    def events(self, invoice: int) -> list[tuple[dt.date, int]]:
        """(date, cents) of what reduces the invoice's balance, by date."""
        found = [
            (p.date, p.cents)
            for p in self.payments
            if p.invoice == invoice and p.status == "Settled"
        ]
        found += [(a.date, a.cents) for a in self.adjustments if a.target == invoice]
        return sorted(found)

    def balance(self, invoice: int, date: dt.date) -> int:
        paid = sum(cents for day, cents in self.events(invoice) if day <= date)
        return self.invoices[invoice].cents - paid

    def paid_on(self, invoice: int) -> dt.date | None:
        left = self.invoices[invoice].cents
        for day, cents in self.events(invoice):
            left -= cents
            if left <= 0:
                return day
        return None


def _payment(random, invoice: int, date: dt.date, cents: int) -> Payment:
    return Payment(
        "",
        "",
        invoice,
        date,
        vocab.METHODS[int(random() * 4)],
        vocab.SOURCES[int(random() * 4)],
        cents,
        vocab.STATUSES[int(random() < 0.15)],
    )


class Entry(NamedTuple):
    entry: str
    date: dt.date
    vendor: str
    department: str
    source: str
    cents: int


@dataclass
class SpendWorld:
    calendar: Calendar
    categories: dict[str, str]  # vendor -> category
    entries: list[Entry]  # in sheet order
    adjustments: list[Adjustment]
    budgets: dict[tuple[str, str], int]  # (department, first month of the quarter) -> cents

    @classmethod
    def draw(cls, rng: Random, scale: Scale) -> SpendWorld:
        calendar = Calendar(rng, scale.months)
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
                calendar.day(offset),
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
                day = entry.date + dt.timedelta(days=int(random() * 30))
                if draw < 0.14:
                    reason, cents = "Reversal", entry.cents
                else:
                    reason = vocab.SPEND_REASONS[int(random() * 3)]
                    cents = max(1, int(entry.cents * (0.05 + 0.5 * random())))
                adjustments.append(Adjustment("", i, day, reason, -cents))
        adjustments.sort(key=lambda a: a.date)
        adjustments = [
            a._replace(adjustment=f"A{scale.first_id + i}") for i, a in enumerate(adjustments)
        ]
        world = cls(calendar, categories, entries, adjustments, {})
        net = world.net_by(lambda e: e.department)
        for department in departments:
            for first, last in calendar.quarters():
                spent = sum(c for (d, m), c in net.items() if d == department and first <= m <= last)
                near = max(spent, 1000)
                budget = 10 * max(1, int(near * (0.6 + 0.8 * random())) // 10)
                world.budgets[department, first] = budget
        return world

    def net_by(self, key) -> dict[tuple[str, str], int]:
        """(key(entry), month) -> net cents; an adjustment counts in its own month."""
        net: dict[tuple[str, str], int] = defaultdict(int)
        for entry in self.entries:
            net[key(entry), month_of(entry.date)] += entry.cents
        for a in self.adjustments:
            net[key(self.entries[a.target]), month_of(a.date)] += a.cents
        return net

    def gross_by(self, key) -> dict[tuple[str, str], int]:
        gross: dict[tuple[str, str], int] = defaultdict(int)
        for entry in self.entries:
            gross[key(entry), month_of(entry.date)] += entry.cents
        return gross


World = RevenueWorld | InvoiceWorld | SpendWorld
