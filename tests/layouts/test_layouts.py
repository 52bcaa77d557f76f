"""Promise 1: the layout never changes the result. docs/design/parity.md explains the method."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.verify.parity import exact_results
from megatron_llama.parallel import ParallelModel
from tests.compiled import skip_without_compiler
from tests.layouts import table, tampers
from tests.layouts.table import LAYOUTS
from tests.layouts.tampers import chunks_of_12, passes_of_the_compiled_loss
from tests.oracle import TOLERANCE, Result, Tamper, oracle, run_layout, worst
from tests.paths import ROOT
from tests.rows import rows

BF16 = "trainer.precision=bf16"
FULL_LENGTH = "trainer.random_ltd={min_value: 16, seq_per_step: 16}"
# Runs of one process whose sums have the same order as the oracle's: bit-identical. Settings of both, and settings.
BITWISE: dict[str, tuple[list[str], str]] = {
    "selective recompute": ([], table.SELECTIVE),
    "elementwise recompute": ([], table.ELEMENTWISE),
    "full recompute": ([], table.FULL),
    "selective recompute, bf16, window": ([BF16, table.WINDOW], table.SELECTIVE),
    "elementwise recompute, bf16, window": ([BF16, table.WINDOW], table.ELEMENTWISE),
    "full recompute, bf16, window": ([BF16, table.WINDOW], table.FULL),
    "selective recompute, random-LTD": ([table.DROPPING], table.SELECTIVE),
    "elementwise recompute, random-LTD": ([table.DROPPING], table.ELEMENTWISE),
    "full recompute, random-LTD": ([table.DROPPING], table.FULL),
    "random-LTD of the full length": ([], FULL_LENGTH),
    "offloaded": ([], table.OFFLOAD),
}


@cache
def trained(ranks: int, *overrides: str) -> Result:
    """Return the result of a row of the table, which several tests read."""
    return run_layout(ranks, *overrides)


@pytest.mark.parametrize(("ranks", "layout", "model"), rows({row[0]: row[1:] for row in LAYOUTS}.items(), table.QUICK))
@pytest.mark.usefixtures("compiled_here")
def test_layout_equals_one_process(ranks: int, layout: list[str], model: list[str]) -> None:
    skip_without_compiler(layout)
    result, expected = trained(ranks, *layout, *model), oracle(*model)
    for name, tensor in expected.initial.items():
        assert torch.equal(result.initial[name], tensor), f"initial {name} depends on the layout"
    differences = worst(result, expected)
    assert all(difference <= TOLERANCE for difference in differences.values()), differences
    if all(override.startswith(("trainer.pp=", "trainer.vpp=", "trainer.pipeline_layers=")) for override in layout):
        assert result.losses[0] == expected.losses[0], "stages compute as one process does"
    assert (result.fused > 0) == ("trainer.async_tp=true" in layout)


@pytest.mark.parametrize(("model", "setting"), BITWISE.values(), ids=BITWISE)
def test_same_order_of_sums_gives_the_same_bits(model: list[str], setting: str) -> None:
    assert set(worst(run_layout(1, *model, setting), oracle(*model)).values()) == {0.0}


def test_dropped_tokens_change_the_loss() -> None:
    assert worst(oracle(table.DROPPING), oracle())["losses"] > 1e-3


@pytest.mark.parametrize(
    ("ranks", "layout", "model"),
    [
        (1, [], []),
        (2, [table.TP2], [table.TIED, table.ODD]),
        (2, [table.TP2, table.NO_SP], []),
        (2, [table.PP2], [table.TIED]),
    ],
    ids=["one process", "tp2+sp, tied, odd vocabulary", "tp2", "pp2, tied"],
)
@pytest.mark.parametrize("how", [chunks_of_12, passes_of_the_compiled_loss])
def test_chunks_of_the_loss_change_nothing(ranks: int, layout: list[str], model: list[str], how: Tamper) -> None:
    differences = worst(run_layout(ranks, *layout, *model, tamper=how), oracle(*model))
    assert all(difference <= TOLERANCE for difference in differences.values()), differences


def same_everywhere(model: ParallelModel) -> None:
    for shard in model.shards:
        if shard.local.dim() == 2:
            shard.local.detach().normal_(0, 0.02, generator=torch.Generator().manual_seed(0))


def test_same_shard_on_all_ranks_is_detected() -> None:
    """The defect of that trainer: each rank initialises its shard as if it were alone."""
    result = run_layout(2, table.TP2, table.MICRO_4, steps=1, tamper=same_everywhere)
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(*result.initial[name].chunk(2, dim=1))
    assert not torch.equal(result.initial[name], oracle().initial[name])


def test_copies_were_compared() -> None:
    # The comparison needs replicas on several ranks: norms with tp, kv heads, ZeRO 0, tied embeddings.
    assert trained(2, table.TP2).copies > 0
    assert trained(2, "trainer.zero=0").copies > trained(2, "trainer.zero=1").copies == 0


def test_every_weight_moves() -> None:
    """In one process: the rows of the table equal it."""
    result = oracle()
    for name, before in result.initial.items():
        assert not torch.equal(before, result.weights[name]), f"{name} did not move"


def test_the_published_table_has_all_rows() -> None:
    """A new row of the table needs `python -m benchmarks.verify.parity --exact docs/results/exact.txt --rows NAME`."""
    page = (ROOT / "docs/results/parity.txt").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith("| ") and line.count("|") == 9]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    assert [row[0] for row in cells] == [name for name, *_ in LAYOUTS]
    assert [row[-1] for row in cells] == [table.rejection(layout, model) or "0" for _, _, layout, model in LAYOUTS]


def test_exact_mode_has_no_difference_in_any_published_row() -> None:
    """A new row of the table needs `python -m benchmarks.verify.exact --rows NAME`."""
    page = (ROOT / "docs/results/exact.txt").read_text(encoding="utf-8")
    assert exact_results(page) == {name: "0" for name, *_ in table.exact_rows()}
    head = "| layout | ranks | fp32 | bf16 |\n|---|---|---|---|\n"
    page = f"{head}| a | 2 | 0 | 3 tensors |\n| b | 2 | 0 | own |\n| c | 2 | – | – |\n"
    assert exact_results(page) == {"a": "3 tensors", "b": "0"}


BROKEN, STARS = table.read_rows("broken.txt")
NAMED = {f"{row[0]}, {' '.join([*row[2], *row[3]])}": row for row in BROKEN}
QUICK = {name for name, star in zip(NAMED, STARS, strict=True) if star}


@pytest.mark.parametrize(("tamper", "ranks", "layout", "model"), rows(NAMED.items(), QUICK))
@pytest.mark.usefixtures("compiled_here")
def test_oracle_goes_red(tamper: str, ranks: int, layout: list[str], model: list[str]) -> None:
    skip_without_compiler(layout)
    expected = oracle(*model)
    try:
        result = run_layout(ranks, *layout, *model, tamper=getattr(tampers, tamper))
    except AssertionError as failure:  # of a rank, or of copies that drifted apart
        assert "differ" in str(failure) or "disagree" in str(failure)
        return
    assert max(worst(result, expected).values()) > 5 * TOLERANCE


def test_every_fault_is_used_and_the_page_of_silent_bugs_names_tampers() -> None:
    files = [*Path(__file__).parent.parent.rglob("test_*.py")]
    used = " ".join([*NAMED, *(file.read_text(encoding="utf-8") for file in files)])
    defined = [name for name, value in vars(tampers).items() if getattr(value, "__module__", "") == tampers.__name__]
    defined = [name for name in defined if not name.startswith("_")]
    assert [name for name in defined if not re.search(rf"\b{name}\b", used)] == []
    page = (ROOT / "docs/design/silent_bugs.md").read_text()
    rows = re.findall(r"\| `(\w+)` \| `test_oracle_goes_red\[(.*?)\]`", page)
    assert len(rows) == 23 and {case for _, case in rows} <= {*NAMED}
    assert all(NAMED[case][0] == tamper for tamper, case in rows)
