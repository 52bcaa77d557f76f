"""Settings of fine-tuning: which go together, what a plan says of them, and what LoRA costs in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_llama.config import compose, format_plan, parameters, resolve, stage_memory, trained_parameters
from megatron_llama.config.memory import GIB
from tests.config.helpers import make, problems_of

CONF = Path(__file__).parents[2] / "conf"


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
            "write finetune.modules_to_save=[embed_tokens,norm]",
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
            "write finetune.method=lora, or leave finetune.lora_rank out",
        ),
        (
            {"finetune.method": "none", "finetune.adapter": "folder"},
            "finetune.adapter",
            "write finetune.method=lora, or leave finetune.adapter out",
        ),
    ],
)
def test_what_is_wrong_is_said(changes: dict[str, Any], field: str, advice: str) -> None:
    (problem,) = problems_of(lora(**changes))
    assert problem.field == field and problem.instead.startswith(advice), problem


@pytest.mark.parametrize("method", ["full", "lora"])
def test_fine_tuning_goes_on_from_a_model(method: str) -> None:
    config = make(**{"finetune.method": method, "data.mock": False, "data.prefixes": ["x"]})
    (problem,) = problems_of(config, exists=lambda path: True)
    assert problem.field == "init_from" and "finetune.method=none" in problem.instead
    plan = resolve(make(**{"finetune.method": method}), 1)  # made-up data: only a measurement
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
    config = compose([*chosen, f"finetune.lora_target_modules={targets}"], CONF)
    plan = resolve(config, 1)
    assert trained_parameters(plan.model, config.finetune) == count
    percent = 100 * count / (parameters(plan.model) + count)
    assert f"{count:,} · {percent:.4g} %" in format_plan(plan)


def test_what_is_frozen_costs_no_gradient_and_no_moments() -> None:
    # 70 B in bf16 on 8 devices: 138 GB of weights are cut in 8, and all that LoRA adds is small change.
    chosen = ["model=llama70b", "data=mock", "trainer.zero=3", "trainer.dp=8", "trainer.precision=bf16"]
    full = stage_memory(resolve(compose(chosen, CONF), 8))[0]
    plan = resolve(compose([*chosen, "finetune=lora", "finetune.lora_rank=4"], CONF), 8)
    (memory,) = stage_memory(plan)
    trained, frozen = 16_384_000 // 8, 68_976_648_192 // 8
    assert (memory.gradients, memory.optimizer) == (4 * trained, 8 * trained)
    assert memory.weights == 4 * trained + 2 * frozen
    assert memory.total < 17 * GIB < 128 * GIB < full.total
    kept = compose([*chosen, "finetune=lora", "finetune.frozen_dtype=fp32"], CONF)
    assert stage_memory(resolve(kept, 8))[0].weights > 2 * memory.weights * 0.99


def test_a_plan_without_lora_does_not_speak_of_it() -> None:
    assert "trained " not in format_plan(resolve(make(), 1)) and "LoRA" not in format_plan(resolve(make(), 1))
