"""`fastask ask` and `Asker`, from a real file to the printed answer.  The policy's weights are
real too: some know one transcript by heart, some are random."""

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import openpyxl
import pytest

from envs.workbook import WorkbookError, read_workbook
from fastask_jax import cli
from fastask_jax._exit import printable
from fastask_jax.ask import Asker, AskError
from fastask_jax.ask.answer import Answer
from fastask_jax.ask.command import unsupported

ROOT = Path(__file__).parents[3]
FIELDS = {
    "question", "answer", "type", "value", "evidence", "turns", "cells", "tool_calls", "tokens",
    "stop_reason", "seconds", "policy", "uncalculated",
}  # fmt: skip


@pytest.mark.slow
def test_an_answer_with_its_evidence(book, taught, asked, home, tmp_path, capsys) -> None:
    words = ["ask", book, asked.question, "--checkpoint", str(taught)]
    assert cli.main(words) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0] == "42"
    assert [line.removeprefix("  read").strip() for line in lines[1:3]] == asked.evidence
    assert lines[3].startswith("  3 turns, 3 tool calls, 25 cells, ")
    assert len(lines) == 4 and shown.err == ""
    kept = [p for p in (home / ".cache" / "fastask").rglob("*") if p.is_file()]
    assert kept

    trace = tmp_path / "trace.jsonl"
    assert cli.main([*words, "Why?", "--json", "--trace", str(trace)]) in (0, 3)
    lines = capsys.readouterr().out.splitlines()
    said, other = map(json.loads, lines)
    assert set(said) == FIELDS == set(other) and other["question"] == "Why?"
    assert said.pop("seconds") > 0 and said.pop("tokens") > 30
    assert said == {
        "question": asked.question,
        "answer": "42",
        "type": "number",
        "value": 42,
        "evidence": asked.evidence,
        "turns": 3,
        "cells": 25,
        "tool_calls": 3,
        "stop_reason": "answered",
        "policy": str(taught / "policy"),
        "uncalculated": {},
    }
    assert "Orders!A1:C4 4 rows" not in lines[0] and "SO-1" not in lines[0]

    session, *kept = map(json.loads, trace.read_text().splitlines())
    assert (session["kind"], session["book"]) == ("session", book)
    assert trace.stat().st_mode & 0o077 == 0
    first = [line for line in kept if line["question"] == 1]
    roles = [line.get("role") for line in first]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool", "tool",
                     "assistant", None]  # fmt: skip
    assert first[2]["tool_calls"][0]["name"] == "read_ranges" and first[2]["tokens"] > 0
    assert first[3]["content"].startswith("Orders!A1:C4 4 rows")
    assert (first[-1]["kind"], first[-1]["answer"]) == ("answer", "42")
    assert {line["question"] for line in kept} == {1, 2}


def test_an_answer_without_evidence_is_doubted() -> None:
    def doubt(answer: str | None, *evidence: str) -> str | None:
        return unsupported(
            Answer("?", answer, None, None, evidence, 2, 0, 1, 9, "answered", 1.0, "policy", {})
        )

    assert "no cell was read" in (doubt("38742") or "")
    assert doubt("38742", "Orders!A1:A3") is None and doubt(None) is None


@pytest.mark.slow
def test_from_a_shell_without_an_answer(book, blank, home) -> None:
    """Random weights say nothing sensible: exit 3, one line, and the object all the same."""
    words = ["ask", book, "How many?", "--checkpoint", str(blank), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "fastask_jax.cli", *words], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 3
    assert done.stderr.startswith("error: no answer after 1 turn: ")
    assert done.stderr.count("\n") == 1
    said = json.loads(done.stdout)
    assert set(said) == FIELDS
    assert (said["answer"], said["evidence"], said["turns"]) == (None, [], 1)


@pytest.mark.slow
def test_loaded_once_asked_often(book, taught, asked, home) -> None:
    with Asker(taught, compile_cache=home) as asker:
        first = asker.ask(book, asked.question)
        again = asker.ask(read_workbook(book), f" {asked.question}\n")
        assert (first.answer, list(first.evidence)) == ("42", asked.evidence)
        assert (again.answer, again.evidence) == (first.answer, first.evidence)
        called, told, *_, last = first.transcript
        assert called.startswith("read_ranges(ranges=['Orders!A:C'")
        assert told.startswith("Orders!A1:C") and last == first.raw == "ANSWER: 42"
        assert dict(asker._engine.engine.traces) == {"append": 1, "decode": 1}
        with pytest.raises(AskError, match="question is empty"):
            asker.ask(book, "  ")
        with pytest.raises(AskError, match="tokens and the model holds 2,048; ask more briefly"):
            asker.ask(book, "why " * 3000)
        with pytest.raises(AskError, match="take at least [0-9,]+ tokens and the model holds"):
            asker.ask(book, "why " * 1_000_000)
        with pytest.raises(WorkbookError, match="isn't a file"):
            asker.ask("/dev/null", asked.question)
        assert asker.ask(book, asked.question).answer == "42"
    with pytest.raises(AskError, match="this asker is closed; make a new one"):
        asker.ask(book, asked.question)


@pytest.mark.slow
def test_formulas_without_results_are_told(blank, tmp_path, home, capsys) -> None:
    book = openpyxl.Workbook()
    lost = "=[1]Other!A1"  # in another file
    book.active["A1"], book.active["A2"], book.active["A3"] = lost, "=A1", "=1+1"
    for n in range(6):
        book.create_sheet(f"S{n}")["B2"] = lost
    path = tmp_path / "book.xlsx"
    book.save(path)
    words = ["ask", str(path), "How many?", "--checkpoint", str(blank), "--json"]
    assert cli.main(words) == 3  # random weights give no answer
    shown = capsys.readouterr()
    assert shown.err.splitlines()[0] == (
        f"warning: {path} holds 8 formulas without a stored result that can't be calculated "
        "here (Sheet: 2, S0: 1, S1: 1, S2: 1, S3: 1, 2 more sheets), read as empty; open it in a "
        "spreadsheet program and save it again"
    )
    counts = {"Sheet": 2} | {f"S{n}": 1 for n in range(6)}
    assert json.loads(shown.out)["uncalculated"] == counts


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("missing.xlsx", None, "no such workbook"),
        ("letter.xlsx", b"{\\rtf1 Dear Sir or Madam}", "is a PDF or text document"),
        ("page.xls", b"<html><table></table></html>", "is HTML, not a workbook"),
        ("cut.xlsx", "half", "is damaged"),
    ],
)
def test_a_bad_workbook_is_one_line(book, tmp_path, capsys, name, data, text) -> None:
    path = tmp_path / name
    if data is not None:
        whole = Path(book).read_bytes()
        path.write_bytes(whole[: len(whole) // 2] if data == "half" else data)
    assert cli.main(["ask", str(path), "How many?"]) == 1
    shown = capsys.readouterr()
    assert text in shown.err and str(path) in shown.err
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1 and shown.out == ""


@pytest.mark.slow
def test_other_kinds_of_files_are_asked_too(taught, asked, tmp_path, home, capsys) -> None:
    """The same question of a .csv that has another name."""
    path = tmp_path / "Orders.xlsx"
    path.write_text("order;region;units\nSO-1;West;12\nSO-2;East;7\nSO-3;West;30\n")
    words = ["ask", str(path), asked.question, "--checkpoint", str(taught), "--json"]
    assert cli.main(words) in (0, 3)
    shown = capsys.readouterr()
    assert shown.err.startswith(f"warning: {path}: the file is csv by its content, not xlsx\n")
    assert json.loads(shown.out)["tool_calls"] > 0


def test_an_unknown_checkpoint_is_one_line(book, tmp_path, capsys) -> None:
    assert cli.main(["ask", book, "How many?", "--checkpoint", str(tmp_path / "typo")]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: no checkpoint at ") and shown.count("\n") == 1
    assert "model/weights/tiny" in shown


def test_without_a_sandbox_nothing_is_asked(book, tmp_path, monkeypatch, capsys) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(sys, "executable", "")
    assert cli.main(["ask", book, "How many?", "--checkpoint", str(tmp_path)]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: run_python isn't available here: ") and shown.count("\n") == 1


def test_weights_that_do_not_load_are_one_line(book, blank, tmp_path, home, capsys) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(blank, folder)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:100])
    assert cli.main(["ask", book, "How many?", "--checkpoint", str(folder)]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: the checkpoint {folder} can't be loaded: ")
    assert shown.count("\n") == 1


def test_weights_that_are_not_finite_are_one_line(book, blank, tmp_path, home, capsys) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(blank, folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + np.float32("nan").tobytes())
    assert cli.main(["ask", book, "How many?", "--checkpoint", str(folder)]) == 1
    shown = capsys.readouterr().err
    assert "can't be loaded: its weights aren't all finite: NaN or infinity in 1 of" in shown
    assert shown.count("\n") == 1


def test_a_strange_tokenizer_is_one_line(book, blank, tokenizer, tmp_path, home, capsys) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(blank, folder)
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens([f"<word{n}>" for n in range(3000)])
    larger.save_pretrained(folder)
    assert cli.main(["ask", book, "How many?", "--checkpoint", str(folder)]) == 1
    shown = capsys.readouterr().err
    assert "knows 2,560 tokens and its tokenizer 3," in shown and shown.count("\n") == 1
    (folder / "tokenizer.json").write_text("{")
    assert cli.main(["ask", book, "How many?", "--checkpoint", str(folder)]) == 1
    assert "can't be loaded" in capsys.readouterr().err
    (folder / "tokenizer.json").unlink()
    assert cli.main(["ask", book, "How many?", "--checkpoint", str(folder)]) == 1
    assert "holds no tokenizer.json" in capsys.readouterr().err


def test_terminal_escapes_are_spelled_out() -> None:
    assert printable("café 12\x1b[2J\n\u202e\ud800") == "café 12\\x1b[2J\\n\\u202e\\ud800"


def test_importing_the_product_imports_no_jax() -> None:
    code = "import sys, fastask_jax.ask; print('jax' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "False False\n", done.stderr
