"""What Python code in a session sees of the cells that were read: `Row` and `Bindings`.

Every read is merged by sheet row and column, then shown in two forms: `cells["Sheet"]`, a
dictionary of everything read, and a list of records under the sheet's name.  This module is
pure standard library and imports nothing of ours, because the sandbox's children load it
outside the package; trusted code (oracles, tests) may use it in-process.

Left out on purpose: types.  A value is bound as it was read, and nothing is parsed, so a
number stored as text stays text.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

_RESERVED_NAMES = frozenset(dir(builtins)) | frozenset(keyword.kwlist) | {"cells"}
_RESERVED_COLUMNS = frozenset(dir(dict)) | frozenset(keyword.kwlist)


def identifier(text: str, reserved: frozenset[str] = frozenset()) -> str:
    """`text` made a Python identifier: "Cap Table" -> "Cap_Table", "2024" -> "_2024".

    Names in `reserved` get a trailing underscore.  Empty when no letter or digit is left.
    """
    name = re.sub(r"\W+", "_", text.strip()).strip("_")
    if name and not name.isidentifier():
        name = "_" + name
    if name and not name.isidentifier():  # \w holds a few signs that no identifier may
        name = re.sub(r"[^0-9A-Za-z_]+", "_", name)
    return name + "_" if name in reserved else name


def column_letters(column: int) -> str:
    """1 -> "A", 27 -> "AA".  Raises ValueError below 1."""
    if column < 1:
        raise ValueError(f"column numbers start at 1, got {column}")
    letters = ""
    while column:
        column, rest = divmod(column - 1, 26)
        letters = chr(65 + rest) + letters
    return letters


class Row(dict[str, Any]):
    """One record: header text -> value, the same values as attributes, and `_row`.

    `row["Net USD"]`, `row["Net_USD"]`, `row.Net_USD` and `row.net_usd` are the same value;
    `row._row` is the row number in the sheet.  Only cells that were read are there: asking
    for another column raises an error that names the columns that are.
    """

    __slots__ = ("_names", "_row")
    _names: dict[str, str]
    _row: int

    def __init__(self, values: dict[str, Any], row: int, names: dict[str, str]) -> None:
        """names: every accepted spelling -> the key it stands for (shared by all rows)."""
        super().__init__(values)
        object.__setattr__(self, "_row", row)
        object.__setattr__(self, "_names", names)

    def _key(self, name: Any) -> str | None:
        if not isinstance(name, str):
            return None
        names = self._names
        key = names.get(name)
        if key is None:
            key = names.get(name.strip().casefold())
        return key

    def _absent(self, name: Any, key: str | None) -> str:
        if key is not None:
            return f"column {key!r} was not read in row {self._row}; read it first"
        return f"no column {name!r}; columns read: {', '.join(map(repr, self))}"

    def __missing__(self, name: Any) -> Any:
        key = self._key(name)
        if key is not None and key in self:
            return dict.__getitem__(self, key)
        raise KeyError(self._absent(name, key))

    def __getattr__(self, name: str) -> Any:
        if name in ("_names", "_row") or name[:2] == "__":
            raise AttributeError(name)
        key = self._key(name)
        if key is not None and key in self:
            return dict.__getitem__(self, key)
        if name in self:
            return dict.__getitem__(self, name)
        raise AttributeError(self._absent(name, key))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_names", "_row"):
            object.__setattr__(self, name, value)
        else:
            self[self._key(name) or name] = value

    def get(self, name: Any, default: Any = None) -> Any:
        """As `dict.get`, with every spelling that `row[name]` accepts."""
        if name in self:
            return dict.__getitem__(self, name)
        key = self._key(name)
        return dict.get(self, key, default) if key is not None else default


class Bindings:
    """All cells that were read so far, as the names that session code sees.

    `namespace` is one dictionary that is kept up to date: "cells" plus one list of `Row` per
    sheet.  Sheets whose names give the same identifier are told apart by _2, _3, in the
    order of their first read.
    """

    def __init__(self) -> None:
        self.cells: dict[str, dict[tuple[int, int], Any]] = {}
        self.names: dict[str, str] = {}
        self.namespace: dict[str, Any] = {"cells": self.cells}

    def bind(self, sheet: str, top_row: int, first_col: int, rows: Iterable[Sequence[Any]]) -> str:
        """Add a block of read cells; returns the name under which its records stand.

        top_row, first_col: 1-based place of the block's first cell.  rows: equal or ragged
        sequences of values, None for an empty cell.  Raises ValueError for a place below 1.
        """
        if top_row < 1 or first_col < 1:
            raise ValueError(f"rows and columns start at 1, got row {top_row}, col {first_col}")
        grid = self.cells.setdefault(sheet, {})
        for row, values in enumerate(rows, top_row):
            for col, value in enumerate(values, first_col):
                grid[row, col] = value
        if sheet not in self.names:
            self.names[sheet] = _distinct(
                identifier(sheet, _RESERVED_NAMES) or "Sheet", self.namespace
            )
        name = self.names[sheet]
        self.namespace[name] = records(grid)
        return name


def records(grid: dict[tuple[int, int], Any]) -> list[Row]:
    """The records of one sheet's read cells ((row, col) -> value), in row order.

    The header is the first row with at least two filled cells, all of them text and
    distinct; each later row that holds any value is a record.  Without a header every filled
    row is a record and its keys are column letters, as they are for unnamed columns.
    """
    table: dict[int, dict[int, Any]] = {}
    for row, col in sorted(grid):
        table.setdefault(row, {})[col] = grid[row, col]
    header_row, header = next(_headers(table), (0, {}))
    columns = sorted({col for row in table.values() for col in row})
    keys = {col: header.get(col) or column_letters(col) for col in columns}
    names = _spellings(keys)
    return [
        Row({keys[col]: value for col, value in values.items()}, row, names)
        for row, values in table.items()
        if row > header_row and any(map(_filled, values.values()))
    ]


def _headers(table: dict[int, dict[int, Any]]) -> Iterator[tuple[int, dict[int, str]]]:
    for row, values in table.items():
        filled = {col: value for col, value in values.items() if _filled(value)}
        texts = list(filled.values())
        # `type() is str` keeps error cells out, whatever class the reader gives them.
        if len(texts) >= 2 and all(type(v) is str for v in texts):
            if len(set(texts)) == len(texts):
                yield row, filled


def _filled(value: Any) -> bool:
    return value is not None and not (type(value) is str and not value.strip())


def _spellings(keys: dict[int, str]) -> dict[str, str]:
    """Every spelling of a column -> its key; exact header texts win over made-up forms."""
    names = {key: key for key in keys.values()}
    loose: dict[str, set[str]] = {}
    for col, key in keys.items():
        name = identifier(key, _RESERVED_COLUMNS) or column_letters(col)
        names.setdefault(_distinct(name, names) if name != key else name, key)
        for form in (key.strip().casefold(), name.casefold()):
            loose.setdefault(form, set()).add(key)
    for form, found in loose.items():
        if len(found) == 1:  # an ambiguous loose spelling is no spelling
            names.setdefault(form, found.pop())
    return names


def _distinct(name: str, taken: Iterable[str]) -> str:
    if name not in taken:
        return name
    number = 2
    while f"{name}_{number}" in taken:
        number += 1
    return f"{name}_{number}"
