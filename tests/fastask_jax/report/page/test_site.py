"""The files of a page: escaping, exports, the server's refusals, the command."""

import http.client
import json
import re
import socket
import struct
import threading
import time
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastask_jax.cli import main
from fastask_jax.report.page import Site, write_site
from fastask_jax.report.page.server import PageServer
from fastask_jax.report.page.site import ASSETS, SCRIPTS, _script


def value_of(script: bytes):
    """What the page makes of a data file: first JavaScript's text, then JSON."""
    [(name, data)] = re.findall(rb"\Afastask\.put\('([^']*)','(.*)'\);\n\Z", script, re.DOTALL)
    text = re.sub(r"\\(['\\])", r"\1", data.decode("ascii"))
    return name.decode(), json.loads(text)


@given(st.recursive(
    st.text(st.characters(codec=None), max_size=30) | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
))  # fmt: skip
def test_data_files_carry_any_text_and_hold_no_markup(value) -> None:
    script = _script("r0-1", value)
    assert value_of(script) == ("r0-1", value)
    assert script.isascii() and b"<" not in script and script.count(b"\n") == 1
    # The text ends where it should: no quote inside is without its backslash.
    body = script.removesuffix(b"');\n").removeprefix(b"fastask.put('r0-1','")
    assert re.fullmatch(rb"(?:[^'\\]|\\['\\])*", body)


def test_a_run_may_be_called_as_the_page_marks_its_places(runs, tmp_path) -> None:
    named = tmp_path / "%SCRIPTS%%NONCE%"
    named.symlink_to(runs[1])
    page = Site([named]).file("index.html").decode()
    assert "<title>%SCRIPTS%%NONCE%</title>" in page and page.count("<script") == len(SCRIPTS) + 1


def test_an_export_is_complete_and_made_again_over_itself(runs, tmp_path) -> None:
    index = write_site(runs, tmp_path / "page")
    page = index.read_text()
    files = {str(f.relative_to(index.parent)) for f in index.parent.rglob("*") if f.is_file()}
    assert files == set(Site(runs).names())
    for name in re.findall(r'(?:src|href)="([^"]+)"', page):
        assert name in files or name == "data:,"
    # Nothing on the page, or in its scripts, comes from another host.
    for name in files - {f for f in files if f.startswith("data/")}:
        text = (index.parent / name).read_text()
        assert not re.search(r"https?:(?!//www\.w3\.org/2000/svg)", text), name
    assert all("innerHTML" not in (ASSETS / name).read_text() for name in SCRIPTS)
    write_site(runs[1:], tmp_path / "page")
    assert not list((tmp_path / "page" / "data").glob("r1-*"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("x")
    with pytest.raises(FileExistsError, match="holds other files"):
        write_site(runs, other)
    assert [f.name for f in other.iterdir()] == ["thesis.txt"]


def test_names_of_runs_tell_them_apart(runs) -> None:
    assert [run.name for run in Site(runs).runs] == ["first", "second"]
    assert len({run.name for run in Site([runs[0], runs[0]]).runs}) == 2
    with pytest.raises(ValueError, match="one run or two, not 3"):
        Site([runs[0]] * 3)


@contextmanager
def serving(site, host="127.0.0.1"):
    with PageServer(site, host) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, path, host=None, method="GET"):
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=10)
    headers = {"Host": host} if host is not None else {}
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body, answer


def test_the_server_answers_its_own_names_and_nothing_else(runs, tmp_path) -> None:
    site = Site([runs[0]])
    with serving(site) as server:
        assert server.server_address[0] == "127.0.0.1"
        status, page, answer = ask(server, "/")
        assert status == 200 and b"assets/main.js?g=" in page
        assert answer.getheader("X-Content-Type-Options") == "nosniff"
        generation = f"?g={site.generation}"
        assert ask(server, "/", method="HEAD")[:2] == (200, b"")
        for name in site.names()[1:]:
            assert ask(server, f"/{name}{generation}")[0] == 200
        for path in ("/../setup.py", "/assets/../run.py", "/assets/%2e%2e/run.py", "//etc/passwd",
                     "/data/r0-99999.js", "/data/r0--1.js", "/data/r0-01.js", "/config.json",
                     "/assets/", "/data/r0-%EF%BC%91.js", "/index.html/"):  # fmt: skip
            assert ask(server, path + generation)[0] == 404, path
        assert ask(server, "/", host="evil.example")[0] == 421
        assert ask(server, "/", host="localhost:1")[0] == 200
        assert ask(server, "/", method="POST")[0] == 501
        assert ask(server, "/data/runs.js?g=older")[0] == 409


def test_the_server_on_the_other_loopback(runs) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("no IPv6 here")
    with serving(Site([runs[0]]), "::1") as server:
        assert server.url == f"http://[::1]:{server.server_address[1]}/"
        for host in (None, "[::1]", "[::1]:80", "localhost:80"):
            assert ask(server, "/", host)[0] == 200, host
        for host in ("evil.example", "127.0.0.1", "[::2]:80", "::1"):
            assert ask(server, "/", host)[0] == 421, host


def test_a_client_that_breaks_off_or_asks_nonsense_leaves_the_terminal_alone(runs, capfd) -> None:
    with serving(Site([runs[0]])) as server:
        with socket.create_connection(server.server_address[:2], timeout=10) as odd:
            odd.sendall(b"GET http://[/ HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert odd.makefile("rb").readline().split()[1] == b"409"
        for request in (b"GET /ass", b"GET /assets/list.js HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            with socket.create_connection(server.server_address[:2]) as gone:
                gone.sendall(request)
                # Closed like this, it is reset.
                gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        time.sleep(0.2)
        assert ask(server, "/")[0] == 200
    assert capfd.readouterr().err == ""


def test_a_run_that_goes_on_is_read_again_with_the_page(tmp_path) -> None:
    traces = tmp_path / "traces.jsonl"
    traces.write_text('{"step": 1, "task": "t"}\n')
    site = Site([tmp_path])
    with serving(site) as server:
        old = f"?g={site.generation}"
        with traces.open("a") as file:
            file.write('{"step": 2, "task": "t"}\n')
        assert ask(server, "/data/r0-list.js" + old)[0] == 200
        assert ask(server, "/")[0] == 200
        status, body, _ = ask(server, "/data/r0-list.js" + old)
        assert status == 409 and b"reload the page" in body
        _, body, _ = ask(server, f"/data/r0-list.js?g={site.generation}")
        assert value_of(body)[1]["count"] == 2


def test_the_command(runs, tmp_path, capsys) -> None:
    assert main(["view", str(runs[0]), str(runs[1]), "--export", str(tmp_path / "page")]) == 0
    assert capsys.readouterr().out == f"open {tmp_path / 'page' / 'index.html'} in a browser\n"
    assert main(["view", str(tmp_path / "nothing")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["view", "a", "b", "c"]) == 2
    assert main(["view", str(runs[0]), "--port", "70000"]) == 2
