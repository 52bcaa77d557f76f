"""Exact mode: losses, norms, gradients, weights and states are bit-identical in every layout."""

from __future__ import annotations

import pytest
import torch

from megatron_llama.devices import get_device
from tests.layouts import tampers
from tests.layouts.table import BIAS_EPS, BIASES, EXACT, EXACT_QUICK, exact_rows
from tests.oracle import TOLERANCE, Result, Tamper, oracle, run_layout, worst
from tests.rows import rows

BF16 = "trainer.precision=bf16"
ROWS, STEPS = exact_rows(), 20
KINDS = ("initial", "first_grads", "last_grads", "weights", "states")


@pytest.fixture(autouse=True, scope="module")
def loaded_kernels() -> None:
    """Load the C++ loops once, instead of in each forked rank."""
    get_device("cpu").kernels(compiled=False).add_to_grid_(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1), 1)


def differing(result: Result, expected: Result) -> list[str]:
    """Return the names of values with other bits."""
    names = [kind for kind in ("losses", "norms") if getattr(result, kind) != getattr(expected, kind)]
    for kind in KINDS:
        ours, theirs = getattr(result, kind), getattr(expected, kind)
        assert ours.keys() == theirs.keys()
        names += [f"{kind}: {name}" for name in theirs if not torch.equal(ours[name], theirs[name])]
    return names


@pytest.mark.parametrize(("ranks", "layout", "model"), rows(((row[0], row[1:]) for row in ROWS), EXACT_QUICK))
def test_every_layout_has_the_bits_of_one_process(ranks: int, layout: list[str], model: list[str]) -> None:
    expected = oracle(EXACT, *model)
    assert expected.states, "states were compared"
    assert not differing(run_layout(ranks, EXACT, *layout, *model), expected)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [[], [BF16]], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("ranks", "layout", "model"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_twenty_steps(ranks: int, layout: list[str], model: list[str], precision: list[str]) -> None:
    if precision and any(override.startswith("trainer.precision") for override in (*layout, *model)):
        pytest.skip("the row has its own precision")
    expected = run_layout(1, EXACT, *model, *precision, steps=STEPS)
    assert not differing(run_layout(ranks, EXACT, *layout, *model, *precision, steps=STEPS), expected)


@pytest.mark.parametrize(
    "layout",
    [["trainer.tp=2", "trainer.zero=3"], ["trainer.pp=2", "trainer.micro_batch_size=2"]],
    ids=["tp2·dp2, zero 3", "pp2·dp2"],
)
def test_bf16(layout: list[str]) -> None:
    assert not differing(run_layout(4, EXACT, BF16, *layout), oracle(EXACT, BF16))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ["optim.name=adam"],
        ["optim.name=sgd"],
        ["optim.name=muon"],
        ["optim.state_bits=8", "model.hidden_size=64"],
        ["trainer.precision=bf16_sr"],
        ["trainer.precision=bf16_pure"],
    ],
    ids=lambda settings: settings[0],
)
def test_other_optimizers_and_formats(settings: list[str]) -> None:
    expected = run_layout(1, EXACT, *settings, steps=STEPS)
    for ranks, layout in (
        (1, ["trainer.micro_batch_size=8"]),
        (4, ["trainer.tp=2", "trainer.zero=3"]),
        (4, ["trainer.pp=2", "trainer.vpp=2", "trainer.zero=2"]),
        (2, ["trainer.zero=0"]),
    ):
        assert not differing(run_layout(ranks, EXACT, *layout, *settings, steps=STEPS), expected), layout


def test_results_equal_the_usual_ones_within_rounding() -> None:
    model = *BIASES, BIAS_EPS
    differences = worst(oracle(EXACT, *model), oracle(*model))
    assert all(difference <= TOLERANCE for difference in differences.values()), differences


@pytest.mark.parametrize(
    ("tamper", "layout"),
    [(tampers.other_order_of_blocks, "trainer.tp=2"), (tampers.gradients_in_fp32, "trainer.zero=1")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_sums_in_another_order_and_rounded_sums_are_detected(tamper: Tamper, layout: str) -> None:
    expected = run_layout(1, EXACT, steps=1, tamper=tamper)
    assert differing(run_layout(2, EXACT, layout, steps=1, tamper=tamper), expected)
