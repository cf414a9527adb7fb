"""How read cells look to session code."""

import copy
import datetime
import json

import pytest

from envs.sandbox.prelude import Bindings, Row, column_letters, identifier


def orders() -> Bindings:
    bindings = Bindings()
    bindings.bind(
        "Orders",
        1,
        1,
        [
            ["Orders of 2024", None, None],
            [None, None, None],
            ["Order", "Net USD", "Due date"],
            ["O-1", 500, datetime.date(2024, 1, 5)],
            [None, None, None],
            ["O-2", 12.5, None],
        ],
    )
    return bindings


def test_records_under_the_header():
    rows = orders().namespace["Orders"]
    assert rows == [
        {"Order": "O-1", "Net USD": 500, "Due date": datetime.date(2024, 1, 5)},
        {"Order": "O-2", "Net USD": 12.5, "Due date": None},
    ]
    assert [row._row for row in rows] == [4, 6]
    assert type(rows[0]["Net USD"]) is int


def test_every_spelling_of_a_column():
    row = orders().namespace["Orders"][0]
    assert row["Net USD"] == row["Net_USD"] == row.Net_USD == row.net_usd == 500
    assert row.get("net usd") == 500
    assert row.get("nothing", 7) == 7
    assert row.Due_date == datetime.date(2024, 1, 5)


def test_absent_columns_say_what_is_there():
    row = orders().namespace["Orders"][0]
    with pytest.raises(AttributeError, match="no column 'Vat'.*'Order', 'Net USD'"):
        row.Vat  # noqa: B018
    with pytest.raises(KeyError, match="no column 'Vat'"):
        row["Vat"]
    with pytest.raises(KeyError, match="no column 3"):
        row[3]


def test_reads_merge_by_row_and_column():
    bindings = Bindings()
    bindings.bind("Orders", 2, 1, [["O-1"], ["O-2"]])
    assert bindings.namespace["Orders"] == [{"A": "O-1"}, {"A": "O-2"}]
    bindings.bind("Orders", 1, 1, [["Order", "Amount"]])
    bindings.bind("Orders", 3, 2, [[7], [9]])
    rows = bindings.namespace["Orders"]
    assert rows == [{"Order": "O-1"}, {"Order": "O-2", "Amount": 7}, {"Amount": 9}]
    assert [row._row for row in rows] == [2, 3, 4]
    with pytest.raises(AttributeError, match="'Amount' was not read in row 2"):
        rows[0].Amount  # noqa: B018
    assert bindings.cells["Orders"] == {
        (1, 1): "Order", (1, 2): "Amount", (2, 1): "O-1", (3, 1): "O-2", (3, 2): 7, (4, 2): 9,
    }  # fmt: skip


def test_unnamed_column_has_its_letter():
    bindings = Bindings()
    bindings.bind("S", 1, 3, [["Name", None, "Sum"], ["a", 1, 2]])
    assert bindings.namespace["S"] == [{"Name": "a", "D": 1, "Sum": 2}]
    assert bindings.namespace["S"][0].D == 1


@pytest.mark.parametrize(
    "first", [["a", "a"], ["a", 1], ["a"], [datetime.date(2024, 1, 1), "x"], [True, "x"]]
)
def test_rows_that_are_no_header(first):
    bindings = Bindings()
    bindings.bind("S", 1, 1, [first, [1, 2]])
    assert set(bindings.namespace["S"][-1]) == {"A", "B"}
    assert bindings.namespace["S"][0]._row == 1


def test_sheet_names_become_identifiers():
    bindings = Bindings()
    block = [["a", "b"], [1, 2]]
    names = [
        bindings.bind(sheet, 1, 1, block)
        for sheet in ("Cap Table", "Cap-Table", "2024", "sum", "cells", "class", "Übersicht", "£")
    ]
    assert names == [
        "Cap_Table", "Cap_Table_2", "_2024", "sum_", "cells_", "class_", "Übersicht", "Sheet",
    ]  # fmt: skip
    assert bindings.bind("Cap-Table", 9, 1, block) == "Cap_Table_2"
    assert all(name.isidentifier() for name in names)
    assert bindings.namespace["cells"] is bindings.cells


def test_clashing_headers_stay_reachable():
    bindings = Bindings()
    bindings.bind("S", 1, 1, [["Net USD", "Net-USD", "values", "net usd"], [1, 2, 3, 4]])
    row = bindings.namespace["S"][0]
    assert (row["Net USD"], row["Net-USD"], row["net usd"]) == (1, 2, 4)
    assert (row.Net_USD, row.Net_USD_2, row.values_) == (1, 2, 3)
    assert list(row.values()) == [1, 2, 3, 4]


def test_a_row_is_a_plain_dictionary_to_others():
    row = orders().namespace["Orders"][1]
    assert isinstance(row, dict) and repr(row) == repr(dict(row))
    assert json.loads(json.dumps(row)) == dict(row)
    for twin in (copy.copy(row), copy.deepcopy(row)):
        assert isinstance(twin, Row) and twin == row and twin._row == 6 and twin.Net_USD == 12.5
    row.Net_USD = 3
    row.extra = 4
    assert row["Net USD"] == 3 and row["extra"] == row.extra == 4


def test_bad_places_are_refused():
    with pytest.raises(ValueError, match="start at 1"):
        Bindings().bind("S", 0, 1, [[1]])
    with pytest.raises(ValueError, match="start at 1"):
        column_letters(0)


def test_small_helpers():
    assert [column_letters(n) for n in (1, 26, 27, 702, 703)] == ["A", "Z", "AA", "ZZ", "AAA"]
    assert identifier("Amount (USD)") == "Amount_USD"
    assert identifier("%%") == ""
    assert identifier("x²").isidentifier()
