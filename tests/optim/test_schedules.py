"""Learning rate of every step, for our schedules and for schedules of other packages."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from megatron_llama.config import ConfigError
from megatron_llama.optim.optimizer import build_schedule
from megatron_llama.optim.schedules import CosineAnnealing, WarmupSchedule
from tests.oracle import make_plan

STEPS, WARMUP, CONSTANT, LOW = 100, 10, 20, 0.1
SHAPE = ("trainer.steps=100", "optim.lr=1", "optim.min_lr=0.1", "optim.warmup_steps=10")
SCHEDULES = ("cosine", "linear", "constant", "wsd")
# Step: rate, at the beginning and end of each part and in the middle of the decay.
GOLDEN = {
    ("cosine", 0): {0: 1 / 11, 9: 10 / 11, 10: 1.0, 55: 0.55, 100: LOW, 130: LOW},
    # With constant steps the warm-up is Megatron's, from zero.
    ("cosine", CONSTANT): {0: 0.0, 5: 0.5, 10: 1.0, 45: 0.55, 80: LOW, 99: LOW, 130: LOW},
    ("linear", 0): {0: 1 / 11, 10: 1.0, 55: 0.55, 82: 0.28, 100: LOW, 130: LOW},
    ("linear", CONSTANT): {0: 1 / 11, 10: 1.0, 45: 0.55, 80: LOW, 99: LOW},
    ("constant", 0): {0: 1 / 11, 9: 10 / 11, 10: 1.0, 99: 1.0, 130: 1.0},
    ("wsd", CONSTANT): {0: 1 / 11, 10: 1.0, 80: 1.0, 90: 0.55, 100: LOW, 130: LOW},
    ("wsd", 0): {0: 1 / 11, 10: 1.0, 99: 1.0, 130: 1.0},
}


def optimizer(lr: float = 1.0) -> torch.optim.Optimizer:
    """An optimizer with two groups as in training: with weight decay and without."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def rates_of(*overrides: str, steps: int = STEPS + 31) -> list[float]:
    """The learning rate of each optimizer step, from a user's overrides to the optimizer's groups."""
    plan = make_plan(1, *overrides)
    inner = optimizer(plan.config.optim.lr)
    return follow(build_schedule(plan, inner), inner, steps)


def follow(scheduler: torch.optim.lr_scheduler.LRScheduler, inner: torch.optim.Optimizer, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        rate, *others = scheduler.get_last_lr()
        assert [group["lr"] for group in inner.param_groups] == [rate, *others] and set(others) == {rate}
        rates.append(float(rate))
        inner.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(("name", "constant"), GOLDEN, ids=str)
def test_curve_and_no_jumps(name: str, constant: int) -> None:
    rates = rates_of(f"optim={name}", *SHAPE, f"optim.constant_steps={constant}")
    assert {step: rates[step] for step in GOLDEN[name, constant]} == pytest.approx(GOLDEN[name, constant])
    assert max(rates) == rates[WARMUP] == 1.0
    assert all(a < b for a, b in pairwise(rates[: WARMUP + 1]))
    assert all(a >= b for a, b in pairwise(rates[WARMUP:]))
    # The steepest that is meant: the warm-up, and the cosine's middle or the short decay of wsd.
    assert max(abs(a - b) for a, b in pairwise(rates)) <= 0.1 + 1e-12


@pytest.mark.parametrize("name", SCHEDULES)
def test_without_warm_up_begins_at_the_top(name: str) -> None:
    assert rates_of(f"optim={name}", *SHAPE, "optim.warmup_steps=0")[0] == 1.0


@pytest.mark.parametrize("name", SCHEDULES)
def test_going_on_from_a_saved_state_gives_the_same_curve(name: str) -> None:
    overrides = (f"optim={name}", *SHAPE)
    plan, inner = make_plan(1, *overrides), optimizer()
    first = build_schedule(plan, inner)
    follow(first, inner, 37)
    rebuilt, other = build_schedule(plan, other := optimizer()), other
    other.load_state_dict(inner.state_dict())
    rebuilt.load_state_dict(first.state_dict())
    assert follow(rebuilt, other, 20) == rates_of(*overrides)[37:57]


def test_invalid_schedules_are_refused() -> None:
    for kind in (CosineAnnealing, WarmupSchedule):
        with pytest.raises(ValueError, match=r"warm-up \(8\) and constant \(3\) steps exceed max_steps=10"):
            kind(optimizer(), max_steps=10, warmup_steps=8, constant_steps=3)
    plan = make_plan(1, "optim.schedule={_target_: torch.optim.lr_scheduler.ExponentialLR}")
    with pytest.raises(ConfigError, match=r"(?s)optim\.schedule.*gamma"):
        build_schedule(plan, optimizer())


def test_a_torch_scheduler_by_config_alone() -> None:
    target = "torch.optim.lr_scheduler"
    exponential = rates_of(f"optim.schedule={{_target_: {target}.ExponentialLR, gamma: 0.5}}", "optim.lr=1", steps=4)
    assert exponential == [1.0, 0.5, 0.25, 0.125]
    one_cycle = f"optim.schedule={{_target_: {target}.OneCycleLR, max_lr: 2, total_steps: '${{trainer.steps}}'}}"
    steps = 20
    rates = rates_of(one_cycle, f"trainer.steps={steps}", steps=steps)
    inner = optimizer()
    expected = follow(torch.optim.lr_scheduler.OneCycleLR(inner, max_lr=2, total_steps=steps), inner, steps)
    assert rates == expected and max(rates) == pytest.approx(2.0)


@pytest.mark.parametrize("constant", [0, CONSTANT])
@pytest.mark.parametrize("warmup", [0, WARMUP])
def test_nemo_gives_the_same_cosine(warmup: int, constant: int) -> None:
    pytest.importorskip("nemo.core.optim.lr_scheduler", reason="the nemo extra is not installed", exc_type=ImportError)
    nemo = "optim.schedule._target_=nemo.core.optim.lr_scheduler.CosineAnnealing"
    shape = (*SHAPE, f"optim.warmup_steps={warmup}", f"optim.constant_steps={constant}")
    assert rates_of(nemo, *shape, steps=STEPS + 20) == pytest.approx(rates_of(*shape, steps=STEPS + 20), rel=1e-12)


def test_cosine_is_half_a_cosine() -> None:
    rates = rates_of(*SHAPE, "optim.constant_steps=0")
    for step in range(WARMUP, STEPS):
        angle = math.pi * (step - WARMUP) / (STEPS - WARMUP)
        assert rates[step] == pytest.approx(LOW + 0.9 * (1 + math.cos(angle)) / 2)
