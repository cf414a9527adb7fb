"""Every case and file of ../shared/cases, by the bench that checks them."""

import json
import shutil
from dataclasses import replace

import pytest

from experiments.bench import readers
from experiments.bench.readers import CASES, Config, Result, main, run_case, table
from experiments.config import UsageError

needs_cases = pytest.mark.skipif(
    not CASES.is_dir(), reason="needs ../shared/cases beside the repository"
)


@needs_cases
@pytest.mark.parametrize(
    "case",
    json.loads((CASES / "readers/cases.json").read_text("utf-8")) if CASES.is_dir() else [],
    ids=lambda case: case["file"],
)
def test_every_case_is_right(case):
    result = run_case(CASES / "readers", case)
    assert result.wrong == []
    assert result.seconds < 5 and result.megabytes < 500


@needs_cases
def test_a_wrong_value_is_found():
    case = {"file": "dim_missing.xlsx", "checks": [{"sheet": "S", "ref": "C4", "value": 44}]}
    assert run_case(CASES / "readers", case).wrong == ["C4: 43, not 44"]
    case = {"file": "dim_missing.xlsx", "must_refuse": "password"}
    assert run_case(CASES / "readers", case).wrong == ["read, but has to be refused (password)"]
    case = {"file": "encrypted.xlsx", "must_refuse": "zip bomb"}
    assert "refused" in run_case(CASES / "readers", case).wrong[0]


@needs_cases
def test_the_last_line_is_the_result(capsys):
    assert main(Config(libreoffice="no", table=True)) == 0
    shown = capsys.readouterr().out.splitlines()
    line = json.loads(shown[-1])
    assert line["bench"] == "readers" and line["value"] == 100
    assert line["cases"] >= 38 and line["wild"] >= 70 and line["wild_compared"] == 0
    assert sum(row.startswith("| ") for row in shown) == line["cases"] + line["wild"] + 1


@needs_cases
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("soffice") is None, reason="needs LibreOffice (soffice)")
def test_files_from_the_wild_agree_with_libreoffice(tmp_path, capsys):
    """A tenth of them; the bench takes all."""
    folder = tmp_path / "cases"
    (folder / "readers").mkdir(parents=True)
    (folder / "in_the_wild").mkdir()
    (folder / "readers" / "cases.json").write_text("[]")
    names = ["1_NoIden.xlsx", "48539.xlsx", "54206.xls", "57074.xls", "51519.xlsb", "finance.xls",
             "FormatKM.xls", "DataTableCities.xlsx"]  # fmt: skip
    for name in names:
        shutil.copy(CASES / "in_the_wild" / name, folder / "in_the_wild" / name)
    assert main(Config(cases=str(folder))) == 0, capsys.readouterr().out
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["wild_compared"] == len(names) and line["libreoffice"]


@needs_cases
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("soffice") is None, reason="needs LibreOffice (soffice)")
def test_a_difference_from_libreoffice_is_found(tmp_path):
    path = CASES / "in_the_wild" / "55906-MultiSheetRefs.xlsx"
    other = CASES / "in_the_wild" / "56737.xlsx"
    made = readers.convert([path, other], tmp_path)
    assert readers.run_wild(path, made[path.name], True).wrong == []
    assert readers.run_wild(path, made[other.name], True).wrong


def test_a_missing_folder_is_one_line(tmp_path):
    with pytest.raises(UsageError, match="no cases in"):
        main(replace(Config(), cases=str(tmp_path)))


def test_the_table_marks_what_is_wrong():
    lines = table([Result("a.xlsx", "read", ["x"])], [Result("b.xls", "refused: a | b")])
    assert "| a.xlsx | **wrong** |" in lines and "refused: a \\| b" in lines
