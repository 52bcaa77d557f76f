"""1-bit Adam against its published arithmetic, written down again without packing, and in layouts."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_llama.optim.onebit_adam import OneBitAdam
from megatron_llama.tools.forecast.step_time import sign_bytes
from tests.oracle import assemble, distance, make_plan, oracle, run_layout, train_rank
from tests.ranks import run_ranks
from tests.rows import read_layouts, rows

SIZES = ((7,), (33, 5), (64,), (1,))
STEPS, FREEZE = 8, 3
LR, BETAS, EPS, DECAY = 0.01, (0.9, 0.95), 1e-8, 0.1
Tensors = list[torch.Tensor]


def gradient(step: int, rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + number)
    return torch.randn(SIZES[number], generator=generator) * 10.0 ** (number - 1)


def initial() -> Tensors:
    return [torch.linspace(-1, 1, math.prod(size)).view(size) for size in SIZES]


def train(
    rank: int, ranks: int, steps: int, resume_at: int | None = None, poisoned: bool = False
) -> tuple[Tensors, Tensors, Tensors]:
    """(weights, momenta, errors) after some steps. At ``resume_at`` everything is put into a new optimizer. If
    ``poisoned`` each step follows a skipped step, in which rank 0 has a NaN gradient."""

    def make(values: Tensors) -> tuple[OneBitAdam, list[torch.nn.Parameter]]:
        weights = [torch.nn.Parameter(value.clone()) for value in values]
        groups = [{"params": weights[:3], "weight_decay": DECAY}, {"params": weights[3:], "weight_decay": 0.0}]
        assert dist.group.WORLD is not None
        inner = OneBitAdam(groups, dist.group.WORLD, lr=LR, betas=BETAS, eps=EPS, freeze_step=FREEZE)
        return inner, weights

    inner, weights = make(initial())
    for step in range(steps):
        if step == resume_at:
            before, errors = inner, inner.extra_states()
            old = weights
            inner, weights = make([weight.detach() for weight in weights])
            for ours, theirs in zip(weights, old, strict=True):
                inner.state[ours] = {kind: value.clone() for kind, value in before.state[theirs].items()}
            inner.load_extra_states(errors)
        for skip in (True, False) if poisoned else (None,):
            for number, weight in enumerate(weights):
                weight.grad = gradient(step, rank, number)
            if skip and rank == 0:
                weights[1].grad[0] = torch.nan  # type: ignore[index]
            inner.reduce_gradients()
            inner.step(skip=None if skip is None else torch.tensor(skip))
            if skip:
                inner.revert_step_count()
    momenta = [inner.state[weight]["exp_avg"] for weight in weights]
    exchange = inner.exchange
    return ([w.detach() for w in weights], momenta, [exchange.worker_error, exchange.server_error])


def reference(ranks: int, steps: int) -> tuple[Tensors, Tensors]:
    """DeepSpeed's OneBitAdam.step and NcclBackend.compressed_allreduce for all ranks at once, value by value."""
    weights = [weight.double() for weight in initial()]
    momenta, squares = ([torch.zeros(size, dtype=torch.float64) for size in SIZES] for _ in range(2))
    columns = [-(-math.prod(size) // (8 * ranks)) * 8 for size in SIZES]
    worker = [torch.zeros(ranks, ranks * width, dtype=torch.float64) for width in columns]
    server = [torch.zeros(ranks, width, dtype=torch.float64) for width in columns]

    def one_bit(values: torch.Tensor, count: int) -> torch.Tensor:
        scale = values[:count].norm() / math.sqrt(count) if count else torch.zeros(())
        signs = torch.where(values >= 0, 1.0, -1.0).double()
        signs[count:] = 0
        return signs * scale

    for step in range(steps):
        for n, size in enumerate(SIZES):
            shares = [gradient(step, rank, n).double() for rank in range(ranks)]
            count, width = math.prod(size), columns[n]
            if step < FREEZE:
                whole = torch.stack(shares).sum(dim=0)
                momenta[n] = BETAS[0] * momenta[n] + (1 - BETAS[0]) * whole
                squares[n] = BETAS[1] * squares[n] + (1 - BETAS[1]) * whole**2
            else:
                sent = []
                for rank in range(ranks):
                    local = torch.zeros(ranks * width, dtype=torch.float64)
                    local[:count] = (BETAS[0] * momenta[n] + (1 - BETAS[0]) * ranks * shares[rank]).flatten()
                    local += worker[n][rank]
                    sent.append(one_bit(local, count))
                    worker[n][rank] = local - sent[-1]
                mean = torch.stack(sent).mean(dim=0).view(ranks, width)
                averages = []
                for rank in range(ranks):
                    local = mean[rank] + server[n][rank]
                    averages.append(one_bit(local, min(max(count - rank * width, 0), width)))
                    server[n][rank] = local - averages[-1]
                momenta[n] = torch.cat(averages)[:count].view(size)
            update = momenta[n] / (squares[n].sqrt() + EPS) + (DECAY if n < 3 else 0.0) * weights[n]
            weights[n] = weights[n] - LR * update
    return weights, momenta


@pytest.mark.parametrize("ranks", [2, 3])
def test_it_is_the_published_arithmetic(ranks: int) -> None:
    actual = run_ranks(train, ranks, ranks, STEPS)
    weights, momenta = reference(ranks, STEPS)
    for rank in actual:
        for ours, exact in zip([*rank[0], *rank[1]], [*weights, *momenta], strict=True):
            assert torch.allclose(ours.double(), exact, rtol=1e-4, atol=1e-5), "against fp64"
    for ours, theirs in zip(actual[0][0], actual[1][0], strict=True):
        assert torch.equal(ours, theirs), "copies drift apart"


def test_a_resume_and_skipped_steps_change_no_bit() -> None:
    for plain, *others in run_ranks(_resumed_and_poisoned, 2):
        for other in others:
            for ours, theirs in zip(itertools.chain(*other), itertools.chain(*plain), strict=True):
                assert torch.equal(ours, theirs)


def _resumed_and_poisoned(rank: int) -> list[tuple[Tensors, Tensors, Tensors]]:
    return [train(rank, 2, STEPS), train(rank, 2, STEPS, resume_at=6), train(rank, 2, STEPS, poisoned=True)]


ONEBIT = ("optim.name=onebit_adam", "trainer.zero=0")
LAYOUTS, QUICK = read_layouts(__file__, "1-bit Adam")


@pytest.mark.parametrize(("ranks", "layout"), rows([*LAYOUTS.items()][:2], QUICK))
def test_the_warm_up_is_the_same_in_every_layout(ranks: int, layout: list[str]) -> None:
    warm_up = oracle(*ONEBIT, "optim.freeze_step=9")
    ours = run_layout(ranks, *ONEBIT, "optim.freeze_step=9", *layout)
    assert ours.losses == pytest.approx(warm_up.losses, rel=1e-5)
    assert ours.norms == pytest.approx(warm_up.norms, rel=1e-4)
    assert all(distance(ours.weights[k], exact) < 1e-4 for k, exact in warm_up.weights.items())


@pytest.mark.parametrize(("ranks", "layout"), rows(LAYOUTS.items(), QUICK))
def test_copies_stay_equal_and_the_loss_falls(ranks: int, layout: list[str]) -> None:
    plan = make_plan(ranks, *ONEBIT, "optim.freeze_step=2", "optim.lr=0.003", "optim=constant", *layout)
    answers = run_ranks(train_rank, ranks, plan, 8, None)
    losses, norms = answers[0][:2]
    assert all(answer[:2] == (losses, norms) for answer in answers)
    _, copies = assemble([answer[-1] for answer in answers])  # copies are bit-identical
    assert copies > 0
    assert all(math.isfinite(number) for number in (*losses, *norms)) and losses[-1] < losses[0]


class _Bytes(TorchDispatchMode):
    """Bytes that operators read and write, without views and collectives, and operators whose output size depends on
    data. On another device such an operator is a device-to-host sync."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        views = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        if func.namespace != "c10d" and not views:
            tensors = (each for each in tree_leaves((args, kwargs, out)) if isinstance(each, torch.Tensor))
            self.moved += sum(each.nbytes for each in tensors)
        self.waits += func is torch.ops.aten.repeat_interleave.Tensor and "output_size" not in (kwargs or {})
        return out


def _moved(rank: int) -> tuple[float, int]:
    values = 1 << 16
    weights = [torch.nn.Parameter(torch.ones(values // 4)) for _ in range(4)]
    groups = [{"params": weights, "weight_decay": DECAY}]
    assert dist.group.WORLD is not None
    inner = OneBitAdam(groups, dist.group.WORLD, lr=LR, betas=BETAS, eps=EPS, freeze_step=0)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    with _Bytes() as counter:
        inner.reduce_gradients()
        inner.step()
    return counter.moved / values, counter.waits


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_step_moves_the_bytes_that_the_forecast_counts(ranks: int) -> None:
    moved, waits = run_ranks(_moved, ranks)[0]
    assert moved == pytest.approx(sign_bytes(ranks), rel=0.01)
    assert waits == 0
