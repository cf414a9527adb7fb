"""What an .xlsx file says about itself beside its cells: sheets, names, styles, strings, colours.

Parts are found by relationships, whose targets may be absolute or relative and whose types may
be Transitional or Strict.  A part that is optional and broken leaves what it would have given
at its default and is named in `Package.notes`.
"""

from __future__ import annotations

import colorsys
import posixpath
import re
from dataclasses import dataclass, field
from urllib.parse import unquote

from envs.workbook.container import Archive, Damaged, WorkbookError, canonical, reason
from envs.workbook.formats import BUILTIN
from envs.workbook.xml import is_true, relation, walk

# fmt: off
INDEXED = [
    "000000", "FFFFFF", "FF0000", "00FF00", "0000FF", "FFFF00", "FF00FF", "00FFFF",
    "000000", "FFFFFF", "FF0000", "00FF00", "0000FF", "FFFF00", "FF00FF", "00FFFF",
    "800000", "008000", "000080", "808000", "800080", "008080", "C0C0C0", "808080",
    "9999FF", "993366", "FFFFCC", "CCFFFF", "660066", "FF8080", "0066CC", "CCCCFF",
    "000080", "FF00FF", "FFFF00", "00FFFF", "800080", "800000", "008080", "0000FF",
    "00CCFF", "CCFFFF", "CCFFCC", "FFFF99", "99CCFF", "FF99CC", "CC99FF", "FFCC99",
    "3366FF", "33CCCC", "99CC00", "FFCC00", "FF9900", "FF6600", "666699", "969696",
    "003366", "339966", "003300", "333300", "993300", "993366", "333399", "333333",
]
# fmt: on
_SLOTS = "dk1 lt1 dk2 lt2 accent1 accent2 accent3 accent4 accent5 accent6 hlink folHlink".split()
_SWAPPED = {0: 1, 1: 0, 2: 3, 3: 2}  # theme numbers against the theme's own order
_ESCAPED = re.compile("_x([0-9A-Fa-f]{4})_")
_SIMPLE = re.compile(rb"<si><t(?: xml:space=\"preserve\")?>([^<&\r]*)</t>\s*\Z")


@dataclass
class SheetEntry:
    """One <sheet>: kind is "worksheet" or "chart"; part is None where it can't be found."""

    name: str
    state: str
    part: str | None
    kind: str


@dataclass
class Name:
    """A defined name.  scope: the sheet it belongs to, or None; broken: it refers to nothing."""

    name: str
    refers_to: str
    scope: str | None
    broken: bool
    hidden: bool = False


@dataclass
class Package:
    sheets: list[SheetEntry] = field(default_factory=list)
    names: list[Name] = field(default_factory=list)
    epoch1904: bool = False
    formats: list[str] = field(default_factory=lambda: ["General"])
    strings_part: str | None = None
    theme: list[str | None] = field(default_factory=list)
    palette: list[str] = field(default_factory=lambda: INDEXED)
    notes: list[str] = field(default_factory=list)

    def color(self, attributes: dict[str, str]) -> str | None:
        """A colour element as "RRGGBB": rgb, theme with tint, or a place in the palette."""
        found: str | None = None
        if "rgb" in attributes:
            found = attributes["rgb"][-6:].upper()
            if not re.fullmatch("[0-9A-F]{6}", found):
                return None
        elif "theme" in attributes and attributes["theme"].isdigit():
            place = int(attributes["theme"])
            place = _SWAPPED.get(place, place)
            found = self.theme[place] if place < len(self.theme) else None
        elif "indexed" in attributes and attributes["indexed"].isdigit():
            place = int(attributes["indexed"])
            found = self.palette[place] if place < len(self.palette) else None
        if found is None:
            return None
        return tinted(found, attributes.get("tint", "0"))


def tinted(color: str, tint: str) -> str:
    """Lighter (tint above 0) or darker, by the lightness of the HLS model (ECMA-376 18.8.3)."""
    try:
        change = max(-1.0, min(1.0, float(tint)))
    except ValueError:
        return color
    if not change:
        return color
    red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (0, 2, 4))
    hue, light, saturation = colorsys.rgb_to_hls(red, green, blue)
    light = light * (1 + change) if change < 0 else light * (1 - change) + change
    channels = colorsys.hls_to_rgb(hue, light, saturation)
    return "".join(f"{round(c * 255):02X}" for c in channels)


def unescape(text: str) -> str:
    """`_x000A_` and the like as the characters they stand for."""
    if "_x" not in text:
        return text
    return _ESCAPED.sub(lambda m: chr(int(m[1], 16)), text)


def relations(archive: Archive, part: str) -> dict[str, tuple[str, str]]:
    """Relationships of a part: id -> (last word of the type, canonical target)."""
    folder, name = posixpath.split(part)
    path = posixpath.join(folder, "_rels", name + ".rels")
    found: dict[str, tuple[str, str]] = {}
    if path not in archive:
        return found

    def start(tag: str, attributes: dict[str, str]) -> None:
        if tag != "Relationship" or attributes.get("TargetMode") == "External":
            return
        target = attributes.get("Target", "").replace("\\", "/")
        whole = target if target.startswith("/") else posixpath.join("/", folder, target)
        place = canonical(posixpath.normpath(whole))
        if place not in archive and canonical(unquote(place)) in archive:
            place = canonical(unquote(place))
        kind = attributes.get("Type", "").rpartition("/")[2]
        found[attributes.get("Id", "")] = kind, place

    walk(archive.read(path), start)
    return found


def read_package(archive: Archive) -> Package:
    """Reads everything but the worksheets and strings.  Raises Damaged and WorkbookError."""
    top = relations(archive, "")
    main = next((t for kind, t in top.values() if kind == "officeDocument"), "xl/workbook.xml")
    if main not in archive:
        raise Damaged("its main part is missing")
    _check_type(archive, main)
    package = Package()
    links = relations(archive, main)
    _workbook(package, archive.read(main), links, archive)
    by_kind = {kind: target for kind, target in links.values() if target in archive}
    for kind, read in (("theme", _theme), ("styles", _styles)):
        if kind in by_kind:
            try:
                read(package, archive.read(by_kind[kind]))
            except Damaged as error:
                package.notes.append(f"its {kind} can't be read ({reason(error)})")
    package.strings_part = by_kind.get("sharedStrings")
    return package


def _check_type(archive: Archive, main: str) -> None:
    """An Office file of another program has a main part of another type."""
    if "[content_types].xml" not in archive:
        return
    types: dict[str, str] = {}

    def start(tag: str, attributes: dict[str, str]) -> None:
        if tag == "Override":
            types[canonical(attributes.get("PartName", ""))] = attributes.get("ContentType", "")

    walk(archive.read("[content_types].xml"), start)
    kind = types.get(main, "")
    if "wordprocessing" in kind or "presentation" in kind:
        raise WorkbookError("is a document of another program, not a workbook; save it as xlsx")


def _workbook(
    package: Package, data: bytes, links: dict[str, tuple[str, str]], archive: Archive
) -> None:
    names: list[tuple[dict[str, str], list[str]]] = []
    inside: list[list[str]] = []
    root: list[str] = []

    def start(tag: str, attributes: dict[str, str]) -> None:
        if not root:
            root.append(tag)
        if tag == "workbookPr":
            package.epoch1904 = is_true(attributes.get("date1904"))
        elif tag == "sheet":
            kind, target = links.get(relation(attributes) or "", ("", ""))
            if kind in ("dialogsheet", "xlMacrosheet", "xlIntlMacrosheet"):
                kind = "macro" if "acro" in kind else "dialog"
            else:
                kind = "chart" if kind == "chartsheet" else "worksheet"
            state = attributes.get("state", "visible")
            package.sheets.append(
                SheetEntry(
                    attributes.get("name", ""),
                    state if state in ("hidden", "veryHidden") else "visible",
                    target if target in archive else None,
                    kind,
                )
            )
        elif tag == "definedName":
            inside.append([])
            names.append((attributes, inside[-1]))

    def end(tag: str) -> None:
        if tag == "definedName":
            inside.clear()

    def text(data: str) -> None:
        if inside:
            inside[-1].append(data)

    walk(data, start, end, text)
    if root != ["workbook"]:
        raise Damaged(f"its main part is a {root[0][:40] if root else 'nothing'}, not a workbook")
    known = {sheet.name.casefold() for sheet in package.sheets}
    for attributes, parts in names:
        refers = "".join(parts).strip()
        scope, broken = None, not refers or "#REF!" in refers or refers.startswith("[")
        if "localSheetId" in attributes:
            place = attributes["localSheetId"]
            if place.isdigit() and int(place) < len(package.sheets):
                scope = package.sheets[int(place)].name
            else:
                broken = True
        target = re.fullmatch(r"(?:'((?:[^']|'')+)'|([^'!(),\"]+))![^!]+", refers)
        if target:
            sheet = (target[1] or target[2]).replace("''", "'")
            broken |= sheet.casefold() not in known and ":" not in sheet
        hidden = is_true(attributes.get("hidden"))
        package.names.append(Name(attributes.get("name", ""), refers, scope, broken, hidden))


def _theme(package: Package, data: bytes) -> None:
    colors: dict[str, str] = {}
    inside: list[str] = []

    def start(tag: str, attributes: dict[str, str]) -> None:
        if tag in _SLOTS:
            inside[:] = [tag]
        elif inside and tag in ("srgbClr", "sysClr"):
            value = attributes.get("lastClr" if tag == "sysClr" else "val", "")
            if re.fullmatch("[0-9A-Fa-f]{6}", value):
                colors.setdefault(inside[0], value.upper())

    def end(tag: str) -> None:
        if tag == "clrScheme":
            inside.clear()

    walk(data, start, end)
    package.theme = [colors.get(slot) for slot in _SLOTS]


def _styles(package: Package, data: bytes) -> None:
    codes, formats, palette = dict(BUILTIN), [], []
    where: list[str] = []

    def start(tag: str, attributes: dict[str, str]) -> None:
        if tag == "numFmt" and attributes.get("numFmtId", "").isdigit() and "dxf" not in where:
            codes[int(attributes["numFmtId"])] = attributes.get("formatCode", "General")
        elif tag == "xf" and where and where[-1] == "cellXfs":
            number = attributes.get("numFmtId", "0")
            formats.append(int(number) if number.isdigit() else 0)
        elif tag == "rgbColor":
            palette.append(attributes.get("rgb", "")[-6:].upper())
        where.append(tag)

    def end(tag: str) -> None:
        where.pop()

    walk(data, start, end)
    package.formats = [codes.get(n, "General") or "General" for n in formats] or ["General"]
    if palette and all(re.fullmatch("[0-9A-F]{6}", color) for color in palette):
        package.palette = palette


class Strings:
    """The shared strings of a UTF-8 document, decoded when they are asked for.

    Damaged for an index that isn't there."""

    def __init__(self, data: bytes) -> None:
        self._list: list[bytes | str]
        # A string without text is <si/>, and any may have attributes: those take the long way.
        plain = b"<sst" in data[:1000] and b"<!" not in data
        if plain and data.count(b"<si") == data.count(b"<si>"):
            self._list = list(data[max(data.find(b"<si>"), 0) :].split(b"</si>"))
            if b"</sst>" not in self._list.pop() and self._list:
                raise Damaged("the shared strings are cut off")
        else:
            self._list = list(_texts(data))

    def __len__(self) -> int:
        return len(self._list)

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self._list):
            raise Damaged(f"there is no shared string {index}")
        found = self._list[index]
        if isinstance(found, bytes):
            simple = _SIMPLE.match(found)
            if simple:
                try:
                    found = unescape(simple[1].decode())
                except UnicodeDecodeError as error:
                    raise Damaged(f"shared string {index} isn't UTF-8") from error
            else:
                texts = _texts(b"<sst>" + found + b"</si></sst>")
                if len(texts) != 1:
                    raise Damaged(f"shared string {index} is broken")
                found = texts[0]
            self._list[index] = found
        return found


def _texts(data: bytes) -> list[str]:
    """Every <si>: its runs joined, phonetic ones left out."""
    texts: list[str] = []
    run: list[str] = []
    state = {"t": False, "phonetic": 0}

    def start(tag: str, attributes: dict[str, str]) -> None:
        if tag == "si":
            run.clear()
        elif tag == "rPh":
            state["phonetic"] += 1
        state["t"] = tag == "t" and not state["phonetic"]

    def end(tag: str) -> None:
        state["t"] = False
        if tag == "rPh":
            state["phonetic"] -= 1
        elif tag == "si":
            texts.append(unescape("".join(run)))

    def text(piece: str) -> None:
        if state["t"]:
            run.append(piece)

    walk(data, start, end, text)
    return texts
