"""Studies and verifications of benchmarks/: tables and statistics of given numbers, and small runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import __main__, long_context, studies
from benchmarks.harness.arguments import load_preset
from benchmarks.launches import Work, forecast
from benchmarks.studies import STUDIES, Trained
from benchmarks.verify import long_step
from tests.compiled import needs_compiler
from tests.cuda.log import Call
from tests.paths import ROOT

LINES = (
    "KERNEL name=vectorized_elementwise_kernel grid=1,1,1 block=1 stream=0",
    "KERNEL name=triton_poi_fused_0 grid=1,1,1 block=1 stream=0",
    "MARK event=triton kernel=triton_poi_fused_0 bytes=500",
    "GEMM batches=1 shape=4096,16384,11008 types=14,14,14 compute=68 layout=NT stream=0",
    "ACCESS name=mm read=0x1,1000;0x2,2000 written=0x3,30 stream=0",
    "ACCESS name=add read=0x1,100;0x2,200 written=0x3,30 stream=0",
    "ACCESS name=_fused_adamw_ read=0x1,7 written= stream=0",
    "SYNC kind=stream stream=0",
    "COPY from=device to=host bytes=8 stream=0",
)
BLOCK = Work.of([Call.parse(f"0.0 1 {line}") for line in LINES])
NOTHING = Work.of([])


def test_calls_are_counted() -> None:
    assert BLOCK.launches == {"elementwise": 1, "Triton": 1, "matmul": 1} and BLOCK.waits == 1
    assert BLOCK.matmuls == {(4096, 16384, 11008): 1}
    assert BLOCK.megabytes(optimizer=False) == pytest.approx(830e-6)
    assert BLOCK.megabytes(optimizer=True) == pytest.approx(7e-6)
    assert (BLOCK - BLOCK).launches.total() == 0 and (BLOCK - NOTHING).moved == BLOCK.moved


def test_forecast_adds_what_a_step_loses() -> None:
    one, two = (forecast(BLOCK, NOTHING, 4096, "compiled", blocks) for blocks in (1, 2))
    # 2 m n k, and attention: three times 4 tokens keys width / 2 FLOPs, at 989 TFLOP/s.
    flops = 2 * 4096 * 16384 * 11008 + 3 * 4 * 16384 * 4096 * 4096 / 2
    assert one.ideal == pytest.approx(flops / 989e12) and two.ideal == pytest.approx(2 * one.ideal)
    assert min(one.lost.values()) >= 0 and one.mfu < two.mfu < 1, "host work once per step"
    assert one.lost["elementwise kernels of the blocks"] == pytest.approx(830 / (3.35e12 * 0.85))
    assert one.lost["gaps between kernels"] < forecast(BLOCK, NOTHING, 4096, "eager", 1).lost["gaps between kernels"]


MODEL = load_preset("llama_15m", None).model
LENGTHS = (1024, 4096, 16384)


def _points(cp: int, factor: float) -> list[dict[str, object]]:
    """Return points whose time follows the formula."""
    points = []
    for length in LENGTHS:
        seconds = factor * length / (1 - long_context.formula_share(MODEL, length, 0))
        points.append({"length": length, "window": 0, "cp": cp, "seconds": seconds, "times": [seconds]})
    return points


def test_attention_share_grows_with_the_length_up_to_the_window() -> None:
    shares = [long_context.formula_share(MODEL, length, 0) for length in LENGTHS]
    assert shares == sorted(shares) and 0 < shares[0] and shares[-1] < 1
    windowed = [long_context.formula_share(MODEL, length, 1024) for length in (65536, 131072)]
    assert windowed[0] == pytest.approx(windowed[1], rel=0.02)
    # 4/3 x 6 x 6 layers x 288 x 16384 for attention, 4/3 x 6 x 6 x 995,328 + 6 x 32,000 x 288 for the rest
    attention, rest = 8 * 6 * 288 * 16384, 8 * 6 * 995_328 + 6 * 32_000 * 288
    assert shares[-1] == pytest.approx(attention / (attention + rest))


def test_measured_shares_of_times_by_the_formula_equal_it() -> None:
    points = [*_points(1, 1e-3), *_points(2, 2e-3)]
    expected = [long_context.formula_share(MODEL, length, 0) for length in LENGTHS]
    assert long_context.measured_shares(MODEL, points) == pytest.approx([*expected, *expected])


def test_rows_and_picture(tmp_path: Path) -> None:
    points = [*_points(1, 1e-3), *_points(2, 2e-3)]
    rows = list(long_context.long_context_rows(MODEL, points))
    assert [row[4] for row in rows] == ["1.00"] * 3 + ["0.50"] * 3
    long_context.draw(points, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def run(seconds: float, *losses: float | None) -> Trained:
    """Return a run with 0.5 TFLOP and 100 tokens per step."""
    step = {"tflops_per_device": 0.25, "step_time_s": 2.0}
    return Trained(seconds, [{**step, "consumed_tokens": 100 * n, "val_loss": loss} for n, loss in enumerate(losses)])


def test_table_compares_with_the_first_variant_of_the_same_seed() -> None:
    names = list(STUDIES["random_ltd"].variants)[:2]
    runs = [[run(30, None, 3.0), run(50, None, 3.2)], [run(20, 2.9), run(34, 3.4)]]
    table = list(studies.table(STUDIES["random_ltd"], dict(zip(names, runs, strict=True))))
    assert table[2] == "| plain | 2 | 1.00 (100%) | 3.1000 | | 100% of 2 seeds | 0.00 | 40 | |"
    gap = "+0.0500 (-0.1000 to +0.2000)"
    shares = "67% (67% to 68%)"
    assert table[3] == f"| {names[1]} | 1 | 0.50 (50%) | 3.1500 | {gap} | 0% of 1 seeds | 0.00 | 27 | {shares} |"
    assert studies.gap([3.0], [2.5]) == "+0.5000" and __main__.STUDIES == tuple(STUDIES)


@pytest.mark.parametrize("name", STUDIES)
def test_each_variant_of_a_study_has_a_plan(name: str) -> None:
    study = STUDIES[name]
    assert all(studies.sent(study, variant) >= 0 for variant in study.variants.values())


def test_equal_work_is_counted_in_layer_tokens() -> None:
    study = replace(STUDIES["random_ltd"], steps=30)
    steps = {name: studies.steps_of(study, variant) for name, variant in study.variants.items()}
    tokens = {name: studies.layer_tokens(study, study.variants[name], steps[name]) for name in steps}
    # 2 of 4 layers process fewer tokens in the first 20 steps: 64 + 192 n/20, rounded down to a multiple of 16.
    lengths = [64 + 192 * step // 20 // 16 * 16 for step in range(20)] + [256] * 10
    assert tokens["random-LTD, equal steps"] == 8 * sum(2 * 256 + 2 * length for length in lengths)
    assert tokens["plain"] == 8 * 30 * 4 * 256
    step = 8 * 4 * 256
    assert 0 <= tokens["plain, random-LTD's layer tokens"] - tokens["random-LTD, equal steps"] < step
    assert 0 <= tokens["random-LTD, plain's layer tokens"] - tokens["plain"] < step
    assert steps["random-LTD, plain's layer tokens"] > 30 > steps["plain, random-LTD's layer tokens"]


def test_tokens_to_a_loss_are_interpolated() -> None:
    one = run(1.0, None, 4.0, None, 3.0, 2.5)
    assert one.tokens_to(3.5) == 200 and one.tokens_to(3.0) == 300 and one.tokens_to(4.5) == 100
    assert one.tokens_to(2.0) is None


def test_finished_run_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[object, ...]] = []

    def program(*words: object) -> None:
        started.append(words)
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "val_loss": 2.0}) + "\n")

    monkeypatch.setattr(studies, "run_program", program)
    first, second = (studies.train(tmp_path, ["model=llama_2m"]) for _ in range(2))
    assert len(started) == 1 and first == second and first.records[0]["val_loss"] == 2.0


def test_folder_names_have_no_spaces() -> None:
    assert studies.folder_name("ZeRO++: all three", 64, 1) == "zero_all_three-64-1"


def test_live_bytes_follow_tensors() -> None:
    before = long_step.live_bytes()
    tensor = torch.ones(16 << 20)
    assert abs(long_step.live_bytes() - before - tensor.nbytes) < 1 << 20


@pytest.mark.parametrize(
    ("status", "output", "expected"),
    [
        (1, "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes", True),
        (1, "RuntimeError: Connection closed by peer", False),
        (0, "MemoryError", False),
    ],
)
def test_only_a_refused_allocation_is_out_of_memory(status: int, output: str, expected: bool) -> None:
    assert long_step.out_of_memory(status, output) is expected


@pytest.mark.slow
def test_one_process_needs_more_memory_than_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert long_step.main(["--length", "8192", "--window", "1024", "--limit-mib", "1250"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[0])
    assert result["planned"] == pytest.approx(result["rehearsed"], rel=0.1)
    # The sampler misses peaks of some milliseconds.
    assert max(result["peaks"]) == pytest.approx(result["rehearsed"], rel=0.2)


SETTINGS = "model=llama_2m data=mock device=cpu data.seq_length=64 trainer.steps=3 trainer.precision=fp32".split()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiled", "bits"),
    [(False, None), (False, 8), pytest.param(True, None, marks=needs_compiler)],
    ids=["eager", "8-bit states", "compiled"],
)
def test_components_of_a_small_step(compiled: bool, bits: int | None, tmp_path: Path) -> None:
    """compile_strict also shows that the hooks cause no graph break."""
    compile_settings = f"trainer.compile=true trainer.compile_strict=true trainer.compile_cache={tmp_path / 'compiled'}"
    command = [sys.executable, str(ROOT / "benchmarks/verify/memory.py"), str(ROOT / "train.py"), *SETTINGS]
    command += [f"optim.state_bits={bits or 'null'}", f"run.dir={tmp_path / 'run'}"]
    command += compile_settings.split() if compiled else []
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    mib = {name: int(size) for name, size in re.findall(r"live at the peak: (.+?) +([\d,]+) MiB", done.stdout)}
    assert mib["weights"] == round(4 * 1_771_200 / 2**20)
    assert mib["optimizer states"] == round((2.25 if bits else 8) * 1_771_200 / 2**20)  # ignores the norms' 32 bits
    assert mib["weights"] + mib["optimizer states"] < mib["total"]
    assert mib["total"] == pytest.approx(sum(mib.values()) - mib["total"], abs=2)
