"""Muon against a plain implementation and torch's, and the division of its work. test_layouts.py compares layouts."""

from __future__ import annotations

import pytest
import torch

from megatron_llama.config import load_config
from megatron_llama.optim import build_optimizer, muon
from megatron_llama.optim.muon import Muon
from megatron_llama.optim.optimizer import build_schedule
from megatron_llama.parallel import ParallelModel
from megatron_llama.plan import Plan, resolve
from megatron_llama.plan.memory import optimizer_bytes
from megatron_llama.plan.muon_division import MatrixWork, newton_schulz_flops
from tests.optim.given_gradients import NORM, STEPS, give_gradients, gradient, updated_alone
from tests.oracle import Tensors, distance, make_plan, on_ranks, on_ranks_by_plan
from tests.paths import CONF

MUON = "optim.name=muon"


def weights_of(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer.")}


def is_matrix(name: str) -> bool:
    return name.endswith("_proj.weight")


def plain_newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (matrix.square().sum().sqrt() + 1e-7)
    for _ in range(5):
        product = x @ x.T
        x = a * x + (b * product + c * product @ product) @ x
    return x


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("heads", [False, True], ids=["whole", "split heads"])
def test_update_is_the_plain_one(adjust: str, heads: bool) -> None:
    """A reference in fp64 in one process: Newton-Schulz per matrix, torch's AdamW for the other weights."""
    settings = [f"optim.adjust_lr={adjust}", "optim.matrix_lr=0.01", f"optim.split_heads={str(heads).lower()}"]
    plan = make_plan(1, MUON, *settings)
    initial, weights = updated_alone(MUON, *settings)
    rates = [rate_of(plan, step) for step in range(STEPS)]
    for name, start in weights_of(initial).items():
        weight = start.double().requires_grad_()
        decay = 0.0 if name.endswith("norm.weight") else 0.1
        adamw = torch.optim.AdamW([weight], betas=(0.9, 0.95), eps=1e-6, weight_decay=decay)
        momentum = torch.zeros_like(weight)
        for step, rate in enumerate(rates):
            clipped = gradient(step, name, tuple(start.shape)).double() * (1.0 / (NORM + 1e-6))
            if not is_matrix(name):
                weight.grad, adamw.param_groups[0]["lr"] = clipped, rate
                adamw.step()
                continue
            momentum = 0.95 * momentum + 0.05 * clipped
            nesterov = 0.05 * clipped + 0.95 * momentum
            parts = nesterov.split(8) if heads and name.split(".")[-2] in ("q_proj", "k_proj", "v_proj") else [nesterov]
            update = torch.cat([plain_newton_schulz(part) for part in parts])
            rows, columns = parts[0].shape
            scale = 0.2 * max(rows, columns) ** 0.5 if adjust != "original" else max(1, rows / columns) ** 0.5
            lr = rate * 0.01 / plan.config.optim.peak_lr
            weight = weight.detach() * (1 - lr * 0.1) - lr * scale * update
        assert distance(weights[name].double(), weight.detach()) < 1e-6, name


def rate_of(plan: Plan, step: int) -> float:
    schedule = build_schedule(plan, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=plan.config.optim.peak_lr))
    schedule.last_epoch = step
    return float(schedule.get_lr()[0])


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_update_is_torch_muons(adjust: str) -> None:
    """torch multiplies in bf16, as Muon here with precision=bf16."""
    settings = ["trainer.precision=bf16", f"optim.adjust_lr={adjust}", "optim.matrix_lr=0.01"]
    plan = make_plan(1, MUON, *settings)
    initial, final = updated_alone(MUON, *settings)
    for name in filter(is_matrix, weights_of(initial)):
        weight = torch.nn.Parameter(initial[name].clone())
        theirs = torch.optim.Muon([weight], momentum=0.95, weight_decay=0.1, adjust_lr_fn=adjust)
        for step in range(STEPS):
            theirs.param_groups[0]["lr"] = rate_of(plan, step) * 0.01 / plan.config.optim.peak_lr
            weight.grad = gradient(step, name, tuple(weight.shape)) * (1.0 / (NORM + 1e-6))
            theirs.step()
        assert distance(theirs.state[weight]["momentum_buffer"], final[f"optimizer.momentum_buffer.{name}"]) < 1e-6
        moved = (weight - initial[name]).detach()
        assert distance(final[name] - initial[name], moved) < 0.01, name  # roundings of bf16


def _work(plan: Plan, model: ParallelModel) -> list[tuple[int, ...]]:
    """Return the shapes of the matrices that a rank orthogonalizes in a step."""
    shapes: list[tuple[int, ...]] = []
    original = muon.orthogonalized

    def counted(matrix: torch.Tensor, heads: int = 1) -> torch.Tensor:
        shapes.append(tuple(matrix.shape))
        return original(matrix, heads)

    muon.orthogonalized = counted
    optimizer = build_optimizer(plan, model)
    give_gradients(model, 0)
    optimizer.step(torch.tensor(NORM))
    return shapes


def test_ranks_share_the_matrices() -> None:
    """A large run too balances its work."""
    plan = make_plan(4, MUON, "trainer.tp=2", "trainer.zero=0")
    by_rank = on_ranks(_work, plan)
    assert sum(map(len, by_rank)) == 28, "each matrix once"
    costs = [sum(newton_schulz_flops(shape) for shape in shapes) for shapes in by_rank]
    whole = sum(costs)
    assert max(costs) < 1.1 * whole / 4
    assert [sum(flops.values()) for flops in MatrixWork(plan, 0).flops] == costs
    world = ["model=llama70b", "data=mock", "trainer.tp=8", "trainer.pp=4", "trainer.global_batch_size=1024"]
    plan, adamw = (resolve(load_config([*world, f"optim.name={name}"], CONF), 512) for name in ("muon", "adamw"))
    costs = [sum(flops.values()) for flops in MatrixWork(plan, 1).flops]
    largest = newton_schulz_flops((28672, 8192))  # no rank can have less than the mean or the largest matrix
    assert len(costs) == 128 and max(costs) <= 4 / 3 * max(largest, sum(costs) / 128)
    assert optimizer_bytes(plan, plan.stages[1]) < 0.51 * optimizer_bytes(adamw, adamw.stages[1])


def _state_bytes(plan: Plan, model: ParallelModel) -> int:
    optimizer = build_optimizer(plan, model)
    assert isinstance(optimizer.inner, Muon)
    return sum(values.nbytes for _, _, values in optimizer.states())


def test_states_take_the_planned_bytes() -> None:
    widths = {"fp32": 4, "bf16_sr": 2}
    plans = [make_plan(2, MUON, "trainer.tp=2", f"trainer.precision={precision}") for precision in widths]
    sizes = [optimizer_bytes(plan, plan.stages[0]) for plan in plans]
    assert on_ranks_by_plan(_state_bytes, plans) == [sizes] * 2
    stage = plans[0].stages[0]
    assert sizes == [width * (2 * stage.held - stage.quantizable) for width in widths.values()]
    assert stage.quantizable == 4 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32) / 2
