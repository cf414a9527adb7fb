"""The bench of opening workbooks, small."""

import json

import pytest

from experiments.bench import w4
from experiments.bench.open_workbook import Config, main, ratios


@pytest.mark.slow
def test_the_last_line_is_the_result(capsys):
    pytest.importorskip("xlsxwriter")
    pytest.importorskip("python_calamine")
    assert main(Config(quick=True)) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["bench"] == "open_workbook" and line["runs"] == 1 and line["rows"] == 5_000
    assert set(line["files"]) == {"openpyxl", "xlsxwriter"}
    for numbers in line["files"].values():
        assert numbers["outline_ratio"] > 1 and numbers["memory_ratio"] > 0.1
        assert numbers["read_ms"] > 0 and numbers["again"] > 0


def test_the_workload_is_the_one_described():
    rows = list(w4.data_rows(4))
    assert rows[0] == [f"col_{n}" for n in range(1, 21)]
    assert [type(v).__name__ for v in rows[1][:5]] == ["str", "int", "float", "date", "str"]
    assert rows[3][0].endswith(" #3") and len(rows) == 4 and len(set(w4.WORDS)) == 100
    top, block = w4.block(100)
    assert (top, len(block), len(block[0])) == (51, 50, 20)
    assert [name for name, _ in w4.sheets(5)] == ["Summary", "Data", "Lookup", "Notes"]


def test_ratios():
    m = {"openpyxl": 10, "outline": 0.1, "openpyxl_block": 4, "block": 0.5, "calamine_block": 1,
         "again": 0.05, "openpyxl_peak_mib": 400, "peak_mib": 200}  # fmt: skip
    assert ratios(m) == {
        "outline_ratio": pytest.approx(100), "block_ratio": 8, "times_calamine": 0.5,
        "again_ratio": pytest.approx(200), "memory_ratio": 2,
    }  # fmt: skip
    with pytest.raises(ValueError, match="runs must be at least 1"):
        Config(runs=0)
