"""The optimizer without master weights: bitwise equal to torch's update, then rounded once, equal in every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import megatron_llama.optim.low_precision as low_precision
from megatron_llama.arch.names import Rectangle
from megatron_llama.config.optimizers import OPTIMIZERS
from megatron_llama.devices import get_device
from megatron_llama.devices.cpu.kernels import CpuKernels
from megatron_llama.devices.kernels import EAGER, Kernels
from megatron_llama.optim import build_optimizer
from megatron_llama.optim.adam import adam_update, adamw_update
from megatron_llama.optim.low_precision import ElementwiseOptimizer, noise, round_stochastically, sgd_update, stream
from megatron_llama.parallel import build_model, process_groups
from megatron_llama.plan import Plan
from tests.optim.gradients import make_up_gradients
from tests.oracle import Tensors, assemble, make_plan
from tests.ranks import run_ranks

CPU = torch.device("cpu")
SEED, STEPS = 99, 3
SHAPE = (40, 33)
GROUP = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.9}
TORCH: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW([p], 0.01, (0.9, 0.95), 1e-8, 0.1, foreach=False),
    "adam": lambda p: torch.optim.Adam([p], 0.01, (0.9, 0.95), 1e-8, 0.1, foreach=False),
    "sgd": lambda p: torch.optim.SGD([p], 0.01, 0.9, weight_decay=0.1, foreach=False),
}
FORMULAS = {"adamw": adamw_update, "adam": adam_update, "sgd": sgd_update}
# Two rectangles of two tensors, as the merged projections have them; the second is not at its tensor's corner.
PIECES = [Rectangle("a", (30, 33), (0, 0), (0, 0), (30, 33)), Rectangle("b", (50, 66), (5, 33), (30, 0), (10, 33))]


def rounded(values: torch.Tensor, kind: str, step: int) -> torch.Tensor:
    """The expected rounding of a tensor that consists of PIECES."""
    number = torch.tensor(step, dtype=torch.int32)
    noises = [noise(stream(SEED, kind, p.name), number, p.offset, p.size, CPU) for p in PIECES]
    return round_stochastically(values, torch.cat(noises))


def elementwise(name: str, weight: torch.nn.Parameter, **settings: Any) -> ElementwiseOptimizer:
    """The optimizer of one weight, which consists of PIECES."""
    groups = [{"params": [weight], **GROUP}]
    settings = {"seed": SEED, "kernels": EAGER, **settings}
    return ElementwiseOptimizer(groups, OPTIMIZERS[name], FORMULAS[name], {weight: PIECES}, **settings)


@pytest.mark.parametrize("block", [1 << 16, 330])
@pytest.mark.parametrize("moments", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("stochastic", [True, False])
def test_before_rounding_it_is_torchs(
    name: str, moments: torch.dtype, stochastic: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuKernels, "rows_at_once", lambda kernels, width: block // width)
    generator = torch.Generator().manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(SHAPE, generator=generator).bfloat16())
    states = OPTIMIZERS[name].states
    ours = elementwise(name, weight, state_dtype=moments, stochastic=stochastic)
    factor = torch.tensor(0.37)
    for step in range(STEPS):
        gradient = torch.randn(SHAPE, generator=generator).bfloat16()
        reference = torch.nn.Parameter(weight.detach().float())
        theirs = TORCH[name](reference)
        theirs.state[reference] = {kind: ours.state[weight][kind].float().clone() for kind in states}
        theirs.state[reference]["step"] = torch.tensor(float(step))
        reference.grad = gradient.float() * factor  # clipped in fp32: once rounded, not twice
        theirs.step()
        weight.grad = gradient.clone()
        ours.step(factor=factor, skip=[None, torch.tensor(False)][step % 2])
        assert torch.equal(weight.grad, gradient)
        pairs = [("weight", weight.detach(), reference.detach())]
        pairs += [(kind, ours.state[weight][kind], theirs.state[reference][kind]) for kind in states]
        for kind, actual, exact in pairs:
            if actual.dtype == torch.float32:
                assert torch.equal(actual, exact), kind
            else:
                assert torch.equal(actual, rounded(exact, kind, step) if stochastic else exact.bfloat16()), kind
                assert not torch.equal(actual.float(), exact), "nothing was rounded, so nothing was tested"
    assert ours.state[weight]["step"] == STEPS
    before = [tensor.clone() for tensor in (weight, *ours.state[weight].values())]
    weight.grad = torch.full_like(weight, torch.nan)
    ours.step(factor=factor, skip=torch.tensor(True))
    ours.revert_step_count()
    assert all(map(torch.equal, before, (weight, *ours.state[weight].values()))), "skipped"


class Fusing(Kernels):
    """Kernels that round a rectangle in one function, and count its calls."""

    calls = 0

    def fuse(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def counted(*tensors: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return function(*tensors)

        return counted


@pytest.mark.parametrize("block", [1 << 16, 330])
def test_rounding_in_one_function_gives_the_same_weights(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    results, kernels = [], [EAGER, Fusing()]
    monkeypatch.setattr(Kernels, "rows_at_once", lambda _, width: max(1, block // width))
    for kernel in kernels:
        generator = torch.Generator().manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(40, 33, generator=generator).bfloat16())
        optimizer = elementwise("adamw", weight, state_dtype=torch.bfloat16, stochastic=True, kernels=kernel)
        for _ in range(3):
            weight.grad = torch.randn(40, 33, generator=generator).bfloat16()
            optimizer.step()
        results.append([weight.detach(), *(optimizer.state[weight][name] for name in ("exp_avg", "exp_avg_sq"))])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert isinstance(kernels[1], Fusing) and kernels[1].calls == 3 * 3 * (2 if block == 1 << 16 else 4)


def test_sgd_in_fp32_is_torchs() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(SHAPE, generator=generator))
    plain = torch.nn.Parameter(weight.detach().clone())
    ours = elementwise("sgd", weight, state_dtype=torch.float32, stochastic=False)
    theirs = TORCH["sgd"](plain)
    for step in range(STEPS):
        factor, gradient = torch.tensor(0.37), torch.randn(SHAPE, generator=generator)
        weight.grad, plain.grad = gradient, gradient * factor
        ours.step(factor=factor, skip=[None, torch.tensor(False)][step % 2])
        theirs.step()
        assert torch.equal(weight, plain)
        assert torch.equal(ours.state[weight]["momentum_buffer"], theirs.state[plain]["momentum_buffer"])


LAYOUTS = [
    (2, ["trainer.tp=2"]),
    (4, ["trainer.tp=4"]),  # ranks share kv heads
    (2, ["trainer.pp=2"]),
    *[(2, [f"trainer.zero={stage}"]) for stage in (0, 1, 2, 3)],
    (4, ["trainer.zero=3", "trainer.shard_group=2"]),
    (4, ["trainer.pp=2", "trainer.vpp=2", "trainer.zero=2"]),
]
PRECISIONS = ("bf16_sr", "fp32_OptStates")
ODD = "model.vocab_size=61"


@pytest.fixture(scope="module")
def one_process() -> list[tuple[Tensors, Tensors]]:
    return updated(1, [])


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS, ids=[" ".join(layout) for _, layout in LAYOUTS])
def test_the_same_gradients_give_the_same_bits_in_every_layout(
    ranks: int, layout: list[str], one_process: list[tuple[Tensors, Tensors]]
) -> None:
    for ours, expected in zip(updated(ranks, layout), one_process, strict=True):
        for actual, want in zip(ours, expected, strict=True):
            assert actual.keys() == want.keys()
            for name, tensor in want.items():
                assert torch.equal(actual[name], tensor), name


def test_noise_by_rank_would_be_seen(one_process: list[tuple[Tensors, Tensors]]) -> None:
    for layout in (["trainer.tp=2"], ["trainer.zero=0"], ["trainer.zero=1"]):
        try:
            ours = updated(2, layout, by_rank=True)
        except AssertionError as failure:
            assert "differ" in str(failure)  # copies drifted apart
            continue
        assert any(not torch.equal(ours[0][0][name], tensor) for name, tensor in one_process[0][0].items())


def test_run_twice(one_process: list[tuple[Tensors, Tensors]]) -> None:
    for ours, expected in zip(updated(1, []), one_process, strict=True):
        assert all(torch.equal(ours[0][name], tensor) for name, tensor in expected[0].items())


def test_the_norm_of_bf16_gradients_is_not_rounded() -> None:
    norm, exact = run_ranks(_norm, 1, make_plan(1, "trainer.precision=bf16_sr"))[0]
    assert norm == pytest.approx(exact, rel=1e-6)
    assert abs(norm - torch.tensor(exact).bfloat16().item()) > 1e-4 * norm  # a rounded one would differ


def _norm(rank: int, plan: Plan) -> tuple[float, float]:
    topology = plan.topology(rank)
    with process_groups(plan, topology, get_device("cpu"), CPU):
        model = build_model(plan, topology, get_device("cpu"), CPU)
        make_up_gradients(model, 0)
        assert all(shard.grad is not None and shard.grad.dtype == torch.bfloat16 for shard in model.shards)
        squares = sum(shard.grad.double().square().sum() for shard in model.shards if shard.grad is not None)
        return build_optimizer(plan, model).gradient_norm().item(), float(squares) ** 0.5


def updated(ranks: int, layout: list[str], by_rank: bool = False) -> list[tuple[Tensors, Tensors]]:
    """Weights and optimizer states after some updates, by precision; gradients depend only on name and position."""
    plans = [make_plan(ranks, *layout, f"trainer.precision={name}", ODD) for name in PRECISIONS]
    answers = run_ranks(_update, ranks, plans, by_rank)
    return [
        (assemble([rank[i][0] for rank in answers])[0], assemble([rank[i][1] for rank in answers])[0])
        for i in range(len(plans))
    ]


def _update(rank: int, plans: list[Plan], by_rank: bool) -> list[tuple[list, list]]:
    if by_rank:
        keys = stream
        low_precision.stream = lambda seed, *what: keys(seed + rank, *what)  # type: ignore[assignment]
    topology, actual = plans[0].topology(rank), []
    with process_groups(plans[0], topology, get_device("cpu"), CPU):
        for plan in plans:
            model = build_model(plan, topology, get_device("cpu"), CPU)
            optimizer = build_optimizer(plan, model)
            for step in range(STEPS):
                make_up_gradients(model, step)
                optimizer.step(torch.tensor(3.0))  # the norm of each layout would differ in the last bit
            entries = [("", shard, shard.local) for shard in model.shards]
            moments = list(optimizer.states())
            assert {shard.local.dtype for shard in model.shards} == {torch.bfloat16}
            actual.append((_named(entries), _named(moments)))
    return actual


def _named(entries: list) -> list[tuple]:
    return [
        (f"{kind}/{rectangle.name}", rectangle.global_shape, rectangle.offset, tensor[rectangle.local_slices].clone())
        for kind, shard, tensor in entries
        for rectangle in shard.rectangles
    ]
