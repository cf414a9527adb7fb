"""`fastask ask` with models elsewhere, as a shell sees it, over real HTTP and without JAX."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fastask_jax import cli
from fastask_jax.ask.choice import PolicyChoice
from tests.fastask_jax.policies.remote.scripted import Script, Turn, listening, units_of_west

ROOT = Path(__file__).parents[3]
KEY = "secret-key"


@pytest.fixture(scope="module")
def key(tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "key"
    file.write_text(KEY + "\n")
    return str(file)


def words(dialect, url, key):
    server = {
        "openai": ["--openai", url + "/v1"],
        "anthropic": ["--anthropic", "--anthropic-url", url + "/v1"],
    }[dialect]
    return [*server, "--model", "scripted", "--api-key-file", key]


@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
def test_an_answer_from_elsewhere(dialect, book, key, asked, home, capsys):
    with listening(Script(units_of_west()).app()) as url:
        given = words(dialect, url, key)
        assert cli.main(["ask", book, asked.question, *given]) == 0
        shown = capsys.readouterr()
        assert shown.out.splitlines()[:2] == ["42", "  read  Orders!A1:C4"] and shown.err == ""
        assert cli.main(["ask", book, asked.question, *given, "again?", "--json"]) == 0
        shown = capsys.readouterr()
    said = [json.loads(line) for line in shown.out.splitlines()]
    assert [(s["question"], s["value"]) for s in said] == [(asked.question, 42), ("again?", 42)]
    assert said[0]["policy"] == f"scripted at {url}/v1" and KEY not in shown.out + shown.err


def test_a_session_over_pipes_without_jax(book, key, asked, home):
    """Each line is answered before the next is sent; the workbook is read once."""
    with listening(Script(units_of_west()).app()) as url:
        command = [
            sys.executable, "-X", "importtime", "-m", "fastask_jax.cli", "ask", book,
            "--questions", "-", "--json", *words("openai", url, key),
        ]  # fmt: skip
        with subprocess.Popen(
            command, cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            for question in (asked.question, "and again?"):
                process.stdin.write(f"\n{question}\n")
                process.stdin.flush()
                assert json.loads(process.stdout.readline())["question"] == question
            out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "")
    loaded = {line.rpartition("|")[2].strip() for line in err.splitlines() if "|" in line}
    assert "httpx" in loaded and "jax" not in loaded


def test_some_questions_get_no_answer(book, key, home, tmp_path, capsys):
    script = Script([Turn(calls=(("get_workbook_metadata", {}),)), Turn("I can't say.")])
    file = tmp_path / "questions"
    file.write_text("first?\n\n  second?  \n")
    with listening(script.app()) as url:
        given = ["ask", book, "--questions", str(file), *words("openai", url, key)]
        assert cli.main(given) == 3
        shown = capsys.readouterr()
        blocks = shown.out.split("\n\n")
        assert len(blocks) == 2
        assert all(b.startswith("(no answer)\n  read  nothing\n  2 turns") for b in blocks)
        assert shown.err.splitlines() == [
            f"error: question {n}: no answer after 2 turns: the model ended without one; "
            "--trace FILE keeps what it did"
            for n in (1, 2)
        ]
        # One that can't be asked outweighs one without an answer, and isn't the end.
        assert cli.main(["ask", book, "first?", "  ", "third?", "--json", *given[4:]]) == 1
        shown = capsys.readouterr()
        first, second, third = map(json.loads, shown.out.splitlines())
        assert first["answer"] is third["answer"] is None and "is empty" in second["error"]
        assert cli.main(["ask", book, "first?", *given[4:]]) == 3
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.startswith("error: no answer after 2 turns")
        file.write_text("\n \n")
        assert cli.main(given) == 1
        assert "there is no question" in capsys.readouterr().err
        file.write_bytes(b"\xff\xfe?\n")
        assert cli.main(given) == 1
        assert "isn't text in UTF-8" in capsys.readouterr().err


def test_a_server_that_refuses_or_is_gone_is_one_line(book, key, home, monkeypatch, capsys):
    with listening(Script([], key="another").app()) as url:
        assert cli.main(["ask", book, "a?", "b?", *words("anthropic", url, key)]) == 1
    shown = capsys.readouterr()
    assert "wrong key; check the key" in shown.err and shown.err.count("\n") == 1
    assert shown.out == "" and KEY not in shown.err
    # What would be tried again for two minutes here: for none.
    monkeypatch.setattr("fastask_jax.policies.remote.policy.RemoteClient", impatient)
    assert cli.main(["ask", book, "a?", "b?", *words("openai", url, key)]) == 1
    shown = capsys.readouterr()
    assert "the question wasn't answered" in shown.err and shown.err.count("\n") == 1


def test_a_question_that_is_refused_is_not_the_end_of_the_others(book, key, home, tmp_path, capsys):
    """What a server says to one conversation alone; wrong keys end all, see above."""
    trace = tmp_path / "trace"
    refused = (400, {}, {"error": {"message": "maximum context length"}})
    with listening(Script([Turn("ANSWER: 1")], faults=[refused]).app()) as url:
        given = ["ask", book, "a?", "b?", *words("openai", url, key)]
        assert cli.main([*given, "--json", "--trace", str(trace)]) == 1
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert "maximum context length" in first["error"] and second["answer"] == "1"
    kept = [json.loads(line) for line in trace.read_text().splitlines()]
    ends = [(k["kind"], k["question"]) for k in kept if k["kind"] in ("error", "answer")]
    assert ends == [("error", 1), ("answer", 2)]


def test_a_file_of_questions_may_begin_with_a_mark(book, key, home, tmp_path, capsys):
    file = tmp_path / "questions"
    file.write_bytes(b"\xef\xbb\xbfa?\n")
    with listening(Script([Turn("ANSWER: 1")]).app()) as url:
        given = ["ask", book, "--questions", str(file), "--json", *words("openai", url, key)]
        assert cli.main(given) == 0
    assert json.loads(capsys.readouterr().out)["question"] == "a?"


def test_a_trace_is_appended_to_no_other_file(book, key, home, tmp_path, capsys):
    """Neither the workbook nor the questions, which would be asked for ever."""
    questions, trace = tmp_path / "questions", tmp_path / "trace"
    questions.write_text("a?\n")
    with listening(Script([Turn("ANSWER: 1")]).app()) as url:
        given = ["ask", book, "--questions", str(questions), *words("openai", url, key), "--trace"]
        for other in (book, str(questions)):
            before = Path(other).read_bytes()
            assert cli.main([*given, other]) == 1
            shown = capsys.readouterr().err
            assert f"{other} is no trace" in shown and shown.count("\n") == 1
            assert Path(other).read_bytes() == before
        trace.touch()
        for sessions in (1, 2):
            assert cli.main([*given, str(trace)]) == 0
            assert trace.read_text().count('"session"') == sessions


def test_an_answer_that_the_terminal_has_no_letters_for_is_not_lost(book, key, home, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", out)
    with listening(Script([Turn("ANSWER: Zoë")]).app()) as url:
        assert cli.main(["ask", book, "a?", *words("openai", url, key)]) == 0
    assert out.buffer.getvalue().startswith(b"Zo\\xeb\n")


def test_a_server_that_is_away_is_waited_for_no_longer_than_the_deadline():
    for deadline, retry in ((2.5, 2.5), (600.0, 120.0)):
        choice = PolicyChoice(openai="http://127.0.0.1:9/v1", model="m", deadline=deadline)
        with choice.open() as asker:
            assert asker._remote.config.retry == retry
    with pytest.raises(ValueError, match="deadline must be above 0"):
        PolicyChoice(openai="http://127.0.0.1:9/v1", model="m", deadline=-1).open()


def impatient(*arguments, **options):
    from fastask_jax.policies.remote.client import RemoteClient

    return RemoteClient(*arguments, **(options | {"retry": 0.0}))


@pytest.mark.parametrize(
    "given, said",
    [
        ([], "ask a QUESTION"),
        (["--json", "a?", "--trace"], "expected one argument"),
        (["a?", "--openai", "http://h", "--anthropic"], "give one of"),
        (["a?", "--openai", "http://h"], "--openai needs --model NAME"),
        (["a?", "--anthropic"], "--anthropic needs --model NAME"),
        (["a?", "--model", "m"], "--model goes with"),
        (["a?", "--prompt", "short"], "--prompt goes with"),
        (["a?", "--anthropic-url", "http://h"], "goes with --anthropic"),
        (["a?", "--temperature", "warm"], "invalid float"),
        (["a?", "--anthropic", "--model", "m", "--temperature", "nan"], "temperature must be 0"),
        (["a?", "--anthropic", "--model", "m", "--deadline", "nan"], "deadline must be above 0"),
        (["a?", "--anthropic", "--model", "m", "--deadline", "0"], "deadline must be above 0"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(given, said, book, capsys):
    assert cli.main(["ask", book, *given]) == 2
    shown = capsys.readouterr().err
    assert said in shown and shown.count("\n") == 1


def test_anthropic_without_a_key_is_told(book, home, monkeypatch, capsys):
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    assert cli.main(["ask", book, "a?", "--anthropic", "--model", "m"]) == 1
    shown = capsys.readouterr().err
    assert "set ANTHROPIC_API_KEY or give --api-key-file" in shown and shown.count("\n") == 1
    with pytest.raises(ValueError, match="address"):
        PolicyChoice(openai="nowhere", model="m").open()
