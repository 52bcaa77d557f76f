"""Bytes per rank by precision and ZeRO stage, and the refusal of what can't fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_llama.config import load_config
from megatron_llama.plan import Machine, Plan, resolve, stage_memory
from megatron_llama.plan.memory import RankMemory, rank_memory
from megatron_llama.plan.shapes import StageParameters
from megatron_llama.system.units import GIB
from tests.config.helpers import make, problems_of
from tests.paths import CONF

COUNT = 1_000_000


def plan_of(zero: int, precision: str, dp: int = 4, optimizer: str = "adamw", micro_batches: int = 2) -> Plan:
    changes = {
        "trainer.zero": zero,
        "trainer.precision": precision,
        "optim.name": optimizer,
        "trainer.global_batch_size": dp * micro_batches,
    }
    return resolve(make(**changes), dp)


def memory_of(plan: Plan) -> RankMemory:
    return rank_memory(plan, StageParameters(held=COUNT, trained=COUNT, quantizable=0))


@pytest.mark.parametrize(
    ("zero", "precision", "weights", "gradients", "optimizer"),
    [
        (0, "fp32", 4 + 4, 4, 8),
        (1, "fp32", 4 + 4 / 4, 4, 8 / 4),
        (2, "fp32", 4 + 4 / 4, 4 / 4, 8 / 4),
        (3, "fp32", 4 / 4, 4 / 4, 8 / 4),
        (0, "bf16", 4 + 2, 4, 8),
        (1, "bf16", 2 + 4 / 4, 4, 8 / 4),
        (2, "bf16", 2 + 4 / 4, 4 / 4, 8 / 4),
        (3, "bf16", 4 / 4, 4 / 4, 8 / 4),
        (0, "bf16_sr", 2 + 2, 2, 4),
        (1, "bf16_sr", 2 + 2 / 4, 2, 4 / 4),
        (2, "bf16_pure", 2 + 2 / 4, 2 / 4, 4 / 4),
        (3, "bf16SR", 2 / 4, 2 / 4, 4 / 4),
        (1, "fp32_OptStates", 2 + 2 / 4, 2, 8 / 4),
        (1, "fp32_ZeroOptMaster", 2 + 4 / 4, 2, 8 / 4),
        (0, "fp32_ZeroOptMaster", 2 + 4, 4, 8),
        (1, "fp32_ZeroOptMasterGradAcc", 2 + 4 / 4, 4, 8 / 4),
        (1, "megatron_amp_O2", 2 + 4 / 4, 4, 8 / 4),
    ],
)
def test_bytes_per_parameter(zero: int, precision: str, weights: float, gradients: float, optimizer: float) -> None:
    memory = memory_of(plan_of(zero, precision))
    assert (memory.weights, memory.gradients, memory.optimizer) == (
        weights * COUNT,
        gradients * COUNT,
        optimizer * COUNT,
    )
    assert memory.total == (weights + gradients + optimizer) * COUNT


def test_sgd_has_no_moments_and_one_micro_batch_is_reduced_at_once() -> None:
    assert memory_of(plan_of(1, "fp32", optimizer="sgd")).optimizer == 0
    once = memory_of(plan_of(1, "fp32", micro_batches=1))
    assert (once.weights, once.gradients, once.optimizer) == (4 * COUNT, COUNT, 2 * COUNT)


def test_each_stage_needs_what_its_parameters_need() -> None:
    plan = resolve(make(**{"trainer.pp": 2, "model.num_hidden_layers": 5}), 2)
    assert [memory.total for memory in stage_memory(plan)] == [20 * stage.held for stage in plan.stages]


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    config = load_config(["model=llama7b", "data=mock", "trainer.global_batch_size=16"], CONF)
    (problem,) = problems_of(config, 8, Machine(48 * GIB, 1, "one A40"))
    assert problem.value == "llama7b"
    assert "one A40 has 48 GiB" in problem.rule
    assert "trainer.zero=2" in problem.instead
    config.trainer.zero = 2
    assert problems_of(config, 8, Machine(48 * GIB, 1, "one A40")) == []


def test_a_bigger_grid_is_advised_where_sharding_can_not_help_and_then_fits() -> None:
    config = load_config(["model=llama70b", "data=mock", "trainer.zero=3"], CONF)
    machine = Machine(80 * GIB, 1, "one H100")
    (problem,) = problems_of(config, 8, machine)
    assert "trainer.tp=8 trainer.pp=2, on a multiple of 16 devices" in problem.instead
    config.trainer.tp, config.trainer.pp = 8, 2
    assert problems_of(config, 16, machine) == []


def test_ranks_on_one_host_share_its_memory() -> None:
    config = make()
    needed = max(memory.total for memory in stage_memory(resolve(config, 4)))
    assert problems_of(config, 4, Machine(4 * needed, 4)) == []
    (problem,) = problems_of(config, 4, Machine(4 * needed - 1, 4))
    assert "for 4 ranks" in problem.rule
    assert "smaller model" in problem.instead or "trainer.zero" in problem.instead


def test_stated_memory_goes_before_what_was_found() -> None:
    config = load_config(["model=llama7b", "data=mock", "device.memory_gib=24"], CONF)
    (problem,) = problems_of(config, 1, Machine(1000 * GIB))
    assert (problem.field, problem.value) == ("device.memory_gib", 24)
    config.device.memory_gib = 200
    assert problems_of(config, 1, Machine(1 * GIB)) == []


def test_a_dry_run_notes_what_this_machine_lacks_and_refuses_what_was_stated() -> None:
    config = load_config(["model=llama7b", "data=mock", "dry_run=true"], CONF)
    plan = resolve(config, 1, Machine(1 * GIB, 1, "this laptop"))
    assert "this laptop has 1 GiB" in plan.notes[0]
    assert resolve(config, 1, Machine(1000 * GIB)).notes == ()
    config.device.memory_gib = 1
    assert [problem.field for problem in problems_of(config, 1)] == ["device.memory_gib"]


def test_the_machine_changes_nothing_else() -> None:
    config = load_config(["model=llama7b", "data=mock", "dry_run=true"], CONF)
    assert replace(resolve(config, 1, Machine(1 * GIB)), notes=()) == resolve(config, 1)
