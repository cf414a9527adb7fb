"""The 14 question types: what is asked, in three wordings each, and the true answer.

`draw` picks the parameters of one question from a world so that the answer is unique, the
yes/no types come out as wanted (they are balanced, or a guesser would be paid), and at
medium and hard difficulty no gross figure gives the net answer away.  It returns None
where a world holds no such question; the caller then draws another world.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from envs.fast_ask.world import InvoiceWorld, Payment, RevenueWorld, SpendWorld, month_of

Ask = dict[str, Any]
Drawn = tuple[Ask, Any] | None


@dataclass(frozen=True)
class Kind:
    """One question type.  `wordings` are filled with the parameters in `ask`."""

    name: str
    family: str
    answer_type: str  # cents, name, yes_no, month, invoice, date or row
    wordings: tuple[str, str, str]
    draw: Callable[[Random, Any, bool, bool], Drawn]


def _period(rng: Random, months: tuple[str, ...], most: int = 4) -> tuple[str, str]:
    length = rng.randint(1, most)
    start = rng.randrange(len(months) - length + 1)
    return months[start], months[start + length - 1]


def _total(table: dict[tuple[str, str], int], name: str, first: str, last: str) -> int:
    return sum(c for (who, month), c in table.items() if who == name and first <= month <= last)


def _sums(table: dict[tuple[str, str], int], first: str, last: str) -> Counter:
    sums: Counter = Counter()
    for (who, month), cents in table.items():
        if first <= month <= last:
            sums[who] += cents
    return sums


def _single_top(sums: Counter) -> str | None:
    """The name with the largest positive sum, if it is alone there."""
    ranked = sums.most_common(2)
    if not ranked or ranked[0][1] <= 0 or (len(ranked) > 1 and ranked[0][1] == ranked[1][1]):
        return None
    return ranked[0][0]


def _not_given_away(net: int, gross: dict[tuple[str, str], int], whole: int) -> bool:
    return net != whole and net not in gross.values()


# --- revenue ---------------------------------------------------------------------------


def _region_net(rng: Random, world: RevenueWorld, guarded: bool, want: bool) -> Drawn:
    region = rng.choice(world.regions)
    first, last = _period(rng, world.calendar.months)
    net = _total(world.net("region"), region, first, last)
    gross = world.gross("region")
    if net <= 0 or guarded and not _not_given_away(net, gross, _total(gross, region, first, last)):
        return None
    return {"region": region, "first": first, "last": last}, net


def _tier_usd(rng: Random, world: RevenueWorld, guarded: bool, want: bool) -> Drawn:
    tier = rng.choice(sorted({c.tier for c in world.contracts}))
    first, last = _period(rng, world.calendar.months, 5)
    usd = _total(world.usd_by_tier(), tier, first, last)
    local = world.local_by_tier()
    if usd <= 0 or guarded and not _not_given_away(usd, local, _total(local, tier, first, last)):
        return None
    return {"tier": tier, "first": first, "last": last}, usd


def _top_customer(rng: Random, world: RevenueWorld, guarded: bool, want: bool) -> Drawn:
    first, last = rng.choice(world.calendar.quarters)
    top = _single_top(_sums(world.net("customer"), first, last))
    return ({"first": first, "last": last}, top) if top else None


def _region_target(rng: Random, world: RevenueWorld, guarded: bool, want: bool) -> Drawn:
    net = world.net("region")
    scopes = [
        (region, month)
        for (region, month), target in world.targets.items()
        if (net.get((region, month), 0) >= target) == want and net.get((region, month), 0) > 0
    ]
    if not scopes:
        return None
    region, month = rng.choice(scopes)
    return {"region": region, "month": month}, want


def _first_month(rng: Random, world: RevenueWorld, guarded: bool, want: bool) -> Drawn:
    months = world.calendar.months
    net: Counter = Counter()
    for (_, month), cents in world.net("").items():
        net[month] += cents
    i = rng.randrange(1, len(months))
    running, peak = 0, 0
    for month in months[:i]:
        running += net[month]
        peak = max(peak, running)
    reached = running + net[months[i]]
    if reached <= peak:
        return None
    amount = peak + 1 + rng.randrange(reached - peak)
    return {"start": months[0], "amount": amount}, months[i]


# --- reconciliation --------------------------------------------------------------------


def _reference(
    rng: Random, world: InvoiceWorld, i: int, answer: dt.date | int | None = None
) -> Ask | None:
    """How the question names invoice i: by id, or (22 % of the time, which makes 15-20 %
    of reconciliation tasks) by a clue that fits no other invoice and doesn't show `answer`."""
    if rng.random() >= 0.22:
        return {"by": "id", "invoice": world.invoices[i].invoice}
    if rng.random() < 0.5:
        own = [p for p in world.payments if p.invoice == i and p.status == "Settled"]
        own = [p for p in own if answer not in (p.date, p.cents)]
        if own:
            clue = _payment_clue(world, rng.choice(own))
            if clue:
                return {"by": "payment", **clue}
    return None if world.invoices[i].due == answer else _signature(world, i)


def _payment_clue(world: InvoiceWorld, payment: Payment) -> Ask | None:
    clue = (payment.source, payment.method, payment.date, payment.cents)
    fits = [p for p in world.payments if (p.source, p.method, p.date, p.cents) == clue]
    if len(fits) != 1:
        return None
    source, method, date, cents = clue
    return {"source": source, "method": method, "paid": date.isoformat(), "amount": cents}


def _signature(world: InvoiceWorld, i: int) -> Ask | None:
    invoice = world.invoices[i]
    sign = (invoice.customer, month_of(invoice.date), invoice.cents, invoice.due)
    fits = [v for v in world.invoices if (v.customer, month_of(v.date), v.cents, v.due) == sign]
    if len(fits) != 1:
        return None
    return {
        "by": "signature",
        "customer": sign[0],
        "month": sign[1],
        "amount": sign[2],
        "due": sign[3].isoformat(),
    }


def describe_invoice(ask: Ask) -> str:
    """The words that stand for the invoice in a question."""
    if ask["by"] == "id":
        return f"invoice {ask['invoice']}"
    if ask["by"] == "payment":
        return f"the invoice settled by {describe_payment(ask)}"
    return (
        f"the invoice of {ask['customer']} from {ask['month']} for {ask['amount']} cents "
        f"due {ask['due']}"
    )


def describe_payment(ask: Ask) -> str:
    if ask["by"] == "id":
        return f"payment {ask['payment']}"
    amount, paid = ask["amount"], ask["paid"]
    return f"the {ask['method']} payment of {amount} cents on {paid} from {ask['source']}"


def _open_balance(rng: Random, world: InvoiceWorld, guarded: bool, want: bool) -> Drawn:
    i = rng.randrange(len(world.invoices))
    invoice = world.invoices[i]
    dates = [d for d in world.calendar.month_ends if d >= invoice.date]
    date = rng.choice(dates)
    balance = world.balance(i, date)
    if balance <= 0 or balance == invoice.cents:
        return None
    # The partial helper of medium workbooks lists what every invoice was billed.
    if guarded and any(balance == v.cents for v in world.invoices):
        return None
    ask = _reference(rng, world, i, balance)
    return ({**ask, "date": date.isoformat()}, balance) if ask else None


def _payment_invoice(rng: Random, world: InvoiceWorld, guarded: bool, want: bool) -> Drawn:
    payment = rng.choice([p for p in world.payments if p.status == "Settled"])
    ask: Ask | None = {"by": "id", "payment": payment.payment}
    if rng.random() < 0.22:
        clue = _payment_clue(world, payment)
        ask = clue and {"by": "payment", **clue}
    return (ask, world.invoices[payment.invoice].invoice) if ask else None


def _paid_by(rng: Random, world: InvoiceWorld, guarded: bool, want: bool) -> Drawn:
    ends = world.calendar.month_ends
    scopes = []
    for i, invoice in enumerate(world.invoices):
        paid = world.paid_on(i)
        if want:
            scopes += [(i, d) for d in ends if paid and d >= paid][:2]
        elif world.events[i]:
            scopes += [(i, d) for d in ends if d >= invoice.date and not (paid and d >= paid)][-2:]
    if not scopes:
        return None
    i, date = rng.choice(scopes)
    ask = _reference(rng, world, i)
    return ({**ask, "date": date.isoformat()}, want) if ask else None


def _paid_on(rng: Random, world: InvoiceWorld, guarded: bool, want: bool) -> Drawn:
    i = rng.randrange(len(world.invoices))
    paid = world.paid_on(i)
    if paid is None:
        return None
    ask = _reference(rng, world, i, paid)
    return (ask, paid) if ask else None


def _duplicate_row(rng: Random, world: InvoiceWorld, guarded: bool, want: bool) -> Drawn:
    groups = defaultdict(list)
    for i, p in enumerate(world.payments):
        groups[p.ref].append(i)
    doubles = [g for g in groups.values() if len(g) > 1]
    return ({}, ("Payments", doubles[0][1])) if len(doubles) == 1 else None


# --- spend -----------------------------------------------------------------------------


def _category_spend(rng: Random, world: SpendWorld, guarded: bool, want: bool) -> Drawn:
    category = rng.choice(sorted(set(world.categories.values())))
    first, last = _period(rng, world.calendar.months)
    net = _total(world.net("category"), category, first, last)
    gross = world.gross("category")
    whole = _total(gross, category, first, last)
    if net <= 0 or guarded and not _not_given_away(net, gross, whole):
        return None
    return {"category": category, "first": first, "last": last}, net


def _top_vendor(rng: Random, world: SpendWorld, guarded: bool, want: bool) -> Drawn:
    first, last = rng.choice(world.calendar.quarters)
    top = _single_top(_sums(world.net("vendor"), first, last))
    return ({"first": first, "last": last}, top) if top else None


def _over_budget(rng: Random, world: SpendWorld, guarded: bool, want: bool) -> Drawn:
    net = world.net("department")
    quarters = dict(world.calendar.quarters)
    scopes = [
        (department, first)
        for (department, first), budget in world.budgets.items()
        if (_total(net, department, first, quarters[first]) > budget) == want
    ]
    if not scopes:
        return None
    department, first = rng.choice(scopes)
    return {"department": department, "first": first, "last": quarters[first]}, want


def _reversed_row(rng: Random, world: SpendWorld, guarded: bool, want: bool) -> Drawn:
    back = [a.target for a in world.adjustments if a.reason == "Reversal"]
    if len(back) < 2:
        return None
    top = _single_top(Counter({i: world.entries[i].cents for i in back}))
    return None if top is None else ({}, ("Ledger", top))


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("region_net", "revenue", "cents", (
            "I am tightening our investor memo. What net recognized revenue did {region} land "
            "across {first} to {last}, in cents?",
            "For the board pack: net recognized revenue of {region} from {first} to {last}, in "
            "cents?",
            "Fundraise model check. How many cents of net recognized revenue came from {region} "
            "between {first} and {last}?",
        ), _region_net),
        Kind("tier_usd", "revenue", "cents", (
            "What did contracts of tier {tier} recognize from {first} to {last}, in US cents at "
            "each month's rate?",
            "For the pricing review: recognized revenue of the {tier} tier over {first} to {last}, "
            "converted to US cents month by month?",
            "Convert to US cents with the monthly rates: how much did {tier} contracts recognize "
            "between {first} and {last}?",
        ), _tier_usd),
        Kind("top_customer", "revenue", "name", (
            "Which customer brought the highest net recognized revenue in the quarter {first} to "
            "{last}?",
            "For the account plan: who is the top customer by net recognized revenue over {first} "
            "to {last}?",
            "Name the customer with the largest net recognized revenue between {first} and {last}.",
        ), _top_customer),
        Kind("region_target", "revenue", "yes_no", (
            "Did {region} meet its target in {month} on net recognized revenue, yes or no?",
            "Sales bonus check: was the {month} target of {region} met by net recognized revenue?",
            "Yes or no: in {month}, did net recognized revenue of {region} reach its target?",
        ), _region_target),
        Kind("first_month", "revenue", "month", (
            "Counting from {start}, in which month did cumulative net recognized revenue of the "
            "whole company first reach {amount} cents?",
            "Milestone memo: first month in which net recognized revenue summed since {start} is "
            "at least {amount} cents?",
            "When did total net recognized revenue since {start} first get to {amount} cents? "
            "Give the month.",
        ), _first_month),
        Kind("open_balance", "reconciliation", "cents", (
            "Collections follow up: what was the open balance of {invoice_text} on {date}, in "
            "cents?",
            "How many cents were still open on {invoice_text} as of {date}?",
            "Audit request. State the open balance in cents at {date} for {invoice_text}.",
        ), _open_balance),
        Kind("payment_invoice", "reconciliation", "invoice", (
            "Which invoice does {payment_text} settle?",
            "Cash application: find the invoice that {payment_text} belongs to.",
            "Name the invoice paid with {payment_text}.",
        ), _payment_invoice),
        Kind("paid_by", "reconciliation", "yes_no", (
            "Was {invoice_text} fully paid by {date}, yes or no?",
            "Collections check: by {date}, had {invoice_text} been paid in full?",
            "Yes or no: no balance was left at {date} on {invoice_text}?",
        ), _paid_by),
        Kind("paid_on", "reconciliation", "date", (
            "On which date did {invoice_text} become fully paid?",
            "Find the day on which the balance of {invoice_text} reached zero.",
            "Closing file: give the date of full payment of {invoice_text}.",
        ), _paid_on),
        Kind("duplicate_row", "reconciliation", "row", (
            "One payment was recorded twice. Which row of Payments holds the later copy?",
            "Find the duplicate payment: give the sheet row of its second entry.",
            "Payment control: which row repeats an earlier payment?",
        ), _duplicate_row),
        Kind("category_spend", "spend", "cents", (
            "What did we spend on {category} vendors from {first} to {last}, net of adjustments, "
            "in cents?",
            "Budget memo: net spend in the {category} category over {first} to {last}, in cents?",
            "How many cents, after adjustments, went to {category} vendors between {first} and "
            "{last}?",
        ), _category_spend),
        Kind("top_vendor", "spend", "name", (
            "Which vendor had the largest net spend in the quarter {first} to {last}?",
            "For procurement: name the top vendor by net spend over {first} to {last}.",
            "Who received the most, net of adjustments, between {first} and {last}?",
        ), _top_vendor),
        Kind("over_budget", "spend", "yes_no", (
            "Did department {department} exceed its budget in the quarter {first} to {last}, net "
            "of adjustments, yes or no?",
            "Budget review: was {department} over budget for {first} to {last} on net spend?",
            "Yes or no: net spend of {department} from {first} to {last} is above its budget?",
        ), _over_budget),
        Kind("reversed_row", "spend", "row", (
            "Which row of Ledger holds the largest reversed entry?",
            "Find the biggest entry that was later reversed: give its sheet row.",
            "Control test: in which Ledger row is the reversed entry with the highest amount?",
        ), _reversed_row),
    )
}  # fmt: skip
FAMILIES = {
    family: tuple(k.name for k in KINDS.values() if k.family == family)
    for family in ("revenue", "reconciliation", "spend")
}


def word(kind: Kind, ask: Ask, wording: int) -> str:
    """The question as the user asks it."""
    fields = dict(ask)
    if kind.name == "payment_invoice":
        fields["payment_text"] = describe_payment(ask)
    elif "by" in ask:
        fields["invoice_text"] = describe_invoice(ask)
    return kind.wordings[wording].format(**fields)
