"""Messages, outputs and exit status of scripts/report.py, and a run in progress."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_llama.cli import parse_overrides
from megatron_llama.config import to_yaml
from megatron_llama.corpus.blend import BlendTimeline
from megatron_llama.launch.start_log import Start
from megatron_llama.launch.world import find_world
from megatron_llama.plan import format_plan
from megatron_llama.tools.report.cli import main, write_report
from megatron_llama.tools.report.curves import LIMIT, LOSS, MOST_METRICS, Curve, read_run_metrics, smoothed
from megatron_llama.tools.report.page import render
from megatron_llama.tools.report.runs import (
    KILLED,
    SAMPLES_FILE,
    Run,
    describe_end,
    differing_settings,
    planned_shares,
    read_run,
    shares_of_record,
)
from tests.browser import Browser, needs_browser, open_browser
from tests.golden import GoldenFiles

TOKENS = 512
"""Tokens of a step."""


def record(step: int, **more: Any) -> dict[str, Any]:
    """Return the metrics of a step, with the keys of the trainer."""
    return {
        "step": step,
        "consumed_samples": 8 * step,
        "consumed_tokens": TOKENS * step,
        "global_batch_size": 8,
        "reduced_train_loss": round(2 + 4 * math.exp(-step / 50) + 0.1 * math.sin(step), 4),
        "lr": 3e-4 / (1 + step),
        "gradient_norm": 1 + 0.2 * math.cos(step),
        "throughput": 80.0,
        "tokens_per_second": 5000.0 + step % 7,
        "tflops_per_device": 0.02,
        "mfu": 0.15 + 0.001 * (step % 5),
        "mfu_full": 0.16,
        "step_time_s": 0.1,
        "data_time_s": 0.001,
        "peak_memory_bytes": 350 << 20,
        "global_step": step,
        "train_step_timing": 0.1,
        "throughput_peak": 90.0,
        **({"val_loss": 2 + 4 * math.exp(-step / 50), "val_token_accuracy": 0.3} if step % 10 == 0 else {}),
        **more,
    }


def write_run(
    folder: Path, steps: int = 60, settings: Mapping[str, Any] | None = None, starts: str = "", **more: Any
) -> Path:
    """Write metrics.jsonl, config.yaml, plan.txt and starts.jsonl of a run; return the folder.

    Args:
        more: Metrics that each step has in addition.
    """
    folder.mkdir(parents=True, exist_ok=True)
    overrides = [f"{name}={value}" for name, value in (settings or {}).items()]
    base = ["model=llama_2m", "data=mock", "device=cpu", "data.seq_length=64", "trainer.global_batch_size=8"]
    plan = find_world(parse_overrides([*base, f"trainer.steps={steps}", *overrides]), None).plan()
    (folder / "config.yaml").write_text(to_yaml(plan.config, plan.requested), encoding="utf-8")
    (folder / "plan.txt").write_text(format_plan(plan), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(lines(steps, **more)), encoding="utf-8")
    if starts:
        (folder / "starts.jsonl").write_text(starts, encoding="utf-8")
    return folder


def lines(steps: int, **more: Any) -> Iterator[str]:
    """Yield the lines of a metrics.jsonl."""
    for step in range(1, steps + 1):
        yield json.dumps(record(step, **more)) + "\n"


def start_line(time: float, step: int | None, **more: Any) -> str:
    known = {"event": "start", "time": time, "step": step, "command": "python train.py", "host": "elsewhere", "pid": 1}
    return json.dumps(known | more) + "\n"


def end_line(time: float, step: int, status: int, reason: str) -> str:
    """Return the line of an end in starts.jsonl."""
    return json.dumps({"event": "end", "time": time, "step": step, "status": status, "reason": reason}) + "\n"


def test_all_problems_are_reported_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x")
    for folder in ("other", "new", "empty"):
        Path(folder).mkdir()
    Path("new/config.yaml").write_text("{}")
    Path("empty/metrics.jsonl").write_text('oops\n{"step": 1, "red')
    write_run(Path("good"), 3)
    assert main(["none", "file", "other", "new", "empty", "good", "good", "--output", "."]) == 2
    GoldenFiles.check("tools/report/refused.txt", capsys.readouterr().err)
    assert not Path("good/report.html").exists()


def test_the_default_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("a/run", "b/run"):
        write_run(Path(folder), 3)
    assert main(["a/run"]) == 0 and (tmp_path / "a/run/report.html").is_file()
    assert main(["a/run", "b/run/"]) == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "a/run" in page and "b/run" in page, "equal names have their folders"
    assert main(["a/run", "--output", "new/page.html"]) == 0 and (tmp_path / "new/page.html").is_file()


@pytest.mark.parametrize("steps", [2000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_the_page_of_a_long_run_is_small(tmp_path: Path, steps: int) -> None:
    """The number of buckets is bounded; 2,000 steps fill the most."""
    more: dict[str, Any] = {f"more_{number}": number / 7 for number in range(20)}
    run = write_run(tmp_path / "run", steps, {"trainer.steps": steps}, **more)
    assert main([str(run)]) == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    assert len(page.encode()) < 3e6 and f"step {steps:,} of {steps:,}" in page
    assert "More metrics (27)" in page


def test_only_the_metrics_are_required(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "reduced_train_loss": 2.5}) + "\n")
    (run / "config.yaml").write_text("{[")
    (run / "samples.json").write_text("[]")
    (run / "starts.jsonl").mkdir()
    (run / "checkpoints/step_00000001").mkdir(parents=True)
    assert main([str(run)]) == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    for words in ("no settings: ", "no plan: plan.txt", "no samples: ", "no starts: ", "no data shares of step 1: "):
        assert f'class="note">{words}' in page, words


def test_a_layout_that_cannot_be_planned_has_no_picture(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 3, {"trainer.pp": 2})
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("num_attention_heads: 4", "num_attention_heads: 5"))
    assert main([str(run)]) == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    assert 'class="note">no picture of the pipeline: model.' in page, "the setting is named"


# --- facts of a run folder -------------------------------------------------------------------------------------------


def run_of(folder: Path, **settings: Any) -> Run:
    return read_run(write_run(folder, 5, settings), folder.name)


def test_shares_count_the_samples_of_each_dataset() -> None:
    timeline = BlendTimeline([]).switched(0, {"x/a": 3.0, "b": 1.0}).switched(40, {"b": 1.0, "c": 4.0})
    record = {"kind": "pretrain", "consumed_samples": 100, "segments": [asdict(one) for one in timeline.segments]}
    shares = shares_of_record(record, 25)
    counted = Counter(timeline.at(number)[0] for number in range(100))
    assert shares is not None and "step 25" in shares.label
    assert {row.path: row.read for row in shares.rows} == counted
    assert {row.name: row.planned for row in shares.rows} == {"a": 0.0, "b": 0.2, "c": 0.8}
    assert sum(row.share or 0 for row in shares.rows) == pytest.approx(1)
    mock = shares_of_record(record | {"kind": "mock"}, 25)
    assert mock is not None and not mock.rows and "random tokens" in mock.label
    tuned = shares_of_record({"kind": "sft", "consumed_samples": 8, "segments": [], "training": ["a", "b"]}, 1)
    assert tuned is not None and [row.path for row in tuned.rows] == ["a", "b"]
    assert shares_of_record({}, 1) is None


def test_without_a_checkpoint_the_shares_are_planned() -> None:
    shares = planned_shares({"data.prefixes": [30, "a", 10, "b"]})
    assert shares is not None and [(row.path, row.read, row.planned) for row in shares.rows] == [
        ("a", None, 0.75),
        ("b", None, 0.25),
    ]
    unweighted = planned_shares({"data.prefixes": ["a", "b"]})
    assert unweighted is not None and [row.planned for row in unweighted.rows] == [None, None]
    assert planned_shares({}) is None and planned_shares({"data.prefixes": ["x", 1]}) is None


def test_only_settings_with_several_values_differ(tmp_path: Path) -> None:
    runs = [run_of(tmp_path / "a"), run_of(tmp_path / "b", **{"optim.lr": 0.001, "trainer.dp": 2})]
    assert {name: values for name, values in differing_settings(runs).items() if "schedule" not in name} == {
        "trainer.dp": [1, 2],
        "trainer.shard_group": [1, 2],
        "optim.lr": [0.0003, 0.001],
        "optim.min_lr": [pytest.approx(3e-5), 1e-4],
    }
    lost = Run("c", tmp_path, runs[0].metrics)
    assert differing_settings([lost, runs[0]]) == {}, "a run without settings differs in none"


@pytest.mark.parametrize(
    ("start", "is_last", "words"),
    [
        (Start(0, ended=1, status=75, reason="stopped by SIGTERM"), False, "stopped by SIGTERM"),
        (Start(0, ended=1, status=3), True, "status 3"),
        (Start(0, host="", pid=0), True, KILLED),
        (Start(0, host="elsewhere", pid=1), False, KILLED),
        (Start(0, host="elsewhere", pid=1), True, "running on elsewhere, or killed"),
    ],
)
def test_the_end_of_a_start(start: Start, is_last: bool, words: str) -> None:
    assert describe_end(start, is_last) == words


def test_starts_are_listed_and_marked(tmp_path: Path) -> None:
    """Times of 400 digits and names with a lone surrogate are written."""
    lines = start_line(1.7e9, 0) + start_line(1.7e9 + 60, 20) + end_line(1.7e9 + 90, 60, 0, "done")
    run = read_run(write_run(tmp_path / "run", 60, starts=lines + "oops\n" + start_line(1e300, None)), "run")
    assert [start.step for start in run.starts] == [0, 20, None]
    page = render([run])
    assert KILLED in page and "unknown time" in page and '"starts":[20]' in page
    assert "starts.jsonl has 1 invalid line, omitted here" in page
    strange = start_line(10**400, 0) + start_line(1.7e9, 0).replace('"command": "', '"command": "\\ud800')
    write_report([write_run(tmp_path / "run", 3, starts=strange)], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "\\ud800" in page and "starts.jsonl has 1 invalid line" in page


def test_the_grid_has_all_ranks_in_their_groups(tmp_path: Path) -> None:
    settings = {"trainer.pp": 2, "trainer.dp": 3, "trainer.tp": 2, "trainer.global_batch_size": 12}
    page = render([run_of(tmp_path / "run", **settings)])
    assert "pp 2 × dp 3 × tp 2 = 12" in page and "pp 0, 2 layers" in page
    assert page.count('<span class="group"') == 6 and page.count('<span class="rank">') == 12
    assert 'title="dp 1"><span class="rank">2</span><span class="rank">3</span>' in page, "tp varies fastest"
    assert "bubble" in page and "stage 1" in page, "the pipeline's picture"


def test_the_picture_needs_no_tokenizer_and_no_device(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 5, {"trainer.pp": 2, "trainer.vpp": 2, "trainer.recompute": "full"})
    config = run / "config.yaml"
    text = config.read_text()
    changes = {"sample_prompts: []": "sample_prompts: [a]", "name: cpu": "name: cuda", "mock: true": "mock: false"}
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    config.write_text(text)
    page = render([read_run(run, "run")])
    assert "interleaved 1F1B, 2 chunks a stage" in page and "no picture" not in page


def test_a_huge_grid_is_shortened(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    run.settings |= {"trainer.tp": 8, "trainer.pp": 1, "trainer.dp": 1000}
    page = render([run])
    assert page.count('<span class="rank">') == 512 and "and 936 more replicas" in page
    run.settings |= {"trainer.tp": 1, "trainer.pp": 100_000, "trainer.dp": 1}
    page = render([run])
    assert page.count('<span class="rank">') == 512 and "and 99,488 more stages" in page
    run.settings |= {"trainer.tp": 10**9}
    assert "no picture of ranks and pipeline" in render([run])


def test_a_link_is_not_copied_into_the_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 3)
    (tmp_path / "secret").write_text("{'key': 's3cret'}")
    for name in ("plan.txt", SAMPLES_FILE):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(tmp_path / "secret")
    page = render([read_run(folder, "run")])
    assert "s3cret" not in page
    assert "plan.txt: is a link" in page
    assert f"{SAMPLES_FILE}: is a link" in page


def test_many_runs_repeat_the_colors_with_dashes(tmp_path: Path) -> None:
    page = render([read_run(write_run(tmp_path / f"run{number}", 3), f"run{number}") for number in range(10)])
    assert page.count('"dashed":true') == 2 and page.count('<label class="c1">') == 2
    assert page.count('class="key dashed"') == 2 * 5, "card, legend, starts, data and plan"


def curve_of(values: list[float], limit: int) -> Curve:
    steps = range(1, len(values) + 1)
    return Curve(steps, [10 * step for step in steps], {"x": np.array(values)}, limit)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 17, 1000])
def test_buckets_have_the_values_of_their_steps(count: int) -> None:
    values = np.random.default_rng(count).standard_normal(count).tolist()
    curve = curve_of(values, limit=8)
    assert len(curve.first) <= 8 and curve.width == 2 ** max(0, math.ceil(math.log2(count / 8)))
    assert curve.first == [1, *(step + 1 for step in curve.last[:-1])] and curve.last[-1] == count
    assert curve.tokens == [10 * step for step in curve.last]
    columns = [curve.column("x", number) for number in (1, 2, 3)]
    for first, last, mean, low, high in zip(curve.first, curve.last, *columns, strict=True):
        inside = values[first - 1 : last]
        assert mean == pytest.approx(statistics.mean(inside), rel=1e-4, abs=1e-6)
        assert (low, high) == pytest.approx((min(inside), max(inside)), rel=1e-5)


@pytest.mark.parametrize("limit", [4, 100])
def test_the_mean_over_steps(limit: int) -> None:
    curve = curve_of([float(step) for step in range(1, 33)], limit)  # with 4: buckets of 8 steps
    assert curve.mean("x", 9, 16) == 12.5 and curve.mean("x", 1, 32) == 16.5
    assert curve.mean("x", 10, 10) == (12.5 if limit == 4 else 10.0)
    assert curve.mean("x", 33, 99) is None and curve.mean("y", 1, 32) is None


def test_steps_with_gaps_and_missing_values() -> None:
    curve = Curve((5, 6, 90, 1000, 10**9), [None] * 5, {"x": np.array([1.0, 1.0, np.nan, 1.0, 1.0])}, limit=4)
    assert len(curve.last) <= 4 and curve.last[-1] == 10**9
    nan = math.nan
    curve = Curve([1, 2, 3], [None] * 3, {"x": np.array([nan, 2.0, nan]), "y": np.array([nan, nan, 3.0])})
    payload = curve.payload(["x", "y"])
    assert payload["series"] == {"x": {"mean": [None, 2.0, None]}, "y": {"mean": [None, None, 3.0]}}
    assert payload["tokens"] == [None] * 3


def test_curves_are_smoothed_and_keep_spikes() -> None:
    """The smoothing is that of loss.png."""
    values = [float(value) for value in np.random.default_rng(1).standard_normal(100)]
    smooth = smoothed([*values])
    assert smooth[:2] == [None, None] and smooth[-2:] == [None, None]  # a window of 5
    assert smooth[2] == pytest.approx(np.mean(values[:5]), rel=1e-5)
    assert smoothed([1.0, None, 3.0]) == [1.0, None, 3.0], "too short for a window"
    values = [1.0] * 5000
    values[3210] = 99.0
    assert max(filter(None, curve_of(values, 100).column("x", 3))) == 99.0


def read(folder: Path, text: str) -> Any:
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    return read_run_metrics(folder)


def test_totals(tmp_path: Path) -> None:
    metrics = read(tmp_path, "".join(lines(60)))
    records = [record(step) for step in range(1, 61)]
    assert metrics.count == 60 and metrics.last == records[-1] and metrics.notes == []
    assert metrics.first_loss == records[0][LOSS] and metrics.last_validation == records[-1]["val_loss"]
    assert metrics.best_validation == (records[-1]["val_loss"], 60)
    assert metrics.median_speed == statistics.median(each["tokens_per_second"] for each in records)
    assert metrics.seconds == pytest.approx(6.0) and metrics.peak_memory == 350 << 20
    assert metrics.validations.last == [10, 20, 30, 40, 50, 60]
    assert "val_loss" not in metrics.steps.names


def test_damaged_and_strange_metrics(tmp_path: Path) -> None:
    """An impossible MFU is not shown; the last line of a run in progress is no fault."""
    good = list(lines(4))
    text = good[0] + "{broken\n" + good[2] + good[1] + "[]\n" + json.dumps(record(4, reduced_train_loss=None)) + "\n"
    metrics = read(tmp_path, text + good[3][:40])
    assert metrics.steps.last == [1, 3, 4]
    invalid, repeated, unknown = metrics.notes
    assert "2 invalid lines" in invalid and "line 2 " in invalid
    assert repeated.startswith("1 line of metrics.jsonl repeat") and unknown == "1 step without a finite loss"
    metrics = read(tmp_path, "".join(lines(3, mfu=0.9)) + json.dumps(record(4, mfu=1.18)) + "\n")
    assert metrics.median_mfu is None and not {"mfu", "mfu_full"} & {*metrics.steps.names}
    assert [note.partition(":")[0] for note in metrics.notes] == ["MFU is unknown, with 1 step above 100 %"]
    assert read(tmp_path, "".join(lines(3)) + '{"step": 4, "redu').notes == []
    assert read(tmp_path, "").last == {}
    strange = {"step": 1e400, "a": math.nan, "b": math.inf, "c": True, "d": "x", "e": [1], "f": 10**400}
    huge = json.dumps(strange | {"step": 10**400})
    metrics = read(tmp_path, json.dumps(strange) + f"\n{huge}\n" + json.dumps(strange | {"step": 2, "lr": 1.0}) + "\n")
    assert metrics.steps.names == ["lr"] and metrics.count == 2
    many = {"step": 1} | {f"m{number}": 1.0 for number in range(200)}
    assert len(read(tmp_path, json.dumps(many) + "\n").steps.names) == MOST_METRICS
    assert LIMIT == 1000


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
