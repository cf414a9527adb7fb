"""What reports tell of a task beside its answer: the question, and the sheets of its workbook.

Holds no cells.  What a sheet is for (source, helper, decoy, notes) is for people who look at a
rollout afterwards; no policy is told.
"""

from __future__ import annotations

from typing import Any

from envs.fast_ask import filler
from envs.fast_ask.tasks import Task, build_workbook, make_task

SOURCE, HELPER, DECOY, NOTES = "source", "helper", "decoy", "notes"
_HELPERS = frozenset(
    "DeptSpend FxExposure OpenItems OrderMonthNet PaidInvoices PaymentChecks RegionalPnL "
    "ReversalLog Settlements SpendSummary VendorSpend".split()
)


def role(sheet: str) -> str:
    """What a generated sheet is for, by its name."""
    if sheet in filler.DECOYS:
        return DECOY
    if sheet in _HELPERS:
        return HELPER
    return NOTES if sheet == "Notes" else SOURCE


def outline(task: Task) -> dict[str, Any]:
    """`question`, and `sheets` in tab order: [name, used range or None, tab colour as RRGGBB or
    None, role]."""
    sheets = []
    for sheet in build_workbook(task).sheets:
        used = sheet.used()
        sheets.append(
            [sheet.name, None if used is None else str(used), sheet.tab_color, role(sheet.name)]
        )
    return {"question": task.question, "sheets": sheets}


def recall(task_id: str, truth: object) -> Task | None:
    """The task that only its id is known of, or None where today's generator makes no such task:
    another id, or another answer than the one that was recorded."""
    try:
        scale, difficulty, kind, seed = task_id.split("-")
        task = make_task(int(seed), kind, difficulty, scale)
    except ValueError:
        return None
    return task if task.id == task_id and task.truth == truth else None
