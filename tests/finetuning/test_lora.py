"""LoRA: initialization, frozen weights, memory and FLOPs, and recomputation."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_llama.arch.flops import flops_per_token
from megatron_llama.arch.names import TensorParallel, is_lora, lora_shapes, rectangles
from megatron_llama.devices import get_device
from megatron_llama.optim import build_optimizer
from megatron_llama.parallel import build_model, process_groups
from megatron_llama.plan import Plan, stage_memory
from megatron_llama.plan.storage import PLAIN
from tests.finetuning.runner import CPU, LORA, RANK, World, make_plan, their_base, their_lora, tune
from tests.messages import raises_with_message
from tests.ranks import RankFailed, run_ranks

SP, ZERO_3 = ["trainer.tp=2"], ["trainer.zero=3"]


def test_initial_lora_adds_nothing(world: World, tmp_path: Path) -> None:
    fresh = tune(1, tmp_path / "lora", *world.fresh, steps=1)
    plain = tune(1, tmp_path / "full", *world.full, steps=1)
    assert fresh.losses == plain.losses  # all bits: B is zero
    start = tune(2, tmp_path / "start", *world.fresh, *SP, steps=0)
    for name, tensor in start.trained.items():
        if "lora_B" in name:
            assert not tensor.any(), f"{name} is not zero"
        else:
            bound = 1 / math.sqrt(tensor.shape[1])  # Kaiming's with a = sqrt(5), as peft's
            assert 0.8 * bound < tensor.abs().max() <= bound and abs(tensor.mean()) < 0.3 * bound
    assert len({tensor.sum().item() for name, tensor in start.trained.items() if "lora_A" in name}) == 14


def test_initialization_does_not_depend_on_the_layout(world: World, tmp_path: Path) -> None:
    one = tune(1, tmp_path / "one", *world.fresh, steps=0)
    for index, (ranks, layout) in enumerate([(4, ["trainer.tp=4"]), (4, ["trainer.pp=2", *ZERO_3])]):
        other = tune(ranks, tmp_path / str(index), *world.fresh, *layout, steps=0)
        assert other.trained.keys() == one.trained.keys()
        assert all(torch.equal(tensor, one.trained[name]) for name, tensor in other.trained.items())


@pytest.mark.parametrize("recompute", ["full", "elementwise", "selective"])
def test_recomputation_gives_the_same_gradients(recompute: str, world: World, tmp_path: Path) -> None:
    """Recomputation keeps LoRA's gradients although the block's input requires no gradient."""
    plain = tune(1, tmp_path / "plain", *world.lora, steps=2)
    recomputed = tune(1, tmp_path / "again", *world.lora, f"trainer.recompute={recompute}", steps=2)
    for name, grad in plain.first_grads.items():
        assert torch.equal(recomputed.first_grads[name], grad) and grad.any(), name
    assert recomputed.losses == plain.losses


def test_dropout(world: World, tmp_path: Path) -> None:
    """Dropout masks differ between steps and are equal in recomputation and on replicas."""
    chosen = [*world.fresh, "finetune.lora_dropout=0.3"]
    drops = tune(1, tmp_path / "one", *chosen, steps=3)
    for recompute in ("elementwise", "full"):
        recomputed = tune(1, tmp_path / recompute, *chosen, f"trainer.recompute={recompute}", steps=3)
        assert drops.losses == recomputed.losses
    assert all(torch.equal(tensor, recomputed.trained[name]) for name, tensor in drops.trained.items())
    assert drops.losses[1:] != tune(1, tmp_path / "none", *world.fresh, steps=3).losses[1:]
    for name, layout in {"sp": SP, "tp": [*SP, "trainer.sp=false"]}.items():
        tune(2, tmp_path / name, *chosen, *layout, steps=3)  # copies are compared
    still = run_ranks(_gradients_of_one_batch, 1, make_plan(1, tmp_path, *LORA, "finetune.lora_dropout=0.3"))[0]
    assert not torch.equal(*still)


@pytest.mark.parametrize(("sp", "seeds"), [("false", [0, 0, 1, 1]), ("true", [0, 1, 2, 3])])
def test_ranks_with_the_same_activations_share_dropout_masks(sp: str, seeds: list[int], tmp_path: Path) -> None:
    """Tensor-parallel ranks have the same activations only without sequence parallelism."""
    plan = make_plan(4, tmp_path, *LORA, "finetune.lora_dropout=0.3", "trainer.tp=2", f"trainer.sp={sp}")
    drawn = run_ranks(_draw, 4, plan)
    assert [drawn.index(number) for number in drawn] == [seeds.index(seed) for seed in seeds]


def _draw(rank: int, plan: Plan) -> float:
    """Return the first random number after the model is built."""
    topology = plan.topology(rank)
    with process_groups(plan, topology, get_device("cpu"), CPU):
        build_model(plan, topology, get_device("cpu"), CPU)
        return torch.rand(()).item()


def _gradients_of_one_batch(rank: int, plan: Plan) -> list[torch.Tensor]:
    from megatron_llama.data.batches import build_data

    device, topology = get_device("cpu"), plan.topology(rank)
    with process_groups(plan, topology, device, CPU):
        model = build_model(plan, topology, device, CPU)
        batch, gradients = build_data(plan, topology, CPU).train.at(0), []
        for _ in range(2):
            model.zero_grad()
            model.forward_backward(batch)
            grad = next(s.grad for s in model.shards if s.name.endswith("lora_B"))
            assert grad is not None
            gradients.append(grad.clone())
        return gradients


@pytest.mark.parametrize("layout", [[], SP, ZERO_3], ids=["one", "tp2+sp", "zero 3"])
def test_frozen_weights_in_bf16_under_fp32_lora(layout: list[str], world: World, tmp_path: Path) -> None:
    """Frozen bf16 weights give bit-identical results to a base that is rounded to bf16."""
    rounded = tmp_path / "rounded"
    rounded.mkdir()
    base = {name: tensor.bfloat16() for name, tensor in load_file(world.base / "model.safetensors").items()}
    save_file(base, rounded / "model.safetensors", {"format": "pt"})
    (rounded / "config.json").write_text((world.base / "config.json").read_text())
    ranks = 2 if layout else 1
    frozen_bf16 = tune(ranks, tmp_path / "frozen_bf16", *world.lora, *layout, "finetune.frozen_dtype=bf16", steps=3)
    expected = tune(ranks, tmp_path / "expected", *world.lora, *layout, f"init_from={rounded}", steps=3)
    assert frozen_bf16.losses == expected.losses
    assert all(torch.equal(tensor, expected.trained[name]) for name, tensor in frozen_bf16.trained.items())
    assert frozen_bf16.dtypes == ({torch.float32}, {torch.bfloat16})
    assert expected.dtypes == ({torch.float32}, {torch.float32})


def test_bf16_keeps_master_weights_of_trained_weights_only(world: World, tmp_path: Path) -> None:
    tuned = tune(2, tmp_path, *world.lora, *SP, "trainer.precision=bf16", steps=2)
    assert tuned.dtypes == ({torch.float32}, {torch.bfloat16})
    sr = tune(2, tmp_path / "sr", *world.lora, *SP, "trainer.precision=bf16_sr", steps=2)
    assert sr.dtypes == ({torch.bfloat16}, {torch.bfloat16})


def test_planned_memory_equals_the_run(world: World, tmp_path: Path) -> None:
    for ranks, layout in ((1, []), (4, ["trainer.tp=4"]), (4, ["trainer.tp=2", "trainer.pp=2"]), (2, ZERO_3)):
        plan = make_plan(ranks, tmp_path, *RANK, *layout, "finetune.modules_to_save=[embed_tokens,input_layernorm]")
        for trained, frozen, moments, stage in run_ranks(_sizes, ranks, plan):
            memory = stage_memory(plan)[stage]
            assert memory.optimizer == moments
            assert memory.gradients == 4 * trained
            assert memory.weights == 4 * (trained + frozen), "nothing is gathered, and nothing copied"
            assert plan.storage.kind == PLAIN or plan.shard_size > 1
    tuned = tune(1, tmp_path / "run", *world.fresh, steps=1)
    count = sum(tensor.numel() for tensor in tuned.trained.values())
    assert count == world.plan.whole.trained
    assert tuned.moments == 2 * count


def test_flops_equal_the_count_of_torch(world: World) -> None:
    (theirs, ours) = run_ranks(_flops, 1, world.plan, world.base)[0]
    assert theirs == ours


def _flops(rank: int, plan: Plan, base: Path) -> tuple[int, int]:
    """Return the FLOPs of forward and backward over 2 x 16 tokens: torch's count for peft's model, and ours."""
    from torch.utils.flop_counter import FlopCounterMode

    model = their_lora(
        their_base(base, attention="eager"), plan
    )  # eager attention consists of matmuls, which the counter counts
    model.enable_input_require_grads()
    tokens = torch.zeros(2, 16, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens).logits.sum().backward()
    rotary = 2 * 2 * 16 * (plan.model.hidden_size // plan.model.num_attention_heads // 2)  # positions x frequencies
    counted = counter.get_total_flops()
    ours = flops_per_token(plan.model, 16, plan.config.finetune).full * tokens.numel()
    # The RoPE table may be computed once for both samples, or for each.
    return next((counted - more for more in (rotary // 2, rotary) if counted - more == ours), counted), ours


def _sizes(rank: int, plan: Plan) -> tuple[int, int, int, int]:
    """Return (trained elements, frozen elements, bytes of moments, pipeline stage) of a rank."""
    device, topology = get_device("cpu"), plan.topology(rank)
    with process_groups(plan, topology, device, CPU):
        model = build_model(plan, topology, device, CPU)
        moments = sum(moment.nbytes for _, _, moment in build_optimizer(plan, model).states())
        sizes = [sum(s.local.numel() for s in model.shards if s.is_trained is trained) for trained in (True, False)]
        return sizes[0], sizes[1], moments, topology.place["pp"]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_names_cover_every_value_once(tp: int, kv_heads: int, tmp_path: Path) -> None:
    plan = make_plan(tp, tmp_path, *LORA, f"trainer.tp={tp}", f"model.num_key_value_heads={kv_heads}")
    model, finetune = plan.model, plan.config.finetune
    counted = {name: torch.zeros(shape) for name, shape in lora_shapes(model, finetune).items()}
    for rank in range(tp):
        for layer in range(model.num_hidden_layers):
            for owner in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
                for side in ("lora_A", "lora_B"):
                    parameter = f"layers.{layer}.{owner}.{side}"
                    for rectangle in rectangles(parameter, model, TensorParallel(rank, tp), 64, finetune):
                        assert is_lora(rectangle.name) and rectangle.global_shape == counted[rectangle.name].shape
                        where = tuple(slice(o, o + n) for o, n in zip(rectangle.offset, rectangle.size, strict=True))
                        counted[rectangle.name][where] += rectangle.replica == 0
    assert all((tensor == 1).all() for tensor in counted.values())


@pytest.mark.parametrize(("ranks", "layout"), [(1, []), (2, SP), (2, ZERO_3)], ids=["one", "tp2+sp", "zero 3"])
def test_a_resumed_run_is_the_uninterrupted_one(ranks: int, layout: list[str], world: World, tmp_path: Path) -> None:
    whole = tune(ranks, tmp_path / "whole", *world.lora, *layout, steps=6)
    first = tune(ranks, tmp_path / "halves", *world.lora, *layout, steps=3)
    second = tune(ranks, tmp_path / "halves", *world.lora, *layout, steps=6)
    assert first.losses + second.losses == whole.losses  # floats, all bits
    assert all(torch.equal(tensor, whole.trained[name]) for name, tensor in second.trained.items())


def test_checkpoints_hold_what_is_trained_and_go_to_any_layout(world: World, tmp_path: Path) -> None:
    tune(2, tmp_path, *world.lora, *SP, steps=2)
    manifest = json.loads((tmp_path / "checkpoints/step_00000002/checkpoint.json").read_text())
    names = {
        name.removeprefix("optimizer.exp_avg.").removeprefix("optimizer.exp_avg_sq.") for name in manifest["tensors"]
    }
    assert {name for name in names if "random" not in name} == lora_shapes(
        world.plan.model, world.plan.config.finetune
    ).keys()
    whole = tune(1, tmp_path / "whole", *world.lora, steps=4)
    other = tune(2, tmp_path, *world.lora, "trainer.pp=2", steps=4)
    assert other.losses == pytest.approx(whole.losses[2:], rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (["finetune.lora_alpha=8"], "finetune.lora_alpha"),
        (["finetune.lora_rank=2"], "finetune.lora_rank"),
        (["finetune.lora_target_modules=[q_proj]"], "finetune.lora_target_modules"),
        (["finetune=full"], "finetune.method"),
        (["init_from=OTHER"], "init_from"),
    ],
    ids=["alpha", "rank", "targets", "method", "base"],
)
def test_another_runs_checkpoint_is_refused(changes: list[str], named: str, world: World, tmp_path: Path) -> None:
    tune(1, tmp_path, *world.fresh, steps=1)
    settings = {s.partition("=")[0]: s for s in [*world.fresh, *changes]}
    if changes == ["finetune=full"]:
        settings = {s.partition("=")[0]: s for s in world.full}
    if changes == ["init_from=OTHER"]:
        other = tmp_path / "other"
        other.mkdir()
        base = load_file(world.base / "model.safetensors")
        base["model.layers.1.mlp.up_proj.weight"] *= 1.01
        save_file(base, other / "model.safetensors", {"format": "pt"})
        (other / "config.json").write_text((world.base / "config.json").read_text())
        settings["init_from"] = f"init_from={other}"
    with raises_with_message(RankFailed, f"ConfigError.*{named}"):
        tune(1, tmp_path, *settings.values(), steps=2)
