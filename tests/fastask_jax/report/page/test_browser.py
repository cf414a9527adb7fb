"""The page in a headless Chromium, opened from disk: what a person does with it."""

import json

import pytest

from experiments.bench.chromium import Browser, find_chromium
from fastask_jax.report.page import write_site
from fastask_jax.report.traces import read_traces

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine (apt-get install chromium)"
)
SHOWN = "document.querySelector('#main').dataset.shown"


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    """A browser, and the address of the page of both runs."""
    index = write_site(runs, tmp_path_factory.mktemp("page"))
    with Browser(CHROMIUM) as browser:
        yield browser, index.as_uri()


def texts(browser, selector):
    """The text of each element of a selector."""
    found = f"[...document.querySelectorAll({json.dumps(selector)})]"
    return browser.run(f"{found}.map(e => e.innerText)")


def choose(browser, name, value):
    browser.run(
        f"(() => {{ const e = document.querySelector('select[name={name}]');"
        f" e.value = {json.dumps(value)}; e.dispatchEvent(new Event('change')); }})()"
    )


def test_from_the_list_to_a_trajectory_with_its_cells_lit(page, runs) -> None:
    browser, address = page
    traces = [t for t in read_traces(runs[0])[:-1] if t["split"] == "train"]
    wrong = [t for t in traces if t["parts"]["correct"] == 0 and len(t["info"]["ranges"]) > 1]
    wanted = wrong[0]["info"]["type"]
    browser.open(f"{address}#/list")
    browser.wait("document.querySelector('.row')")
    choose(browser, "run", "0")
    choose(browser, "split", "train")
    choose(browser, "type", wanted)
    choose(browser, "outcome", "wrong")
    failures = [t for t in traces if t["info"]["type"] == wanted and t["parts"]["correct"] == 0]
    assert texts(browser, "output.total")[0].startswith(f"{len(failures)} of ")
    assert set(texts(browser, ".row .type")) == {wanted}
    assert set(browser.run("[...document.querySelectorAll('.row')].map(e => e.dataset.outcome)")) \
        == {"wrong"}  # fmt: skip
    # The filters are part of the address, so that a list can be sent to someone.
    assert f"type={wanted}" in browser.run("location.hash")

    browser.press("j", "k")
    browser.press("Enter")
    browser.wait(SHOWN)
    seen = None
    for place in range(len(failures)):  # newest first: down to one that has read something
        shown = browser.run(SHOWN)
        if browser.run("document.querySelectorAll('.sheet .lit').length"):
            seen = shown
            break
        browser.press("j")
        browser.wait(f"{SHOWN} && {SHOWN} !== {json.dumps(shown)}")
        assert texts(browser, ".where .dim")[0] == f"{place + 2} of {len(failures)}"
    assert seen is not None, "one of the failures has read cells"
    step, group, sample = seen.removeprefix("0/s").split("-")
    place = {"step": int(step), "group": int(group), "sample": int(sample)}
    [trace] = [t for t in failures if place.items() <= t.items()]
    ranges = browser.run("[...document.querySelectorAll('.lit')].map(e => e.dataset.range)")
    assert sorted(ranges) == sorted(trace["info"]["ranges"])
    # Each is a coloured area of the panel of its sheet, and the panel counts the cells.
    areas = browser.run(
        "[...document.querySelectorAll('.lit')].map(e => [e.getBoundingClientRect().width *"
        " e.getBoundingClientRect().height, getComputedStyle(e).fill])"
    )
    assert all(size > 4 and fill == "rgb(43, 95, 168)" for size, fill in areas)
    lit = browser.run("[...document.querySelectorAll('.sheet')].map(e => +e.dataset.lit)")
    assert 0 < sum(lit) <= trace["info"]["cells"]
    roles = browser.run("[...document.querySelectorAll('.sheet.decoy')].map(e => e.dataset.sheet)")
    assert roles == [name for name, _, _, role in trace["sheets"] if role == "decoy"]
    # The reward is taken apart, and its parts add up.
    rows = browser.run(
        "[...document.querySelectorAll('.reward tbody tr')].map(r => +r.lastChild.innerText)"
    )
    assert sum(rows) == pytest.approx(trace["reward"], abs=2e-3)
    # Every token that was sampled is there, and the less likely ones are shaded.
    replies = "".join(t["text"] for t in trace["turns"] if t["role"] == "reply")
    tokens = browser.run("[...document.querySelectorAll('.t')].map(e => e.textContent)")
    assert "".join(tokens) == replies
    shaded = browser.run(
        "[...document.querySelectorAll('.t')].map(e => +e.style.getPropertyValue('--s'))"
    )
    logprobs = [x for t in trace["turns"] if t["role"] == "reply" for x in t["logprobs"]]
    assert max(shaded) == pytest.approx(min(1, -min(logprobs) / 5), abs=0.02)

    browser.press("Escape")
    browser.wait("document.querySelector('.row.selected')")
    assert texts(browser, "output.total")[0].startswith(f"{len(failures)} of ")
    browser.press("/", "q")
    assert browser.run("document.querySelector('input[name=q]').value") == "q"
    assert not browser.problems


def test_two_runs_side_by_side(page, runs) -> None:
    browser, address = page
    browser.open("about:blank")
    browser.open(address)
    browser.wait("document.querySelector('#compare tbody tr')")
    rates = []
    for run in runs:
        last = sorted((run / "evals").glob("step_*.json"))[-1]
        records = json.loads(last.read_text())
        rates.append(sum(r["correct"] for r in records) / len(records))
    assert [float(t.split()[0]) for t in texts(browser, "#compare tr.total .value")] == [
        pytest.approx(100 * rate, abs=0.51) for rate in rates
    ]
    difference = texts(browser, "#compare tr.total .difference b")[0].replace("\u2212", "-")
    assert float(difference) == pytest.approx(100 * (rates[1] - rates[0]), abs=0.51)
    types = {r["type"] for r in records}
    shown = browser.run(
        "[...document.querySelectorAll('#compare tr[data-row]')].map(e => e.dataset.row)"
    )
    assert types <= set(shown)
    # Curves of both in one picture.
    assert browser.run("document.querySelector('.chart').querySelectorAll('path.line').length") == 2
    assert browser.run("document.querySelectorAll('.chart').length") >= 12
    for width in (1280, 390):
        browser.resize(width, 844)
        assert browser.run("document.documentElement.scrollWidth") <= width
    browser.resize(1280, 860)
    assert not browser.problems


def test_nothing_that_a_run_says_is_executed(page, runs) -> None:
    """Every text of the hostile trace is shown as text: in the list, in the trajectory, raw."""
    browser, address = page
    browser.open("about:blank")
    browser.open(f"{address}#/list?run=0&from=99")
    browser.wait("document.querySelector('.row')")
    assert "<img src=x" in texts(browser, ".row .question")[0]
    browser.press("Enter")
    browser.wait(SHOWN)
    before = browser.run("document.querySelectorAll('script, img, iframe').length")
    said = browser.run("document.querySelector('.said.reply .tokens').textContent")
    assert "</script><script>window.pwned = 1</script><img src=x onerror='window.p" in said
    assert "line\u2028separator\u2029paragraph\x00zero" in said
    assert texts(browser, ".more")[0].endswith("show all 300,000 characters")
    browser.run("document.querySelectorAll('.more').forEach(e => e.click())")
    browser.press("r")
    browser.wait(SHOWN)
    assert browser.run("document.querySelectorAll('script, img, iframe').length") == before
    # Markup that did get into the page would still not run: the page's policy.
    markup = '<img src=x onerror="window.pwned = 4"><svg onload="window.pwned = 5"></svg>'
    browser.run(f"document.body.insertAdjacentHTML('beforeend', {json.dumps(markup)})")
    browser.run("new Promise(done => setTimeout(done, 100))")
    assert browser.run("window.pwned === undefined && ({}).correct === undefined")
    for name in ("%ff", "../../x", "__proto__", "constructor"):
        browser.run(f"location.hash = '#/t/0/{name}'")
        browser.wait("document.querySelector('.empty')")
        browser.run(f"location.hash = '#/{name}'")
        browser.wait("document.querySelector('#compare')")
    assert not browser.problems
