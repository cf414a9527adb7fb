"""One reader opens one workbook of W4, in a process of its own: seconds, bytes and what it read.

    python -m experiments.bench.w4_roles ROLE FILE ROWS [STORE]

Prints one JSON object.  Imports, and the start of our reader's warm process, are not measured.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.bench import w4

Said = dict[str, Any]


def main(role: str, path: str, rows: str, store: str = "") -> None:
    top = int(rows) // 2 + 1
    print(json.dumps(ROLES[role](Path(path), top, store)))


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _texts(rows: Any) -> list[list[str]]:
    """Values as text: dates and whole floats of all readers look alike then."""
    return [[w4.text(v) for v in row] for row in rows]


def ours(path: Path, top: int, store: str) -> Said:
    """Outline, then the block with values, kinds, formats and formulas, then other blocks."""
    from envs.workbook import Area, BlockStore, read_workbook
    from envs.workbook.reader import Worker

    warm = path.with_name("warm.csv")
    warm.write_text("a\n1\n")
    read_workbook(warm)
    keep = BlockStore(store) if store else None
    began = time.perf_counter()
    book = read_workbook(path, store=keep)
    outline = [(s.name, s.marks.state, s.tab_color, str(s.used())) for s in book.sheets]
    seen = time.perf_counter()
    area = Area(top, 1, top + 49, 20)
    cells = list(book["Data"].cells(area))
    read = time.perf_counter()
    reads = []
    height = book["Data"].used().bottom  # type: ignore[union-attr]
    for n in range(21):
        first = 2 + n * (height - 60) // 21
        start = time.perf_counter()
        list(book["Data"].cells(Area(first, 1, first + 49, 20)))
        reads.append(time.perf_counter() - start)
    feed = book.feed  # type: ignore[attr-defined]
    peak = _peak() + (feed.peak if isinstance(feed, Worker) else 0)
    kept = feed.keep() if keep and isinstance(feed, Worker) else keep is not None
    return {
        "outline": seen - began,
        "block": read - began,
        "read": statistics.median(reads),
        "slowest_read": max(reads),
        "peak": peak,
        "from_store": not isinstance(feed, Worker),
        "kept": kept,
        "used": {name: used for name, _, _, used in outline},
        "values": _texts([cell.value for cell in row] for _, row in cells),
    }


def openpyxl_normal(path: Path, top: int, store: str) -> Said:
    """Loaded whole: once for the outline, and once more for values beside formulas."""
    import openpyxl

    began = time.perf_counter()
    book = openpyxl.load_workbook(path)
    outline = [(s.title, s.sheet_state, s.sheet_properties.tabColor) for s in book.worksheets]
    used = {s.title: s.calculate_dimension() for s in book.worksheets}
    seen = time.perf_counter()
    peak = _peak()
    assert len(outline) == len(used)
    sheet = book["Data"]
    values = [[c.value for c in row] for row in sheet.iter_rows(top, top + 49, 1, 20)]
    return {"outline": seen - began, "peak": peak, "used": used, "values": _texts(values)}


def openpyxl_stream(path: Path, top: int, store: str) -> Said:
    """The faster way to the block: read-only, once for formulas and once for values."""
    import openpyxl

    began = time.perf_counter()
    for data_only in (False, True):
        book = openpyxl.load_workbook(path, read_only=True, data_only=data_only)
        cells = [
            [(c.value, c.data_type, c.number_format) for c in row]
            for row in book["Data"].iter_rows(top, top + 49, 1, 20)
        ]
        book.close()
    values = _texts([value for value, _, _ in row] for row in cells)
    return {"block": time.perf_counter() - began, "values": values}


def calamine(path: Path, top: int, store: str) -> Said:
    """Values only: the file in one go, as it reads."""
    from python_calamine import CalamineWorkbook

    began = time.perf_counter()
    book = CalamineWorkbook.from_path(str(path))
    rows = book.get_sheet_by_name("Data").to_python()[top - 1 : top + 49]
    values = [[int(v) if isinstance(v, float) and v.is_integer() else v for v in r] for r in rows]
    return {"block": time.perf_counter() - began, "values": _texts(values)}


ROLES: dict[str, Callable[[Path, int, str], Said]] = {
    "ours": ours,
    "openpyxl": openpyxl_normal,
    "openpyxl-stream": openpyxl_stream,
    "calamine": calamine,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
