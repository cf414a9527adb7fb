"""How each question type is solved through the tools: which columns to read, what to run.

A program is assignments (the question's parameters) followed by a body that is the same for
every question of its type.  `source_program` works from the source sheets at any
difficulty; `helper_program` uses the helper sheet of easy workbooks.  They share no code
with the truths in `world.py`: the oracle policy runs them through the tools and must agree.
"""

from __future__ import annotations

from dataclasses import dataclass

from envs.fast_ask.questions import Ask


@dataclass(frozen=True)
class Program:
    """reads: (sheet, first column, last column) in letters; code: what to run after them."""

    reads: tuple[tuple[str, str, str], ...]
    code: str


_ORDERS = (("Orders", "A", "C"), ("OrderLines", "A", "D"), ("Shipments", "A", "B"),
           ("Returns", "A", "C"))  # fmt: skip
_INVOICES = (("Invoices", "A", "E"), ("Payments", "A", "G"), ("Remittances", "A", "B"),
             ("Adjustments", "B", "E"))  # fmt: skip
_LEDGER = (("Ledger", "A", "F"), ("Vendors", "A", "B"), ("Adjustments", "B", "E"))
_TARGETS = (("Targets", "A", "C"),)
_BUDGETS = (("Budgets", "A", "D"),)

_SHIPPED = "m={s.order:str(s.ship_date)[:7] for s in Shipments}\n"
_REGION = (
    "k={o.order for o in Orders if o.region==r}\n" + _SHIPPED + "n=sum(l.qty*l.unit_cents "
    'for l in OrderLines if l.order in k and a<=m.get(l.order,"")<=b)-sum(t.refund_cents '
    "for t in Returns if t.order in k and a<=str(t.return_date)[:7]<=b)\n"
)
_CUSTOMERS = (
    "w={o.order:o.customer for o in Orders}\n" + _SHIPPED + "n={}\nfor l in OrderLines:\n"
    ' if a<=m.get(l.order,"")<=b:\n  n[w[l.order]]=n.get(w[l.order],0)+l.qty*l.unit_cents\n'
    "for t in Returns:\n if a<=str(t.return_date)[:7]<=b:\n"
    "  n[w[t.order]]=n.get(w[t.order],0)-t.refund_cents\nprint(max(n,key=n.get))"
)
_MONTHS = (
    _SHIPPED + "n={}\nfor l in OrderLines:\n k=m.get(l.order)\n if k:\n"
    "  n[k]=n.get(k,0)+l.qty*l.unit_cents\nfor t in Returns:\n k=str(t.return_date)[:7]\n"
    " n[k]=n.get(k,0)-t.refund_cents\n"
)
_FIRST = "c=0\nfor k in sorted(n):\n c+=n[k]\n if c>=x:\n  print(k)\n  break"
_APPLIED = "j={r.ref:r.invoice for r in Remittances}\n"
_BALANCE = (
    _APPLIED + "n=sum(v.amount_cents for v in Invoices if v.invoice==i)-sum(p.amount_cents for p "
    'in Payments if j[p.ref]==i and p.status=="Settled" and str(p.date)<=d)-sum(x.amount_cents '
    "for x in Adjustments if x.invoice==i and str(x.date)<=d)\n"
)
_PAID_ON = (
    _APPLIED + "e=[(str(p.date),p.amount_cents) for p in Payments if j[p.ref]==i and "
    'p.status=="Settled"]+[(str(x.date),x.amount_cents) for x in Adjustments if x.invoice==i]\n'
    "n=sum(v.amount_cents for v in Invoices if v.invoice==i)\n"
    "for d,c in sorted(e):\n n-=c\n if n<=0:\n  print(d)\n  break"
)
_DUPLICATE = (
    "s=set()\nfor p in Payments:\n k=(p.ref,p.date,p.method,p.source,p.amount_cents)\n"
    ' if k in s:\n  print(f"Payments!{p._row}")\n s.add(k)'
)
_SPENT = (
    "n=sum(e.amount_cents for e in Ledger if e.entry in k and a<=str(e.date)[:7]<=b)"
    "+sum(x.amount_cents for x in Adjustments if x.entry in k and a<=str(x.date)[:7]<=b)\n"
)
_CATEGORY = (
    "v={x.vendor:x.category for x in Vendors}\nk={e.entry for e in Ledger if v[e.vendor]==c}\n"
    + _SPENT
)
_DEPARTMENT = "k={e.entry for e in Ledger if e.department==c}\n" + _SPENT
_VENDORS = (
    "w={e.entry:e.vendor for e in Ledger}\nn={}\nfor e in Ledger+Adjustments:\n"
    " if a<=str(e.date)[:7]<=b:\n  n[w[e.entry]]=n.get(w[e.entry],0)+e.amount_cents\n"
    "print(max(n,key=n.get))"
)
_REVERSED = (
    'k={x.entry for x in Adjustments if x.reason=="Reversal"}\n'
    "e=max((e for e in Ledger if e.entry in k),key=lambda e:e.amount_cents)\n"
    'print(f"Ledger!{e._row}")'
)
_PRINT = "print(n)"
_YES_NO = 'print("yes" if {} else "no")'
_TOP = "print(max(n,key=n.get))"


def _assign(**values: object) -> str:
    """Assignments, texts in double quotes: r="West" newline a="2025-02" newline."""
    return "".join(
        f'{name}="{value}"\n' if isinstance(value, str) else f"{name}={value}\n"
        for name, value in values.items()
    )


def _find_invoice(ask: Ask) -> str:
    """Code that sets i to the invoice id that the question means."""
    if ask["by"] == "id":
        return _assign(i=ask["invoice"])
    if ask["by"] == "payment":
        return _find_payment(ask) + _APPLIED + "i=j[q.ref]\n"
    return (
        _assign(c=ask["customer"], m=ask["month"], x=ask["amount"], u=ask["due"])
        + "i=[v.invoice for v in Invoices if v.customer==c and str(v.invoice_date)[:7]==m and "
        "v.amount_cents==x and str(v.due_date)==u][0]\n"
    )


def _find_payment(ask: Ask) -> str:
    """Code that sets q to the payment that the question means."""
    if "payment" in ask:
        return _assign(p=ask["payment"]) + "q=[x for x in Payments if x.payment==p][0]\n"
    return (
        _assign(w=ask["method"], x=ask["amount"], d=ask["paid"], s=ask["source"])
        + "q=[p for p in Payments if p.source==s and p.method==w and str(p.date)==d and "
        "p.amount_cents==x][0]\n"
    )


def _period(ask: Ask) -> str:
    return _assign(a=ask["first"], b=ask["last"])


def source_program(kind: str, ask: Ask) -> Program:
    """The program from source sheets; right at every difficulty."""
    if kind == "region_net":
        return Program(_ORDERS, _assign(r=ask["region"]) + _period(ask) + _REGION + _PRINT)
    if kind == "tier_usd":
        return Program(
            (("Contracts", "C", "F"), ("FXRates", "A", "C")),
            _assign(t=ask["tier"]) + _period(ask) + "f={(x.month,x.currency):x.usd_rate for x in "
            "FXRates}\nprint(round(sum(c.recognized_cents*f[c.month,c.currency] for c in "
            "Contracts if c.tier==t and a<=c.month<=b)))",
        )
    if kind == "top_customer":
        return Program(_ORDERS, _period(ask) + _CUSTOMERS)
    if kind == "region_target":
        code = _assign(r=ask["region"], a=ask["month"], b=ask["month"]) + _REGION
        code += "t=[x.target_cents for x in Targets if x.region==r and x.month==a][0]\n"
        return Program(_ORDERS + _TARGETS, code + _YES_NO.format("n>=t"))
    if kind == "first_month":
        return Program(_ORDERS[1:], _assign(x=ask["amount"]) + _MONTHS + _FIRST)
    if kind == "open_balance":
        code = _find_invoice(ask) + _assign(d=ask["date"]) + _BALANCE
        return Program(_INVOICES, code + _PRINT)
    if kind == "paid_by":
        code = _find_invoice(ask) + _assign(d=ask["date"]) + _BALANCE
        return Program(_INVOICES, code + _YES_NO.format("n<=0"))
    if kind == "paid_on":
        return Program(_INVOICES, _find_invoice(ask) + _PAID_ON)
    if kind == "payment_invoice":
        return Program(_INVOICES[1:3], _find_payment(ask) + _APPLIED + "print(j[q.ref])")
    if kind == "duplicate_row":
        return Program(_INVOICES[1:2], _DUPLICATE)
    if kind == "category_spend":
        return Program(_LEDGER, _assign(c=ask["category"]) + _period(ask) + _CATEGORY + _PRINT)
    if kind == "top_vendor":
        return Program((_LEDGER[0], _LEDGER[2]), _period(ask) + _VENDORS)
    if kind == "over_budget":
        code = _assign(c=ask["department"]) + _period(ask) + _DEPARTMENT
        code += "t=[x.budget_cents for x in Budgets if x.department==c and x.first_month==a][0]\n"
        return Program((_LEDGER[0], _LEDGER[2]) + _BUDGETS, code + _YES_NO.format("n>t"))
    if kind == "reversed_row":
        return Program((_LEDGER[0], _LEDGER[2]), _REVERSED)
    raise ValueError(f"unknown task type {kind!r}")


def _grouped(sheet: str, who: str) -> str:
    return (
        f"n={{}}\nfor x in {sheet}:\n if a<=x.month<=b:\n"
        f"  n[x.{who}]=n.get(x.{who},0)+x.net_cents\n{_TOP}"
    )


def helper_program(kind: str, ask: Ask) -> Program:
    """The program from the helper sheet of an easy workbook."""
    pnl = (("RegionalPnL", "A", "D"),)
    net = "n=sum(x.net_cents for x in {} if x.{}=={} and a<=x.month<=b)\n"
    if kind == "region_net":
        code = _assign(r=ask["region"]) + _period(ask) + net.format("RegionalPnL", "region", "r")
        return Program(pnl, code + _PRINT)
    if kind == "tier_usd":
        return Program(
            (("FxExposure", "A", "D"),),
            _assign(t=ask["tier"]) + _period(ask)
            + "print(sum(x.usd_cents for x in FxExposure if x.tier==t and a<=x.month<=b))",
        )  # fmt: skip
    if kind == "top_customer":
        return Program(
            (("OrderMonthNet", "A", "D"),), _period(ask) + _grouped("OrderMonthNet", "customer")
        )
    if kind == "region_target":
        code = _assign(r=ask["region"], a=ask["month"], b=ask["month"])
        code += net.format("RegionalPnL", "region", "r")
        code += "t=[x.target_cents for x in Targets if x.region==r and x.month==a][0]\n"
        return Program(pnl + _TARGETS, code + _YES_NO.format("n>=t"))
    if kind == "first_month":
        code = "n={}\nfor x_ in RegionalPnL:\n n[x_.month]=n.get(x_.month,0)+x_.net_cents\n"
        return Program(pnl, _assign(x=ask["amount"]) + code + _FIRST)
    if kind in ("open_balance", "paid_by"):
        reads = (("OpenItems", "A", "D"),) + _clue_reads(ask)
        code = _find_invoice(ask) + _assign(d=ask["date"])
        code += "n=[x.open_cents for x in OpenItems if x.invoice==i and str(x.as_of)==d][0]\n"
        return Program(reads, code + (_PRINT if kind == "open_balance" else _YES_NO.format("n<=0")))
    if kind == "paid_on":
        code = "print([x.paid_on for x in PaidInvoices if x.invoice==i][0])"
        reads = (("PaidInvoices", "A", "C"),) + _clue_reads(ask)
        return Program(reads, _find_invoice(ask) + code)
    if kind == "payment_invoice":
        reads = (("Settlements", "A", "C"),)
        if "payment" in ask:
            code = _assign(p=ask["payment"])
        else:
            reads += _INVOICES[1:2]
            code = _find_payment(ask) + "p=q.payment\n"
        return Program(reads, code + "print([x.invoice for x in Settlements if x.payment==p][0])")
    if kind == "duplicate_row":
        return Program(
            (("PaymentChecks", "A", "C"),),
            'x=[x for x in PaymentChecks if x.verdict=="Duplicate"][0]\n'
            'print(f"Payments!{x.payments_row}")',
        )
    if kind == "category_spend":
        code = _assign(c=ask["category"]) + _period(ask)
        code += net.format("SpendSummary", "category", "c")
        return Program((("SpendSummary", "A", "D"),), code + _PRINT)
    if kind == "top_vendor":
        return Program(
            (("VendorSpend", "A", "D"),), _period(ask) + _grouped("VendorSpend", "vendor")
        )
    if kind == "over_budget":
        code = _assign(c=ask["department"]) + _period(ask)
        code += net.format("DeptSpend", "department", "c")
        code += "t=[x.budget_cents for x in Budgets if x.department==c and x.first_month==a][0]\n"
        return Program((("DeptSpend", "A", "D"),) + _BUDGETS, code + _YES_NO.format("n>t"))
    if kind == "reversed_row":
        return Program(
            (("ReversalLog", "A", "C"),),
            "x=max(ReversalLog,key=lambda x:x.amount_cents)\n" + 'print(f"Ledger!{x.ledger_row}")',
        )
    raise ValueError(f"unknown task type {kind!r}")


def _clue_reads(ask: Ask) -> tuple[tuple[str, str, str], ...]:
    return {"id": (), "payment": _INVOICES[1:3], "signature": _INVOICES[:1]}[ask["by"]]
