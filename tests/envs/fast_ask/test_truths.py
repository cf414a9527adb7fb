"""Every truth follows from the question's words and the cells of its workbook alone.

The reader below knows neither the generator's worlds nor the oracle's programs: it takes the
parameters out of the question's text and recomputes the answer from the sheets, as an
accountant with the notes at hand would.  Along the way it asserts that only one answer fits.
"""

from __future__ import annotations

import datetime as dt
import re
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.fast_ask import DIFFICULTIES, KINDS, Task, build_workbook, make_task, vocab
from envs.workbook import Workbook

DATE = r"\d{4}-\d\d-\d\d"
MONTH = r"\d{4}-\d\d(?!-?\d)"


class Records(list):
    """The rows of one sheet as dictionaries; `row` is the sheet's row number.  The header is
    the first row with more than one filled cell."""

    def __init__(self, book: Workbook, name: str) -> None:
        rows = iter(sorted(book[name].rows.items()))
        header = next(values for _, values in rows if len(values) > 1)
        assert len(set(header)) == len(header)
        super().__init__({**dict(zip(header, values, strict=True)), "row": r} for r, values in rows)


def only(found) -> Any:
    """The single element of `found`."""
    (one,) = found
    return one


def month(date: dt.date) -> str:
    return f"{date.year}-{date.month:02d}"


def named(question: str, words) -> str:
    """The one word of a vocabulary that the question names."""
    return only(w for w in words if re.search(rf"\b{w}\b", question))


def months_in(question: str) -> list[str]:
    return re.findall(MONTH, question)


def revenue_events(book: Workbook) -> list[tuple[dict, str, int]]:
    """(order record, month, cents) of every shipped line and every refund."""
    orders = {o["order"]: o for o in Records(book, "Orders")}
    assert len(orders) == len(Records(book, "Orders"))
    shipped: dict[str, str] = {}
    for s in Records(book, "Shipments"):
        assert s["order"] not in shipped, "an order ships once"
        shipped[s["order"]] = month(s["ship_date"])
    events = [
        (orders[line["order"]], shipped[line["order"]], line["qty"] * line["unit_cents"])
        for line in Records(book, "OrderLines")
        if line["order"] in shipped
    ]
    for r in Records(book, "Returns"):
        assert r["order"] in shipped, "only what was shipped comes back"
        events.append((orders[r["order"]], month(r["return_date"]), -r["refund_cents"]))
    return events


def spend_events(book: Workbook) -> list[tuple[dict, str, int]]:
    """(ledger record, month, cents) of every entry and every adjustment."""
    entries = {e["entry"]: e for e in Records(book, "Ledger")}
    assert len(entries) == len(Records(book, "Ledger"))
    events = [(e, month(e["date"]), e["amount_cents"]) for e in entries.values()]
    for a in Records(book, "Adjustments"):
        assert a["amount_cents"] < 0
        events.append((entries[a["entry"]], month(a["date"]), a["amount_cents"]))
    return events


def within(events, first: str, last: str) -> list[tuple[dict, str, int]]:
    return [e for e in events if first <= e[1] <= last]


def top(events, field: str) -> str:
    sums: Counter = Counter()
    for record, _, cents in events:
        sums[record[field]] += cents
    return only(name for name in sums if sums[name] == max(sums.values()))


def meant_payment(book: Workbook, question: str) -> dict:
    payments = Records(book, "Payments")
    by_id = re.search(r"payment (P\d+)", question)
    if by_id:
        return only(p for p in payments if p["payment"] == by_id[1])
    clue = re.search(rf"the (\w+) payment of (\d+) cents on ({DATE}) from (\w+)", question)
    method, cents, date, source = clue.groups()
    return only(
        p
        for p in payments
        if (p["method"], p["amount_cents"], str(p["date"]), p["source"])
        == (method, int(cents), date, source)
    )


def settled_invoice(book: Workbook, payment: dict) -> str:
    return only(r["invoice"] for r in Records(book, "Remittances") if r["ref"] == payment["ref"])


def meant_invoice(book: Workbook, question: str) -> dict:
    invoices = Records(book, "Invoices")
    by_id = re.search(r"invoice (INV-\d+)", question)
    if by_id:
        number = by_id[1]
    elif "the invoice settled by" in question:
        number = settled_invoice(book, meant_payment(book, question))
    else:
        clue = re.search(
            rf"the invoice of (\w+) from ({MONTH}) for (\d+) cents due ({DATE})", question
        )
        customer, month_, cents, due = clue.groups()
        return only(
            v
            for v in invoices
            if (v["customer"], month(v["invoice_date"]), v["amount_cents"], str(v["due_date"]))
            == (customer, month_, int(cents), due)
        )
    return only(v for v in invoices if v["invoice"] == number)


def reductions(book: Workbook, invoice: dict) -> list[tuple[str, int]]:
    """(date, cents) of what counts against an invoice, in the order of dates."""
    found = [
        (str(a["date"]), a["amount_cents"])
        for a in Records(book, "Adjustments")
        if a["invoice"] == invoice["invoice"]
    ]
    for p in Records(book, "Payments"):
        if p["status"] == "Settled" and settled_invoice(book, p) == invoice["invoice"]:
            found.append((str(p["date"]), p["amount_cents"]))
        assert p["status"] in ("Settled", "Pending")
    return sorted(found)


def balance(book: Workbook, invoice: dict, date: str) -> int:
    left = invoice["amount_cents"]
    left -= sum(cents for day, cents in reductions(book, invoice) if day <= date)
    assert left >= 0, "never paid more than billed"
    return left


CLUES = rf"of \d+ cents on {DATE} from \w+|for \d+ cents due {DATE}"


def asked_date(question: str) -> str:
    """The date that is not part of a clue."""
    return only(re.findall(DATE, re.sub(CLUES, "", question)))


def recompute(kind: str, question: str, book: Workbook) -> str:
    """The answer, written as the model should write it."""
    if kind == "region_net":
        first, last = months_in(question)
        events = within(revenue_events(book), first, last)
        region = named(question, vocab.REGIONS)
        return str(sum(cents for order, _, cents in events if order["region"] == region))
    if kind == "tier_usd":
        first, last = months_in(question)
        tier = named(question, vocab.TIERS)
        rates = {(r["month"], r["currency"]): r["usd_rate"] for r in Records(book, "FXRates")}
        assert len(rates) == len(Records(book, "FXRates"))
        exact = sum(
            c["recognized_cents"] * Fraction(str(rates[c["month"], c["currency"]]))
            for c in Records(book, "Contracts")
            if c["tier"] == tier and first <= c["month"] <= last
        )
        assert exact.denominator == 1, "rates must not leave fractions of a cent"
        return str(int(exact))
    if kind == "top_customer":
        return top(within(revenue_events(book), *months_in(question)), "customer")
    if kind == "region_target":
        when = only(months_in(question))
        region = named(question, vocab.REGIONS)
        events = within(revenue_events(book), when, when)
        net = sum(cents for order, _, cents in events if order["region"] == region)
        target = only(
            t["target_cents"]
            for t in Records(book, "Targets")
            if (t["region"], t["month"]) == (region, when)
        )
        return "yes" if net >= target else "no"
    if kind == "first_month":
        start = only(months_in(question))
        amount = int(re.search(r"(\d+) cents", question)[1])
        by_month: Counter = Counter()
        for _, when, cents in revenue_events(book):
            assert when >= start, "nothing was recognized before the start that the question names"
            by_month[when] += cents
        running = 0
        for when in sorted(by_month):
            running += by_month[when]
            if running >= amount:
                return when
        raise AssertionError("the amount is never reached")
    if kind == "payment_invoice":
        return settled_invoice(book, meant_payment(book, question))
    if kind == "duplicate_row":
        seen, again = set(), []
        for p in Records(book, "Payments"):
            key = (p["ref"], p["date"], p["method"], p["source"], p["amount_cents"])
            if key in seen:
                again.append(p["row"])
            seen.add(key)
        return f"Payments!{only(again)}"
    if kind in ("open_balance", "paid_by"):
        invoice = meant_invoice(book, question)
        left = balance(book, invoice, asked_date(question))
        if kind == "open_balance":
            return str(left)
        return "no" if left else "yes"
    if kind == "paid_on":
        invoice = meant_invoice(book, question)
        days = [d for d, _ in reductions(book, invoice) if balance(book, invoice, d) == 0]
        return days[0]
    if kind == "category_spend":
        category = named(question, vocab.CATEGORIES)
        categories = {v["vendor"]: v["category"] for v in Records(book, "Vendors")}
        events = within(spend_events(book), *months_in(question))
        return str(sum(c for e, _, c in events if categories[e["vendor"]] == category))
    if kind == "top_vendor":
        return top(within(spend_events(book), *months_in(question)), "vendor")
    if kind == "over_budget":
        first, last = months_in(question)
        department = named(question, vocab.DEPARTMENTS)
        events = within(spend_events(book), first, last)
        budget = only(
            b["budget_cents"]
            for b in Records(book, "Budgets")
            if (b["department"], b["first_month"]) == (department, first)
        )
        spent = sum(c for e, _, c in events if e["department"] == department)
        return "yes" if spent > budget else "no"
    assert kind == "reversed_row"
    back = {a["entry"] for a in Records(book, "Adjustments") if a["reason"] == "Reversal"}
    entries = [e for e in Records(book, "Ledger") if e["entry"] in back]
    largest = max(e["amount_cents"] for e in entries)
    return f"Ledger!{only(e['row'] for e in entries if e['amount_cents'] == largest)}"


def check(task: Task) -> None:
    assert recompute(task.type, task.question, build_workbook(task)) == task.truth, task


@pytest.mark.parametrize("kind", KINDS)
def test_truth_follows_from_question_and_workbook(kind: str) -> None:
    for difficulty in DIFFICULTIES:
        for seed in range(40):
            check(make_task(seed, kind, difficulty))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**30), st.sampled_from(list(KINDS)), st.sampled_from(DIFFICULTIES))
def test_truth_follows_for_any_seed(seed: int, kind: str, difficulty: str) -> None:
    check(make_task(seed, kind, difficulty))


@pytest.mark.parametrize("kind", KINDS)
def test_truth_follows_from_question_and_workbook_at_standard_scale(kind: str) -> None:
    for seed, difficulty in enumerate(DIFFICULTIES):
        check(make_task(seed, kind, difficulty, "standard"))
