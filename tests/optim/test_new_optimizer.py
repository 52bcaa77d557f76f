"""A new optimizer is one function and one row: Lion (arXiv:2302.06675), registered here, trains, saves and resumes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from megatron_llama.config import Problem
from megatron_llama.config.limits import one_of
from megatron_llama.config.optimizers import OPTIMIZERS, OptimizerRow
from megatron_llama.config.settings_table import settings_by_name
from megatron_llama.optim.base import Group, OptimizerInputs, ShardOptimizer
from megatron_llama.optim.low_precision import ElementwiseOptimizer
from megatron_llama.plan.memory import optimizer_bytes
from tests.checkpoint.runner import Run, assert_same, run
from tests.config.helpers import make, problems_of
from tests.oracle import make_plan

ROW = OptimizerRow(factory="tests.optim.test_new_optimizer.build_lion", states=("exp_avg",))


def build_lion(inputs: OptimizerInputs) -> ShardOptimizer:
    """Build ``lion``."""
    return ElementwiseOptimizer(inputs, lion_update, **inputs.hyperparameters)


def lion_update(tensors: Sequence[Tensor], gradient: Tensor, step: Tensor, group: Group) -> None:
    """Lion's update of fp32 weight and exp_avg, in place."""
    weight, exp_avg = tensors
    beta1, beta2 = group["betas"]
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.sub_(exp_avg.lerp(gradient, 1 - beta1).sign_(), alpha=group["lr"])
    exp_avg.lerp_(gradient, 1 - beta2)


TP2_DP2 = ("trainer.tp=2", "trainer.zero=1")
LION = ("optim.name=lion", "optim.lr=0.001", "optim.betas=[0.9,0.99]", "optim.warmup_steps=2", "trainer.steps=8")


def register(monkeypatch: pytest.MonkeyPatch, row: OptimizerRow) -> None:
    """Add the row of ``lion``, and the name to the setting's limit, which an edit of the table does by itself."""
    monkeypatch.setitem(OPTIMIZERS, "lion", row)
    setting = settings_by_name()["optim.name"]
    monkeypatch.setitem(settings_by_name(), "optim.name", replace(setting, limit=one_of(*OPTIMIZERS)))


@pytest.fixture
def lion(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, ROW)


@pytest.mark.usefixtures("lion")
@pytest.mark.parametrize("precision", ["fp32", "bf16_sr"])
def test_it_trains_and_resumes_bit_identically(precision: str, tmp_path: Path) -> None:
    settings = (*LION, "trainer.zero=1", f"trainer.precision={precision}")
    whole = run(2, tmp_path / "whole", *settings, until=4)
    first = run(2, tmp_path / "halves", *settings, until=2)
    second = run(2, tmp_path / "halves", *settings, until=4)
    assert second.started_at == 2 and first.losses | second.losses == whole.losses
    assert_same(second.tensors, whole.tensors)
    assert second.updates == whole.updates == 4
    assert _moved(whole) and whole.losses[4] < whole.losses[1]


def _moved(whole: Run) -> bool:
    """Whether each weight has a state in the checkpoint that is not zero."""
    weights = [name for name in whole.tensors if "/" not in name]
    return all(whole.tensors[f"exp_avg/{name}"].any() for name in weights)


@pytest.mark.usefixtures("lion")
def test_rules_memory_and_8_bit_states_read_its_row() -> None:
    plan, adamw = (make_plan(4, *TP2_DP2, f"optim.name={name}") for name in ("lion", "adamw"))
    assert 2 * optimizer_bytes(plan, plan.stages[0]) == optimizer_bytes(adamw, adamw.stages[0])
    eight = make_plan(1, *LION, "optim.state_bits=8", "model.hidden_size=64")
    assert optimizer_bytes(eight, eight.stages[0]) < optimizer_bytes(plan, plan.whole)


def problems(world_size: int, **changes: object) -> list[Problem]:
    return problems_of(make(**{"optim.name": "lion", **changes}), world_size)


def test_settings_that_a_row_refuses_are_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"optim.state_bits": 8, "trainer.offload": ["optimizer"], "trainer.precision": "bf16_sr"}
    reasons = {name: f"is a trial without {name}" for name in changes}
    register(monkeypatch, replace(ROW, refuses=reasons))
    for name, value in changes.items():
        (problem,) = problems(1, **{name: value})
        assert problem.field == name and problem.rule == f"conflicts with optim.name=lion: it {reasons[name]}"
    register(monkeypatch, replace(ROW, sums_gradients=True))
    (problem,) = problems(2, **{"trainer.zero": 1})
    assert problem.field == "trainer.zero" and "it exchanges unsharded gradients" in problem.rule
