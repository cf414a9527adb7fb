"""Rows found without a parser are those that a parser finds, whatever way the XML is written."""

from __future__ import annotations

import random
import zipfile
from pathlib import Path
from xml.sax.saxutils import escape

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.workbook.a1 import column_letter
from envs.workbook.cells import Context, parse_row, plain_row
from envs.workbook.container import Archive, Damaged, Limits, WorkbookError
from envs.workbook.package import Strings
from envs.workbook.sheetxml import SheetXml
from envs.workbook.xlsx import XlsxSource

CASES = Path(__file__).parents[4] / "shared" / "cases"
NS = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"


def facts(document: bytes, chunk: int, whole: bool) -> tuple:
    def chunks():
        yield from (document[i : i + chunk] for i in range(0, len(document), chunk))

    sheet = SheetXml(chunks, Context(lambda: None, False), whole)
    return (
        str(sheet.used), sheet.rows(1, 1 << 20), sheet.hidden_rows, sheet.count_formulas(),
        sheet.merged, sheet.hidden_columns, sheet.declared,
    )  # fmt: skip


def found(document: bytes, chunk: int = 1 << 20) -> tuple:
    """Facts of a document by both ways: parsed whole, and found row by row."""
    whole = facts(document, chunk, True)
    assert facts(document, chunk, False) == whole
    return whole


BODY = (
    '<cols><col min="2" max="3" hidden="1"/></cols><sheetData>'
    '<row r="2"><c r="C2" t="str"><v>a &amp; b</v></c><c r="D2" s="1"/></row>'
    '<row r="3" hidden="1"><c r="B3"><f>1+1</f></c><c r="E3"><f>2</f><v>2</v></c></row>'
    '<row r="4"/><row r="7" ht="3"><c r="C7" t="inlineStr"><is><t>x</t></is></c></row>'
    "</sheetData><mergeCells><mergeCell ref=\"A1:B2\"/></mergeCells>"
    '<rowBreaks count="1"><brk id="3"/></rowBreaks>'
)
PLAIN = f'<worksheet xmlns="{NS}"><dimension ref="A1"/>{BODY}</worksheet>'
WANTED = (
    "B2:E7",
    [
        [2, [[3, ["a & b"], [0]]], []],
        [3, [[2, [None, None, None, 2], [0, 0, 0, 0]]],
         [[2, "=1+1", None, False], [5, "=2", None, True]]],
        [7, [[3, ["x"], [0]]], []],
    ],
    [3], 1, ["A1:B2"], [(2, 3)], "A1",
)  # fmt: skip
PREFIXED = PLAIN.replace("<", "<x:").replace("<x:/", "</x:").replace("xmlns=", "xmlns:x=")
FORMS = {
    "plain": PLAIN.encode(),
    "declared": b'<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\r\n' + PLAIN.encode(),
    "utf-16": ('<?xml version="1.0" encoding="UTF-16"?>' + PLAIN).encode("utf-16"),
    "mark": b"\xef\xbb\xbf" + PLAIN.encode(),
    "latin-1": ('<?xml version="1.0" encoding="ISO-8859-1"?>' + PLAIN).encode("latin-1"),
    "prefixed": PREFIXED.encode(),
    "comment": PLAIN.replace("<sheetData>", "<sheetData><!-- <row r='9'/></row> -->").encode(),
    "cdata": PLAIN.replace("a &amp; b", "<![CDATA[a & b]]>").encode(),
    "quotes": PLAIN.replace('<row r="2">', "<row r='2'>").replace('r="C2"', "r='C2'").encode(),
    "blanks": PLAIN.replace("</row>", "</row\n>").replace("<c ", "<c\n ").encode(),
    "spread": PLAIN.replace("><", ">\n  <").encode(),
    "order": PLAIN.replace('<row r="7" ht="3">', '<row ht="3" r="7">').encode(),
    "spans": PLAIN.replace('<row r="2">', '<row r="2" spans="1:9" x14ac:dyDescent="0.25" '
                           'xmlns:x14ac="urn:x">').encode(),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk", [1 << 20, 37, 5])
def test_all_ways_of_writing_a_sheet_are_one(form: str, chunk: int) -> None:
    assert found(FORMS[form], chunk) == WANTED


def test_empty_sheets() -> None:
    for rows in ("", " ", "<row r='1'/>", "\n<row r='2'></row>"):
        inside = f"<sheetData>{rows}</sheetData>" if rows else "<sheetData/>"
        document = f'<worksheet xmlns="{NS}">{inside}</worksheet>'.encode()
        assert found(document)[:2] == ("None", [])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_random_sheets_both_ways(seed: int) -> None:
    """Blanks with styles, gaps, formulas without results, rows of nothing."""
    draw = random.Random(seed)
    rows = []
    for r in sorted(draw.sample(range(1, 60), draw.randrange(0, 12))):
        cells = []
        for c in sorted(draw.sample(range(1, 30), draw.randrange(0, 6))):
            ref = column_letter(c) + str(r)
            inside = draw.choice(
                ["", "<v/>", "<v></v>", "<v>1</v>", "<f>A1</f>", "<f>A1</f><v>2.5</v>",
                 "<f>A1</f><v></v>", "<is><t>t</t></is>"]
            )  # fmt: skip
            kind = ' t="inlineStr"' if "<is>" in inside else ""
            cells.append(f'<c r="{ref}" s="1"{kind}>{inside}</c>' if inside else f'<c r="{ref}"/>')
        rows.append(f'<row r="{r}">{"".join(cells)}</row>')
    document = f'<worksheet xmlns="{NS}"><sheetData>{"".join(rows)}</sheetData></worksheet>'
    assert found(document.encode(), 97)[2] == []


@pytest.mark.skipif(not CASES.is_dir(), reason="needs ../shared/cases beside the repository")
def test_real_files_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0
    for path in sorted([*(CASES / "readers").iterdir(), *(CASES / "in_the_wild").iterdir()]):
        if path.suffix not in (".xlsx", ".xlsm") or not zipfile.is_zipfile(path):
            continue
        sources = []
        for whole in (1 << 30, 0):
            monkeypatch.setattr("envs.workbook.xlsx.WHOLE", whole)
            try:
                with open(path, "rb") as file:
                    source = XlsxSource(file, Limits())
                    outline = source.outline
                    for i, sheet in enumerate(outline["sheets"]):
                        sheet["uncalculated"] = source.uncalculated(i)
                    rows = [source.rows(i, 1, 1 << 20) for i in range(len(outline["sheets"]))]
                    sources.append((outline, rows))
            except Exception as error:  # a refusal is compared too
                sources.append((type(error).__name__, []))
        assert sources[0] == sources[1], path.name
        compared += 1
    assert compared > 40


def test_shared_strings_lazy_and_parsed_agree() -> None:
    texts = ["plain", " kept ", "a & b <c>", "line\nbreak", "_x0041_", "ünï", "", "x" * 999]
    entries = [f'<si><t xml:space="preserve">{escape(t)}</t></si>' for t in texts]
    entries += ["<si><r><t>two </t></r><r><t>runs</t></r><rPh><t>no</t></rPh></si>"]
    wanted = [t.replace("_x0041_", "A") for t in texts] + ["two runs"]
    for extra in ("", "<!-- not plain -->", "<si/>", "<si >\n</si>"):
        found = Strings(f'<sst xmlns="{NS}">{"".join(entries)}{extra}</sst>'.encode())
        assert [found[i] for i in range(len(wanted))] == wanted
        for bad in (-1, len(found)):
            with pytest.raises(Damaged, match=f"no shared string {bad}"):
                found[bad]
    with pytest.raises(Damaged, match="cut off"):
        Strings(f'<sst xmlns="{NS}">{"".join(entries)}'.encode())


@pytest.mark.skipif(not CASES.is_dir(), reason="needs ../shared/cases beside the repository")
def test_plain_rows_are_those_of_the_parser() -> None:
    """Every row of every real file that takes the short way."""
    short = 0
    for path in sorted([*(CASES / "readers").iterdir(), *(CASES / "in_the_wild").iterdir()]):
        if path.suffix not in (".xlsx", ".xlsm") or not zipfile.is_zipfile(path):
            continue
        with open(path, "rb") as file:
            try:
                archive = Archive(file, Limits(ratio=10**6))
                strings = Strings(archive.read("xl/sharedStrings.xml"))
            except Damaged:
                strings = None
            except (WorkbookError, zipfile.BadZipFile):
                continue
            context = Context(lambda s=strings: s, False)
            for part in archive.names():
                if not part.startswith("xl/worksheets/sheet"):
                    continue
                try:
                    data = archive.read(part)
                except Damaged:  # a fuzzed file
                    continue
                for piece in data.split(b"</row>"):
                    piece = piece[max(piece.rfind(b"<row r="), 0) :]
                    number = piece[8:].partition(b'"')[0]
                    if not number.isdigit():
                        continue
                    row = plain_row(int(number), piece, context)
                    if row is not None:
                        assert row == parse_row(int(number), piece, context), (path, piece)
                        short += 1
    assert short > 200


cell_texts = st.sampled_from(
    ["5", "-5", "0.5", "1E3", "1e-05", "1_0", " 5", "+5", "1.", ".5", "1e999", "NaN", "", "007",
     "12345678901234567890", "a", "a&amp;b", "_x0041_", "x\ty"]
)  # fmt: skip
kinds = st.sampled_from(["", ' t="n"', ' t="str"', ' t="b"', ' t="e"', ' t="s"', ' t="inlineStr"'])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(kinds, cell_texts, st.booleans()), min_size=1, max_size=4))
def test_random_cells_both_ways(entries: list[tuple[str, str, bool]]) -> None:
    context = Context(lambda: Strings(b"<sst><si><t>one</t></si><si><t>two</t></si></sst>"), False)
    cells = []
    for column, (kind, text, inline) in enumerate(entries, 2):
        inside = f"<is><t>{text}</t></is>" if inline else f"<v>{text}</v>"
        style = ' s="3"' if column % 2 else ""
        cells.append(f'<c r="{column_letter(column)}7"{style}{kind}>{inside}</c>')
    piece = f'<row r="7">{"".join(cells)}'.encode()
    row = plain_row(7, piece, context)
    if row is not None:
        assert repr(row) == repr(parse_row(7, piece, context))
