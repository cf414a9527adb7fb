"""From a world to a workbook: source sheets, notes, and what `helpers` and `filler` add.

Easy workbooks hold a helper sheet with the asked column; medium ones hold the same helper
without that column, and decoys; hard ones hold decoys and no helper.  The notes state what
recognized, net, settled, reversed and over budget mean, so that the truth follows from the
workbook alone.  Nothing here looks at the truth, except that a decoy never repeats it.
"""

from __future__ import annotations

from functools import lru_cache
from operator import attrgetter
from random import Random

from envs.fast_ask import filler, helpers
from envs.fast_ask.filler import Table
from envs.fast_ask.vocab import Scale
from envs.fast_ask.world import InvoiceWorld, RevenueWorld, SpendWorld, World
from envs.workbook import Sheet, Workbook

CENTS = '#,##0"c"'
COLORS = ("FACADE", "DECADE", "BEADED", "EFFACE", None, None)
ROW_SHEETS = {"Payments": "Payments received", "Ledger": "General ledger"}  # with their titles

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


@lru_cache(maxsize=256)
def _columns(header: str) -> tuple[tuple[str, ...], dict[int, str]]:
    """Column names, and the number formats of those that have one."""
    names = tuple(header.split())
    formats = {
        i: "0.00" if name.endswith("_rate") else CENTS
        for i, name in enumerate(names, 1)
        if name.endswith(("_cents", "_rate"))
    }
    return names, formats


def _sheet(table: Table, top: int = 1) -> Sheet:
    """The table with its header in row `top`, below the sheet's title if there is room."""
    name, header, records = table
    names, formats = _columns(header)
    rows: dict[int, tuple] = {}
    if top > 1:
        rows[top - 1] = (ROW_SHEETS[name],)
    rows[top] = names
    rows.update(enumerate(records, top + 1))
    return Sheet(name, rows, None, dict(formats))


def build(
    world: World,
    kind: str,
    level: str,
    scale: Scale,
    tops: dict[str, int],
    rng: Random,
    truth: int | str | None,
) -> Workbook:
    """The workbook of one task; `rng` only orders and decorates.

    tops: `first_rows` of this task.  truth: what no decoy may show.
    """
    if isinstance(world, RevenueWorld):
        family, sources = "revenue", _revenue_tables(world)
    elif isinstance(world, InvoiceWorld):
        family, sources = "reconciliation", _invoice_tables(world)
    else:
        family, sources = "spend", _spend_tables(world)
    sheets = [
        _sheet(filler.with_idle_columns(table, rng, scale), tops.get(table[0], 1))
        for table in sources
    ]
    if level != "hard":
        helper = helpers.helper(world, kind, level == "easy", tops)
        sheets.insert(rng.randrange(len(sheets) + 1), _sheet(helper))
    if level != "easy":
        for decoy in filler.decoys(rng, scale, truth):
            sheets.insert(rng.randrange(1, len(sheets) + 1), _sheet(decoy))
    sheets.append(Sheet("Notes", {i: (text,) for i, text in enumerate(NOTES[family], 1)}))
    for sheet in sheets:
        sheet.tab_color = COLORS[int(rng.random() * len(COLORS))]
    return Workbook(sheets)


def _revenue_tables(world: RevenueWorld) -> list[Table]:
    orders = world.orders
    shipped = sorted([o for o in orders if o.shipped], key=attrgetter("shipped"))
    carriers = ("Road", "Rail", "Air")
    return [
        (
            "Orders",
            "order customer region order_date",
            [(o.order, o.customer, o.region, o.date) for o in orders],
        ),
        (
            "OrderLines",
            "order sku qty unit_cents",
            [(o.order, sku, qty, unit) for o in orders for sku, qty, unit in o.lines],
        ),
        (
            "Shipments",
            "order ship_date carrier",
            [(o.order, o.shipped, carriers[len(o.lines) % 3]) for o in shipped],
        ),
        (
            "Returns",
            "order return_date refund_cents",
            [(orders[r.order].order, r.date, r.cents) for r in world.refunds],
        ),
        (
            "Contracts",
            "contract customer tier currency month recognized_cents",
            map(tuple, world.contracts),
        ),
        (
            "FXRates",
            "month currency usd_rate",
            # 1, not 1.0, as a file would hold it
            [
                (m, c, rate / 100 if rate % 100 else rate // 100)
                for (m, c), rate in world.rates.items()
            ],
        ),
        (
            "Targets",
            "region month target_cents",
            [(region, month, cents) for (region, month), cents in world.targets.items()],
        ),
    ]


def _invoice_tables(world: InvoiceWorld) -> list[Table]:
    invoices = world.invoices
    seen: dict[str, str] = {p.ref: invoices[p.invoice].invoice for p in world.payments}
    return [
        (
            "Invoices",
            "invoice customer invoice_date due_date amount_cents",
            map(tuple, invoices),
        ),
        (
            "Payments",
            "payment ref date method source amount_cents status",
            [
                (p.payment, p.ref, p.date, p.method, p.source, p.cents, p.status)
                for p in world.payments
            ],
        ),
        ("Remittances", "ref invoice", sorted(seen.items())),
        (
            "Adjustments",
            "adjustment invoice date reason amount_cents",
            [
                (a.adjustment, invoices[a.target].invoice, a.date, a.reason, a.cents)
                for a in world.adjustments
            ],
        ),
    ]


def _spend_tables(world: SpendWorld) -> list[Table]:
    quarters = dict(world.calendar.quarters)
    entries = world.entries
    return [
        ("Ledger", "entry date vendor department source amount_cents", map(tuple, entries)),
        ("Vendors", "vendor category", world.categories.items()),
        (
            "Adjustments",
            "adjustment entry date reason amount_cents",
            [
                (a.adjustment, entries[a.target].entry, a.date, a.reason, a.cents)
                for a in world.adjustments
            ],
        ),
        (
            "Budgets",
            "department first_month last_month budget_cents",
            [(d, first, quarters[first], cents) for (d, first), cents in world.budgets.items()],
        ),
    ]
