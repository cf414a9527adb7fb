"""What an .xlsx file says beside its cells: colours as Excel shows them, tables, names, parts."""

from __future__ import annotations

import zipfile
from pathlib import Path

import openpyxl
import pytest
from openpyxl.styles.colors import Color
from openpyxl.workbook.defined_name import DefinedName
from openpyxl.worksheet.table import Table

from envs.workbook import Area, read_workbook
from envs.workbook.package import tinted


def close_to(found: str | None, wanted: str) -> bool:
    """Equal to a unit in each channel: programs round differently."""
    assert found is not None
    channels = [(int(found[i : i + 2], 16), int(wanted[i : i + 2], 16)) for i in (0, 2, 4)]
    return all(abs(a - b) <= 1 for a, b in channels)


@pytest.mark.parametrize(
    ("tint", "shown"),
    # Excel's own palette of Accent 1 in the Office theme of 2007: lighter by 80, 60, 40 %, darker
    # by 25 and 50 %.
    [("0.8", "DCE6F1"), ("0.6", "B8CCE4"), ("0.4", "95B3D7"), ("-0.25", "366092"),
     ("-0.5", "244062"), ("0", "4F81BD"), ("x", "4F81BD")],
)  # fmt: skip
def test_tints_are_those_of_excels_palette(tint: str, shown: str) -> None:
    assert close_to(tinted("4F81BD", tint), shown)


def test_tab_colours(tmp_path: Path) -> None:
    book = openpyxl.Workbook()
    colors = {
        "rgb": (Color(rgb="FF12AB34"), "12AB34"),
        "dark1": (Color(theme=1), "000000"),  # the theme's own order has it first
        "light1": (Color(theme=0), "FFFFFF"),
        "accent1": (Color(theme=4), "4F81BD"),
        "tint": (Color(theme=4, tint=0.3999755851924192), "95B3D7"),
        "indexed": (Color(indexed=10), "FF0000"),
        "automatic": (Color(indexed=64), None),
        "none": (None, None),
    }
    for name, (color, _) in colors.items():
        sheet = book.create_sheet(name)
        sheet.sheet_properties.tabColor = color
    del book["Sheet"]
    path = tmp_path / "book.xlsx"
    book.save(path)
    for sheet in read_workbook(path).sheets:
        wanted = colors[sheet.name][1]
        if wanted is None:
            assert sheet.tab_color is None
        else:
            assert close_to(sheet.tab_color, wanted), sheet.name


def test_tables_names_and_states(tmp_path: Path) -> None:
    book = openpyxl.Workbook()
    sheet = book.active
    for row in [("name", "n"), ("a", 1), ("b", 2)]:
        sheet.append(row)
    sheet.add_table(Table(displayName="Sales", ref="A1:B3"))
    book.create_sheet("Hid").sheet_state = "hidden"
    book.defined_names["Rate"] = DefinedName("Rate", attr_text="0.2")
    book.defined_names["Gone"] = DefinedName("Gone", attr_text="'No sheet'!$A$1")
    sheet.defined_names["Local"] = DefinedName("Local", attr_text="Sheet!$A$1:$A$3")
    path = tmp_path / "book.xlsx"
    book.save(path)
    found = read_workbook(path)
    (table,) = found.sheets[0].marks.tables
    assert (table.name, table.ref, table.columns, table.header, table.totals) == (
        "Sales", "A1:B3", ("name", "n"), True, False,
    )  # fmt: skip
    names = {n.name: (n.refers_to, n.scope, n.broken) for n in found.defined_names}
    assert names == {
        "Rate": ("0.2", None, False),
        "Gone": ("'No sheet'!$A$1", None, True),
        "Local": ("Sheet!$A$1:$A$3", "Sheet", False),
    }
    assert [s.marks.state for s in found.sheets] == ["visible", "hidden"]


@pytest.mark.parametrize("change", ["case", "backslash", "absolute", "encoded", "moved"])
def test_parts_are_found_under_other_names(tmp_path: Path, change: str) -> None:
    book = openpyxl.Workbook()
    book.active["B2"] = 22
    path = tmp_path / "book.xlsx"
    book.save(path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    rels, sheet = "xl/_rels/workbook.xml.rels", "xl/worksheets/sheet1.xml"
    if change == "case":
        parts = {n.upper() if n.endswith("sheet1.xml") else n: data for n, data in parts.items()}
    elif change == "backslash":
        parts = {name.replace("/", "\\"): data for name, data in parts.items()}
    elif change == "absolute":
        parts[rels] = parts[rels].replace(b'"/xl/worksheets', b'"worksheets')
    elif change == "encoded":
        parts["xl/worksheets/sheet 1.xml"] = parts.pop(sheet)
        parts[rels] = parts[rels].replace(b"sheet1.xml", b"sheet%201.xml")
    else:
        parts["data/any.xml"] = parts.pop(sheet)
        parts[rels] = parts[rels].replace(b"/xl/worksheets/sheet1.xml", b"../data/any.xml")
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in parts.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    assert read_workbook(path).sheets[0].rows == {2: (None, 22)}


def test_shared_formulas_are_translated(tmp_path: Path) -> None:
    book = openpyxl.Workbook()
    book.active["A1"] = 1
    path = tmp_path / "book.xlsx"
    book.save(path)
    rows = (
        b'<sheetData><row r="1"><c r="A1"><v>1</v></c><c r="B1"><f t="shared" ref="B1:B3" si="0">'
        b'A1*$A$1</f><v>1</v></c></row><row r="3"><c r="B3"><f t="shared" si="0"/><v>9</v></c>'
        b'<c r="C3"><f t="array" ref="C3:C4">A1:A2</f><v>1</v></c></row></sheetData>'
    )
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    data = parts["xl/worksheets/sheet1.xml"]
    begin, end = data.index(b"<sheetData>"), data.index(b"</sheetData>") + 12
    parts["xl/worksheets/sheet1.xml"] = data[:begin] + rows + data[end:]
    with zipfile.ZipFile(path, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
    sheet = read_workbook(path).sheets[0]
    cells = {r: row for r, row in sheet.cells(Area(1, 2, 3, 3))}
    assert [c.formula for c in cells[1]] == ["=A1*$A$1", None]
    assert [(c.formula, c.array) for c in cells[3]] == [("=A3*$A$1", None), ("=A1:A2", "C3:C4")]


def test_a_broken_theme_costs_only_its_colours(tmp_path: Path) -> None:
    book = openpyxl.Workbook()
    book.active["A1"] = 5
    book.active.sheet_properties.tabColor = Color(theme=4)
    path = tmp_path / "book.xlsx"
    book.save(path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    parts["xl/theme/theme1.xml"] = b"<a:theme"
    with zipfile.ZipFile(path, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
    found = read_workbook(path)
    assert found.sheets[0].rows == {1: (5,)} and found.sheets[0].tab_color is None
    assert found.notes[0].startswith("its theme can't be read (broken XML")
