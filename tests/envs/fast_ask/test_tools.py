"""The three tools over one workbook: what they print, what they refuse, what they bind."""

from __future__ import annotations

import datetime as dt
import zipfile
from pathlib import Path

import openpyxl
import pytest

from envs.core import ToolCall
from envs.fast_ask.tools import MAX_CELL_TEXT, MAX_CELLS, TOOLS, Toolbox, show_value
from envs.sandbox.prelude import Bindings
from envs.workbook import (
    CellError,
    DefinedName,
    Marks,
    Sheet,
    Table,
    Workbook,
    read_workbook,
    write_xlsx,
)


def book() -> Workbook:
    orders = {1: ("order", "region", "cents")}
    orders.update({r: (f"O{r}", "West", 100 * r) for r in range(2, 602)})
    return Workbook(
        [
            Sheet("Orders", orders, "FACADE"),
            Sheet("Cap Table", {4: (None, "holder", "shares"), 5: (None, "Seed", 7)}),
            Sheet("It's 2024!", {1: ("note", dt.date(2024, 2, 29))}, "DECADE"),
            Sheet("Empty"),
        ]
    )


class Box(Toolbox):
    """A toolbox that keeps what it bound and what code it was asked to run."""

    def __init__(self, wb: Workbook | None = None) -> None:
        self.bound: list[tuple[str, int, int, list[list]]] = []
        self.code: list[str] = []
        super().__init__(wb or book(), self._run, lambda *block: self.bound.append(block))

    def _run(self, code: str) -> str:
        self.code.append(code)
        return "ran"

    def ask(self, name: str, **arguments: object) -> str:
        return self.call(ToolCall(name, dict(arguments)))

    def ranges(self, *ranges: str, **more: object) -> str:
        return self.ask("read_ranges", ranges=list(ranges), **more)


@pytest.fixture
def box() -> Box:
    return Box()


def test_metadata_lists_names_used_ranges_and_tab_colours(box: Box) -> None:
    assert box.ask("get_workbook_metadata") == (
        "Orders!A1:C601 #FACADE\n'Cap Table'!B4:C5\n'It''s 2024!'!A1:B1 #DECADE\nEmpty empty"
    )
    assert box.malformed == box.cells_read == 0


def test_metadata_tells_of_formulas_without_results() -> None:
    sheets = [Sheet("A", {1: (1,)}, "FACADE", uncalculated=1), Sheet("B", uncalculated=2)]
    assert Box(Workbook(sheets)).metadata() == (
        "A!A1 #FACADE (1 formula without results read as empty)\n"
        "B empty (2 formulas without results read as empty)"
    )


def test_what_metadata_prints_can_be_read(box: Box) -> None:
    for line in box.metadata().splitlines()[1:3]:
        assert not box.ranges(line.split(" #")[0]).startswith("error")


def test_a_range_prints_and_binds_its_cells(box: Box) -> None:
    assert box.ranges("Orders!A1:C3") == (
        "Orders!A1:C3 3 rows\n1: order,region,cents\n2: O2,West,200\n3: O3,West,300"
    )
    assert box.bound == [
        ("Orders", 1, 1, [["order", "region", "cents"], ["O2", "West", 200], ["O3", "West", 300]])
    ]
    assert box.cells_read == 9 and box.ranges_read == ["Orders!A1:C3"]


def test_several_ranges_over_several_sheets(box: Box) -> None:
    text = box.ranges("Orders!C601", "'Cap Table'!B4:C5", "'it''s 2024!'!b1", "Orders!A9:A9")
    assert text == (
        "Orders!C601 1 rows\n601: 60100\n'Cap Table'!B4:C5 2 rows\n4: holder,shares\n5: Seed,7\n"
        "'It''s 2024!'!B1 1 rows\n1: 2024-02-29\nOrders!A9 1 rows\n9: O9"
    )
    assert [b[0] for b in box.bound] == ["Orders", "Cap Table", "It's 2024!", "Orders"]
    assert box.cells_read == 7


@pytest.mark.parametrize(
    ("asked", "read"),
    [
        ("Orders!A:A", "Orders!A1:A601"),
        ("orders!$a:$a", "Orders!A1:A601"),
        ("Orders!C:Z", "Orders!C1:C601"),
        ("Orders!600:999", "Orders!A600:C601"),
        ("Orders!3:3", "Orders!A3:C3"),
        ("Cap Table!A:C", "'Cap Table'!B4:C5"),
        ("'Cap Table'", "'Cap Table'!B4:C5"),
        ("Cap Table!", "'Cap Table'!B4:C5"),
        ("Orders!$b$2:$c$3", "Orders!B2:C3"),
        ("Orders!C3:B2", "Orders!B2:C3"),
    ],
)
def test_open_ranges_are_clipped_to_the_used_range(box: Box, asked: str, read: str) -> None:
    text = box.ranges(asked, show=0)
    assert text.splitlines()[0].startswith(f"{read} ") and box.ranges_read == [read]


def test_nothing_there(box: Box) -> None:
    assert box.ranges("Empty!A:C", "Orders!X:Z") == "Empty: nothing there\nOrders: nothing there"
    assert box.cells_read == 0 and box.bound == [] and box.ranges_read == []
    # outside the used range, but asked for by name: blank cells
    assert box.ranges("Empty!A1:B2") == "Empty!A1:B2 2 rows\n1: ,\n2: ,"
    assert box.cells_read == 4


def test_the_cap_counts_all_ranges_of_a_call_and_reads_nothing_above_it(box: Box) -> None:
    assert box.ranges("Orders!A1:A600", "Orders!B1:B401") == (
        "error: 1,001 cells requested, at most 1,000 in one call; nothing was read. Ask for "
        "fewer rows or columns."
    )
    assert "1,803 cells requested" in box.ranges("Orders")
    assert "17,179,869,184 cells requested" in box.ranges("Empty!A1:XFD1048576")
    assert box.bound == [] and box.cells_read == 0 and box.malformed == 0
    assert box.ranges("Orders!A1:A600", "Orders!B1:B400", show=0).count("rows") == 2
    assert box.cells_read == MAX_CELLS == 1000


def test_one_bad_range_refuses_the_whole_call(box: Box) -> None:
    assert box.ranges("Orders!A1", "Nope!A1").startswith("error: no sheet named 'Nope'; sheets: ")
    assert box.ranges("Orders!A1", "Orders!foo").startswith("error: ")
    assert box.bound == [] and box.cells_read == 0 and box.malformed == 2


def test_show_limits_what_is_printed_and_not_what_is_bound(box: Box) -> None:
    assert box.ranges("Orders!A1:A5", show=2) == "Orders!A1:A5 5 rows\n1: order\n2: O2"
    assert box.ranges("Orders!A1:A5", show=0) == "Orders!A1:A5 5 rows"
    assert box.ranges("Orders!A1:A5", show=-3) == "Orders!A1:A5 5 rows"
    assert box.ranges("Orders!A1:A5", show=99).count("\n") == 5
    assert box.ranges("Orders!A1:A5", show=None).count("\n") == 5
    assert [len(b[3]) for b in box.bound] == [5] * 5


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"ranges": None},
        {"ranges": 5},
        {"ranges": {}},
        {"ranges": [5]},
        {"ranges": ["Orders!A1", None]},
        {"ranges": []},
        {"ranges": [""]},
        {"ranges": ["Orders!A1"], "show": "2"},
        {"ranges": ["Orders!A1"], "show": 1.5},
        {"ranges": ["Orders!A1"], "show": True},
        {"ranges": ["Orders!A1"] * 51},
        {"ranges": ["A1:B2"]},
        {"ranges": ["Orders!" + "A" * 100_000]},
    ],
)
def test_wrong_arguments_are_told_in_one_line(box: Box, arguments: dict) -> None:
    text = box.call(ToolCall("read_ranges", arguments))
    assert text.startswith("error: ") and "\n" not in text and len(text) < 400
    assert box.malformed == 1 and box.bound == []


def test_one_range_as_plain_text_is_forgiven(box: Box) -> None:
    assert box.ask("read_ranges", ranges="Orders!A2") == "Orders!A2 1 rows\n2: O2"


def test_a_range_without_sheet_needs_a_single_sheet(box: Box) -> None:
    assert "names no sheet; write Sheet!B2" in box.ranges("B2")
    assert Box(Workbook([Sheet("Only", {2: (None, 5)})])).ranges("B2") == "Only!B2 1 rows\n2: 5"
    assert Box(Workbook([])).ranges("B2").startswith("error: ")


def test_python_gets_its_code(box: Box) -> None:
    assert box.ask("run_python", code="print(1)") == "ran" and box.code == ["print(1)"]
    assert box.ask("run_python") == 'error: run_python takes "code": a text'
    assert box.ask("run_python", code=["print(1)"]).startswith("error: ")
    assert box.code == ["print(1)"] and box.malformed == 2


def test_unknown_tools_and_unparsed_calls(box: Box) -> None:
    assert box.ask("read_cells") == (
        "error: no tool named 'read_cells'; tools: get_workbook_metadata, read_ranges, run_python"
    )
    assert box.call(ToolCall("read_ranges", {}, error="no closing tag")) == "error: no closing tag"
    assert box.malformed == 2


def test_extra_arguments_are_let_pass(box: Box) -> None:
    assert box.ask("get_workbook_metadata", verbose=True).startswith("Orders!")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (True, "TRUE"),
        (False, "FALSE"),
        (5, "5"),
        (1.0, "1"),
        (0.1 + 0.2, "0.3"),
        (1e21, "1e+21"),
        ("text", "text"),
        ("a,b", '"a,b"'),
        ('say "hi"', '"say ""hi"""'),
        ("two\nlines", '"two\nlines"'),
        (dt.date(2024, 2, 29), "2024-02-29"),
        (dt.datetime(2024, 2, 29, 7, 30), "2024-02-29 07:30:00"),
        (dt.time(7, 30), "07:30:00"),
        (CellError("#N/A"), "#N/A"),
    ],
)
def test_how_cells_are_shown(value: object, text: str) -> None:
    assert show_value(value) == text


def test_long_texts_are_cut_where_they_are_shown_only() -> None:
    box = Box(Workbook([Sheet("S", {1: ("x" * 30_000,)})]))
    text = box.ranges("S!A1")
    assert len(text) < MAX_CELL_TEXT + 60 and "… (30,000 characters)" in text
    assert box.bound[0][3] == [["x" * 30_000]]


def test_reads_in_pieces_are_the_same_records_as_one_read() -> None:
    """What programs see does not depend on how the columns and rows were fetched."""
    pieces, whole = Bindings(), Bindings()
    wb = book()
    box = Toolbox(wb, lambda code: "", pieces.bind)
    for ranges in (["Orders!C1:C300", "Orders!A250:A601"], ["Orders!B:B"],
                   ["Orders!A1:A260", "Orders!C301:C601"]):  # fmt: skip
        assert not box.read(ranges, 0).startswith("error")
    one = Toolbox(wb, lambda code: "", whole.bind)
    for first in (1, 301):
        one.read([f"Orders!A{first}:C{min(first + 299, 601)}"], 0)
    one.read(["Orders!A601:C601"], 0)
    ours, theirs = pieces.namespace["Orders"], whole.namespace["Orders"]
    assert [(r._row, dict(r)) for r in ours] == [(r._row, dict(r)) for r in theirs]
    assert len(ours) == 600 and ours[7].cents == 900


def test_specs_are_json_schemas_of_what_is_accepted() -> None:
    assert [t.name for t in TOOLS] == ["get_workbook_metadata", "read_ranges", "run_python"]
    for tool in TOOLS:
        assert tool.parameters["type"] == "object" and tool.description.endswith(".")
        assert set(tool.parameters["required"]) <= set(tool.parameters["properties"])
    assert "1000" in TOOLS[1].description


def test_texts_that_look_like_other_values_are_quoted() -> None:
    looks = ["00501", "12.50", "-3", "1e5", "TRUE", "#N/A", "#DIV/0!"]
    assert [show_value(text) for text in looks] == [f'"{text}"' for text in looks]
    plain = ["SO-1", "2024-01", "12 apples", "True", "#1", "", "+", "1.2.3"]
    assert [show_value(text) for text in plain] == plain
    assert show_value(CellError("#N/A")) == "#N/A" and show_value(501) == "501"


def test_metadata_tells_what_values_hide() -> None:
    marks = Marks(
        state="veryHidden",
        declared="A1:XFD1048576",
        hidden_rows=((3, 3), (5, 9)),
        hidden_columns=((2, 3),),
        merged=("A1:A2", "B1:C1"),
        tables=(Table("Sales", "A1:C9", ("a", "b", "c"), True, False),),
    )
    names = (
        DefinedName("Rate", "0.2", None, False, False),
        DefinedName("Dead", "#REF!", None, True, False),
        DefinedName("_xlnm.Print_Area", "S!$A$1", "S", False, False),
        DefinedName("secret", "1", None, False, True),
    )
    lost = Sheet("Lost", marks=Marks(damage="the part is missing"))
    chart = Sheet("Chart", marks=Marks(kind="chart", state="hidden"))
    wb = Workbook([Sheet("S", {1: (1,)}, marks=marks), lost, chart], names)
    assert Box(wb).metadata() == (
        "S!A1 (very hidden; hidden rows 3, 5:9; hidden columns B:C; merged A1:A2, B1:C1; "
        "the file claims A1:XFD1048576)\n"
        "table Sales at S!A1:C9\n"
        "Lost empty (can't be read: the part is missing)\n"
        "Chart empty (chart sheet; hidden)\n"
        "name Rate = 0.2\n"
        "name Dead = broken"
    )


def test_reading_marks_hidden_rows_percents_and_missing_results(tmp_path: Path) -> None:
    made = openpyxl.Workbook()
    made.active.append([0.125, 5, "x"])
    made.active.append(["=[1]Other!A1", -1, None])
    made.active["A1"].number_format = "0.0%"
    made.active["B2"].number_format = "yyyy-mm-dd"
    made.active.row_dimensions[2].hidden = True
    path = tmp_path / "book.xlsx"
    made.save(path)
    box = Box(read_workbook(path))
    assert box.metadata() == (
        "Sheet!A1:C2 (hidden rows 2; 1 formula without results read as empty)"
    )
    assert box.ranges("Sheet!A1:C2") == (
        "Sheet!A1:C2 2 rows\n1: 0.125 (12.5%),5,x\n"
        "2 (hidden): (=[1]Other!A1 not calculated),-1 (####),"
    )
    assert box.bound == [("Sheet", 1, 1, [[0.125, 5, "x"], [None, -1, None]])]


def test_a_file_that_turns_out_damaged_is_an_error_for_the_model(tmp_path: Path) -> None:
    """Rows of a large file are parsed when they are read."""
    path = tmp_path / "book.xlsx"
    write_xlsx(Workbook([Sheet("S", {r: ("word " * 40, r) for r in range(1, 24_000)})]), path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    sheet = parts["xl/worksheets/sheet1.xml"]
    assert len(sheet) > 4 << 20
    parts["xl/worksheets/sheet1.xml"] = sheet.replace(b"<v>12000</v>", b"<v>NaN</v>")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    box = Box(read_workbook(path))
    assert box.ranges("S!B11999:B11999").endswith("11999: 11999")
    said = box.ranges("S!B12000:B12001")
    assert said.startswith("error: can't read ") and "cell 'B12000'" in said
    assert box.cells_read == 1 and box.malformed == 0
