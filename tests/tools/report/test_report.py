"""Messages, outputs and exit status of scripts/report.py, and a run in progress."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron_llama.corpus.blend import BlendTimeline
from megatron_llama.launch.starts import Start
from megatron_llama.tools.report.cli import main, write_report
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
from tests.golden import GoldenFiles
from tests.tools.report.helpers import end_line, lines, start_line, write_run


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


def test_a_run_in_progress(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 10)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(next(lines(11))[:50])
    assert main([str(run)]) == 0
    assert "step 10 of 10" in (run / "report.html").read_text(encoding="utf-8")


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
    lines = start_line(1.7e9, 0) + start_line(1.7e9 + 60, 20) + end_line(1.7e9 + 90, 60, 0, "done")
    run = read_run(write_run(tmp_path / "run", 60, starts=lines + "oops\n" + start_line(1e300, None)), "run")
    assert [start.step for start in run.starts] == [0, 20, None]
    page = render([run])
    assert KILLED in page and "unknown time" in page and '"starts":[20]' in page
    assert "starts.jsonl has 1 invalid line, omitted here" in page


def test_strange_values_of_starts_are_written(tmp_path: Path) -> None:
    """Times of 400 digits, and names with a lone surrogate, which UTF-8 does not have."""
    strange = start_line(10**400, 0) + start_line(1.7e9, 0).replace('"command": "', '"command": "\\ud800')
    folder = write_run(tmp_path / "run", 3, starts=strange)
    write_report([folder], tmp_path / "page.html")
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
    runs = [read_run(write_run(tmp_path / f"run{number}", 3), f"run{number}") for number in range(10)]
    page = render(runs)
    assert page.count('"dashed":true') == 2 and page.count('<label class="c1">') == 2
    assert page.count('class="key dashed"') == 2 * 5, "card, legend, starts, data and plan"
