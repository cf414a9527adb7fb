"""Helper sheets: per question type, the table that would answer it directly.

The last column of each is the one that the answer is read or summed from; medium workbooks
get the table without it, so that it looks like a shortcut and is none.
"""

from __future__ import annotations

from operator import itemgetter

from envs.fast_ask.filler import Table
from envs.fast_ask.world import InvoiceWorld, Monthly, RevenueWorld, SpendWorld, World


def helper(world: World, kind: str, whole: bool, tops: dict[str, int]) -> Table:
    """The helper of a type; without its last column (the answer's) unless `whole`."""
    if isinstance(world, RevenueWorld):
        name, header, rows = _revenue(world, kind)
    elif isinstance(world, InvoiceWorld):
        name, header, rows = _invoices(world, kind, tops)
    else:
        name, header, rows = _spend(world, kind, tops)
    if not whole:
        header = " ".join(header.split()[:-1])
        rows = [row[:-1] for row in rows]
    return name, header, rows


def _by_month(world: Monthly, name: str, who: str) -> tuple[str, str, list[tuple]]:
    gross, net = world.gross(who), world.net(who)
    rows = [(m, w, gross.get((w, m), 0), cents) for (w, m), cents in net.items()]
    return name, f"month {who} gross_cents net_cents", sorted(rows, key=itemgetter(1, 0))


def _revenue(world: RevenueWorld, kind: str) -> tuple[str, str, list[tuple]]:
    if kind == "tier_usd":
        local = world.local_by_tier()
        usd = world.usd_by_tier()
        rows = [(month, tier, local[tier, month], usd[tier, month]) for tier, month in sorted(usd)]
        return "FxExposure", "month tier local_cents usd_cents", rows
    if kind == "top_customer":
        return _by_month(world, "OrderMonthNet", "customer")
    return _by_month(world, "RegionalPnL", "region")


def _spend(world: SpendWorld, kind: str, tops: dict[str, int]) -> tuple[str, str, list[tuple]]:
    if kind == "reversed_row":
        rows = [
            (a.adjustment, -a.cents, tops["Ledger"] + 1 + a.target)
            for a in world.adjustments
            if a.reason == "Reversal"
        ]
        return "ReversalLog", "adjustment amount_cents ledger_row", rows
    if kind == "category_spend":
        return _by_month(world, "SpendSummary", "category")
    if kind == "top_vendor":
        return _by_month(world, "VendorSpend", "vendor")
    return _by_month(world, "DeptSpend", "department")


def _invoices(world: InvoiceWorld, kind: str, tops: dict[str, int]) -> tuple[str, str, list[tuple]]:
    invoices = world.invoices
    if kind in ("open_balance", "paid_by"):
        return "OpenItems", "invoice as_of billed_cents open_cents", _open_items(world)
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


def _open_items(world: InvoiceWorld) -> list[tuple]:
    """The balance of each invoice at each month's end, in one walk over its events."""
    rows = []
    for invoice, events in zip(world.invoices, world.events, strict=True):
        number, billed, left, k = invoice.invoice, invoice.cents, invoice.cents, 0
        for end in world.calendar.month_ends:
            if end < invoice.date:
                continue
            while k < len(events) and events[k][0] <= end:
                left -= events[k][1]
                k += 1
            rows.append((number, end, billed, left))
    return rows
