"""One episode as the page shows it: its transcript, its reward, and which cells it read.

Whatever a trace or a record holds becomes plain data of known types, so that the page needs no
checks of its own: texts are texts, numbers finite, ranges rectangles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envs.workbook.a1 import Area, RangeError, parse_area

Outline = Callable[[str, object], dict[str, Any] | None]
# Where the outline of a workbook comes from.
RECORDED, REBUILT = "recorded", "rebuilt"


def number(value: Any) -> float | int | None:
    """A finite number, or None; true and false are 1 and 0."""
    if isinstance(value, bool):
        return int(value)
    try:
        return value if isinstance(value, (int, float)) and math.isfinite(value) else None
    except OverflowError:  # more digits than a float has room for
        return None


def text(value: Any, limit: int | None = None) -> str:
    """A text of at most `limit` characters; "" for None."""
    found = "" if value is None else str(value)
    return found if limit is None or len(found) <= limit else found[: limit - 1] + "…"


def detail(record: Mapping[str, Any], rebuild: Outline) -> dict[str, Any]:
    """What the page shows of a trace, or of an evaluation's record (which has no `turns`).

    rebuild: gives the outline of a task by its id and true answer, where the record has none.
    """
    info = record["info"] if isinstance(record.get("info"), dict) else record
    task = text(record.get("task") or info.get("task"))
    told, origin = dict(record), RECORDED
    if not isinstance(record.get("sheets"), list):
        made = rebuild(task, info.get("truth"))
        origin = "" if made is None else REBUILT
        told |= made or {}
    parts = record["parts"] if isinstance(record.get("parts"), dict) else {}
    return {
        "task": task,
        "question": text(told.get("question")),
        "answer": None if info.get("answer") is None else text(info["answer"]),
        "truth": None if info.get("truth") is None else text(info["truth"]),
        "error": None if record.get("error") is None else text(record["error"]),
        "reward": number(record.get("reward")),
        "parts": {text(k, 60): number(v) for k, v in parts.items()},
        "advantage": number(record.get("advantage")),
        "seconds": number(record.get("seconds")),
        "cells": number(info.get("cells")),
        "malformed": number(info.get("malformed")),
        "python": [number(info.get("python_calls")), number(info.get("python_errors"))],
        "sheets": _sheets(told.get("sheets")),
        "outline": origin,
        "reads": _reads(info),
        "turns": _turns(record.get("turns")),
    }


def _sheets(value: Any) -> list[dict[str, Any]]:
    """Name, used area, tab colour and role of each sheet that is told of."""
    out = []
    for row in value if isinstance(value, list) else []:
        if isinstance(row, list) and len(row) >= 4 and isinstance(row[0], str):
            name, used, colour, role = row[:4]
            out.append(
                {
                    "name": name,
                    "used": _area(used),
                    "range": text(used),
                    "colour": colour if _is_colour(colour) else None,
                    "role": text(role, 20),
                }
            )
    return out


def _is_colour(value: Any) -> bool:
    digits = set("0123456789abcdefABCDEF")
    return isinstance(value, str) and len(value) == 6 and digits.issuperset(value)


def _area(value: Any) -> list[int] | None:
    """[top, left, bottom, right] of an A1 range, or None."""
    try:
        _, area, _ = parse_area(value) if isinstance(value, str) else (None, None, False)
    except RangeError:
        return None
    return _corners(area)


def _corners(area: Area | None) -> list[int] | None:
    return None if area is None else [area.top, area.left, area.bottom, area.right]


def _reads(info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Sheet, area, turn and call of every range that was read; turn 0 where it isn't known."""
    calls = info.get("reads")
    if not isinstance(calls, list):
        ranges = info.get("ranges")
        calls = [[0, 0, *ranges]] if isinstance(ranges, list) else []
    out = []
    for call in calls:
        if not isinstance(call, list) or len(call) < 2:
            continue
        turn, order, *ranges = call
        for label in ranges:
            if isinstance(label, str) and (found := _read(label)) is not None:
                sheet, corners = found
                place = {"turn": number(turn) or 0, "call": number(order) or 0}
                out.append({"sheet": sheet, "area": corners, "range": text(label, 200), **place})
    return out


def _read(label: str) -> tuple[str, list[int]] | None:
    try:
        sheet, area, _ = parse_area(label)
    except RangeError:
        return None
    corners = _corners(area)
    return None if sheet is None or corners is None else (sheet, corners)


def _turns(value: Any) -> list[dict[str, Any]]:
    out = []
    for turn in value if isinstance(value, list) else []:
        if not isinstance(turn, dict):
            continue
        said: dict[str, Any] = {
            "role": text(turn.get("role"), 20),
            "text": text(turn.get("text")),
            "tokens": number(turn.get("tokens")),
        }
        if said["role"] == "reply":
            versions = turn.get("versions")
            said |= {"logprob": number(turn.get("logprob")), "versions": _numbers(versions)}
            lengths, logprobs = _numbers(turn.get("chars")), _numbers(turn.get("logprobs"))
            if lengths and len(lengths) == len(logprobs) and sum(lengths) == len(said["text"]):
                said |= {"chars": lengths, "logprobs": logprobs}
        out.append(said)
    return out


def _numbers(value: Any) -> list[float | int]:
    found: Sequence[Any] = value if isinstance(value, list) else []
    numbers = [number(x) for x in found]
    return [] if None in numbers else [x for x in numbers if x is not None]
