"""In all layouts, fine-tuning equals a loop of transformers, peft and torch.optim on the same batches, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_llama.model.noise import EmbeddingNoise, token_keys
from megatron_llama.plan import Plan
from tests.finetuning import runner
from tests.finetuning.runner import (
    BIASES,
    LAYER_1,
    LORA,
    PATTERNS,
    RANK,
    TOLERANCE,
    Tuned,
    World,
    assert_near,
    make_plan,
    tune,
)
from tests.model.llamas import loss_of_batch
from tests.oracle import distance
from tests.ranks import run_ranks
from tests.rows import each_layout, read_layouts, rows

LAYOUTS, QUICK = read_layouts(__file__, "full")


@pytest.mark.parametrize(("ranks", "layout"), rows(LAYOUTS.items(), QUICK))
def test_full_fine_tuning(ranks: int, layout: list[str], world: World, theirs_full: Tuned, tmp_path: Path) -> None:
    assert_near(tune(ranks, tmp_path, *world.full, *layout), theirs_full)


@pytest.mark.parametrize(("ranks", "layout"), rows(LAYOUTS.items(), {*QUICK, "zero 2"}))
def test_lora(ranks: int, layout: list[str], world: World, theirs_lora: Tuned, tmp_path: Path) -> None:
    ours = tune(ranks, tmp_path, *world.lora, *layout)
    assert_near(ours, theirs_lora)
    assert len(ours.losses) == runner.STEPS
    base = load_file(world.base / "model.safetensors")
    assert ours.frozen.keys() == base.keys()
    assert all(torch.equal(tensor, base[name]) for name, tensor in ours.frozen.items()), "the base has moved"


def noisy(rank: int, plan: Plan, base: Path) -> Tuned:
    """Full fine-tuning by transformers, with noise on the embeddings."""
    model, size = runner.their_base(base), plan.config.trainer.global_batch_size
    noise = EmbeddingNoise(5.0, plan.config.data.length, (0, 1))

    def loss_of(model: Any, plan: Plan, step: int) -> torch.Tensor:
        samples = range(step * size, (step + 1) * size)
        keys = torch.stack([token_keys(plan.config.trainer.seed, n, plan.config.data.length) for n in samples])
        hook = model.get_input_embeddings().register_forward_hook(
            lambda module, args, output: noise(output.transpose(0, 1), keys).transpose(0, 1)
        )
        with hook:
            return loss_of_batch(model, plan, step)

    return runner.train_theirs(model, plan, runner.STEPS, loss_of)


@each_layout(__file__, "noise")
def test_neftune(ranks: int, layout: list[str], world: World, tmp_path: Path) -> None:
    changes = [*world.full, "finetune.neftune_noise_alpha=5"]
    theirs = run_ranks(noisy, 1, make_plan(1, tmp_path, *changes), world.base)[0]
    assert_near(tune(ranks, tmp_path, *changes, *layout), theirs)


def test_noise_of_neftune_is_uniform() -> None:
    keys = torch.stack([token_keys(1234, sample, 512) for sample in (0, 1, 2**40)])
    noise = EmbeddingNoise(5.0, 512, (0, 1))(torch.zeros(512, 3, 256), keys) * (512 * 256) ** 0.5 / 5
    assert noise.abs().max() < 1 and len(noise.unique()) > 65_000
    counts = torch.histc(noise, 64)
    mean = noise.numel() / 64
    # Chi-square with 63 degrees of freedom; 130 has a probability of 2e-6.
    assert ((counts - mean) ** 2 / mean).sum() < 130
    assert noise.mean(dim=(0, 2)).abs().max() < 0.01 and (noise[:, 0] * noise[:, 1]).mean().abs() < 0.01


@each_layout(__file__, "harder", "ranks, settings")
def test_lora_in_harder_layouts(ranks: int, settings: list[str], world: World, tmp_path: Path) -> None:
    alone = [setting for setting in settings if "model." in setting or "batch" in setting]
    start = LORA if any("model." in setting for setting in settings) else world.lora
    ours = tune(ranks, tmp_path / "ours", *start, *settings, steps=3)
    one = tune(1, tmp_path / "one", *start, *alone, steps=3)
    assert_near(ours, one)
    assert all(distance(ours.first_grads[name], grad) <= TOLERANCE for name, grad in one.first_grads.items())
    assert ours.frozen.keys() == one.frozen.keys()
    assert all(torch.equal(ours.frozen[name], tensor) for name, tensor in one.frozen.items())


# Embedding, head and every norm train too.
MODULES = (
    *RANK,
    "finetune.modules_to_save=[embed_tokens,lm_head,norm]",
    "finetune.lora_target_modules=[v_proj,up_proj]",
)
KINDS = {
    "patterns": PATTERNS,
    "patterns and dora": (*PATTERNS, "finetune.use_dora=true"),
    "one layer": LAYER_1,
    "all biases": ("model.attention_bias=true", "model.mlp_bias=true", *BIASES[1:]),
    "biases of one layer": (*BIASES[:-1], "finetune.bias=lora_only", "finetune.layers_to_transform=[0]"),
    "whole modules": MODULES,
    "rank-stabilized": (*RANK, "finetune.use_rslora=true", "finetune.lora_alpha=6"),
    "dora": (*LORA, "finetune.use_dora=true"),
}
ADAPTERS, QUICK = read_layouts(__file__, "adapters")


@pytest.mark.parametrize("name", rows([(name, [name]) for name in ADAPTERS], QUICK))
def test_other_adapters(name: str, world: World, tmp_path: Path) -> None:
    """An adapter of peft sets its kind; DoRA's magnitudes are not the norms of the base."""
    kind, (ranks, layout) = KINDS[name.partition(", ")[0]], ADAPTERS[name]
    plan, adapter = make_plan(1, tmp_path, *kind), tmp_path / "adapter"
    model = [setting for setting in kind if "model." in setting]
    base = tmp_path / "base" if model else world.base
    run_ranks(runner.save_adapter, 1, plan, base, adapter)
    theirs = run_ranks(runner.run_lora, 1, plan, base, adapter, 3)[0]
    chosen = ["finetune=lora", *model, f"finetune.adapter={adapter}", f"init_from={base}"]
    ours = tune(ranks, tmp_path / "run", *chosen, *layout, steps=3)
    assert_near(ours, theirs)
    expected = plan.config.finetune
    actual = make_plan(1, tmp_path, *chosen).config.finetune
    names = "use_rslora", "use_dora", "bias", "rank_pattern", "alpha_pattern", "exclude_modules", "layers_to_transform"
    assert all(getattr(actual, each) == getattr(expected, each) for each in names)
    adapted = sum(each.endswith("lora_A.weight") for each in theirs.trained)
    assert sum("magnitude" in each for each in ours.trained) == (adapted if expected.use_dora else 0)
    if expected.modules_to_save:
        assert {"model.layers.1.input_layernorm.weight", "lm_head.weight"} <= theirs.trained.keys()


@each_layout(__file__, "dora")
def test_dora_starts_at_the_norms_of_the_base(ranks: int, layout: list[str], world: World, tmp_path: Path) -> None:
    # A rate that does not change fp32: the weights after the first step are the initial ones.
    fresh = [*world.fresh, "optim.lr=1e-12", *layout]
    started = tune(ranks, tmp_path / "run", *fresh, "finetune.use_dora=true", steps=1)
    base = load_file(world.base / "model.safetensors")
    magnitudes = {name: tensor for name, tensor in started.trained.items() if name.endswith("magnitude_vector")}
    assert len(magnitudes) == 14
    for name, tensor in magnitudes.items():
        weight = base[name.removeprefix("base_model.model.").replace("lora_magnitude_vector", "weight")]
        assert distance(tensor, weight.norm(dim=1)) <= TOLERANCE
    plain = tune(1, tmp_path / "plain", *world.fresh, steps=1)
    assert started.losses[0] == pytest.approx(plain.losses[0], rel=TOLERANCE), "the first output is the base model's"


# Sums in another order move about one value in a million to the next float8 number, as in tests/layouts/test_bf16.py.
FLOAT8_SHARE = 0.3
LEAST_ERROR = 0.02
"""Float8 rounds, so its error is not smaller."""


@each_layout(__file__, "float8")
def test_float8_is_near_one_process(ranks: int, layout: list[str], world: World, tmp_path: Path) -> None:
    """Distances are shares of the error of float8 itself: the distance of one process from fp32."""
    recipe, alone = layout[0], [setting for setting in layout if "batch" in setting]
    ours = tune(ranks, tmp_path / "ours", *world.lora, *layout, steps=1).first_grads
    one = tune(1, tmp_path / "one", *world.lora, recipe, *alone, steps=1).first_grads
    exact = tune(1, tmp_path / "exact", *world.lora, *alone, steps=1).first_grads
    error = max(distance(one[name], grad) for name, grad in exact.items())
    assert error > LEAST_ERROR
    assert max(distance(ours[name], grad) for name, grad in one.items()) < FLOAT8_SHARE * error
