"""The page in a real browser: nothing is cut, hover and tables have the values of the metrics, nothing is requested."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_llama.tools.report.cli import write_report
from megatron_llama.tools.report.curves import LOSS
from tests.browser import Browser, needs_browser, open_browser
from tests.tools.report.helpers import end_line, record, start_line, write_run

STRANGE = "<b>'\"&</script>"
SIZES = [(400, False), (400, True), (1400, False), (1400, True)]
CUT = Path(__file__).with_name("cut.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of three runs: one with another layout and a restart, one shorter, one with a strange name."""
    folder = tmp_path_factory.mktemp("report")
    starts = start_line(1.7e9, 0) + end_line(1.7e9 + 60, 30, 75, "stopped by SIGTERM") + start_line(1.7e9 + 90, 20)
    first = write_run(folder / "a_long_name_of_a_run_with_many_words_20261126", 60, {"trainer.pp": 2}, starts)
    second = write_run(folder / "short", 25, {"optim.lr": 0.001}, peak=1.0)
    third = write_run(folder / "odd" / STRANGE.replace("/", "-"), 60)
    samples = [{"prompt": "<i>", "text": "<i>" + STRANGE}]
    (third / "samples.json").write_text(json.dumps({"step": 60, "samples": samples}))
    write_report([first, second, third], folder / "page.html")
    return folder / "page.html"


def plot(browser: Browser, metric: str) -> dict[str, float]:
    """Scroll to a chart; return its place in the window."""
    place: dict[str, float] = browser.evaluate(
        f"(one => (one.scrollIntoView({{block: 'center'}}), one.getBoundingClientRect().toJSON()))"
        f"(document.querySelector('.plot[data-metric={metric}]'))"
    )
    return place


def tip(browser: Browser) -> dict[str, Any]:
    """Return text and place of the tip."""
    shown: dict[str, Any] = browser.evaluate(
        "(one => ({head: one.querySelector('b').textContent, box: one.getBoundingClientRect().toJSON(),"
        " values: [...one.querySelectorAll('.value')].map(value => value.textContent),"
        " names: [...one.querySelectorAll('em')].map(name => name.textContent)}))(document.querySelector('.tip'))"
    )
    return shown


@needs_browser
@pytest.mark.parametrize(("width", "dark"), SIZES)
def test_nothing_is_cut_and_nothing_is_requested(browser: Browser, page: Path, width: int, dark: bool) -> None:
    browser.open(page, width, dark=dark)
    assert browser.errors == [] and browser.requests == [page.as_uri()]
    browser.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    browser.settle()
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert browser.evaluate(CUT) == []
    count = "one => one.querySelectorAll('.curve').length"
    drawn = browser.evaluate(f"[...document.querySelectorAll('.plot')].map({count})")
    assert len(drawn) > 12 and min(drawn) > 0
    light = browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert light is not dark


@needs_browser
@pytest.mark.parametrize(
    "style",
    ["dl{width:500px}", "h1{margin-left:-20px}", "h1{white-space:nowrap;overflow:hidden}", ".plot text{font-size:9em}"],
)
def test_a_cut_element_would_be_seen(browser: Browser, page: Path, style: str) -> None:
    browser.open(page, 400)
    browser.evaluate(f"document.querySelector('style').append('{style}')")
    browser.settle()
    assert browser.evaluate(CUT) != []


@needs_browser
@pytest.mark.parametrize("width", [400, 1400])
def test_hover_shows_the_values_of_each_run(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width)
    for share, step in ((0.0, 1), (0.5, 0), (1.0, 60)):
        place = plot(browser, LOSS)
        left, right = place["left"] + 58, place["right"] - 14  # LEFT and RIGHT of charts.js
        browser.hover(left + share * (right - left), place["top"] + 60)
        shown = tip(browser)
        number = int(re.match(r"step (\d+), ", shown["head"])[1])  # type: ignore[index]
        assert number == step or not step
        assert shown["values"] == [f"{record(number)[LOSS]:.4f}"] * (3 if number <= 25 else 2)
        assert len(shown["names"]) == len(shown["values"])
        box = shown["box"]
        assert place["left"] <= box["left"] and box["right"] <= place["right"] and box["bottom"] <= place["bottom"]
    lines = browser.evaluate("[...document.querySelectorAll('.cross')].filter(one => one.getAttribute('d')).length")
    assert lines > 3, "all charts show the step"
    browser.hover(1, 1)
    assert browser.evaluate("document.querySelector('.tip')") is None


@needs_browser
def test_keys_move_the_cross(browser: Browser, page: Path) -> None:
    browser.open(page, 1400)
    browser.evaluate("document.querySelector('.plot').focus()")
    for name in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowRight"):
        browser.send("Input.dispatchKeyEvent", type="keyDown", key=name)
    assert tip(browser)["head"].startswith("step 2,")
    browser.send("Input.dispatchKeyEvent", type="keyDown", key="Escape")
    assert browser.evaluate("document.querySelector('.tip')") is None


@needs_browser
def test_axis_scale_and_runs_can_be_chosen(browser: Browser, page: Path) -> None:
    browser.open(page, 1400)
    labels = "[...document.querySelectorAll('.plot[data-metric=reduced_train_loss] text')].map(one => one.textContent)"
    curves = "document.querySelectorAll('.plot[data-metric=reduced_train_loss] path.curve').length"
    before = browser.evaluate(labels)
    assert "20" in before and browser.evaluate(curves) == 3
    browser.evaluate("document.querySelector('input[value=tokens]').click()")
    assert "10 k" in browser.evaluate(labels)
    browser.evaluate("document.querySelector('input[value=log]').click()")
    assert browser.evaluate(labels) != before
    browser.evaluate("document.querySelector('input[name=run]').click()")
    assert browser.evaluate(curves) == 2
    assert browser.errors == []


@needs_browser
def test_tables_have_the_values(browser: Browser, page: Path) -> None:
    browser.open(page, 1400)
    rows = browser.evaluate(
        "[...document.querySelector('figure').querySelectorAll('tbody tr')]"
        ".map(row => [...row.cells].map(cell => cell.textContent))"
    )
    assert len(rows) == 11 and rows[0][0] == "1" and rows[-1][0] == "60"
    for step, *values in rows:
        loss = f"{record(int(step))[LOSS]:.4f}"
        assert values == [loss, loss if int(step) <= 25 else "", loss]
    settings = browser.evaluate("document.querySelector('#settings').innerText")
    assert "trainer.pp" in settings and "optim.lr" in settings and "trainer.steps" in settings
    assert "model.name" not in settings


def test_text_of_a_run_is_no_html(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("</script>") == 2 and "<i>" not in text and "&lt;i&gt;" in text
    assert not re.search(r"https?://(?!www\.w3\.org/(2000/svg|1999/xlink))|<link|@import|url\((?!#)", text)
    assert "default-src 'none'" in text.partition("</head>")[0].replace("&#39;", "'")
    data = re.search(r'<script type="application/json" id="content">(.*?)</script>', text, re.DOTALL)
    assert data is not None and "<" not in data[1] and len(json.loads(data[1])["runs"]) == 3
    assert page.stat().st_mode & 0o077 == 0, "only the user may read settings"
