"""Fine-tuning settings, their lines in a plan, and the memory of LoRA."""

from __future__ import annotations

import importlib.metadata

import pytest

from megatron_llama.config import load_config
from megatron_llama.config.settings import LORA_TARGETS
from megatron_llama.plan import Plan, format_plan, parameters, resolve, stage_memory
from megatron_llama.system.installed import pip_install
from megatron_llama.system.tables import GIB
from tests.config.helpers import everything_exists, make, problems_of
from tests.paths import CONF
from tests.plan.rule_cases import parse_settings

WIDE = "LORA WIDE intermediate_size=768"
BIG = ["model=llama70b", "data=mock", "trainer.zero=3", "trainer.dp=8", "trainer.precision=bf16", "dry_run=true"]


def plan_of(*overrides: str) -> Plan:
    return resolve(load_config([*BIG, "finetune=lora", "finetune.lora_rank=4", *overrides], CONF), 8)


@pytest.mark.parametrize("spelling", ["all-linear", "[all-linear]"])
def test_all_matrices_have_a_name_as_in_peft(spelling: str) -> None:
    chosen = ["data=mock", "finetune=lora", f"finetune.lora_target_modules={spelling}"]
    assert load_config(chosen, CONF).finetune.lora_target_modules == list(LORA_TARGETS)
    mixed = load_config([*chosen[:2], "finetune.lora_target_modules=[all-linear,q_proj]"], CONF)
    assert [problem.field for problem in problems_of(mixed)] == ["finetune.lora_target_modules"]


# peft prints these for the published models: get_peft_model(...).print_trainable_parameters()
@pytest.mark.parametrize(
    ("preset", "rank", "targets", "count"),
    [
        ("llama7b", 8, "[q_proj,v_proj]", 4_194_304),
        ("llama7b", 8, "[q_proj,k_proj,v_proj,o_proj]", 8_388_608),
        ("llama7b", 16, "[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]", 39_976_960),
        ("llama70b", 4, "[q_proj,k_proj,v_proj,o_proj]", 16_384_000),
    ],
)
def test_published_counts(preset: str, rank: int, targets: str, count: int) -> None:
    settings = [f"finetune.lora_rank={rank}", f"finetune.lora_target_modules={targets}"]
    plan = resolve(load_config([f"model={preset}", "data=mock", "finetune=lora", *settings], CONF), 1)
    assert plan.whole.trained == count
    assert f"{count:,} · {100 * count / (parameters(plan.model) + count):.4g} %" in format_plan(plan)


def test_frozen_weights_have_no_gradient_and_no_moments() -> None:
    """70 B in bf16 on 8 devices: 138 GB of weights are divided by 8, and LoRA adds little."""
    full = stage_memory(resolve(load_config(BIG, CONF), 8))[0]
    (memory,) = stage_memory(plan_of())
    trained, frozen = 16_384_000 // 8, 68_976_648_192 // 8
    assert (memory.gradients, memory.optimizer) == (4 * trained, 8 * trained)
    assert memory.weights == 4 * trained + 2 * frozen
    assert memory.total < 17 * GIB < 128 * GIB < full.total
    assert stage_memory(plan_of("finetune.frozen_dtype=fp32"))[0].weights > 2 * memory.weights * 0.99


def test_quantized_weights_in_the_plan() -> None:
    matrices = 80 * (2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 8192 * 28672)  # the published shape
    others, trained = 68_976_648_192 - matrices, 16_384_000
    for kind, share in {"int8": 1.0625, "nf4": 0.5625}.items():
        plan = plan_of(f"finetune.frozen_dtype={kind}")
        (memory,) = stage_memory(plan)
        assert memory.weights == (4 * trained + 2 * others + share * matrices) / 8
        assert f"blocks' frozen matrices in {kind}: {share} bytes per value" in format_plan(plan)
    (whole,) = stage_memory(plan_of("finetune.frozen_dtype=nf4", "trainer.zero=1"))
    # Gathered weights are packed too. A block frees its gathered weights when its gradient is ready.
    assert whole.weights == memory.weights + 2 * (others + trained) + share * matrices - memory.gradients


@pytest.mark.parametrize("installed", [None, "0.13.0"])
def test_quantizing_needs_torchao(installed: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed

    monkeypatch.setattr("importlib.metadata.version", version)
    changes = parse_settings(f"{WIDE} frozen_dtype=int8")
    (problem,) = problems_of(make(**changes))
    assert problem.field == "finetune.frozen_dtype" and (installed or "no torchao") in problem.rule
    assert problem.instead.endswith(f"{pip_install(extra='quantize')}, or write finetune.frozen_dtype=bf16")
    plan = resolve(make(**changes, dry_run=True), 1)  # may be of another machine
    assert any(pip_install(extra="quantize") in note for note in plan.notes)
    assert not problems_of(make(**parse_settings(f"{WIDE} frozen_dtype=bf16")))


def test_problems_of_quantized_blocks_come_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.18.0")
    for tp, row, field in ((8, WIDE, "trainer.tp"), (1, "LORA WIDE intermediate_size=800", "finetune.frozen_dtype")):
        changes = parse_settings(f"{row} frozen_dtype=nf4 tp={tp}")
        assert [problem.field for problem in problems_of(make(**changes), tp)] == [field]
        both = problems_of(make(**{**changes, "optim.lr": -1.0}), tp, exists=everything_exists)
        assert {problem.field for problem in both} == {field, "optim.lr"}


@pytest.mark.parametrize("method", ["full", "lora"])
def test_mock_data_needs_no_starting_weights(method: str) -> None:
    plan = resolve(make(**{"finetune.method": method}), 1)  # for measurements only
    assert any("starts from random weights" in note for note in plan.notes) and not resolve(make(), 1).notes
    assert "LoRA" not in format_plan(resolve(make(), 1))
