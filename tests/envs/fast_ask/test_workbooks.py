"""What stands in a task's workbook: layout by difficulty, notes, amounts, sizes, and that no
decoy or partial helper gives the answer away."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from pathlib import Path

import openpyxl
import pytest

from envs.fast_ask import DIFFICULTIES, KINDS, Task, build_workbook, make_task
from envs.fast_ask.filler import MONTHS
from envs.fast_ask.sheets import COLORS
from envs.workbook import Sheet, Workbook, read_workbook, write_xlsx

SOURCES = {
    "revenue": "Orders OrderLines Shipments Returns Contracts FXRates Targets".split(),
    "reconciliation": "Invoices Payments Remittances Adjustments".split(),
    "spend": "Ledger Vendors Adjustments Budgets".split(),
}
# type -> (helper sheet, the column that only the whole one has)
HELPERS = {
    "region_net": ("RegionalPnL", "net_cents"),
    "tier_usd": ("FxExposure", "usd_cents"),
    "top_customer": ("OrderMonthNet", "net_cents"),
    "region_target": ("RegionalPnL", "net_cents"),
    "first_month": ("RegionalPnL", "net_cents"),
    "open_balance": ("OpenItems", "open_cents"),
    "payment_invoice": ("Settlements", "invoice"),
    "paid_by": ("OpenItems", "open_cents"),
    "paid_on": ("PaidInvoices", "paid_on"),
    "duplicate_row": ("PaymentChecks", "verdict"),
    "category_spend": ("SpendSummary", "net_cents"),
    "top_vendor": ("VendorSpend", "net_cents"),
    "over_budget": ("DeptSpend", "net_cents"),
    "reversed_row": ("ReversalLog", "ledger_row"),
}
DECOYS = {"HiringPlan", "CapTable", "Leases", "FixedAssets", "Insurance", "Benefits"}
TINY = [
    (kind, difficulty, seed) for kind in KINDS for difficulty in DIFFICULTIES for seed in range(25)
]
STANDARD = [(kind, difficulty, 7) for kind in KINDS for difficulty in DIFFICULTIES]


def tasks(scale: str) -> list[tuple[Task, Workbook]]:
    specs = TINY if scale == "tiny" else STANDARD
    made = [make_task(seed, kind, difficulty, scale) for kind, difficulty, seed in specs]
    return [(task, build_workbook(task)) for task in made]


@pytest.fixture(scope="module", params=["tiny", "standard"])
def books(request: pytest.FixtureRequest) -> list[tuple[Task, Workbook]]:
    return tasks(request.param)


def header(sheet: Sheet) -> tuple:
    return next(values for _, values in sorted(sheet.rows.items()) if len(values) > 1)


def cells(sheet: Sheet) -> list:
    return [v for values in sheet.rows.values() for v in values if v is not None]


def test_difficulty_decides_helper_and_decoys(books) -> None:
    for task, book in books:
        names = Counter(book.names())
        assert max(names.values()) == 1
        extra = set(names) - set(SOURCES[task.family]) - {"Notes"}
        helper, column = HELPERS[task.type]
        decoys = extra & DECOYS
        assert len(decoys) == (0 if task.difficulty == "easy" else 2 if task.scale == "tiny" else 4)
        assert extra - decoys == ({helper} if task.difficulty != "hard" else set())
        if task.difficulty != "hard":
            names_of_helper = header(book[helper])
            assert (column == names_of_helper[-1]) == (task.difficulty == "easy")
            assert (column in names_of_helper) == (task.difficulty == "easy")
            assert len(book[helper].rows) >= 2


def test_helpers_and_decoys_stand_in_no_fixed_place(books) -> None:
    task = books[0][0]
    places: dict[str, set[int]] = {}
    for seed in range(12):
        book = build_workbook(make_task(seed, "region_net", "medium", task.scale))
        for i, name in enumerate(book.names()):
            places.setdefault(name, set()).add(i)
    assert len(places["RegionalPnL"]) > 3 and len(places["HiringPlan"]) > 2


def test_no_decoy_and_no_partial_helper_shows_the_answer(books) -> None:
    checked = 0
    for task, book in books:
        if task.difficulty == "easy":
            continue
        helper, column = HELPERS[task.type]
        for sheet in book.sheets:
            if sheet.name not in DECOYS and sheet.name != helper:
                continue
            # A row number, month or name stands among the labels of the partial helper, but
            # an amount, date or invoice id would be the answer itself.
            if sheet.name == helper and task.answer_type in ("name", "month", "row"):
                assert column not in header(sheet)
                continue
            shown = {str(value) for value in cells(sheet)}
            assert task.truth not in shown, (task, sheet.name)
            checked += 1
    assert checked > 40


def test_a_yes_and_a_no_look_alike_in_the_decoys() -> None:
    """Every small number is as frequent beside a yes as beside a no."""
    counts: dict[str, Counter] = {"yes": Counter(), "no": Counter()}
    for seed in range(300):
        task = make_task(seed, "over_budget", "hard")
        for sheet in build_workbook(task).sheets:
            if sheet.name == "HiringPlan":
                counts[task.truth].update(row[3] for row in list(sheet.rows.values())[1:])
    totals = {truth: count.total() for truth, count in counts.items()}
    for n in range(1, 9):
        shares = [counts[truth][n] / totals[truth] for truth in counts]
        assert abs(shares[0] - shares[1]) < 0.05, n


def test_decoy_months_never_show_the_asked_month() -> None:
    clashes = 0
    for seed in range(400):
        task = make_task(seed, "first_month", "hard")
        if task.truth not in MONTHS:
            continue
        clashes += 1
        for sheet in build_workbook(task).sheets:
            assert sheet.name not in DECOYS or task.truth not in cells(sheet)
    assert clashes > 5


def test_amounts_are_whole_cents(books) -> None:
    for _, book in books:
        for sheet in book.sheets:
            if sheet.name == "Notes":
                continue
            names = header(sheet)
            for values in sheet.rows.values():
                for name, value in zip(names, values, strict=False):
                    if name.endswith("_cents") and value != name:
                        assert type(value) is int or values[0] in ("Payments received",), sheet.name
                    assert type(value) is not float or name == "usd_rate"


def test_columns_have_formats_and_dates_are_dates(books) -> None:
    for _, book in books:
        for sheet in book.sheets:
            if sheet.name == "Notes":
                continue
            names = header(sheet)
            assert sheet.formats == {
                i: "0.00" if name == "usd_rate" else '#,##0"c"'
                for i, name in enumerate(names, 1)
                if name.endswith(("_cents", "_rate"))
            }
            first = min(r for r, values in sheet.rows.items() if values == names)
            for r, values in sheet.rows.items():
                assert r <= first or len(values) == len(names)
                for name, value in zip(names, values, strict=False):
                    if r > first and name.endswith(("date", "as_of", "posted")):
                        assert type(value) is dt.date


def test_notes_state_the_definitions(books) -> None:
    words = {
        "revenue": ("Recognized:", "Net:", "usd_rate is", "Target met:"),
        "reconciliation": ("Settled:", "belongs to", "Open balance", "Fully paid:", "Duplicate:"),
        "spend": ("Net spend:", "Adjustments belong", "Reversed:", "Over budget:"),
    }
    for task, book in books:
        assert book.names()[-1] == "Notes"
        text = "\n".join(cells(book["Notes"]))
        assert all(word in text for word in words[task.family])


def test_tab_colours_vary_and_mean_nothing(books) -> None:
    colors: dict[str, Counter] = {}
    for _, book in books:
        for sheet in book.sheets:
            colors.setdefault(sheet.name, Counter())[sheet.tab_color] += 1
    assert all(set(found) <= set(COLORS) for found in colors.values())
    assert len(set().union(*colors.values())) == len(set(COLORS))
    common = [found for found in colors.values() if found.total() > 30]
    assert common and all(len(found) >= 4 for found in common)


def test_row_sheets_begin_in_many_rows() -> None:
    tops = Counter()
    for seed in range(200):
        ledger = build_workbook(make_task(seed, "reversed_row"))["Ledger"]
        first, values = next((r, v) for r, v in sorted(ledger.rows.items()) if len(v) > 1)
        assert values[0] == "entry"
        assert sorted(ledger.rows)[0] in (first, first - 1), "a title stands right above"
        tops[first] += 1
    assert min(tops) == 1 and max(tops) == 30 and max(tops.values()) < 20


def test_sizes_of_tiny_tables() -> None:
    """The sheets that questions aggregate over hold about 8 to 20 rows."""
    sizes: dict[str, list[int]] = {}
    for _, book in tasks("tiny"):
        for sheet in book.sheets:
            top = min(r for r, values in sheet.rows.items() if len(values) > 1 or r == 1)
            sizes.setdefault(sheet.name, []).append(max(sheet.rows) - top)
    for name in ("Orders", "Invoices", "Contracts", "FXRates", "Targets", *DECOYS & set(sizes)):
        assert 8 <= min(sizes[name]) and max(sizes[name]) <= 20, name
    for name in ("OrderLines", "Payments", "Ledger", "Remittances"):
        assert 8 <= min(sizes[name]) and max(sizes[name]) <= 24, name
    assert all(max(found) <= 66 for found in sizes.values())


def test_sizes_of_standard_workbooks() -> None:
    """Reading everything of a hard workbook takes more than 15 turns of 1,000 cells, and more
    than the 13 turns of four parallel reads that metadata and answer leave."""
    for task, book in tasks("standard"):
        total = sum(area.cells for area in (s.used() for s in book.sheets) if area)
        sources = sum(book[name].used().cells for name in SOURCES[task.family])
        assert sources > 5_000
        if task.difficulty == "hard":
            assert total > 13 * 4 * 1000
        big = [s for s in book.sheets if len(s.rows) > 100]
        assert len(big) >= 2 and max(len(s.rows) for s in big) >= 250


@pytest.mark.parametrize("kind", ["region_net", "duplicate_row", "reversed_row"])
def test_written_files_hold_the_same_workbook(tmp_path: Path, kind: str) -> None:
    task = make_task(11, kind, "medium")
    book = build_workbook(task)
    path = tmp_path / "book.xlsx"
    write_xlsx(book, path)
    back = read_workbook(path)
    for ours, theirs in zip(book.sheets, back.sheets, strict=True):
        assert (theirs.name, theirs.tab_color, theirs.rows) == (
            ours.name,
            ours.tab_color,
            ours.rows,
        )
        for r, values in ours.rows.items():
            assert [type(v) for v in values] == [type(v) for v in theirs.rows[r]]
    file = openpyxl.load_workbook(path)
    for sheet in book.sheets[:-1]:  # all but the notes
        top = min(r for r, values in sheet.rows.items() if values == header(sheet))
        written = file[sheet.name][top + 1]
        for column, number_format in sheet.formats.items():
            if top + 1 in sheet.rows:
                assert written[column - 1].number_format == number_format
        if sheet.name in ("Orders", "Payments", "Ledger"):
            dates = [c for c in written if c.is_date]
            assert dates and all(c.number_format == "yyyy-mm-dd" for c in dates)
