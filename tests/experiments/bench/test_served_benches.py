"""The benchmarks of asks and malformed requests, but for their servers: those are in
tests/fastask_jax/serve/test_asks.py and on the command line."""

import io
import time
import zipfile

import pytest

from experiments.bench import asks, fuzz


def test_each_ask_has_a_workbook_of_its_own():
    found = asks.cases(3)
    assert len({case.book for case in found}) == 3 == len({case.task.id for case in found})
    for case in found:
        assert "xl/workbook.xml" in zipfile.ZipFile(io.BytesIO(case.book)).namelist()
    for wrong in ({"asks": 1}, {"asks": 257}, {"rounds": 0}):
        with pytest.raises(ValueError):
            asks.Config(**wrong)


def test_malformed_requests_follow_from_the_seed_and_reach_every_endpoint(monkeypatch):
    [case] = asks.cases(1)
    first, second = fuzz.Malformed(5, case.book), fuzz.Malformed(5, case.book)
    requests = [first() for _ in range(600)]
    later = time.localtime(time.time() + 3600)
    monkeypatch.setattr(time, "localtime", lambda *_: later)  # as archives would be stamped
    assert [r.as_bytes() for r in requests] == [second().as_bytes() for _ in range(600)]
    paths = {request.path for request in requests}
    assert {fuzz.GENERATE, fuzz.CHAT, fuzz.ASK, fuzz.WEIGHTS, "/v1/models", "/metrics"} <= paths
    assert len({request.as_bytes() for request in requests}) > 300
    assert any(request.raw for request in requests)
    with pytest.raises(ValueError):
        fuzz.Config(requests=0)
