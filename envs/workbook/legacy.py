"""Workbooks of other formats through other readers: .xls by xlrd, .xlsb by calamine.

What those readers don't give isn't there: formulas (results are), and for .xlsb error cells,
number formats, merged cells and hidden rows too.  That is said in the book's notes.
"""

from __future__ import annotations

import datetime as dt
import io
from typing import Any, BinaryIO

from envs.workbook.a1 import Area
from envs.workbook.cells import Row
from envs.workbook.container import Archive, Damaged, Limits, WorkbookError
from envs.workbook.grid import Grid, book_outline, check_cells, sheet_outline, spans

_EXTRA = "pip install 'fastask-jax[workbooks]'"


def read_xls(file: BinaryIO, limits: Limits) -> Grid:
    """Raises WorkbookError, and whatever xlrd raises for broken files."""
    try:
        import xlrd
    except ImportError as error:
        raise WorkbookError(f"is an .xls workbook, which needs xlrd: {_EXTRA}") from error
    data = file.read(limits.unpacked // 2)
    try:
        book = xlrd.open_workbook(
            file_contents=data, formatting_info=True, ragged_rows=True, on_demand=True,
            logfile=io.StringIO(),
        )  # fmt: skip
    except xlrd.XLRDError as error:
        if "encrypted" in str(error).lower():
            raise WorkbookError(
                "is password-protected; open it in a spreadsheet program and save it without the "
                "password"
            ) from error
        raise Damaged(str(error)) from error
    except NotImplementedError as error:  # formatting_info of very old files
        raise Damaged(str(error)) from error
    keys = sorted({xf.format_key for xf in book.xf_list}) or [0]
    styles = {key: place for place, key in enumerate(keys)}
    formats = [book.format_map[k].format_str if k in book.format_map else "General" for k in keys]
    outline = book_outline(
        epoch1904=book.datemode == 1,
        formats=formats,
        names=[_name(name, book) for name in book.name_obj_list],
        notes=["of an .xls file results are read, not formulas"],
    )
    xf_styles = [styles[xf.format_key] for xf in book.xf_list]
    colors = _tab_colors(book)
    sheets = []
    total = 0
    for sheet in book.sheets():
        rows = [row for r in range(sheet.nrows) if (row := _xls_row(sheet, r, xf_styles, xlrd))]
        total += sum(len(segment[1]) for row in rows for segment in row[1])
        check_cells(total, limits)
        sheets.append(rows)
        outline["sheets"].append(
            sheet_outline(
                sheet.name,
                None,
                state=("visible", "hidden", "veryHidden")[sheet.visibility]
                if sheet.visibility in (0, 1, 2)
                else "hidden",
                tab_color=colors.get(sheet.number),
                merged=[
                    str(Area(top + 1, left + 1, bottom, right))
                    for top, bottom, left, right in sheet.merged_cells
                ],
                hidden_rows=spans([r + 1 for r, i in sheet.rowinfo_map.items() if i.hidden]),
                hidden_columns=spans([c + 1 for c, i in sheet.colinfo_map.items() if i.hidden]),
                protected=False,
            )
        )
    if not sheets:
        raise Damaged("it holds no worksheets")
    return Grid(outline, sheets, limits)


def _xls_row(sheet: Any, r: int, xf_styles: list[int], xlrd: Any) -> Row | None:
    types, values, xfs = sheet.row_types(r), sheet.row_values(r), sheet._cell_xf_indexes[r]
    out: list[list[Any]] = []
    end = -10
    for c, (kind, value) in enumerate(zip(types, values, strict=True), 1):
        if kind in (xlrd.XL_CELL_EMPTY, xlrd.XL_CELL_BLANK):
            continue
        if kind in (xlrd.XL_CELL_NUMBER, xlrd.XL_CELL_DATE):
            raw: Any = int(value) if value == int(value) and abs(value) < 1e15 else value
        elif kind == xlrd.XL_CELL_BOOLEAN:
            raw = bool(value)
        elif kind == xlrd.XL_CELL_ERROR:
            raw = ["e", xlrd.error_text_from_code.get(value, f"#ERR{value}")]
        else:
            raw = value
        xf = xfs[c - 1]
        style = xf_styles[xf] if 0 <= xf < len(xf_styles) else 0
        if c - end > 8 or not out:
            out.append([c, [], []])
        else:
            out[-1][1] += [None] * (c - end - 1)
            out[-1][2] += [0] * (c - end - 1)
        out[-1][1].append(raw)
        out[-1][2].append(style)
        end = c
    return [r + 1, out, []] if out else None


_BUILTIN_NAMES = {
    "\x00": "Consolidate_Area", "\x01": "Auto_Open", "\x02": "Auto_Close", "\x03": "Extract",
    "\x04": "Database", "\x05": "Criteria", "\x06": "Print_Area", "\x07": "Print_Titles",
    "\x08": "Recorder", "\x09": "Data_Form", "\x0a": "Auto_Activate", "\x0b": "Auto_Deactivate",
    "\x0c": "Sheet_Title", "\x0d": "_FilterDatabase",
}  # fmt: skip


def _name(name: Any, book: Any) -> dict[str, Any]:
    text = name.result.text if name.result is not None and name.result.text else ""
    label = name.name
    if name.builtin:
        label = "_xlnm." + _BUILTIN_NAMES.get(label, label)
    scope = None
    if 0 <= name.scope < book.nsheets:
        scope = book.sheet_by_index(name.scope).name
    return {
        "name": label,
        "refers_to": text,
        "scope": scope,
        "broken": "#REF!" in text or (not text and not name.macro),
        "hidden": bool(name.hidden),
    }


def _tab_colors(book: Any) -> dict[int, str]:
    """Sheet number -> colour, from the record that xlrd passes over."""
    found = {}
    data = book.mem
    for number in range(book.nsheets):
        position = book._sh_abs_posn[number]
        while position + 4 <= len(data):
            kind = int.from_bytes(data[position : position + 2], "little")
            size = int.from_bytes(data[position + 2 : position + 4], "little")
            if kind == 0x0A:  # end of the sheet
                break
            if kind == 0x862 and size >= 20:
                place = int.from_bytes(data[position + 20 : position + 24], "little") & 0x7F
                color = book.colour_map.get(place)
                if color:
                    found[number] = "{:02X}{:02X}{:02X}".format(*color)
            position += 4 + size
    return found


def read_xlsb(file: BinaryIO, limits: Limits) -> Grid:
    """Raises WorkbookError, and whatever calamine raises for broken files."""
    try:
        from python_calamine import CalamineWorkbook, SheetTypeEnum, SheetVisibleEnum
    except ImportError as error:
        raise WorkbookError(
            f"is an .xlsb workbook, which needs python-calamine: {_EXTRA}"
        ) from error
    archive = Archive(file, limits)
    for name in archive.names():  # its own reader has no limits
        for _ in archive.chunks(name):
            pass
    file.seek(0)
    book = CalamineWorkbook.from_filelike(io.BytesIO(file.read()))
    lost = "formulas, number formats, errors, merged cells and hidden rows"
    outline = book_outline(notes=[f"of an .xlsb file values are read, not {lost}"])
    outline["formats"] = ["General", "yyyy-mm-dd", "yyyy-mm-dd hh:mm:ss", "hh:mm:ss", "[h]:mm:ss"]
    sheets: list[list[Row]] = []
    for entry in book.sheets_metadata:
        chart = entry.typ == SheetTypeEnum.ChartSheet
        other = entry.typ not in (SheetTypeEnum.WorkSheet, SheetTypeEnum.ChartSheet)
        said = sheet_outline(
            entry.name,
            None,
            state="visible"
            if entry.visible == SheetVisibleEnum.Visible
            else "hidden"
            if entry.visible == SheetVisibleEnum.Hidden
            else "veryHidden",
            kind="chart" if chart else "macro" if other else "worksheet",
        )
        outline["sheets"].append(said)
        if chart or other:
            sheets.append([])
            continue
        sheet = book.get_sheet_by_name(entry.name)
        top, left = sheet.start or (0, 0)
        height = (sheet.end[0] - top + 1) if sheet.end else 0
        width = (sheet.end[1] - left + 1) if sheet.end else 0
        check_cells(height * width, limits)
        rows = []
        for number, values in enumerate(sheet.to_python(skip_empty_area=True), top + 1):
            row = _calamine_row(number, left + 1, values)
            if row:
                rows.append(row)
        sheets.append(rows)
    return Grid(outline, sheets, limits)


_EPOCH = dt.datetime(1899, 12, 30)


def _calamine_row(number: int, left: int, values: list[Any]) -> Row | None:
    raws: list[Any] = []
    styles: list[int] = []
    for value in values:
        style, raw = 0, value
        if value == "" and isinstance(value, str):
            raw = None
        elif isinstance(value, float):
            raw = int(value) if value.is_integer() and abs(value) < 1e15 else value
        elif isinstance(value, dt.datetime):
            style, raw = 2, _serial(value)
        elif isinstance(value, dt.date):
            style, raw = 1, int(_serial(dt.datetime.combine(value, dt.time())))
        elif isinstance(value, dt.time):
            seconds = value.hour * 3600 + value.minute * 60 + value.second
            style, raw = 3, (seconds + value.microsecond / 1e6) / 86400
        elif isinstance(value, dt.timedelta):
            style, raw = 4, value / dt.timedelta(days=1)
        raws.append(raw)
        styles.append(style)
    while raws and raws[-1] is None:
        raws.pop()
        styles.pop()
    begin = next((i for i, raw in enumerate(raws) if raw is not None), None)
    if begin is None:
        return None
    return [number, [[left + begin, raws[begin:], styles[begin:]]], []]


def _serial(value: dt.datetime) -> float:
    days = (value - _EPOCH) / dt.timedelta(days=1)
    return days - (value < dt.datetime(1900, 3, 1))
