"""Fine-tuning settings: valid combinations, their lines in a plan, and the memory of LoRA."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

from megatron_llama.config import load_config
from megatron_llama.config.settings import LORA_TARGETS
from megatron_llama.plan import format_plan, parameters, resolve, stage_memory
from megatron_llama.system.installed import pip_install
from megatron_llama.system.tables import GIB
from tests.config.helpers import make, problems_of
from tests.paths import CONF


def lora(**changes: Any):
    return make(**{"finetune.method": "lora", **changes})


@pytest.mark.parametrize(
    ("changes", "field", "advice"),
    [
        ({"finetune.lora_rank": 193}, "finetune.lora_rank", "write finetune.lora_rank=192 or less"),
        ({"finetune.lora_rank": 0}, "finetune.lora_rank", "write finetune.lora_rank=8"),
        ({"finetune.lora_dropout": 1.0}, "finetune.lora_dropout", "write finetune.lora_dropout=0"),
        ({"finetune.lora_alpha": 0.0}, "finetune.lora_alpha", "write finetune.lora_alpha=16"),
        (
            {"finetune.lora_target_modules": ["q_proj", "c_attn"]},
            "finetune.lora_target_modules",
            "write finetune.lora_target_modules=[q_proj,k_proj,v_proj,o_proj]",
        ),
        (
            {"finetune.lora_target_modules": []},
            "finetune.lora_target_modules",
            "write finetune.lora_target_modules=[q_proj,k_proj,v_proj,o_proj]",
        ),
        (
            {"finetune.modules_to_save": ["embed"]},
            "finetune.modules_to_save",
            "write finetune.modules_to_save=[embed_tokens]",
        ),
        (
            {"finetune.modules_to_save": ["embed_tokens", "norm"], "model.tie_word_embeddings": True},
            "finetune.modules_to_save",
            "write finetune.modules_to_save=[norm], or finetune.method=full",
        ),
        ({"finetune.method": "qlora"}, "finetune.method", "write finetune.method=lora"),
        ({"finetune.frozen_dtype": "fp4"}, "finetune.frozen_dtype", "write finetune.frozen_dtype=nf4"),
        (
            {"finetune.method": "full", "finetune.lora_rank": 4},
            "finetune.lora_rank",
            "write finetune.method=lora, or omit finetune.lora_rank",
        ),
        (
            {"finetune.method": "none", "finetune.adapter": "folder"},
            "finetune.adapter",
            "write finetune.method=lora, or omit finetune.adapter",
        ),
    ],
)
def test_what_is_wrong_is_said(changes: dict[str, Any], field: str, advice: str) -> None:
    (problem,) = problems_of(lora(**changes))
    assert problem.field == field and problem.instead.startswith(advice), problem


@pytest.mark.parametrize("spelling", ["all-linear", "[all-linear]"])
def test_all_matrices_have_a_name_as_in_peft(spelling: str) -> None:
    chosen = ["data=mock", "finetune=lora", f"finetune.lora_target_modules={spelling}"]
    assert load_config(chosen, CONF).finetune.lora_target_modules == list(LORA_TARGETS)
    mixed = load_config([*chosen[:2], "finetune.lora_target_modules=[all-linear,q_proj]"], CONF)
    assert [problem.field for problem in problems_of(mixed)] == ["finetune.lora_target_modules"]


@pytest.mark.parametrize("method", ["full", "lora"])
def test_fine_tuning_goes_on_from_a_model(method: str) -> None:
    config = make(**{"finetune.method": method, "data.mock": False, "data.prefixes": ["x"]})
    (problem,) = problems_of(config, exists=lambda path: True)
    assert problem.field == "init_from" and "finetune.method=none" in problem.instead
    plan = resolve(make(**{"finetune.method": method}), 1)  # mock data: for measurements only
    assert any("starts from random weights" in note for note in plan.notes)
    assert not resolve(make(), 1).notes


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
    chosen = [f"model={preset}", "data=mock", "finetune=lora", f"finetune.lora_rank={rank}"]
    config = load_config([*chosen, f"finetune.lora_target_modules={targets}"], CONF)
    plan = resolve(config, 1)
    assert plan.whole.trained == count
    percent = 100 * count / (parameters(plan.model) + count)
    assert f"{count:,} · {percent:.4g} %" in format_plan(plan)


def test_what_is_frozen_costs_no_gradient_and_no_moments() -> None:
    # 70 B in bf16 on 8 devices: 138 GB of weights are cut in 8, and all that LoRA adds is small change.
    chosen = ["model=llama70b", "data=mock", "trainer.zero=3", "trainer.dp=8", "trainer.precision=bf16"]
    full = stage_memory(resolve(load_config(chosen, CONF), 8))[0]
    plan = resolve(load_config([*chosen, "finetune=lora", "finetune.lora_rank=4"], CONF), 8)
    (memory,) = stage_memory(plan)
    trained, frozen = 16_384_000 // 8, 68_976_648_192 // 8
    assert (memory.gradients, memory.optimizer) == (4 * trained, 8 * trained)
    assert memory.weights == 4 * trained + 2 * frozen
    assert memory.total < 17 * GIB < 128 * GIB < full.total
    in_fp32 = load_config([*chosen, "finetune=lora", "finetune.frozen_dtype=fp32"], CONF)
    assert stage_memory(resolve(in_fp32, 8))[0].weights > 2 * memory.weights * 0.99


WIDE = {"model.hidden_size": 512, "model.num_attention_heads": 8, "model.num_key_value_heads": 8}


@pytest.mark.parametrize(
    ("changes", "field", "advice"),
    [
        # rows of down_proj: 768 are 12 blocks, which 8 ranks can't share
        ({"trainer.tp": 8, "model.intermediate_size": 768}, "trainer.tp", "write trainer.tp=4, or finetune.frozen_"),
        ({"model.intermediate_size": 800}, "finetune.frozen_dtype", "write finetune.frozen_dtype=bf16"),
        ({"model.hidden_size": 480, "model.intermediate_size": 768}, "finetune.frozen_dtype", "write finetune.frozen_"),
    ],
)
def test_blocks_of_quantized_weights_are_never_cut(
    changes: dict[str, Any], field: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.18.0")
    changes = {**WIDE, **changes, "finetune.frozen_dtype": "nf4"}
    (problem,) = problems_of(lora(**changes), changes.get("trainer.tp", 1))
    assert problem.field == field and problem.instead.startswith(advice), problem
    assert not problems_of(lora(**{**changes, "finetune.frozen_dtype": "bf16"}), changes.get("trainer.tp", 1))
    # All problems are reported together.
    both = {
        problem.field for problem in problems_of(lora(**changes, **{"optim.lr": -1.0}), changes.get("trainer.tp", 1))
    }
    assert both == {field, "optim.lr"}


@pytest.mark.parametrize("installed", [None, "0.13.0"])
def test_quantizing_needs_torchao(installed: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed

    monkeypatch.setattr("importlib.metadata.version", version)
    changes = {**WIDE, "model.intermediate_size": 768, "finetune.frozen_dtype": "int8"}
    (problem,) = problems_of(lora(**changes))
    assert problem.field == "finetune.frozen_dtype" and (installed or "no torchao") in problem.rule
    assert problem.instead.endswith(f"{pip_install(extra='quantize')}, or write finetune.frozen_dtype=bf16")
    plan = resolve(lora(**changes, dry_run=True), 1)  # is of another machine, maybe
    assert any(pip_install(extra="quantize") in note for note in plan.notes)
    assert not problems_of(lora(**{**changes, "finetune.frozen_dtype": "bf16"}))


def test_quantized_weights_in_the_plan() -> None:
    chosen = ["model=llama70b", "data=mock", "trainer.zero=3", "trainer.dp=8", "trainer.precision=bf16", "dry_run=true"]
    chosen += ["finetune=lora", "finetune.lora_rank=4"]
    matrices = 80 * (2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 8192 * 28672)  # the published shape
    others, trained = 68_976_648_192 - matrices, 16_384_000
    for kind, share in {"int8": 1.0625, "nf4": 0.5625}.items():
        plan = resolve(load_config([*chosen, f"finetune.frozen_dtype={kind}"], CONF), 8)
        (memory,) = stage_memory(plan)
        assert memory.weights == (4 * trained + 2 * others + share * matrices) / 8
        assert f"blocks' frozen matrices in {kind}: {share} bytes per value" in format_plan(plan)
    whole = resolve(load_config([*chosen, "finetune.frozen_dtype=nf4", "trainer.zero=1"], CONF), 8)
    # Gathered weights are packed too. A block frees its gathered weights when its gradient is ready.
    assert (
        stage_memory(whole)[0].weights == memory.weights + 2 * (others + trained) + share * matrices - memory.gradients
    )


def test_a_plan_without_lora_does_not_speak_of_it() -> None:
    assert "trained " not in format_plan(resolve(make(), 1)) and "LoRA" not in format_plan(resolve(make(), 1))
