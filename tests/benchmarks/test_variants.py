"""Studies of methods: gaps by seed, tables, and the number of steps of equal work, without training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.methods import muon, random_ltd, variants
from benchmarks.methods.variants import Trained


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
