"""Studies and verifications of benchmarks/: tables and statistics of given numbers, and small runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import long_context
from benchmarks.harness.arguments import load_preset
from benchmarks.launches import Work, forecast
from benchmarks.methods import muon, random_ltd, retrieval, variants
from benchmarks.methods.retrieval import FILLER, KEYS, NOTES, VALUES, VOCABULARY, Study
from benchmarks.methods.variants import Trained
from benchmarks.verify import finetuning, long_step, precision
from megatron_llama.corpus.indexed_format import IndexedDataset
from tests.compiled import needs_compiler
from tests.cuda.log import Call
from tests.paths import ROOT
from tests.tools.inference.models import make_folder

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
    """Return a run with 0.5 TFLOP per step."""
    return Trained(seconds, [{"val_loss": loss, "tflops_per_device": 0.25, "step_time_s": 2.0} for loss in losses])


def test_table_compares_with_the_plain_run_of_the_same_seed() -> None:
    trained = {"plain": [run(30, None, 3.0), run(50, None, 3.2)], "less": [run(20, 2.9), run(34, 3.4)]}
    assert trained["plain"][0].validations == trained["plain"][0].records[1:]
    table = list(variants.comparison(("steps",), {"plain": ("2",), "less": ("1",)}, trained, 10.0))
    assert table[2] == "| plain | 2 | 1.00 (100%) | 3.1000 | | 30 | |"
    assert table[3] == "| less | 1 | 0.50 (50%) | 3.1500 | +0.0500 (-0.1000 to +0.2000) | 17 | 55% (50% to 60%) |"
    assert variants.gap([3.0], [2.5]) == "+0.5000"


def test_equal_work_is_counted_in_layer_tokens() -> None:
    ways = random_ltd.build_variants(30, 64)
    tokens = {name: random_ltd.layer_tokens(kind, steps, 64) for name, (kind, steps) in ways.items()}
    # 2 of 4 layers process fewer tokens in the first 20 steps: 64 + 192 n/20, rounded down to a multiple of 16.
    lengths = [64 + 192 * step // 20 // 16 * 16 for step in range(20)] + [256] * 10
    assert tokens["random-LTD, equal steps"] == 8 * sum(2 * 256 + 2 * length for length in lengths)
    assert tokens["plain"] == 8 * 30 * 4 * 256
    step = 8 * 4 * 256
    assert 0 <= tokens["plain, random-LTD's layer tokens"] - tokens["random-LTD, equal steps"] < step
    assert 0 <= tokens["random-LTD, plain's layer tokens"] - tokens["plain"] < step
    assert ways["random-LTD, plain's layer tokens"][1] > 30 > ways["plain, random-LTD's layer tokens"][1]


def test_finished_run_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[object, ...]] = []

    def program(*words: object) -> None:
        started.append(words)
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "val_loss": 2.0}) + "\n")

    monkeypatch.setattr(variants, "run_program", program)
    first, second = (variants.train(tmp_path, ["model=llama_2m"]) for _ in range(2))
    assert len(started) == 1 and first == second and first.records[0]["val_loss"] == 2.0


def test_tokens_to_a_loss_are_interpolated() -> None:
    losses = [None, 4.0, None, 3.0, 2.5]
    records = [{"consumed_tokens": 100 * step, "val_loss": loss} for step, loss in enumerate(losses)]
    run_ = Trained(1.0, records)
    assert muon.tokens_to(3.5, run_) == 200 and muon.tokens_to(3.0, run_) == 300 and muon.tokens_to(4.5, run_) == 100
    assert muon.tokens_to(2.0, run_) is None


def test_folder_names_have_no_spaces() -> None:
    assert variants.folder_name("ZeRO++: all three", 64, 1) == "zero_all_three-64-1"


def test_each_value_follows_from_the_note_of_its_key(tmp_path: Path) -> None:
    retrieval.write_set(tmp_path / "set", 3, 256, seed=1)
    tokens, masks = IndexedDataset(str(tmp_path / "set")), IndexedDataset(str(tmp_path / "set_mask"))
    for number in range(3):
        ids, mask = tokens.document(number).astype(int), masks.document(number)
        assert len(ids) == len(mask) == 257 and ids.max() < VOCABULARY
        notes = {int(each) // VALUES: int(each) % VALUES for each in ids[ids < NOTES]}
        assert sorted(notes) == list(range(KEYS)) and (ids >= VOCABULARY - FILLER).sum() >= 256 - 3 * KEYS
        learned = np.flatnonzero(mask)
        assert len(learned) == KEYS and learned[-1] == 255, "the last token of the example is no answer"
        assert {ids[at - 1] - NOTES: ids[at] - NOTES - KEYS for at in learned} == notes


def test_retrieval_in_a_short_form(tmp_path: Path) -> None:
    """Context parallelism does not change the losses; YaRN extends the trained weights by a factor of 4."""
    study = Study(tmp_path, 2048, short=2, long=2, extended=1)
    one = study.train("one", 128, 2, 1, retrieval.MODEL)
    two = study.train("two", 128, 2, 1, retrieval.MODEL, "trainer.cp=2")
    assert one.losses == pytest.approx(two.losses, abs=1e-5) and len(one.losses) == 2
    start = [*one.further(None), retrieval.YARN]
    unchanged = study.train("before", 512, 1, 1, start, *retrieval.UNCHANGED)
    assert unchanged.losses[0] < 2 * one.losses[-1]
    plan = (tmp_path / "before" / "plan.txt").read_text(encoding="utf-8")
    assert "yarn x 4" in plan and "sequence 512" in plan


RUNS = {
    "fp32": [[4.0 - step / 100 for step in range(100)], [4.1 - step / 100 for step in range(100)]],
    "bf16_pure": [[4.0 - step / 200 for step in range(100)], [4.1 - step / 200 + 0.02 for step in range(100)]],
}


def test_gaps_compare_with_the_first_precision_of_the_same_seed(tmp_path: Path) -> None:
    assert [gap.tolist() for gap in precision.gaps(RUNS, "fp32")] == [[0.0] * 91] * 2
    first, second = precision.gaps(RUNS, "bf16_pure")
    # The mean over the last 10 of 100 steps, 90 to 99, is the loss of step 94.5.
    assert first[-1] == pytest.approx(94.5 / 200) and second[-1] == pytest.approx(94.5 / 200 + 0.02)
    [head, _, _, row] = precision.table(RUNS, {name: [[], []] for name in RUNS})
    assert row == "| bf16_pure | 3.5875 (3.5275 to 3.6475) | +0.4825 (+0.4725 to +0.4925) |"
    assert "validation" not in head
    validated = {"fp32": [[4.0, 3.0], [4.0, 3.1]], "bf16_pure": [[4.0, 3.5], [4.0, 3.4]]}
    row = precision.table(RUNS, validated)[-1]
    assert row.endswith("(+0.4725 to +0.4925) | 3.4500 (3.4000 to 3.5000) | +0.4000 (+0.3000 to +0.5000) |")
    precision.draw(RUNS, tmp_path / "curves.png", "title")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_precision_with_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, ...]] = []

    def program(*words: str) -> None:
        started.append(words)
        folder = Path(words[-1].removeprefix("run.dir="))
        folder.mkdir()
        steps = [{"step": 1, "reduced_train_loss": 2.0, "val_loss": None}, {"step": 2, "reduced_train_loss": 1.5}]
        steps[1]["val_loss"] = 1.5 + len(started) / 10
        (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))

    monkeypatch.setattr(precision, "run_program", program)
    words = ["optim.lr=1e-3", "--seeds", "1", "2", "--output", str(tmp_path)]
    assert precision.main([*words, "--precisions", "fp32", "bf16 optim.state_bits=8 optim.lr=2e-3"]) == 0
    # Seeds run one after another, so that other load on the machine affects all precisions.
    eight = "bf16_optim_state_bits_8_optim_lr_2e_3"
    assert [Path(run[-1]).name for run in started] == ["fp32-1", f"{eight}-1", "fp32-2", f"{eight}-2"]
    words_of_run = started[1]
    assert words_of_run.index("optim.lr=1e-3") < words_of_run.index("optim.lr=2e-3")
    assert "optim.state_bits=8" in words_of_run
    assert "trainer.precision=bf16" in words_of_run and "trainer.seed=1" in words_of_run
    assert "optim.state_bits=8" not in started[0]
    page = (tmp_path / "precision.md").read_text()
    assert "seeds 1, 2" in page and "| 1.8000 (1.7000 to 1.9000) | +0.1000 (+0.1000 to +0.1000) |" in page


def test_failed_run_is_reported(tmp_path: Path) -> None:
    script = [sys.executable, "-m", "benchmarks.verify.precision", "--steps", "1", "--output", str(tmp_path)]
    done = subprocess.run([*script, "--precisions", "fp23"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "must be one of fp32, bf16" in done.stderr
    assert "fp23-1234: train.py ended with status 2" in done.stderr


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


ANSWERS = ("entailment", "not_entailment")


def share(right: int, of: int) -> dict[str, Any]:
    return {"right": right, "of": of, "share": right / of, "low": 0.25, "high": 0.75}


def test_table() -> None:
    chosen = {"entailment": {"there": 3, "chosen": 1}, "not_entailment": {"there": 5, "chosen": 7}}
    majority = {"label": "not_entailment", "share": 0.625}
    qnli = {"accuracy": share(4, 8), "majority": majority, "labels": chosen}
    gsm8k = {"well_formed": share(3, 4), "exact_match": share(1, 4)}
    names = ("qnli_before", "qnli_full", "qnli_lora")
    reports = dict.fromkeys(names, qnli) | dict.fromkeys(("gsm8k_before", "gsm8k_full"), gsm8k)
    lines = finetuning.table(reports).splitlines()
    assert "| always `not_entailment` | 62.5% | |" in lines
    assert "| lora | 50.0% (4 of 8; 25.0% to 75.0%) | entailment 1, not_entailment 7 |" in lines
    assert "| full | 75.0% (3 of 4; 25.0% to 75.0%) | 25.0% (1 of 4; 25.0% to 75.0%) |" in lines


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="trainer.compile=true on the CPU needs a C++ compiler, g++")
def test_fine_tuning_end_to_end_and_resume(tmp_path: Path) -> None:
    model = make_folder(tmp_path / "model", max_position_embeddings=512, hidden_size=64, intermediate_size=128)
    data = tmp_path / "data"
    data.mkdir()
    rows = [f"{n}\tWho was number {n}?\tA cat sat on mat {n}.\t{ANSWERS[n % 2]}" for n in range(160)]
    (data / "qnli_dev.tsv").write_text("\n".join(["index\tquestion\tsentence\tlabel", *rows]) + "\n")
    sums = [json.dumps({"question": f"{n} + 1?", "answer": f"It is {n + 1}.\n#### {n + 1}"}) for n in range(200)]
    for part in ("train", "test"):
        (data / f"gsm8k_{part}.jsonl").write_text("\n".join(sums) + "\n")
    output = tmp_path / "out"
    # The figure needs a validation, which runs every 50 steps.
    sizes = ("--split", "120,40", "--epochs", "4", "--gsm8k-steps", "50", "--questions", "4")
    script = [sys.executable, "-m", "benchmarks.verify.finetuning", "--model", str(model), "--data", str(data)]

    def run() -> subprocess.CompletedProcess[str]:
        command = [*script, "--output", str(output), *sizes]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=500, cwd=ROOT)

    done = run()
    assert done.returncode == 0, done.stderr[-3000:]
    assert (output / "finetuning.md").read_text() in done.stdout
    assert (output / "finetuning.png").read_bytes().startswith(b"\x89PNG")
    before, lora = (json.loads((output / f"qnli_{name}.json").read_text()) for name in ("before", "lora"))
    assert before["accuracy"]["of"] == lora["accuracy"]["of"] == 40
    written = {path: path.stat().st_mtime_ns for path in output.rglob("*.json*")}
    (output / "finetuning.md").unlink()
    repeated = run()
    assert repeated.returncode == 0, repeated.stderr[-3000:]
    assert (output / "finetuning.md").exists()
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*.json*")} == written
