"""LoRA: initialization, frozen weights, memory and FLOPs, and recomputation."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_llama.arch.flops import flops_per_token
from megatron_llama.arch.hf_tp_mapping import lora_shapes
from megatron_llama.checkpoint.folder import find_checkpoint
from megatron_llama.checkpoint.lora_adapter import trained_shapes
from megatron_llama.checkpoint.manifest import read_manifest
from megatron_llama.optim import build_optimizer
from megatron_llama.parallel import ParallelModel
from megatron_llama.plan import Plan
from megatron_llama.plan.memory import rank_memory
from megatron_llama.plan.plan import PLAIN
from tests.finetuning.runner import (
    BIASES,
    LAYER_1,
    LORA,
    PATTERNS,
    RANK,
    World,
    make_plan,
    their_base,
    their_lora,
    tune,
)
from tests.messages import raises_with_message
from tests.oracle import on_ranks, rank_data
from tests.ranks import RankFailed, run_ranks

SP, ZERO_3 = ["trainer.tp=2"], ["trainer.zero=3"]


def test_initialization_adds_nothing_and_does_not_depend_on_the_layout(world: World, tmp_path: Path) -> None:
    fresh = tune(1, tmp_path / "lora", *world.fresh, steps=1)
    assert fresh.losses == tune(1, tmp_path / "full", *world.full, steps=1).losses  # all bits: B is zero
    one = tune(1, tmp_path / "one", *world.fresh, steps=0).trained
    for name, tensor in one.items():
        if "lora_B" in name:
            assert not tensor.any(), f"{name} is not zero"
        else:
            bound = 1 / math.sqrt(tensor.shape[1])  # Kaiming's with a = sqrt(5), as peft's
            assert 0.8 * bound < tensor.abs().max() <= bound and abs(tensor.mean()) < 0.3 * bound
    assert len({tensor.sum().item() for name, tensor in one.items() if "lora_A" in name}) == 14
    for index, layout in enumerate((["trainer.tp=4"], ["trainer.pp=2", *ZERO_3])):
        other = tune(4, tmp_path / str(index), *world.fresh, *layout, steps=0).trained
        assert other.keys() == one.keys()
        assert all(torch.equal(tensor, one[name]) for name, tensor in other.items())


def test_recomputation_gives_the_same_gradients(world: World, tmp_path: Path) -> None:
    """Recomputation keeps LoRA's gradients although the block's input requires no gradient."""
    plain = tune(1, tmp_path / "plain", *world.lora, steps=2)
    for recompute in ("full", "elementwise", "selective"):
        recomputed = tune(1, tmp_path / recompute, *world.lora, f"trainer.recompute={recompute}", steps=2)
        for name, grad in plain.first_grads.items():
            assert torch.equal(recomputed.first_grads[name], grad) and grad.any(), name
        assert recomputed.losses == plain.losses


def test_dropout(world: World, tmp_path: Path) -> None:
    """Dropout masks differ between steps and are equal in recomputation and on replicas."""
    chosen = [*world.fresh, "finetune.lora_dropout=0.3"]
    drops = tune(1, tmp_path / "one", *chosen, steps=2)
    for recompute in ("elementwise", "full"):
        recomputed = tune(1, tmp_path / recompute, *chosen, f"trainer.recompute={recompute}", steps=2)
        assert drops.losses == recomputed.losses
    assert all(torch.equal(tensor, recomputed.trained[name]) for name, tensor in drops.trained.items())
    for name, layout in {"sp": SP, "tp": [*SP, "trainer.sp=false"]}.items():
        tune(2, tmp_path / name, *chosen, *layout, steps=2)  # copies are compared
    still = on_ranks(_gradients_of_one_batch, make_plan(1, tmp_path, *LORA, "finetune.lora_dropout=0.3"))[0]
    assert not torch.equal(*still)


@pytest.mark.parametrize(("sp", "seeds"), [("false", [0, 0, 1, 1]), ("true", [0, 1, 2, 3])])
def test_ranks_with_the_same_activations_share_dropout_masks(sp: str, seeds: list[int], tmp_path: Path) -> None:
    """Tensor-parallel ranks have the same activations only without sequence parallelism."""
    plan = make_plan(4, tmp_path, *LORA, "finetune.lora_dropout=0.3", "trainer.tp=2", f"trainer.sp={sp}")
    drawn = on_ranks(_draw, plan)
    assert [drawn.index(number) for number in drawn] == [seeds.index(seed) for seed in seeds]


def _draw(plan: Plan, model: ParallelModel) -> float:
    """Return the first random number after the model is built."""
    return torch.rand(()).item()


def _gradients_of_one_batch(plan: Plan, model: ParallelModel) -> list[torch.Tensor]:
    batch, gradients = rank_data(plan).train.at(0), []
    for _ in range(2):
        model.zero_grad()
        model.forward_backward(batch)
        grad = next(s.grad for s in model.shards if s.name.endswith("lora_B"))
        assert grad is not None
        gradients.append(grad.clone())
    return gradients


def _copy_base(world: World, folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    """Write the base model with changed weights."""
    folder.mkdir()
    changed = {name: change(name, tensor) for name, tensor in load_file(world.base / "model.safetensors").items()}
    save_file(changed, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text((world.base / "config.json").read_text())
    return folder


@pytest.mark.parametrize("layout", [[], SP, ZERO_3], ids=["one", "tp2+sp", "zero 3"])
def test_frozen_weights_in_bf16_under_fp32_lora(layout: list[str], world: World, tmp_path: Path) -> None:
    """Frozen bf16 weights give bit-identical results to a base that is rounded to bf16."""
    rounded = _copy_base(world, tmp_path / "rounded", lambda name, tensor: tensor.bfloat16())
    ranks = 2 if layout else 1
    frozen_bf16 = tune(ranks, tmp_path / "frozen_bf16", *world.lora, *layout, "finetune.frozen_dtype=bf16", steps=2)
    expected = tune(ranks, tmp_path / "expected", *world.lora, *layout, f"init_from={rounded}", steps=2)
    assert frozen_bf16.losses == expected.losses
    assert all(torch.equal(tensor, expected.trained[name]) for name, tensor in frozen_bf16.trained.items())
    assert frozen_bf16.dtypes == ({torch.float32}, {torch.bfloat16})
    assert expected.dtypes == ({torch.float32}, {torch.float32})


def test_bf16_keeps_master_weights_of_trained_weights_only(world: World, tmp_path: Path) -> None:
    for precision, trained in (("bf16", torch.float32), ("bf16_sr", torch.bfloat16)):
        tuned = tune(2, tmp_path / precision, *world.lora, *SP, f"trainer.precision={precision}", steps=1)
        assert tuned.dtypes == ({trained}, {torch.bfloat16})


KINDS = {
    "whole modules": (*RANK, "finetune.modules_to_save=[embed_tokens,input_layernorm]"),
    "patterns": PATTERNS,
    "one layer": LAYER_1,
    "all biases": BIASES,
}


@pytest.mark.parametrize("kind", KINDS)
def test_planned_memory_equals_the_run(kind: str, tmp_path: Path) -> None:
    for ranks, layout in ((1, []), (4, ["trainer.tp=4"]), (4, ["trainer.tp=2", "trainer.pp=2"]), (2, ZERO_3)):
        plan = make_plan(ranks, tmp_path, *KINDS[kind], *layout)
        for trained, frozen, moments, stage in on_ranks(_sizes, plan):
            memory = rank_memory(plan, plan.stages[stage])
            assert memory.optimizer == moments
            assert memory.gradients == 4 * trained
            assert memory.weights == 4 * (trained + frozen), "nothing is gathered, and nothing copied"
            assert plan.storage.kind == PLAIN or plan.shard_size > 1
        assert plan.whole.trained == sum(map(math.prod, trained_shapes(plan.model, plan.config.finetune).values()))


@pytest.mark.parametrize("kind", [LORA, PATTERNS, LAYER_1], ids=["all layers", "patterns", "one layer"])
def test_flops_equal_the_count_of_torch(kind: tuple[str, ...], world: World, tmp_path: Path) -> None:
    (theirs, ours) = run_ranks(_flops, 1, make_plan(1, tmp_path, *kind), world.base)[0]
    assert theirs == ours


def _flops(rank: int, plan: Plan, base: Path) -> tuple[int, int]:
    """Return the FLOPs of forward and backward over 2 x 16 tokens: torch's count for peft's model, and ours."""
    from torch.utils.flop_counter import FlopCounterMode

    # Eager attention consists of matmuls, which the counter counts.
    model = their_lora(their_base(base, attention="eager"), plan)
    model.enable_input_require_grads()
    tokens = torch.zeros(2, 16, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens).logits.sum().backward()
    rotary = 2 * 2 * 16 * (plan.model.hidden_size // plan.model.num_attention_heads // 2)  # positions x frequencies
    counted = counter.get_total_flops()
    ours = flops_per_token(plan.model, 16, plan.config.finetune).full * tokens.numel()
    # The RoPE table may be computed once for both samples, or for each.
    return next((counted - more for more in (rotary // 2, rotary) if counted - more == ours), counted), ours


def _sizes(plan: Plan, model: ParallelModel) -> tuple[int, int, int, int]:
    """Return (trained elements, frozen elements, bytes of moments, pipeline stage) of a rank."""
    moments = sum(moment.nbytes for _, _, moment in build_optimizer(plan, model).states())
    sizes = [sum(s.local.numel() for s in model.shards if s.is_trained is trained) for trained in (True, False)]
    return sizes[0], sizes[1], moments, plan.topology(torch.distributed.get_rank()).place["pp"]


def test_checkpoints_have_trained_weights_and_load_in_any_layout(world: World, tmp_path: Path) -> None:
    tune(2, tmp_path, *world.lora, *SP, steps=1)
    names = {name.rpartition("exp_avg.")[2] for name in read_manifest(find_checkpoint(tmp_path)).stored.tensors}
    names = {name.rpartition("exp_avg_sq.")[2] for name in names if "random" not in name}
    assert names == lora_shapes(world.plan.model, world.plan.config.finetune).keys()
    whole = tune(1, tmp_path / "whole", *world.lora, steps=3)
    assert tune(2, tmp_path, *world.lora, "trainer.pp=2", steps=3).losses == pytest.approx(whole.losses[1:], rel=1e-5)


def test_a_checkpoint_of_another_base_is_refused(world: World, tmp_path: Path) -> None:
    """tests/checkpoint/test_differences.py has each setting; the base is compared by its weights."""
    run = tmp_path / "run"
    tune(1, run, *world.fresh, steps=1)
    name = "model.layers.1.mlp.up_proj.weight"
    other = _copy_base(world, tmp_path / "other", lambda n, tensor: tensor * 1.01 if n == name else tensor)
    with raises_with_message(RankFailed, "ConfigError.*init_from"):
        tune(1, run, *world.fresh, f"init_from={other}", steps=2)
