"""Files made to exhaust the reader: each is refused, or read at a cost that is bounded.

Every file is read in a child process with hard limits on memory and CPU time, so that a reader
that falls for one fails the test instead of the machine.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from envs.workbook import Limits, WorkbookError, read_workbook

ROOT = Path(__file__).parents[3]
CASES = ROOT.parent / "shared" / "cases"

READ = """
import json, sys
from envs.workbook import WorkbookError, read_workbook
for path in sys.argv[1:]:
    try:
        book = read_workbook(path)
        said = {"ok": [[s.name, str(s.used()), s.filled()] for s in book.sheets]}
    except WorkbookError as error:
        said = {"refused": str(error)}
    print(json.dumps(said), flush=True)
"""


def read_limited(*paths: Path, memory_mb: int = 1500, seconds: int = 20) -> list[dict]:
    """What the reader made of each file, under hard limits that its workers inherit."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))

    child = subprocess.run(
        [sys.executable, "-c", READ, *map(str, paths)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    results = [json.loads(line) for line in child.stdout.splitlines()]
    assert len(results) == len(paths)
    return results


def workbook(path: Path, sheet: bytes, head: bytes = b"", **parts: bytes) -> Path:
    """A minimal workbook with the given inside of <worksheet>; `parts` replace or add parts."""
    ns = b'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
    rel = b"http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    package = b"http://schemas.openxmlformats.org/package/2006/"
    office = b"application/vnd.openxmlformats-officedocument.spreadsheetml."
    content = {
        "[Content_Types].xml": b'<Types xmlns="' + package + b'content-types">'
        b'<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.'
        b'relationships+xml"/><Default Extension="xml" ContentType="application/xml"/>'
        b'<Override PartName="/xl/workbook.xml" ContentType="' + office + b'sheet.main+xml"/>'
        b'<Override PartName="/xl/worksheets/sheet1.xml" ContentType="' + office
        + b'worksheet+xml"/></Types>',
        "_rels/.rels": b'<Relationships xmlns="' + package + b'relationships"><Relationship '
        b'Id="rId1" Type="' + rel + b'/officeDocument" Target="xl/workbook.xml"/></Relationships>',
        "xl/workbook.xml": b"<workbook " + ns + b' xmlns:r="' + rel + b'"><sheets><sheet name="S" '
        b'sheetId="1" r:id="rId1"/></sheets></workbook>',
        "xl/_rels/workbook.xml.rels": b'<Relationships xmlns="' + package + b'relationships">'
        b'<Relationship Id="rId1" Type="' + rel + b'/worksheet" Target="worksheets/sheet1.xml"/>'
        b"</Relationships>",
        "xl/worksheets/sheet1.xml": head + b"<worksheet " + ns + b">" + sheet + b"</worksheet>",
    }  # fmt: skip
    content.update({name.replace("__", "/"): data for name, data in parts.items()})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return path


def cell(ref: str, value: int = 1) -> bytes:
    return f'<c r="{ref}"><v>{value}</v></c>'.encode()


def row(number: int, *cells: bytes) -> bytes:
    return f'<row r="{number}">'.encode() + b"".join(cells) + b"</row>"


def data(*rows: bytes) -> bytes:
    return b"<sheetData>" + b"".join(rows) + b"</sheetData>"


ONE = data(row(1, cell("A1", 7)))


def test_a_plain_one_is_read(tmp_path: Path) -> None:
    (said,) = read_limited(workbook(tmp_path / "plain.xlsx", ONE))
    assert said == {"ok": [["S", "A1", 1]]}


def test_values_in_the_far_corners(tmp_path: Path) -> None:
    far = data(row(1, cell("A1")), row(1048576, cell("XFD1048576")))
    (said,) = read_limited(workbook(tmp_path / "far.xlsx", far))
    assert said == {"ok": [["S", "A1:XFD1048576", 2]]}


def test_ranges_over_the_whole_sheet_make_no_cells(tmp_path: Path) -> None:
    everywhere = b"A1:XFD1048576"
    tail = (
        b'<mergeCells count="1"><mergeCell ref="' + everywhere + b'"/></mergeCells>'
        b'<conditionalFormatting sqref="' + everywhere + b'"><cfRule type="expression" '
        b'priority="1"><formula>1</formula></cfRule></conditionalFormatting>'
        b'<dataValidations count="1"><dataValidation type="whole" sqref="' + everywhere + b'">'
        b"<formula1>1</formula1></dataValidation></dataValidations>"
        b'<hyperlinks><hyperlink ref="' + everywhere + b'" location="S!A1"/></hyperlinks>'
    )
    (said,) = read_limited(workbook(tmp_path / "ranges.xlsx", ONE + tail), seconds=20)
    assert said == {"ok": [["S", "A1", 1]]}


def test_wide_rows_cost_only_what_they_hold(tmp_path: Path) -> None:
    wide = data(*(row(n, cell(f"XFD{n}")) for n in range(1, 20_000)))
    path = workbook(tmp_path / "wide.xlsx", wide)
    (said,) = read_limited(path)
    assert said == {"ok": [["S", "XFD1:XFD19999", 19_999]]}
    with pytest.raises(WorkbookError, match="span more cells than fit in memory; read ranges"):
        _ = read_workbook(path).sheets[0].rows


@pytest.mark.parametrize("ref", ["XFE1", "A1048577", "A99999999999", "ZZZZ1", "1A", "A0"])
def test_cells_outside_the_sheet(tmp_path: Path, ref: str) -> None:
    number = "".join(c for c in ref if c.isdigit())
    (said,) = read_limited(
        workbook(tmp_path / "outside.xlsx", data(row(int(number or 1), cell(ref)))), seconds=20
    )
    assert "refused" in said or all(used == "None" for _, used, _ in said["ok"]), said


@pytest.mark.parametrize(
    "part", ["xl__worksheets__sheet1.xml", "xl__workbook.xml", "xl___rels__workbook.xml.rels"]
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_entities_are_refused_wherever_they_stand(tmp_path: Path, part: str, encoding: str) -> None:
    entities = "".join(
        f'<!ENTITY e{n} "{f"&e{n - 1};" * 10 if n else "lol" * 10}">' for n in range(9)
    )
    bomb = f'<?xml version="1.0" encoding="{encoding}"?>\n<!-- x --><!DOCTYPE w [{entities}]>'
    bomb += '<worksheet xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main">'
    bomb += '<sheetData><row r="1"><c r="A1" t="str"><v>&e8;</v></c></row></sheetData></worksheet>'
    path = workbook(tmp_path / "bomb.xlsx", ONE, **{part: bomb.encode(encoding)})
    (said,) = read_limited(path, seconds=20)
    assert "DOCTYPE" in said["refused"]


def test_zip_bombs(tmp_path: Path) -> None:
    blanks = workbook(tmp_path / "blanks.xlsx", data(row(1, b" " * (30 << 20))))
    cells = workbook(tmp_path / "cells.xlsx", data(row(1, b"<c/>" * (4 << 20))))
    for said in read_limited(blanks, cells, memory_mb=400):
        assert "archive expands too much" in said["refused"], said


def test_the_unpacked_size_is_limited(tmp_path: Path) -> None:
    path = workbook(tmp_path / "large.xlsx", ONE, xl__media__a=os.urandom(3 << 20))
    with pytest.raises(WorkbookError, match="unpacks to 3 MiB; the limit is 2 MiB"):
        read_workbook(path, Limits(unpacked=2 << 20))
    assert read_workbook(path, Limits(unpacked=4 << 20)).sheets[0].rows == {1: (7,)}


def test_a_bomb_that_keeps_the_ratio_costs_bounded_memory_and_time(tmp_path: Path) -> None:
    """Random filler keeps the ratio low; a reader that makes objects of the row of empty cells
    would take gigabytes."""
    filler = {"xl__media__a": os.urandom(1 << 20)}
    cells = workbook(tmp_path / "tags.xlsx", data(row(1, b"<c/>" * (18 << 20))), **filler)
    heavy = b"<styleSheet>" + b"<xf/>" * 2_000_000 + b"</styleSheet>"
    styles = workbook(tmp_path / "styles.xlsx", ONE, **{"xl__styles.xml": heavy}, **filler)
    for said in read_limited(cells, styles):
        assert "refused" in said or said["ok"][0][1] in ("None", "A1")


def test_a_worker_that_takes_too_long_or_too_much_is_one_line(tmp_path: Path) -> None:
    rows = data(*(row(n, cell(f"B{n}"), cell(f"D{n}")) for n in range(1, 300_000)))
    path = workbook(tmp_path / "slow.xlsx", rows)
    with pytest.raises(WorkbookError, match="memory|MiB") as small:
        read_workbook(path, Limits(memory=64 << 20, ratio=10**6))
    with pytest.raises(WorkbookError, match="takes more than 1 s") as slow:
        book = read_workbook(path, Limits(seconds=1, ratio=10**6))
        for _ in range(20):
            book.sheets[0].filled()
    for caught in (small, slow):
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert read_workbook(workbook(tmp_path / "next.xlsx", ONE)).sheets[0].rows == {1: (7,)}


def test_a_long_text_that_many_cells_share_is_not_sent(tmp_path: Path) -> None:
    """A file of 100 kB whose cells would be gigabytes once each has its text."""
    ns = b'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
    rel = b"http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    cells = data(*(row(n, f'<c r="A{n}" t="s"><v>0</v></c>'.encode()) for n in range(1, 5000)))
    parts = {
        "xl__sharedStrings.xml": b"<sst %b><si><t>%b</t></si></sst>" % (ns, b"x" * (1 << 20)),
        "xl___rels__workbook.xml.rels": b'<Relationships xmlns="http://schemas.openxmlformats.org/'
        b'package/2006/relationships"><Relationship Id="rId1" Type="' + rel + b'/worksheet" '
        b'Target="worksheets/sheet1.xml"/><Relationship Id="rId2" Type="' + rel
        + b'/sharedStrings" Target="sharedStrings.xml"/></Relationships>',
    }  # fmt: skip
    path = workbook(tmp_path / "shared.xlsx", cells, **parts)
    (said,) = read_limited(path, memory_mb=400)
    assert "256 MiB of texts" in said["refused"]


def test_very_many_parts(tmp_path: Path) -> None:
    path = workbook(tmp_path / "parts.xlsx", ONE, **{f"xl__media__{n}": b"" for n in range(10_001)})
    (said,) = read_limited(path)
    assert "parts" in said["refused"]


def test_deep_nesting(tmp_path: Path) -> None:
    deep = b"<row>" * 100_000 + b"</row>" * 100_000
    (said,) = read_limited(workbook(tmp_path / "deep.xlsx", data(deep)))
    assert "refused" in said or said["ok"][0][1] == "None"


def test_a_lying_size_is_caught(tmp_path: Path) -> None:
    """The directory says that the sheet is small; no more than that is ever unpacked."""
    path = workbook(tmp_path / "lie.xlsx", data(row(1, b" " * (30 << 20))))
    raw = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        size = archive.getinfo("xl/worksheets/sheet1.xml").file_size.to_bytes(4, "little")
    assert raw.count(size) == 2
    path.write_bytes(raw.replace(size, (1000).to_bytes(4, "little")))
    (said,) = read_limited(path, memory_mb=400)
    assert "damaged" in said["refused"]


@pytest.mark.skipif(not CASES.is_dir(), reason="needs ../shared/cases beside the repository")
@pytest.mark.parametrize("folder", ["readers", "in_the_wild"])
def test_every_case_is_read_or_refused(folder: str) -> None:
    paths = sorted(p for p in (CASES / folder).iterdir() if p.is_file())
    assert len(paths) > 30
    results = read_limited(*paths, seconds=120)
    for path, result in zip(paths, results, strict=True):
        if "refused" in result:
            assert str(path) in result["refused"]
        else:
            assert result["ok"], path
    if folder == "readers":
        said = {path.name: result for path, result in zip(paths, results, strict=True)}
        assert "archive expands too much" in said["zip_bomb.xlsx"]["refused"]
        path = next(path for path in paths if path.name == "entity_bomb.xlsx")
        refused = said["entity_bomb.xlsx"]["refused"]
        assert refused.startswith(f"{path} holds a document type declaration (DOCTYPE)")
        assert "password" in said["encrypted.xlsx"]["refused"]
        assert said["far_corner.xlsx"]["ok"][0][1] == "A1:XFD1048576"
        assert said["dim_too_small.xlsx"]["ok"][0][1] == "A1:C4"
