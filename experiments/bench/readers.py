"""Whether every case and every file from the wild is read right, and at what cost.

    python -m experiments.bench.readers                   all of ../shared/cases
    python -m experiments.bench.readers --libreoffice no  without LibreOffice's conversions
    python -m experiments.bench.readers --table           also the table of docs/readers.md

Cases are checked against their `cases.json`, hand-made values or the words of a refusal.  Files
from the wild have no expected values: each is converted by LibreOffice to .xlsx, and what
openpyxl reads there is compared cell by cell with what our reader reads in the original.  Where
`soffice` isn't installed those files are named as unchecked.  Exit status 1 for anything wrong,
over 5 s or over 500 MB.
"""

from __future__ import annotations

import datetime as dt
import json
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from envs.workbook import Area, CellError, Limits, WorkbookError, column_letter, parse_area
from envs.workbook.container import Damaged, damaged
from envs.workbook.model import Cell
from envs.workbook.opened import OpenedSheet, OpenedWorkbook
from envs.workbook.reader import Rows, Worker, recalculated
from experiments.bench.report import report
from experiments.config import UsageError, option, parse, run_main

CASES = Path(__file__).parents[3] / "shared" / "cases"
SECONDS, MEGABYTES = 5.0, 500
EPOCHS = {False: dt.datetime(1899, 12, 30), True: dt.datetime(1904, 1, 1)}

# Where LibreOffice's conversion isn't what the file says: file -> where, and why.
DIFFER: dict[str, tuple[tuple[str, ...], str]] = {
    "48968.xls": (
        tuple(f"Sheet1!A{n}:" for n in (16, 24, 25, 26)),
        "it calculates dates of January 1900 anew, with another day 0",
    ),
    "64508.xlsx": (("sheets ",), "it renames the sheet"),
    "DataTableCities.xlsx": (("PivotTable!",), "it lays the pivot table out anew"),
    "excelant.xls": (("ErrorCell!A1:",), "it calculates a missing function anew, to #N/A"),
}


@dataclass(frozen=True)
class Config:
    """What to check."""

    cases: str = option(str(CASES), "folder with readers/ and in_the_wild/")
    libreoffice: Literal["auto", "no"] = option("auto", "compare with LibreOffice where it is")
    table: bool = option(False, "print the table of docs/readers.md")


@dataclass
class Result:
    """One file: what was found wrong, what it took, and what became of it."""

    file: str
    outcome: str = ""
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    megabytes: float = 0.0
    checked: str = "no"


def open_measured(path: Path) -> tuple[OpenedWorkbook | WorkbookError, float, float]:
    """The workbook or its refusal, seconds, and megabytes of the worker."""
    limits = Limits()
    began = time.perf_counter()
    worker = None
    try:
        with open(path, "rb") as file:
            worker = Worker(path, file, limits, None)
        said = worker.ask("open")
        try:
            feed = worker if said["rows"] is None else Rows(said["rows"])
            found: OpenedWorkbook | WorkbookError = OpenedWorkbook(said["outline"], feed, limits)
        except Damaged as error:
            found = damaged(path, error)
    except WorkbookError as error:
        found = error
    seconds = time.perf_counter() - began
    peak = worker.peak / 1e6 if worker else 0.0
    return found, seconds, peak


def at(book: OpenedWorkbook, sheet: str, ref: str) -> Cell:
    """The cell, on the only sheet where none is named."""
    found = book[sheet] if sheet else book.sheets[0]
    area = parse_area(ref)[1]
    assert isinstance(area, Area)
    return next(cells[0] for _, cells in found.cells(area))


def check(book: OpenedWorkbook, path: Path, asked: dict[str, Any]) -> str | None:
    """What is wrong with one check of a case, or None."""
    sheet = book[asked["sheet"]] if asked["sheet"] else book.sheets[0]
    assert isinstance(sheet, OpenedSheet)
    ref, wanted = asked["ref"], asked["value"]
    found: Any
    if ref.startswith("@"):
        if ref not in FACTS:
            return f"{ref} is no check that is known; known: {', '.join(FACTS)}"
        found = FACTS[ref](book, sheet)
        if isinstance(wanted, list) and isinstance(found, list):
            found, wanted = sorted(found), sorted(wanted)
        return None if found == wanted else f"{ref}: {found!r}, not {wanted!r}"
    if asked.get("recalculated"):
        area = parse_area(ref)[1]
        assert area is not None
        found = recalculated(path)[sheet.name].get((area.top, area.left))
        return None if same(found, wanted) else f"{ref} recalculated: {found!r}, not {wanted!r}"
    cell = at(book, asked["sheet"], ref)
    kind, value, wanted_kind = cell.kind, cell.value, asked.get("type")
    if isinstance(value, (dt.date, dt.time)):
        value = value.isoformat()
        if isinstance(wanted, str):
            value = value[: max(len(wanted), 8)] if kind == "time" else value[: len(wanted)]
    if wanted_kind in ("serial", "duration"):
        value = cell.raw
    elif wanted_kind == "datetime":
        wanted_kind = "date"
    elif kind == "error":
        value = str(value)
    if wanted_kind and kind != wanted_kind:
        return f"{ref}: {kind} {value!r}, not {wanted_kind} {wanted!r}"
    if not same(value, wanted):
        return f"{ref}: {value!r}, not {wanted!r}"
    for key, had in (("shown", cell.shown), ("formula", cell.formula)):
        if key in asked and asked[key] != had:
            return f"{ref}: {key} {had!r}, not {asked[key]!r}"
    return None


def same(found: Any, wanted: Any) -> bool:
    """Equal in value and kind; numbers to 12 digits."""
    if isinstance(found, bool) or isinstance(wanted, bool):
        return found is wanted
    if isinstance(found, (int, float)) and isinstance(wanted, (int, float)):
        return abs(found - wanted) <= 1e-12 * abs(wanted)
    return type(found) is type(wanted) and bool(found == wanted)


def _numbers(spans: tuple[tuple[int, int], ...]) -> list[int]:
    return [n for first, last in spans for n in range(first, last + 1)]


FACTS: dict[str, Callable[[OpenedWorkbook, OpenedSheet], Any]] = {
    "@used": lambda book, sheet: str(sheet.used()),
    "@merged": lambda book, sheet: list(sheet.marks.merged),
    "@hidden_rows": lambda book, sheet: _numbers(sheet.marks.hidden_rows),
    "@hidden_cols": lambda book, sheet: [
        column_letter(n) for n in _numbers(sheet.marks.hidden_columns)
    ],
    "@state": lambda book, sheet: sheet.marks.state,
    "@cells": lambda book, sheet: sheet.filled(),
    "@tab_color": lambda book, sheet: sheet.tab_color,
    "@tables": lambda book, sheet: [table.name for table in sheet.marks.tables],
    "@names": lambda book, sheet: [name.name for name in book.defined_names],
    "@sheets": lambda book, sheet: book.names(),
}


def run_case(folder: Path, case: dict[str, Any]) -> Result:
    path = folder / case["file"]
    result = Result(case["file"], checked="cases.json")
    found, result.seconds, result.megabytes = open_measured(path)
    if isinstance(found, WorkbookError):
        result.outcome = "refused: " + str(found).partition(f"{path} ")[2][:80]
        word = case.get("must_refuse")
        if word is None or word.lower() not in str(found).lower():
            result.wrong.append(f"refused: {found}")
        return result
    result.outcome = "read"
    if "must_refuse" in case:
        result.wrong.append(f"read, but has to be refused ({case['must_refuse']})")
    for asked in case.get("checks", []):
        wrong = check(found, path, asked)
        if wrong:
            result.wrong.append(wrong)
    found.close()
    return result


# Files from the wild, against LibreOffice.


def convert(paths: list[Path], folder: Path) -> dict[str, Path]:
    """Each file's conversion to .xlsx, where LibreOffice makes one."""
    made = {}
    profile = folder / "profile"
    for number, path in enumerate(paths):
        inside, out = folder / f"in{number}", folder / f"out{number}"
        inside.mkdir()
        copy = inside / f"book{path.suffix}"
        shutil.copy(path, copy)
        try:
            subprocess.run(
                ["soffice", f"-env:UserInstallation=file://{profile}", "--headless",
                 "--convert-to", "xlsx:Calc MS Excel 2007 XML", "--outdir", str(out), str(copy)],
                capture_output=True,
                timeout=120,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            continue
        if (out / "book.xlsx").exists():
            made[path.name] = out / "book.xlsx"
    return made


def as_serial(value: Any, epoch1904: bool) -> Any:
    """openpyxl's dates and times as the numbers that they are stored as."""
    if isinstance(value, dt.datetime):
        days = (value - EPOCHS[epoch1904]) / dt.timedelta(days=1)
        return days - (not epoch1904 and value < dt.datetime(1900, 3, 1))
    if isinstance(value, dt.time):
        return (value.hour * 3600 + value.minute * 60 + value.second) / 86400
    if isinstance(value, dt.timedelta):
        return value / dt.timedelta(days=1)
    return value


def alike(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, bool) or isinstance(theirs, bool):
        return ours == theirs
    if isinstance(ours, (int, float)) and isinstance(theirs, (int, float)):
        return abs(ours - theirs) <= max(1e-9 * abs(ours), 6e-6 if ours != int(ours) else 1e-9)
    if isinstance(ours, str) and isinstance(theirs, str):
        return ours.replace("\r\n", "\n") == theirs.replace("\r\n", "\n")
    return bool(ours == theirs) or (ours in (None, "") and theirs in (None, ""))


def compare(book: OpenedWorkbook, converted: Path) -> list[str]:
    """Cells that differ, and sheets that are missing or in another state."""
    import openpyxl

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = openpyxl.load_workbook(converted, data_only=True)
    wrong = []
    ours = [s for s in book.sheets if s.marks.kind == "worksheet"]
    # Chart and macro sheets become plain ones there.
    special = {s.name for s in book.sheets if s.marks.kind != "worksheet"}
    others = [s for s in theirs.worksheets if s.title not in special]
    if [s.name for s in ours] != [s.title for s in others]:
        wrong.append(f"sheets {[s.name for s in ours]}, LibreOffice {[s.title for s in others]}")
    epoch1904 = theirs.epoch.year == 1904
    for sheet in ours:
        if sheet.name not in theirs.sheetnames:
            continue
        other = theirs[sheet.name]
        hidden = sheet.marks.state != "visible"
        if hidden != (other.sheet_state != "visible"):
            wrong.append(f"{sheet.name} is {sheet.marks.state}, LibreOffice {other.sheet_state}")
        values: dict[tuple[int, int], Any] = {}
        for row in other.iter_rows():
            for cell in row:
                if cell.value is not None:
                    value = as_serial(cell.value, epoch1904)
                    if cell.data_type == "e":
                        value = CellError(value)
                    values[cell.row, cell.column] = value
        used = sheet.used()
        mine: dict[tuple[int, int], Any] = {}
        if used is not None:
            for r, cells in sheet.cells(used):
                for c, found in enumerate(cells, used.left):
                    if found.kind == "error":
                        mine[r, c] = found.value
                    elif found.raw is not None:
                        mine[r, c] = found.raw
        for place in sorted(set(values) | set(mine)):
            if not alike(mine.get(place), values.get(place)):
                ref = Area(place[0], place[1], place[0], place[1])
                wrong.append(
                    f"{sheet.name}!{ref}: {mine.get(place)!r}, LibreOffice {values.get(place)!r}"
                )
    return wrong


def run_wild(path: Path, converted: Path | None, with_office: bool) -> Result:
    result = Result(path.name)
    found, result.seconds, result.megabytes = open_measured(path)
    if isinstance(found, WorkbookError):
        result.outcome = "refused: " + str(found).partition(f"{path}")[2].strip(": ")[:90]
        if "\n" in str(found):
            result.wrong.append("an error of more than one line")
        if with_office:
            result.checked = "LibreOffice " + ("opens it" if converted else "refuses it too")
        return result
    result.outcome = "read"
    if converted is not None:
        result.checked = "LibreOffice"
        where, why = DIFFER.get(path.name, ((), ""))
        differences = compare(found, converted)
        result.wrong += [line for line in differences if not line.startswith(where)]
        if where and differences:
            result.checked = f"LibreOffice, but {why}"
    elif with_office:
        result.checked = "LibreOffice can't open it"
    found.close()
    return result


def main(config: Config) -> int:
    folder = Path(config.cases)
    if not (folder / "readers" / "cases.json").is_file():
        raise UsageError(f"no cases in {folder}; give their folder with --cases")
    cases = json.loads((folder / "readers" / "cases.json").read_text("utf-8"))
    wild = sorted(p for p in (folder / "in_the_wild").iterdir() if p.is_file())
    office = config.libreoffice == "auto" and shutil.which("soffice") is not None
    results = [run_case(folder / "readers", case) for case in cases]
    with tempfile.TemporaryDirectory() as made:
        converted = convert(wild, Path(made)) if office else {}
        others = [run_wild(path, converted.get(path.name), office) for path in wild]
    if not office:
        print(f"unchecked against LibreOffice: {', '.join(p.name for p in wild)}")
    for result in [*results, *others]:
        if result.seconds > SECONDS or result.megabytes > MEGABYTES:
            result.wrong.append(f"took {result.seconds:.1f} s and {result.megabytes:.0f} MB")
        for wrong in result.wrong[:5]:
            print(f"{result.file}: {wrong}")
    if config.table:
        print(table(results, others))
    bad = [r for r in [*results, *others] if r.wrong]
    everything = [*results, *others]
    report(
        "readers",
        "% of files right",
        [100 * (1 - len(bad) / len(everything))],
        cases=len(results),
        cases_wrong=sum(bool(r.wrong) for r in results),
        wild=len(others),
        wild_read=sum(r.outcome == "read" for r in others),
        wild_compared=sum(r.outcome == "read" and "LibreOffice" in r.checked for r in others),
        wild_wrong=sum(bool(r.wrong) for r in others),
        slowest_seconds=max(r.seconds for r in everything),
        largest_megabytes=max(r.megabytes for r in everything),
        libreoffice=office,
    )
    return int(bool(bad))


def table(cases: list[Result], wild: list[Result]) -> str:
    """Markdown: a line a file."""
    lines = ["| file | outcome | checked with | s | MB |", "|---|---|---|---|---|"]
    for r in [*cases, *wild]:
        outcome = "**wrong**" if r.wrong else r.outcome.replace("|", "\\|")
        lines.append(
            f"| {r.file} | {outcome} | {r.checked} | {r.seconds:.2f} | {r.megabytes:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(lambda argv: main(parse(Config, argv, description=__doc__)))
