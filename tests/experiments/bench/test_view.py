"""The benchmark of the run page: its last line, on a small run; and what has no browser."""

import json

import pytest

from experiments.bench import view
from experiments.bench.chromium import Browser, BrowserError, find_chromium


@pytest.mark.slow
@pytest.mark.skipif(find_chromium() is None, reason="no Chromium on this machine")
def test_the_bench_lists_a_run(capsys) -> None:
    view.main(["--episodes", "12", "--runs", "1"])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["bench"], line["unit"], line["episodes"]) == ("view", "s", 12)
    assert 0 < line["filter_seconds"] < line["value"] < 10


def test_a_browser_that_ends_is_told() -> None:
    with pytest.raises(BrowserError, match="the browser has ended"):
        Browser("/bin/true")


def test_without_a_browser_the_bench_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match="apt-get install chromium"):
        view.main([])
