"""From a world to a workbook: source sheets, helpers, decoys and the notes.

Easy workbooks hold a helper sheet with the asked column; medium ones hold the same helper
without that column, and decoys; hard ones hold decoys and no helper.  The notes state what
recognized, net, settled, reversed and over budget mean, so that the truth follows from the
workbook alone.  Nothing here looks at the truth, except that a decoy never repeats it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

from envs.fast_ask import vocab
from envs.fast_ask.questions import Ask
from envs.fast_ask.vocab import Scale
from envs.fast_ask.world import InvoiceWorld, RevenueWorld, SpendWorld, World
from envs.workbook import Sheet, Workbook

CENTS = '#,##0"c"'
COLORS = ("FACADE", "DECADE", "BEADED", "EFFACE", None, None)
ROW_SHEETS = ("Payments", "Ledger")

NOTES = {
    "revenue": (
        "Recognized: an order counts in the month of its ship_date; not shipped, not counted.",
        "Revenue of an order: qty times unit_cents over its lines.",
        "Net: recognized revenue less refund_cents, each refund in the month of its return_date.",
        "Contracts: recognized_cents is in the currency of the contract; usd_rate is US cents for "
        "one cent of that currency in that month.",
        "Target met: net recognized revenue of the month is at least target_cents.",
    ),
    "reconciliation": (
        "Settled: a payment counts on its date when its status is Settled; Pending never counts.",
        "A payment belongs to the invoice that Remittances gives for its ref.",
        "Open balance on a date: amount_cents less settled payments and adjustments up to and "
        "including that date.",
        "Fully paid: the open balance is zero.",
        "Duplicate: same ref, date, method, source and amount as an earlier row.",
    ),
    "spend": (
        "Net spend: amounts in Ledger plus Adjustments, each by its own date.",
        "Adjustments belong to the vendor and department of their entry; they are negative.",
        "Reversed: the entry has an adjustment with reason Reversal.",
        "Over budget: net spend of the quarter is above budget_cents.",
    ),
}


def first_rows(rng: Random) -> dict[str, int]:
    """The header row of the sheets that row answers point into.  It wanders far enough that
    no constant guess of a row is right more than about once in thirty times."""
    return {name: rng.randint(1, 30) for name in ROW_SHEETS}


def _sheet(name: str, header: str, rows: Iterable[tuple], top: int = 1, title: str = "") -> Sheet:
    columns = tuple(header.split())
    numbered = dict(enumerate(rows, top + 1))
    if title and top > 1:
        numbered = {top - 1: (title,), top: columns, **numbered}
    else:
        numbered = {top: columns, **numbered}
    formats = {
        i: "0.00" if name.endswith("_rate") else CENTS
        for i, name in enumerate(columns, 1)
        if name.endswith(("_cents", "_rate"))
    }
    return Sheet(name, numbered, None, formats)


def build(
    world: World, kind: str, level: str, scale: Scale, tops: dict[str, int], rng: Random, truth
) -> Workbook:
    """The workbook of one task; `rng` only orders and decorates."""
    if isinstance(world, RevenueWorld):
        family, sheets = "revenue", _revenue_sheets(world)
    elif isinstance(world, InvoiceWorld):
        family, sheets = "reconciliation", _invoice_sheets(world, tops, scale)
    else:
        family, sheets = "spend", _spend_sheets(world, tops)
    if level != "hard":
        sheets.insert(rng.randrange(len(sheets) + 1), _helper(world, kind, level == "easy", tops))
    if level != "easy":
        for decoy in _decoys(rng, scale, truth):
            sheets.insert(rng.randrange(1, len(sheets) + 1), decoy)
    sheets.append(Sheet("Notes", {i: (text,) for i, text in enumerate(NOTES[family], 1)}))
    for sheet in sheets:
        sheet.tab_color = COLORS[int(rng.random() * len(COLORS))]
    return Workbook(sheets)


def _revenue_sheets(world: RevenueWorld) -> list[Sheet]:
    orders = world.orders
    lines = [
        (order.order, sku, quantity, unit)
        for order in orders
        for sku, quantity, unit in order.lines
    ]
    shipped = sorted((o for o in orders if o.shipped), key=lambda o: o.shipped)
    carriers = ("Road", "Rail", "Air")
    return [
        _sheet(
            "Orders",
            "order customer region order_date",
            ((o.order, o.customer, o.region, o.date) for o in orders),
        ),
        _sheet("OrderLines", "order sku qty unit_cents", lines),
        _sheet(
            "Shipments",
            "order ship_date carrier",
            ((o.order, o.shipped, carriers[len(o.lines) % 3]) for o in shipped),
        ),
        _sheet(
            "Returns",
            "order return_date refund_cents",
            ((orders[r.order].order, r.date, r.cents) for r in world.refunds),
        ),
        _sheet(
            "Contracts",
            "contract customer tier currency month recognized_cents",
            (tuple(c) for c in world.contracts),
        ),
        _sheet(
            "FXRates",
            "month currency usd_rate",
            ((month, currency, rate / 100) for (month, currency), rate in world.rates.items()),
        ),
        _sheet(
            "Targets",
            "region month target_cents",
            ((region, month, cents) for (region, month), cents in world.targets.items()),
        ),
    ]


def _invoice_sheets(world: InvoiceWorld, tops: dict[str, int], scale: Scale) -> list[Sheet]:
    invoices = world.invoices
    seen: dict[str, str] = {p.ref: invoices[p.invoice].invoice for p in world.payments}
    return [
        _sheet(
            "Invoices",
            "invoice customer invoice_date due_date amount_cents",
            (tuple(i) for i in invoices),
        ),
        _sheet(
            "Payments",
            "payment ref date method source amount_cents status",
            (
                (p.payment, p.ref, p.date, p.method, p.source, p.cents, p.status)
                for p in world.payments
            ),
            tops["Payments"],
            "Payments received",
        ),
        _sheet("Remittances", "ref invoice", sorted(seen.items())),
        _sheet(
            "Adjustments",
            "adjustment invoice date reason amount_cents",
            (
                (a.adjustment, invoices[a.target].invoice, a.date, a.reason, a.cents)
                for a in world.adjustments
            ),
        ),
    ]


def _spend_sheets(world: SpendWorld, tops: dict[str, int]) -> list[Sheet]:
    quarters = dict(world.calendar.quarters())
    return [
        _sheet(
            "Ledger",
            "entry date vendor department source amount_cents",
            (tuple(e) for e in world.entries),
            tops["Ledger"],
            "General ledger",
        ),
        _sheet("Vendors", "vendor category", world.categories.items()),
        _sheet(
            "Adjustments",
            "adjustment entry date reason amount_cents",
            (
                (a.adjustment, world.entries[a.target].entry, a.date, a.reason, a.cents)
                for a in world.adjustments
            ),
        ),
        _sheet(
            "Budgets",
            "department first_month last_month budget_cents",
            ((d, first, quarters[first], cents) for (d, first), cents in world.budgets.items()),
        ),
    ]


def _helper(world: World, kind: str, whole: bool, tops: dict[str, int]) -> Sheet:
    """The helper sheet of a type; without its last column (the answer's) unless `whole`."""
    name, header, rows = _helper_table(world, kind, tops)
    if not whole:
        header = " ".join(header.split()[:-1])
        rows = [row[:-1] for row in rows]
    return _sheet(name, header, rows)


def _helper_table(world, kind: str, tops: dict[str, int]) -> tuple[str, str, list[tuple]]:
    if isinstance(world, RevenueWorld):
        if kind == "tier_usd":
            local: dict[tuple[str, str], int] = {}
            for c in world.contracts:
                local[c.tier, c.month] = local.get((c.tier, c.month), 0) + c.cents
            usd = world.usd_by_tier()
            return (
                "FxExposure",
                "month tier local_cents usd_cents",
                [(month, tier, local[tier, month], usd[tier, month]) for tier, month in sorted(usd)],
            )
        key = (lambda o: o.customer) if kind == "top_customer" else (lambda o: o.region)
        name = "OrderMonthNet" if kind == "top_customer" else "RegionalPnL"
        who = "customer" if kind == "top_customer" else "region"
        gross, net = world.gross_by(key), world.net_by(key)
        cells = [(m, w, gross.get((w, m), 0), net[w, m]) for w, m in sorted(net)]
        return name, f"month {who} gross_cents net_cents", cells
    if isinstance(world, InvoiceWorld):
        return _invoice_helper(world, kind, tops)
    if kind == "reversed_row":
        rows = [
            (a.adjustment, -a.cents, tops["Ledger"] + 1 + a.target)
            for a in world.adjustments
            if a.reason == "Reversal"
        ]
        return "ReversalLog", "adjustment amount_cents ledger_row", rows
    key = {
        "category_spend": lambda e: world.categories[e.vendor],
        "top_vendor": lambda e: e.vendor,
        "over_budget": lambda e: e.department,
    }[kind]
    who = {"category_spend": "category", "top_vendor": "vendor", "over_budget": "department"}[kind]
    gross, net = world.gross_by(key), world.net_by(key)
    cells = [(m, w, gross.get((w, m), 0), net[w, m]) for w, m in sorted(net)]
    name = {"category_spend": "SpendSummary", "top_vendor": "VendorSpend"}.get(kind, "DeptSpend")
    return name, f"month {who} gross_cents net_cents", cells


def _invoice_helper(
    world: InvoiceWorld, kind: str, tops: dict[str, int]
) -> tuple[str, str, list[tuple]]:
    invoices = world.invoices
    if kind in ("open_balance", "paid_by"):
        rows = [
            (invoice.invoice, end, invoice.cents, world.balance(i, end))
            for i, invoice in enumerate(invoices)
            for end in world.calendar.month_ends()
            if end >= invoice.date
        ]
        return "OpenItems", "invoice as_of billed_cents open_cents", rows
    if kind == "payment_invoice":
        rows = [(p.payment, p.date, invoices[p.invoice].invoice) for p in world.payments]
        return "Settlements", "payment posted invoice", rows
    if kind == "paid_on":
        dates = [(v.invoice, v.cents, world.paid_on(i)) for i, v in enumerate(invoices)]
        return "PaidInvoices", "invoice billed_cents paid_on", [d for d in dates if d[2]]
    checks, seen = [], set()
    for i, p in enumerate(world.payments):
        verdict = "Duplicate" if p.ref in seen else "Fine"
        seen.add(p.ref)
        checks.append((tops["Payments"] + 1 + i, p.payment, verdict))
    return "PaymentChecks", "payments_row payment verdict", checks


def _decoys(rng: Random, scale: Scale, truth) -> list[Sheet]:
    """Planning data that no question needs; no number or month in it equals `truth` (an
    int, a text or None)."""
    random = rng.random

    def number(low: int, high: int) -> int:
        value = low + int(random() * (high - low))
        return value + 1 if value == truth else value

    def pick(words: Sequence[str]) -> str:
        i = int(random() * len(words))
        return words[i] if words[i] != truth else words[i - 1]

    def rows() -> range:
        return range(rng.randint(*scale.decoy_rows))

    months = [f"{year}-{month:02d}" for year in (2026, 2027) for month in range(1, 13)]
    hiring = [
        (pick(vocab.ROLES), pick(vocab.RECRUITERS), pick(months), number(1, 9), number(4000, 19000))
        for _ in rows()
    ]
    caps = [(pick(vocab.HOLDERS), number(1000, 90000), number(1, 40)) for _ in rows()]
    leases = [(f"L{i}", pick(months), number(1000, 90000)) for i in rows()]
    chosen = [
        _sheet("HiringPlan", "role recruiter start headcount salary_cents", hiring),
        _sheet("CapTable", "holder shares percent", caps),
        _sheet("Leases", "lease renewal rent_cents", leases),
    ]
    return rng.sample(chosen, 2)
