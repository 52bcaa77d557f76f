"""Muon against a plain implementation and torch's, in layouts with equal gradients, and its division of the work."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz

from megatron_llama.config import load_config
from megatron_llama.devices import get_device
from megatron_llama.optim import build_optimizer
from megatron_llama.optim.muon import COEFFICIENTS, EPS, Muon, orthogonalized
from megatron_llama.parallel import build_model, process_groups
from megatron_llama.plan import Plan, resolve
from megatron_llama.plan.matrix_work import MatrixWork, newton_schulz_flops
from megatron_llama.plan.memory import optimizer_bytes
from tests.oracle import Tensors, assemble, distance, make_plan, rectangles
from tests.paths import CONF
from tests.ranks import run_ranks

MUON, STEPS, CLIP_NORM = "optim.name=muon", 3, 4.0
LAYOUTS = {
    "tp2": (2, ["trainer.tp=2"]),
    "tp4, kv heads < tp": (4, ["trainer.tp=4"]),
    "dp2, zero 0": (2, ["trainer.zero=0"]),
    "pp2·vpp2·dp2, zero 1": (4, ["trainer.pp=2", "trainer.vpp=2", "trainer.zero=1"]),
    "tp2·dp2, zero 2": (4, ["trainer.tp=2", "trainer.zero=2"]),
    "dp4, hybrid, zero 3": (4, ["trainer.zero=3", "trainer.shard_group=2", "trainer.micro_batch_size=1"]),
    "cp2·tp2, zero 3": (4, ["trainer.cp=2", "trainer.tp=2", "trainer.zero=3"]),
}
QUICK = ("tp2·dp2, zero 2", "dp4, hybrid, zero 3")


def gradient(step: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step + sum(name.encode())))


def train_with_given_gradients(rank: int, plan: Plan, skipped: bool = False) -> tuple[list[tuple], ...]:
    """Return initial weights, weights and momenta after STEPS updates with gradients that depend on the names only."""
    device, topology = get_device("cpu"), plan.topology(rank)
    with process_groups(plan, topology, device, torch.device("cpu")):
        model = build_model(plan, topology, device, torch.device("cpu"))
        optimizer = build_optimizer(plan, model)
        initial = rectangles(model, lambda shard: shard.local)
        for step in range(STEPS):
            for shard in model.trained:
                shard.parameter.grad = torch.zeros_like(shard.parameter)
                assert shard.grad is not None
                for part in shard.rectangles:
                    where = tuple(slice(o, o + n) for o, n in zip(part.offset, part.size, strict=True))
                    shard.grad[part.local_slices] = gradient(step, part.name, part.global_shape)[where]
            if skipped:
                optimizer.update(torch.tensor(CLIP_NORM), torch.tensor(True))
            else:
                optimizer.step(torch.tensor(CLIP_NORM))
        weights = rectangles(model, lambda shard: shard.local)
        momenta = [
            (part.name, part.global_shape, part.offset, values[part.local_slices].clone())
            for kind, shard, values in optimizer.states()
            if kind == "momentum_buffer"
            for part in shard.rectangles
        ]
        return initial, weights, momenta


@cache
def trained(ranks: int, *settings: str) -> tuple[Tensors, ...]:
    """Return the whole tensors of ``train_with_given_gradients``."""
    answers = run_ranks(train_with_given_gradients, ranks, make_plan(ranks, MUON, *settings))
    return tuple(assemble([answer[kind] for answer in answers])[0] for kind in range(3))


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
    initial, weights, _ = trained(1, *settings)
    rates = [rate_of(plan, step) for step in range(STEPS)]
    for name, start in initial.items():
        weight = start.double().requires_grad_()
        decay = 0.0 if name.endswith("norm.weight") else 0.1
        adamw = torch.optim.AdamW([weight], betas=(0.9, 0.95), eps=1e-6, weight_decay=decay)
        momentum = torch.zeros_like(weight)
        for step, rate in enumerate(rates):
            clipped = gradient(step, name, tuple(start.shape)).double() * (1.0 / (CLIP_NORM + 1e-6))
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
    from megatron_llama.optim.optimizer import build_schedule

    schedule = build_schedule(plan, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=plan.config.optim.peak_lr))
    schedule.last_epoch = step
    return float(schedule.get_lr()[0])


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_update_is_torch_muons(adjust: str) -> None:
    """torch multiplies in bf16, as Muon here with precision=bf16."""
    settings = ["trainer.precision=bf16", f"optim.adjust_lr={adjust}", "optim.matrix_lr=0.01"]
    plan = make_plan(1, MUON, *settings)
    initial, weights, momenta = trained(1, *settings)
    for name in filter(is_matrix, initial):
        weight = torch.nn.Parameter(initial[name].clone())
        muon = torch.optim.Muon([weight], momentum=0.95, weight_decay=0.1, adjust_lr_fn=adjust)
        for step in range(STEPS):
            muon.param_groups[0]["lr"] = rate_of(plan, step) * 0.01 / plan.config.optim.peak_lr
            weight.grad = gradient(step, name, tuple(weight.shape)) * (1.0 / (CLIP_NORM + 1e-6))
            muon.step()
        assert distance(muon.state[weight]["momentum_buffer"], momenta[name]) < 1e-6
        moved = (weight - initial[name]).detach()
        assert distance(weights[name] - initial[name], moved) < 0.01, name  # roundings of bf16


@pytest.mark.parametrize("shape", [(32, 32), (64, 24), (24, 64)])
def test_newton_schulz_is_torchs_and_orthogonal(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    theirs = _zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, EPS)
    assert distance(orthogonalized(matrix.bfloat16()).float(), theirs.float()) < 0.01
    values = torch.linalg.svdvals(orthogonalized(matrix))
    assert 0.6 < values.min() and values.max() < 1.25
    heads = orthogonalized(matrix, 2)
    assert torch.equal(heads, torch.cat([orthogonalized(part) for part in matrix.chunk(2)]))


@pytest.mark.parametrize("precision", ["fp32", "bf16_sr"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LAYOUTS]
)
def test_update_has_the_bits_of_one_process(name: str, precision: str) -> None:
    ranks, layout = LAYOUTS[name]
    settings = [f"trainer.precision={precision}"]
    one, other = trained(1, *settings), trained(ranks, *settings, *layout)
    for ours, expected in zip(other, one, strict=True):
        assert ours.keys() == expected.keys()
        assert [key for key, tensor in expected.items() if not torch.equal(ours[key], tensor)] == []
    assert sum(map(is_matrix, one[0])) == len(one[2]) == 28, "each matrix has a momentum, and no other weight"


def test_a_skipped_step_changes_nothing() -> None:
    plan = make_plan(2, MUON, "trainer.tp=2")
    for initial, weights, momenta in run_ranks(train_with_given_gradients, 2, plan, True):
        pairs = zip(initial, weights, strict=True)
        assert all(torch.equal(before[-1], after[-1]) for before, after in pairs)
        assert not any(values.any() for *_, values in momenta)


def _work(rank: int, plan: Plan) -> list[tuple[int, ...]]:
    """Return the shapes of the matrices that a rank orthogonalizes in a step."""
    import megatron_llama.optim.muon as module

    shapes: list[tuple[int, ...]] = []
    original = module.orthogonalized

    def counted(matrix: torch.Tensor, heads: int = 1) -> torch.Tensor:
        shapes.append(tuple(matrix.shape))
        return original(matrix, heads)

    module.orthogonalized = counted
    train_with_given_gradients(rank, plan)
    return shapes


def test_ranks_share_the_matrices() -> None:
    plan = make_plan(4, MUON, "trainer.tp=2", "trainer.zero=0")
    by_rank = run_ranks(_work, 4, plan)
    assert sum(map(len, by_rank)) == 28 * STEPS, "each matrix once"
    costs = [sum(newton_schulz_flops(shape) for shape in shapes) for shapes in by_rank]
    whole = sum(costs)
    assert max(costs) < 1.1 * whole / 4
    assert [sum(flops.values()) * STEPS for flops in MatrixWork(plan, 0).flops] == costs


def test_large_runs_balance_their_work() -> None:
    world = ["model=llama70b", "data=mock", "trainer.tp=8", "trainer.pp=4", "trainer.global_batch_size=1024"]
    plan, adamw = (resolve(load_config([*world, f"optim.name={name}"], CONF), 512) for name in ("muon", "adamw"))
    costs = [sum(flops.values()) for flops in MatrixWork(plan, 1).flops]
    largest = newton_schulz_flops((28672, 8192))  # no rank can have less than the mean or the largest matrix
    assert len(costs) == 128 and max(costs) <= 4 / 3 * max(largest, sum(costs) / 128)
    assert optimizer_bytes(plan, plan.stages[1]) < 0.51 * optimizer_bytes(adamw, adamw.stages[1])


def _state_bytes(rank: int, plan: Plan) -> int:
    device, topology = get_device("cpu"), plan.topology(rank)
    with process_groups(plan, topology, device, torch.device("cpu")):
        optimizer = build_optimizer(plan, build_model(plan, topology, device, torch.device("cpu")))
        assert isinstance(optimizer.inner, Muon)
        return sum(values.nbytes for _, _, values in optimizer.states())


@pytest.mark.parametrize("precision", ["fp32", "bf16_sr"])
def test_states_take_the_planned_bytes(precision: str) -> None:
    plan = make_plan(2, MUON, "trainer.tp=2", f"trainer.precision={precision}")
    assert run_ranks(_state_bytes, 2, plan) == [optimizer_bytes(plan, plan.stages[0])] * 2
    matrices = plan.stages[0].quantizable
    width = 4 if precision == "fp32" else 2
    assert optimizer_bytes(plan, plan.stages[0]) == width * (2 * plan.stages[0].held - matrices)
    assert math.isclose(matrices, 4 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32) / 2)
