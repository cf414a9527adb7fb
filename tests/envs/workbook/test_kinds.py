"""Other kinds of workbooks: ods by hand-made documents, xls and xlsb from the wild."""

from __future__ import annotations

import builtins
import datetime as dt
import zipfile
from pathlib import Path

import pytest

from envs.workbook import Area, CellError, Limits, WorkbookError, read_workbook
from envs.workbook.legacy import read_xls, read_xlsb
from envs.workbook.ods_formulas import display

CASES = Path(__file__).parents[4] / "shared" / "cases"
needs_cases = pytest.mark.skipif(
    not CASES.is_dir(), reason="needs ../shared/cases beside the repository"
)
SPACES = " ".join(
    f'xmlns:{p}="urn:oasis:names:tc:opendocument:xmlns:{n}:1.0"'
    for p, n in [("office", "office"), ("table", "table"), ("text", "text"), ("style", "style"),
                 ("number", "datastyle")]
) + ' xmlns:calcext="urn:org:documentfoundation:names:experimental:calc:xmlns:calcext:1.0"'
STYLES = """
<number:percentage-style style:name="N1"><number:number number:decimal-places="1"
 number:min-integer-digits="1"/><number:text>%</number:text></number:percentage-style>
<number:date-style style:name="N2"><number:year number:style="long"/><number:text>-</number:text>
<number:month number:style="long"/><number:text>-</number:text><number:day number:style="long"/>
</number:date-style>
<number:time-style style:name="N3" number:truncate-on-overflow="false"><number:hours/>
<number:text>:</number:text><number:minutes number:style="long"/></number:time-style>
<style:style style:name="c1" style:family="table-cell" style:data-style-name="N1"/>
<style:style style:name="c2" style:family="table-cell" style:data-style-name="N2"/>
<style:style style:name="c3" style:family="table-cell" style:data-style-name="N3"/>
<style:style style:name="t1" style:family="table"><style:table-properties table:display="false"
 table:tab-color="#ff8000"/></style:style>
"""


def ods(path: Path, tables: str, before: str = "", **parts: bytes) -> Path:
    content = (
        f"<office:document-content {SPACES}><office:automatic-styles>{STYLES}"
        f"</office:automatic-styles><office:body><office:spreadsheet>{before}{tables}"
        "</office:spreadsheet></office:body></office:document-content>"
    )
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mimetype", "application/vnd.oasis.opendocument.spreadsheet")
        archive.writestr("content.xml", content)
        for name, data in parts.items():
            archive.writestr(name.replace("__", "/"), data)
    return path


def value(kind: str, text: str, words: str = "", more: str = "") -> str:
    name = f"{kind}-value" if kind in ("date", "time", "boolean") else "value"
    return (
        f'<table:table-cell office:value-type="{kind}" office:{name}="{text}" {more}>'
        f"<text:p>{words}</text:p></table:table-cell>"
    )


def words(*paragraphs: str) -> str:
    inside = "".join(f"<text:p>{p}</text:p>" for p in paragraphs)
    return f'<table:table-cell office:value-type="string">{inside}</table:table-cell>'


def row(*cells: str, more: str = "") -> str:
    return f"<table:table-row {more}>{''.join(cells)}</table:table-row>"


def table(*rows: str, name: str = "S", more: str = "") -> str:
    return f'<table:table table:name="{name}" {more}>{"".join(rows)}</table:table>'


def test_ods_values(tmp_path: Path) -> None:
    error = (
        '<table:table-cell table:formula="of:=1/0" office:value-type="string" '
        'office:string-value="" calcext:value-type="error"><text:p>#DIV/0!</text:p>'
        "</table:table-cell>"
    )
    first = row(
        value("float", "5"), value("float", "2.5"), words("a", "b <text:s text:c='2'/>c"),
        value("percentage", "0.125", "12.5%", 'table:style-name="c1"'),
        value("date", "2024-02-29", "", 'table:style-name="c2"'), value("boolean", "true"),
        value("time", "PT42H00M00S", "", 'table:style-name="c3"'), error,
        value("date", "2024-02-29T13:45:30"), value("time", "PT13H45M30S"),
    )  # fmt: skip
    book = read_workbook(ods(tmp_path / "book.ods", table(first)))
    assert book.sheets[0].rows == {
        1: (5, 2.5, "a\nb   c", 0.125, dt.date(2024, 2, 29), True, dt.timedelta(hours=42),
            CellError("#DIV/0!"), dt.datetime(2024, 2, 29, 13, 45, 30), dt.time(13, 45, 30))
    }  # fmt: skip
    (_, cells), = book.sheets[0].cells(Area(1, 1, 1, 10))
    assert [c.kind for c in cells] == [
        "number", "number", "text", "number", "date", "boolean", "duration", "error", "date",
        "time",
    ]  # fmt: skip
    assert [cells[3].shown, cells[4].shown, cells[6].shown] == ["12.5%", "2024-02-29", "42:00"]
    assert (cells[7].formula, cells[7].stored) == ("=1/0", True)


def test_ods_repeats_spans_and_what_is_hidden(tmp_path: Path) -> None:
    columns = (
        '<table:table-column/><table:table-column table:visibility="collapse" '
        'table:number-columns-repeated="2"/>'
    )
    spanned = (
        '<table:table-cell table:number-columns-spanned="2" table:number-rows-spanned="2" '
        'office:value-type="float" office:value="1"><text:p>1</text:p></table:table-cell>'
    )
    rows = [
        row('<table:table-cell table:number-columns-repeated="2"/>', spanned),
        row('<table:table-cell table:number-columns-repeated="3" office:value-type="float" '
            'office:value="7"><text:p>7</text:p></table:table-cell>',
            more='table:number-rows-repeated="2" table:visibility="filter"'),
        row('<table:table-cell table:number-columns-repeated="16384"/>',
            more='table:number-rows-repeated="1048573"'),
    ]  # fmt: skip
    other = table(row(words("x")), name="H", more='table:style-name="t1"')
    book = read_workbook(ods(tmp_path / "book.ods", table(columns, *rows) + other))
    sheet, hidden = book.sheets
    assert sheet.rows == {1: (None, None, 1), 2: (7, 7, 7), 3: (7, 7, 7)}
    assert str(sheet.used()) == "A1:C3"
    assert sheet.marks.merged == ("C1:D2",)
    assert sheet.marks.hidden_rows == ((2, 3),) and sheet.marks.hidden_columns == ((2, 3),)
    assert (hidden.marks.state, hidden.tab_color) == ("hidden", "FF8000")


def test_ods_names_and_what_is_passed_over(tmp_path: Path) -> None:
    annotated = (
        '<table:table-cell office:value-type="string"><office:annotation><text:p>no</text:p>'
        "</office:annotation><text:p>yes</text:p></table:table-cell>"
    )
    names = (
        '<table:named-expressions><table:named-range table:name="Good" '
        'table:cell-range-address="$S.$A$1:.$B$2"/></table:named-expressions>'
        '<table:database-ranges><table:database-range table:name="Sales" '
        'table:target-range-address="S.A1:S.B2"/></table:database-ranges>'
    )
    tracked = f"<table:tracked-changes>{table(row(words('old')), name='T')}</table:tracked-changes>"
    path = ods(tmp_path / "book.ods", table(row(annotated)) + names, before=tracked)
    book = read_workbook(path)
    assert book.names() == ["S"] and book.sheets[0].rows == {1: ("yes",)}
    assert [(n.name, n.refers_to, n.broken) for n in book.defined_names] == [
        ("Good", "S!$A$1:$B$2", False)
    ]
    assert [(t.name, t.ref) for t in book.sheets[0].marks.tables] == [("Sales", "A1:B2")]


def test_ods_formulas_without_results(tmp_path: Path) -> None:
    cells = row(value("float", "2"), '<table:table-cell table:formula="of:=[.A1]*2"/>')
    path = ods(tmp_path / "book.ods", table(cells))
    sheet = read_workbook(path, calculate=False).sheets[0]
    assert sheet.uncalculated == 1 and str(sheet.used()) == "A1:B1"
    assert sheet.remarks(Area(1, 1, 1, 2)) == {(1, 2): "=A1*2 not calculated"}


@pytest.mark.parametrize(
    ("stored", "shown"),
    [
        ("of:=SUM([.A1:.A3];2)", "=SUM(A1:A3,2)"),
        ("of:=[$Sheet2.A1]+[$'My ''sheet'.$B$2:.C3]", "=Sheet2!A1+'My ''sheet'!$B$2:C3"),
        ('of:="a;b"&[.A1]', '="a;b"&A1'),
    ],
)
def test_ods_formula_texts(stored: str, shown: str) -> None:
    assert display(stored) == shown


def test_hostile_ods(tmp_path: Path) -> None:
    many = row(words("x"), more='table:number-rows-repeated="1048576"')
    wide = row('<table:table-cell table:number-columns-repeated="16384" office:value-type="float" '
               'office:value="1"/>', more='table:number-rows-repeated="1048576"')  # fmt: skip
    with pytest.raises(WorkbookError, match="filled cells; the limit is"):
        read_workbook(ods(tmp_path / "wide.ods", table(wide)))
    with pytest.raises(WorkbookError, match="filled cells; the limit is"):
        read_workbook(ods(tmp_path / "many.ods", table(many)), Limits(cells=10_000))
    manifest = {"META-INF__manifest.xml": b"<m:encryption-data/>"}
    locked = ods(tmp_path / "locked.ods", table(), **manifest)
    with pytest.raises(WorkbookError, match="password-protected"):
        read_workbook(locked)
    bomb = ods(tmp_path / "bomb.ods", table(row(words("&a;"))))
    with zipfile.ZipFile(bomb) as archive:
        content = archive.read("content.xml")
    with zipfile.ZipFile(bomb, "w") as archive:
        archive.writestr("mimetype", "application/vnd.oasis.opendocument.spreadsheet")
        archive.writestr("content.xml", b'<!DOCTYPE x [<!ENTITY a "b">]>' + content)
    with pytest.raises(WorkbookError, match="document type declaration"):
        read_workbook(bomb)


@needs_cases
def test_xls_values_states_and_colours() -> None:
    wild = CASES / "in_the_wild"
    book = read_workbook(wild / "54206.xls")
    assert (book.sheets[0].tab_color, str(book.sheets[0].used())) == ("99CC00", "A1:J82")
    assert read_workbook(wild / "52575_main.xls").sheets[0].rows == {
        1: (10,), 2: ("POI rocks!",), 3: (True,),
    }  # fmt: skip
    merged = read_workbook(wild / "NoGutsRecords.xls").sheets[0]
    assert merged.marks.merged[:3] == ("B1:L1", "B2:L2", "C3:F3")
    assert merged.rows[3][2] == dt.date(2007, 8, 8)


@needs_cases
def test_xlsb_values() -> None:
    book = read_workbook(CASES / "in_the_wild" / "51519.xlsb")
    assert book.names() == ["Sheet1", "Sheet2", "Sheet3"]
    assert str(book.sheets[0].used()) == "A1:D18"


@needs_cases
@pytest.mark.parametrize(
    ("file", "module", "read"),
    [("Simple.xls", "xlrd", read_xls), ("51519.xlsb", "python_calamine", read_xlsb)],
)
def test_a_reader_that_is_not_installed_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, file: str, module: str, read
) -> None:
    real = builtins.__import__

    def fail(name: str, *args, **kwargs):
        if name == module:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fail)
    with open(CASES / "in_the_wild" / file, "rb") as source:
        with pytest.raises(WorkbookError, match=r"pip install 'fastask-jax\[workbooks\]'"):
            read(source, Limits())
