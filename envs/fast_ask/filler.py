"""Cells that no question needs: decoy sheets, and idle columns of the source sheets.

Tiny workbooks get two small decoys.  Standard ones get four large ones and idle columns, so
that reading everything costs more than a whole episode may read.  Their rows are slices of
long tables that each process draws once, from fixed seeds: tens of thousands of cells for the
price of a few slices, and the same ones everywhere.

No number and no month of a decoy equals the answer.  Idle columns stand to the right of the
columns that questions are about and hold no amounts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from random import Random
from typing import Any

from envs.fast_ask import vocab
from envs.fast_ask.vocab import Scale

Table = tuple[str, str, Iterable[tuple]]  # sheet name, header, rows

MONTHS = tuple(f"{year}-{month:02d}" for year in (2026, 2027) for month in range(1, 13))
_LONG = 3000  # rows of a long table; more than any sheet of a workbook takes

# What fills a column: a vocabulary, or (prefix, low, high) for codes and plain numbers ("").
_Filling = tuple[str, ...] | tuple[str, int, int]
_CITIES = tuple("Aarhus Bergen Cadiz Delft Evora Ghent Izmir Linz Malmo Porto".split())
_DONE = ("Open", "Done", "Held")

_PLAN = tuple("jan feb mar apr may jun jul aug sep oct nov dec".split())

# Each decoy has a year's plan in twelve further columns, filled as "plan" says.
DECOYS: dict[str, dict[str, _Filling]] = {
    "HiringPlan": {
        "role": vocab.ROLES, "recruiter": vocab.RECRUITERS, "start": MONTHS,
        "headcount": ("", 1, 9), "salary_cents": ("", 400_000, 1_900_000), "site": _CITIES,
        "plan": ("", 1000, 90_000),
    },
    "CapTable": {
        "holder": vocab.HOLDERS, "shares": ("", 1000, 90_000), "percent": ("", 1, 40),
        "grant": ("G", 1000, 9999), "vesting": MONTHS, "strike_cents": ("", 10, 900),
        "plan": ("", 10, 4000),
    },
    "Leases": {
        "lease": ("L", 1000, 9999), "renewal": MONTHS, "rent_cents": ("", 100_000, 900_000),
        "city": _CITIES, "desks": ("", 4, 300), "broker": vocab.RECRUITERS,
        "plan": ("", 10_000, 90_000),
    },
    "FixedAssets": {
        "asset": ("F", 1000, 9999), "site": _CITIES, "bought": MONTHS,
        "cost_cents": ("", 50_000, 990_000), "life_months": ("", 12, 84), "state": _DONE,
        "plan": ("", 100, 20_000),
    },
    "Insurance": {
        "policy": ("Y", 1000, 9999), "begins": MONTHS, "broker": vocab.RECRUITERS,
        "premium_cents": ("", 20_000, 400_000), "city": _CITIES, "claims": ("", 0, 7),
        "plan": ("", 1000, 30_000),
    },
    "Benefits": {
        "person": ("B", 1000, 9999), "tariff": ("T", 1, 9), "joined": MONTHS,
        "share_cents": ("", 5000, 90_000), "advisor": vocab.RECRUITERS, "state": _DONE,
        "plan": ("", 100, 9000),
    },
}  # fmt: skip

_IDLE: dict[str, dict[str, _Filling]] = {
    "Orders": {
        "channel": ("Phone", "Web", "Field"), "rep": vocab.RECRUITERS, "warehouse": _CITIES,
        "priority": ("", 1, 5), "basket": ("T", 1000, 9999),
    },
    "OrderLines": {
        "bin": ("N", 100, 999), "lot": ("T", 1000, 9999), "packer": vocab.RECRUITERS,
        "pallet": ("", 1, 60), "aisle": ("", 1, 40),
    },
    "Shipments": {"tracking": ("T", 10_000, 99_999), "dock": ("", 1, 20), "city": _CITIES},
    "Returns": {"handler": vocab.RECRUITERS, "shelf": ("N", 100, 999), "city": _CITIES},
    "Contracts": {"signer": vocab.RECRUITERS, "term": ("", 6, 36), "file": ("F", 1000, 9999)},
    "Invoices": {"clerk": vocab.RECRUITERS, "copy": ("K", 1000, 9999), "site": _CITIES},
    "Payments": {"teller": vocab.RECRUITERS, "branch": _CITIES, "tray": ("", 1, 40)},
    "Remittances": {"scanned": ("N", 1000, 9999), "clerk": vocab.RECRUITERS},
    "Adjustments": {"approver": vocab.RECRUITERS, "ticket": ("T", 1000, 9999)},
    "Ledger": {
        "preparer": vocab.RECRUITERS, "voucher": ("K", 1000, 9999), "site": _CITIES,
        "tray": ("", 1, 40),
    },
}  # fmt: skip


@lru_cache(maxsize=64)
def _long_table(sheet: str, decoy: bool) -> tuple[str, list[tuple], frozenset]:
    """(header, rows, all values) of a sheet's filler, the same in every process."""
    fillings = DECOYS[sheet] if decoy else _IDLE[sheet]
    columns: list[tuple[str, _Filling]] = []
    for name, filling in fillings.items():
        columns += [(month, filling) for month in _PLAN] if name == "plan" else [(name, filling)]
    values = [_column(Random(f"filler/{sheet}/{name}"), filling) for name, filling in columns]
    rows = list(zip(*values, strict=True))
    return " ".join(name for name, _ in columns), rows, frozenset(v for c in values for v in c)


def _column(rng: Random, filling: _Filling) -> list[Any]:
    if len(filling) != 3 or not isinstance(filling[1], int):
        return rng.choices(filling, k=_LONG)
    prefix, low, high = filling
    numbers = rng.choices(range(low, int(high)), k=_LONG)
    return [f"{prefix}{n}" for n in numbers] if prefix else numbers


def _some_rows(rng: Random, rows: list[tuple], count: int) -> list[tuple]:
    first = int(rng.random() * (_LONG - count))
    return rows[first : first + count]


def with_idle_columns(table: Table, rng: Random, scale: Scale) -> Table:
    """The table with its idle columns, where the scale has them."""
    name, header, records = table
    if not scale.idle_columns or name not in _IDLE:
        return table
    rows = list(records)
    idle_header, idle, _ = _long_table(name, False)
    idle = _some_rows(rng, idle, len(rows))
    return name, f"{header} {idle_header}", map(tuple.__add__, rows, idle)


def decoys(rng: Random, scale: Scale, truth: int | str | None) -> list[Table]:
    """Planning data that no question needs; no number or month in it equals `truth`."""
    return _small_decoys(rng, scale, truth) if scale.decoys == 2 else _large(rng, scale, truth)


def _large(rng: Random, scale: Scale, truth: int | str | None) -> list[Table]:
    tables: list[Table] = []
    for name in rng.sample(list(DECOYS), scale.decoys):
        header, rows, values = _long_table(name, True)
        rows = _some_rows(rng, rows, rng.randint(*scale.decoy_rows))
        if truth in values:
            rows = [_without(row, truth) if truth in row else row for row in rows]
        tables.append((name, header, rows))
    return tables


def _without(row: tuple, truth: int | str | None) -> tuple:
    other = truth + 1 if isinstance(truth, int) else next(m for m in MONTHS if m != truth)
    return tuple(other if value == truth else value for value in row)


def _small_decoys(rng: Random, scale: Scale, truth: int | str | None) -> list[Table]:
    random = rng.random

    def number(low: int, high: int) -> int:
        value = low + int(random() * (high - low))
        return value + 1 if value == truth else value

    def pick(words: Sequence[str]) -> str:
        i = int(random() * len(words))
        return words[i] if words[i] != truth else words[i - 1]

    def rows() -> range:
        return range(rng.randint(*scale.decoy_rows))

    hiring = [
        (pick(vocab.ROLES), pick(vocab.RECRUITERS), pick(MONTHS), number(1, 9), number(4000, 19000))
        for _ in rows()
    ]
    caps = [(pick(vocab.HOLDERS), number(1000, 90000), number(1, 40)) for _ in rows()]
    leases = [(f"L{i}", pick(MONTHS), number(1000, 90000)) for i in rows()]
    chosen: list[Table] = [
        ("HiringPlan", "role recruiter start headcount salary_cents", hiring),
        ("CapTable", "holder shares percent", caps),
        ("Leases", "lease renewal rent_cents", leases),
    ]
    return rng.sample(chosen, 2)
