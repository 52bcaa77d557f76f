"""Exact mode: losses, norms, gradients, weights and states are bit-identical in every layout."""

from __future__ import annotations

import pytest
import torch

from megatron_llama.devices import get_device
from megatron_llama.parallel import ParallelModel
from megatron_llama.parallel.exact import gradients
from megatron_llama.parallel.exact.sums import Tree
from tests.layouts.table import BIAS_EPS, BIASES, EXACT, EXACT_QUICK, exact_rows
from tests.oracle import TOLERANCE, Result, oracle, run_layout, worst
from tests.rows import rows

BF16 = "trainer.precision=bf16"
ROWS, STEPS = exact_rows(), 20
KINDS = ("initial", "first_grads", "last_grads", "weights", "states")


@pytest.fixture(autouse=True, scope="module")
def loaded_kernels() -> None:
    """Load the C++ loops once, instead of in each forked rank."""
    kernels = get_device("cpu").kernels(compiled=False)
    kernels.add_to_grid_(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1), 1)


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


def other_order_of_blocks(model: ParallelModel) -> None:
    once = Tree.total

    def swapped(self: Tree, nodes: list[torch.Tensor], *, scatter: bool = False) -> torch.Tensor:
        # Three blocks and more: the sum of two does not depend on their order.
        return once(self, [nodes[-1], *nodes[:-1]], scatter=scatter)

    Tree.nodes = lambda self, leaves: [leaf.float() for leaf in leaves]  # type: ignore[method-assign]
    Tree.total = swapped  # type: ignore[method-assign]


def gradients_in_fp32(model: ParallelModel) -> None:
    exact: gradients.ExactSums = model.replicated  # type: ignore[assignment]
    for total in exact.totals.values():
        total.add = total_in_fp32(total)  # type: ignore[method-assign]


def total_in_fp32(total: gradients.Total) -> object:
    sums: dict[tuple, torch.Tensor] = {}

    def add(values: torch.Tensor, *where: slice) -> None:
        key = tuple((part.start, part.stop) for part in where)
        before = sums.get(key)
        sums[key] = values.float() if before is None else before + values
        total._buffer(values.device)[where] = (sums[key] * 2.0**50).to(torch.int64)

    return add


def test_another_order_of_one_sum_is_detected() -> None:
    assert differing(run_layout(1, EXACT, tamper=other_order_of_blocks), oracle(EXACT))


def test_rounded_sums_of_gradients_are_detected() -> None:
    expected = run_layout(1, EXACT, "trainer.micro_batch_size=1", steps=1)
    layout = "trainer.micro_batch_size=1", "trainer.zero=1"
    assert not differing(run_layout(2, EXACT, *layout, steps=1), expected)
    assert differing(run_layout(2, EXACT, *layout, steps=1, tamper=gradients_in_fp32), expected)
