"""metrics.jsonl, TensorBoard and the console report the same values; a file that a kill left is cut back cleanly; the
peak FLOP/s of MFU."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_llama.devices import Device, Peak, device_named, processor
from megatron_llama.parallel.compiling import WARM_UP_BATCHES
from megatron_llama.system.errors import MachineError
from megatron_llama.train import console
from megatron_llama.train import peak_flops as module
from megatron_llama.train.console import StepPrinter
from megatron_llama.train.loss_curve import draw_run
from megatron_llama.train.metrics import EVERY_STEP, SOME_STEPS, MetricsLogger
from megatron_llama.train.metrics_file import MetricsFile, read_metrics, read_run_records
from megatron_llama.train.peak_flops import PEAK_FILE, find_peak
from megatron_llama.train.sinks import tag_of
from tests.golden import GoldenFiles
from tests.oracle import CPU
from tests.paths import ROOT
from tests.ranks import run_ranks
from tests.train.steps import PEAK, STEPS, log_steps, measured, plan_of


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The scalars that TensorBoard would show."""
    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def test_tensorboard_says_what_the_file_says(tmp_path: Path) -> None:
    log_steps(plan_of(tmp_path))
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert all(tuple(record)[: len(EVERY_STEP)] == EVERY_STEP for record in records)
    assert [record["step"] for record in records if "val_loss" in record] == [4, 8, 12]
    shown = events(tmp_path)
    assert {*shown} == {tag for record in records for name in record if (tag := tag_of(name))}
    assert sorted(tag for tag in shown if "/" in tag) == [
        *("speed/throughput_peak", "speed/train_samples_per_second", "training/global_batch_size"),
        *("validation/val_loss", "waits/data_time_s"),
    ]
    for tag, points in shown.items():
        name = tag.rpartition("/")[2]
        written = [(record["step"], record[name]) for record in records if name in record]
        assert [step for step, _ in points] == [step for step, _ in written]
        # TensorBoard keeps single precision.
        assert [value for _, value in points] == pytest.approx([value for _, value in written], rel=1e-6)


def test_the_documentation_lists_every_metric_in_its_order() -> None:
    page = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [*EVERY_STEP, *SOME_STEPS]


def test_throughput_is_of_the_last_ten_steps(tmp_path: Path) -> None:
    log_steps(plan_of(tmp_path))
    last_ten = sum(0.5 * step for step in range(3, 13))
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["throughput"] == pytest.approx(10 * 8 / last_ten)


def test_metric_names_of_nemo_and_transformers(tmp_path: Path) -> None:
    with MetricsLogger(plan_of(tmp_path, "logging.tensorboard=false"), PEAK) as logger:
        for step, seconds in enumerate((8.0, 1.0, 1.0, 2.0, 4.0, 2.0), start=1):
            logger.log_step(measured(step, step_time_s=seconds, parameter_norm=42.0))
    assert not (tmp_path / "tensorboard").exists()
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["global_step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert {record["parameter_norm"] for record in records} == {42.0}
    assert [record["train_step_timing"] for record in records] == [8.0, 1.0, 1.0, 2.0, 4.0, 2.0]
    throughput = [8 / 8, 16 / 9, 24 / 10, 32 / 12, 40 / 16, 48 / 18]
    assert [record["throughput"] for record in records] == pytest.approx(throughput)
    peaks = [max(throughput[: step + 1]) for step in range(6)]
    assert [record["throughput_peak"] for record in records] == pytest.approx(peaks)
    assert ["train_samples_per_second" in record for record in records] == [False] * 3 + [True] * 3
    assert [record["train_samples_per_second"] for record in records[3:]] == pytest.approx([8 / 2, 16 / 6, 24 / 8])


def test_resume_keeps_the_throughput_peak_and_restarts_warm_up(tmp_path: Path) -> None:
    log_steps(plan_of(tmp_path), last=6)  # each step is slower: the first has the peak
    log_steps(plan_of(tmp_path), first=6)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert {record["throughput_peak"] for record in records} == {16.0}
    has = [record["step"] for record in records if "train_samples_per_second" in record]
    assert has == [4, 5, 9, 10, 11, 12], "the first three steps of each start warm up"


def test_no_number_is_null_and_no_point(tmp_path: Path) -> None:
    with MetricsLogger(plan_of(tmp_path), Peak(0.0, "unknown")) as logger:
        logger.log_step(measured(1, val_loss=math.nan))
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert "NaN" not in line, "which would be no JSON"
    assert json.loads(line)["mfu"] is None and json.loads(line)["val_loss"] is None
    assert "mfu" not in events(tmp_path) and "validation/val_loss" not in events(tmp_path)


def test_going_on_from_a_checkpoint_leaves_each_step_once(tmp_path: Path) -> None:
    log_steps(plan_of(tmp_path), last=9)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 10, "consumed_sam')  # the kill
    time.sleep(1)  # TensorBoard orders its files by the second, and files of one process by an unpadded number
    log_steps(plan_of(tmp_path), first=6)
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert [step for step, _ in events(tmp_path)["reduced_train_loss"]] == list(range(1, STEPS + 1))


LINES = [f'{{"step": {step}, "lr": 0.{step}}}\n' for step in (1, 2, 3)]


@pytest.mark.parametrize(
    ("text", "step", "left"),
    [
        ("".join(LINES), 3, 3),
        ("".join(LINES), 2, 2),
        ("".join(LINES), 0, 0),
        ("".join(LINES) + '{"step": 4, "l', 9, 3),
        ("".join(LINES[:2]) + LINES[2].rstrip("\n"), 9, 2),  # whole, but the end of the line was not written yet
        ("".join(LINES) + "\0" * 100, 9, 3),  # what some file systems leave after a power cut
        ("", 5, 0),
    ],
)
def test_cut_back(tmp_path: Path, text: str, step: int, left: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    MetricsFile(path, step).close()
    assert path.read_text() == "".join(LINES[:left])
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left"


@pytest.mark.parametrize(
    "rubbish", ["rubbish", '{"step": "2"}', '{"step": null}', "[" * 100_000, "[1]", "", '{"lr": 1}', "\0\0"]
)
def test_a_broken_line_in_the_middle_does_not_stop_a_run(
    tmp_path: Path, rubbish: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, text = tmp_path / "metrics.jsonl", LINES[0] + f"{rubbish}\n" * 3 + LINES[1] + LINES[2]
    path.write_text(text)
    MetricsFile(path, 2).close()
    assert path.read_text() == LINES[0] + LINES[1]
    (copy,) = (one for one in tmp_path.iterdir() if one != path)
    assert copy.read_text() == text, "nothing was thrown away"
    warning = capsys.readouterr().err
    assert "removed 3 invalid lines, first line 2" in warning and str(copy) in warning
    MetricsFile(path, 1).close()
    assert len(list(tmp_path.iterdir())) == 2 and not capsys.readouterr().err, "once"


def test_memory_of_a_resumed_run_does_not_grow_with_its_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 20_001)))
    tracemalloc.start()
    MetricsFile(path, 19_990).close()
    assert tracemalloc.get_traced_memory()[1] < path.stat().st_size / 2
    tracemalloc.stop()


def test_others_lines_do_not_spoil_the_end_of_a_run(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    log_steps(plan)
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 99}\n{"step": 100, "lr": "high", "mfu": 1}\n')
    assert len(read_run_records(path)) == STEPS and draw_run(plan) is not None


def test_a_pipe_is_no_file_of_metrics(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match="not a regular file"):
        MetricsFile(tmp_path / "metrics.jsonl", 2)


class FullDisk(io.FileIO):
    """A file that can grow by ``space`` bytes."""

    space = 7

    def write(self, data: Any) -> int:
        if not self.space:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = super().write(data[: self.space])
        self.space -= written
        return written


@pytest.mark.parametrize("space", [1000, 0])
def test_a_full_disk_gets_its_lines_later(space: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    file._file = disk = FullDisk(path, "a")  # type: ignore[assignment]
    for line in LINES:
        file.append(json.loads(line))
    assert path.read_text() == '{"step"'
    disk.space = space
    file.close()
    printed = capsys.readouterr().err
    assert printed.count("the disk is full; steps are written") == 1, "not at each step"
    assert ("the disk is full: 3" in printed) == (not space)
    assert path.read_text() == ("".join(LINES) if space else '{"step"')


def replace_folder(folder: Path) -> None:
    """Replace a folder by a new one."""
    shutil.rmtree(folder)
    folder.mkdir()


HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "file deleted": (lambda folder: (folder / "metrics.jsonl").unlink(), ""),
    "file renamed": (lambda folder: (folder / "metrics.jsonl").rename(folder / "old.jsonl"), ""),
    "file in a linked folder deleted": (lambda folder: (folder / "metrics.jsonl").unlink(), ""),
    "folder deleted": (shutil.rmtree, "was deleted"),
    "folder renamed": (lambda folder: folder.rename(folder.with_name("other")), "was .*renamed"),
    "folder replaced": (replace_folder, "was .*replaced"),
}


@pytest.mark.parametrize("name", HARMS)
def test_files_that_are_deleted_during_a_run(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    harm, reported = HARMS[name]
    folder = tmp_path / "run"
    (tmp_path / "scratch").mkdir()
    folder.symlink_to("scratch") if "linked" in name else folder.mkdir()
    file = MetricsFile(folder / "metrics.jsonl", 0)
    file.append({"step": 1})
    harm(folder)
    if reported:
        with pytest.raises(MachineError, match=f"{folder} {reported}"):
            file.append({"step": 2})
        return
    file.append({"step": 2})
    assert read_metrics(folder / "metrics.jsonl") == [{"step": 2}]
    assert "metrics.jsonl was deleted or replaced during the run" in capsys.readouterr().err


def shown(terminal: bool, every: int) -> str:
    """The console's output of a whole run."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100)
    progress = StepPrinter(STEPS, 0, every, console)
    progress.start()
    for step in range(1, STEPS + 1):
        more = {"val_loss": 0.25} if step == 7 else {}
        progress.step(measured(step, tokens_per_second=1234.5, mfu=0.345, **more), seconds_per_step=2.0)
    progress.stop()
    return file.getvalue()


def test_the_bar_fits_79_columns() -> None:
    file = io.StringIO()
    progress = StepPrinter(500_000, 0, 1, Console(file=file, force_terminal=True, width=100, color_system=None))
    progress.start()
    for step in (1, 400_000):
        progress.step(measured(step, tokens_per_second=1_234_567.0, mfu=0.345), seconds_per_step=9.0)
    progress.stop()
    lines = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", file.getvalue()).replace("\r", "\n").splitlines()
    assert max(map(len, (line.rstrip() for line in lines))) <= 79
    assert "10d 10:00 left" in lines[-1] and "tokens/s" in lines[-1]


@pytest.mark.parametrize("columns", ["0", "00", "10", "junk"])
def test_no_size_of_a_terminal_hides_the_lines(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    progress = StepPrinter(STEPS, 0, 1)
    progress.step(measured(1, tokens_per_second=1234.5, mfu=0.345), seconds_per_step=None)
    progress.print_lines(["the run ends"])
    assert capsys.readouterr().out.startswith("step 1/12  loss ")


def test_lines_of_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A step is a line, however narrow the console is. Steps that may compile are not in the time left."""
    page = f"every 5 steps\n{shown(terminal=False, every=5)}"
    file = io.StringIO()
    progress = StepPrinter(500_000, 0, 1, Console(file=file, force_terminal=False, width=40))
    progress.step(measured(400_000, tokens_per_second=1_234_567.0, mfu=0.345, val_loss=2.5), seconds_per_step=9.0)
    progress.step(measured(400_001, tokens_per_second=9.0, mfu=None, **{"rewards/margins": 0.25}), seconds_per_step=9.0)
    with monkeypatch.context() as patch:
        clock = iter((0, 20, 40, 60, 80))
        patch.setattr(console, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        for done in (0, 2, 4, 6, 8):
            progress.validation(done, 8)
    page += f"a narrow console\n{file.getvalue()}"
    for name, slow, setting in (
        ("resumed", 5, "trainer.zero=1"),
        ("compiled", WARM_UP_BATCHES, "trainer.compile=true"),
    ):
        first = 5 if name == "resumed" else 1
        with MetricsLogger(plan_of(tmp_path, setting), PEAK, start_step=first - 1) as logger:
            for step in range(first, first + 5):
                logger.log_step(measured(step, step_time_s=3600.0 if step <= slow else 2.0))
        page += f"{name}\n{capsys.readouterr().out}"
    assert "\x1b" not in page and "\r" not in page
    GoldenFiles.check("train/log.txt", page)


SOURCE = "measured, 1024 x 1024 float32 matmul, 4 threads on 2 cores"
RUNS = {
    "one step": ([{}], Peak(100e9, SOURCE)),
    "waiting for data": ([{"data_time_s": 100.0}, *[{"step_time_s": 1.0, "data_time_s": 0.2}] * 3], PEAK),
    "no data time": ([{"data_time_s": 100.0}, *[{"step_time_s": 1.0, "data_time_s": None}] * 3], PEAK),
    "padding": ([{"step_time_s": 0.5, "tokens": 1000, "attended": 100_000}], PEAK),
    "above the peak": ([{}] * 3, Peak(1e6, "measured, 512 x 512 float32 matmul")),
}


def test_summaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    page = ""
    for name, (steps, peak) in RUNS.items():
        with MetricsLogger(plan_of(Path("run")), peak) as logger:
            for step, values in enumerate(steps, start=1):
                logger.log_step(measured(step, **values))
            logger.finish()
        page += f"{name}\n\n{capsys.readouterr().out}\n"
    with MetricsLogger(plan_of(Path("run")), PEAK, start_step=2) as logger:
        logger.log_step(measured(3, step_time_s=0.2))
        logger.finish()
    page += f"resumed, speed of step 3\n\n{capsys.readouterr().out}\n"
    assert max(map(len, page.splitlines())) <= 120
    GoldenFiles.check("train/summaries.txt", page)


def test_a_picture_that_cannot_be_written_does_not_fail_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loss.png").mkdir()
    with MetricsLogger(plan_of(tmp_path), PEAK) as logger:
        logger.log_step(measured(1))
        logger.finish()
    text = capsys.readouterr().out
    assert "WARNING: loss.png was not written: Is a directory.\n" in text
    assert "loss curve" not in text and "peak memory" in text, "the summary follows"


def test_a_terminal_gets_one_line_that_is_redrawn() -> None:
    text = shown(terminal=True, every=1)
    assert "12/12" in text and "val loss" in text
    assert text.count("\n") <= 4, "the line stays where it is; only validation adds one"
    assert text.rstrip().endswith("\x1b[?25h"), "the cursor comes back"


def measuring(flops: float, **facts: str) -> Device:
    """A CPU whose measurement returns ``flops``."""

    class Measured(type(device_named("cpu"))):  # type: ignore[misc]
        def hardware(self) -> dict[str, str]:
            return {"processor": "A", **facts}

        def peak_flops(self, precision: str) -> Peak:
            return Peak(flops, "measured")

    return Measured()


def _peaks(rank: int, folder: Path, devices: list[Device], cores: int | None = None, *overrides: str) -> list[Peak]:
    """Return the peaks that a rank finds with each device, one after another. ``cores``: also its threads."""
    if cores is not None:
        module.usable_cores = lambda: [*range(cores)]
        torch.set_num_threads(cores)
    return [find_peak(plan_of(folder, *overrides), device, CPU) for device in devices]


def _flops(folder: Path, *devices: Device) -> list[float]:
    """Return the FLOP/s of two ranks, as if each had a core."""
    share = min(1.0, len(module.usable_cores()) / 2)
    one, other = run_ranks(_peaks, 2, folder, [*devices])
    assert one == other, "on all ranks"
    return [peak.flops / share for peak in one]


def test_a_resumed_run_keeps_its_measured_peak(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A first start, and later ones on a busy host and on another processor."""
    peaks = _flops(tmp_path, measuring(90e9), measuring(12e9), measuring(12e9, processor="B"))
    assert peaks == pytest.approx([90e9, 90e9, 12e9])
    assert "MFU: measuring the peak again: processor A -> B" in capfd.readouterr().err
    assert json.loads((tmp_path / PEAK_FILE).read_text())["conditions"]["processor"] == "B"


@pytest.mark.parametrize("text", ["", "[1", "{}", '{"flops": -1, "source": "x", "conditions": {}}', '{"flops": "x"}'])
def test_a_damaged_file_is_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / PEAK_FILE).write_text(text)
    assert _flops(tmp_path, measuring(50e9)) == pytest.approx([50e9])


def test_a_peak_below_a_step_of_the_run_is_replaced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _flops(tmp_path, measuring(1e6))
    log_steps(plan_of(tmp_path), last=2)
    assert _flops(tmp_path, measuring(50e9)) == pytest.approx([50e9])
    assert "GFLOP/s was saved" in capfd.readouterr().err


def test_peaks_of_ranks(tmp_path: Path) -> None:
    """Ranks that share cores share their FLOP/s; a set peak is not measured."""
    peaks = run_ranks(_peaks, 2, tmp_path, [measuring(1.0)], None, "device.peak_tflops=2")
    assert peaks == [[Peak(2e12, "device.peak_tflops")]] * 2 and not (tmp_path / PEAK_FILE).exists()
    peaks = run_ranks(_peaks, 2, tmp_path, [measuring(80e9)], 2)
    assert peaks == [[Peak(pytest.approx(40e9), "measured, 4 threads on 2 cores")]] * 2


def test_interrupted_measurements_do_not_lower_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([10e9, 11e9, 60e9, 12e9, 95e9, 20e9, 30e9, 40e9, 94e9, 12e9, *[1.0] * 99])
    monkeypatch.setattr(processor, "matmul_rate", lambda *_: next(rates))
    rate, size = processor.best_matmul_rate((512, 1024), torch.float32)
    assert (rate, size) == (95e9, 512), "measured until two rounds agree"
