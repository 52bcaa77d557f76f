"""LoRA over weights in 8 and 4 bits is, in every layout, LoRA over an ordinary model of the values they unpack to."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule

from megatron_llama.model import quantized as quantized_module
from megatron_llama.model.quantized import dequantize, quantize
from megatron_llama.optim.gradient_norm import parameter_norm
from megatron_llama.parallel import ParallelModel
from megatron_llama.parallel.compare_copies import Copies
from megatron_llama.plan import Plan
from megatron_llama.plan.memory import rank_memory
from tests.finetuning import runner
from tests.finetuning.runner import LORA, Tuned, assert_near, make_plan, tune
from tests.oracle import CPU, on_ranks, rank_data
from tests.processes import run_command
from tests.ranks import run_ranks
from tests.rows import each_layout

WIDE = ("model.hidden_size=128", "model.intermediate_size=128")  # tp2 leaves rows of one block
STEPS = 2


@dataclass
class Quantized:
    """A base model, and folders with its dequantized weights by kind of quantization."""

    base: Path
    unpacked: dict[str, Path]

    def lora(self, kind: str) -> list[str]:
        return [*LORA, *WIDE, f"init_from={self.base}", f"finetune.frozen_dtype={kind}"]

    def plain(self, kind: str) -> list[str]:
        return [*LORA, *WIDE, f"init_from={self.unpacked[kind]}"]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    pytest.importorskip("transformers", reason="transformers, the oracle, is a development dependency")
    # Import before ranks are forked, as it takes seconds.
    where = "torchao.quantization.quantize_.workflows.nf4.nf4_tensor"
    pytest.importorskip(where, reason="torchao quantizes: pip install 'megatron_llama[quantize]'")
    folder = tmp_path_factory.mktemp("quantized")
    made = Quantized(folder / "base", {kind: folder / kind for kind in ("int8", "nf4")})
    run_ranks(_prepare, 1, make_plan(1, folder, *LORA, *WIDE), made)
    return made


@pytest.fixture(scope="module")
def oracles(quantized: Quantized, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tuned]:
    """Results of LoRA in fp32, in one process, on the dequantized base."""
    folder = tmp_path_factory.mktemp("oracles")
    return {kind: tune(1, folder / kind, *quantized.plain(kind), steps=STEPS) for kind in quantized.unpacked}


def _prepare(rank: int, plan: Plan, made: Quantized) -> None:
    runner.save_base(rank, plan, made.base)
    base = load_file(made.base / "model.safetensors")
    for kind, folder in made.unpacked.items():
        folder.mkdir()
        values = {name: _torchao(w, kind) if name.endswith("_proj.weight") else w for name, w in base.items()}
        save_file(values, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text((made.base / "config.json").read_text())


def _torchao(whole: torch.Tensor, kind: str) -> torch.Tensor:
    """A whole tensor, quantized and unpacked by torchao (int8), or by hand with torchao's levels (nf4)."""
    from torchao.quantization import Int8Tensor, PerGroup
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    if kind == "int8":
        return Int8Tensor.from_hp(whole, granularity=PerGroup(64)).dequantize()
    levels = to_nf4(torch.ones(64, 256)).nf4
    blocks = whole.reshape(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    nearest = ((blocks / largest).unsqueeze(-1) - levels).abs().argmin(-1)
    return (levels[nearest] * largest).view_as(whole)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_one_process_has_all_bits_of_lora_on_the_unpacked_model(
    kind: str, quantized: Quantized, oracles: dict[str, Tuned], tmp_path: Path
) -> None:
    ours, oracle = tune(1, tmp_path, *quantized.lora(kind), steps=STEPS), oracles[kind]
    assert (ours.losses, ours.norms) == (oracle.losses, oracle.norms)
    assert all(torch.equal(ours.first_grads[name], grad) for name, grad in oracle.first_grads.items())
    assert all(torch.equal(ours.trained[name], tensor) for name, tensor in oracle.trained.items())
    assert all(tensor.any() for tensor in ours.trained.values())
    assert ours.dtypes == ({torch.float32}, {torch.uint8, torch.float32})
    saved = sum(path.stat().st_size for path in tmp_path.glob("checkpoints/step_*/*"))
    assert saved < sum(path.stat().st_size for path in quantized.base.iterdir()), "the base is in the checkpoint"


@each_layout(__file__, "quantized", "ranks, settings")
def test_every_layout_has_the_same_values_and_trains_alike(
    ranks: int, settings: list[str], quantized: Quantized, oracles: dict[str, Tuned], tmp_path: Path
) -> None:
    kind, *layout = settings
    ours = tune(ranks, tmp_path, *quantized.lora(kind), *layout, steps=STEPS)
    assert_near(ours, oracles[kind])
    unpacked = load_file(quantized.unpacked[kind] / "model.safetensors")
    assert ours.frozen.keys() == unpacked.keys()
    assert all(torch.equal(tensor, unpacked[name]) for name, tensor in ours.frozen.items())  # all bits


@each_layout(__file__, "quantized dora", "ranks, settings")
def test_dora_on_a_quantized_base(ranks: int, settings: list[str], quantized: Quantized, tmp_path: Path) -> None:
    """DoRA's norms are of the dequantized rows, as in PEFT."""
    (kind, *layout), dora = settings, "finetune.use_dora=true"
    ours = tune(ranks, tmp_path / "ours", *quantized.lora(kind), dora, *layout, steps=STEPS)
    oracle = tune(1, tmp_path / "oracle", *quantized.plain(kind), dora, steps=STEPS)
    assert ours.dtypes[1] == {torch.uint8, torch.float32}
    assert sum("magnitude" in name for name in ours.trained) == sum("lora_A" in name for name in ours.trained) > 0
    assert_near(ours, oracle)
    if ranks == 1:
        assert all(torch.equal(ours.trained[name], tensor) for name, tensor in oracle.trained.items())


def test_scales_stay_fp32_where_the_rest_is_gathered_in_bf16(quantized: Quantized, tmp_path: Path) -> None:
    chosen = ["trainer.precision=bf16", "trainer.zero=3"]
    ours = tune(2, tmp_path / "ours", *quantized.lora("nf4"), *chosen, steps=1)
    plain = tune(2, tmp_path / "plain", *quantized.plain("nf4"), *chosen, steps=1)
    assert ours.losses == plain.losses and ours.dtypes == ({torch.float32}, {torch.uint8, torch.bfloat16})


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_errors_are_within_half_a_step(kind: str, quantized: Quantized) -> None:
    run_ranks(_check_errors, 1, kind)


def test_torchao_prints_nothing_at_its_import(quantized: Quantized) -> None:
    code = "import torch; from megatron_llama.model import quantized; quantized.quantize(torch.zeros(1, 64), 'nf4')"
    assert run_command(sys.executable, "-c", code).stderr == ""


def _check_errors(rank: int, kind: str) -> None:
    torch.manual_seed(3)
    values = torch.randn(96, 256) * torch.logspace(-6, 3, 96).unsqueeze(1)
    values[5, 64:128] = 0
    largest = values.unflatten(1, (-1, 64)).abs().amax(-1, keepdim=True)
    # The largest gap of nf4's levels is between -1 and -0.6962; int8's range ends at 127 of 127.5.
    most = largest * {"int8": 0.5 / 127.5, "nf4": 0.3038 / 2}[kind] * 1.0001 + 1e-7
    dequantized = dequantize(quantize(values, kind), kind, torch.float32)
    errors = (dequantized - values).abs().unflatten(1, (-1, 64))
    assert (errors <= most).all() and not dequantized[5, 64:128].any()
    relative = ((dequantized - values).norm() / values.norm()).item()
    assert {"int8": 0.003, "nf4": 0.06}[kind] < relative < {"int8": 0.008, "nf4": 0.11}[kind]
    assert torch.equal(quantize(values[7:31], kind), quantize(values, kind)[7:31])  # any rows
    at_once, quantized_module._MOST_VALUES = quantize(values, kind), 5 * 256  # five rows at once; in this rank only
    assert torch.equal(quantize(values, kind), at_once)
    part = dequantize(quantize(values[:, 64:192], kind), kind, torch.float32)
    assert torch.equal(part, dequantized[:, 64:192])  # and any blocks
    values[9, 70] = torch.nan
    assert dequantize(quantize(values, kind), kind, torch.float32)[9].isnan().sum() == 64
    assert dequantize(quantize(values[:0], kind), kind, torch.float32).shape == (0, 256)


@pytest.mark.parametrize(("kind", "zero"), [("nf4", 1), ("int8", 3)])
def test_memory_is_that_of_the_plan(kind: str, zero: int, quantized: Quantized, tmp_path: Path) -> None:
    layout = ["trainer.tp=2", f"trainer.zero={zero}", "trainer.micro_batch_size=1"]
    plan = make_plan(4, tmp_path, *LORA, *WIDE, *layout, f"finetune.frozen_dtype={kind}")
    memory = rank_memory(plan, plan.stages[0])
    for held, gathered, matrices, packed, saved_dtypes in on_ranks(_memory, plan):
        # With several micro batches, gathered weights are freed only after the gradients are reduced.
        assert memory.weights == held + (0 if zero == 3 else gathered)
        assert packed == matrices * {"int8": 1.0625, "nf4": 0.5625}[kind]
        assert saved_dtypes == {torch.uint8}, "a backward pass keeps an unpacked matrix"


def _memory(plan: Plan, model: ParallelModel) -> tuple[int, int, int, int, set[torch.dtype]]:
    """Return bytes of this rank's weights, bytes of gathered weights, elements and bytes of its matrices, and the
    dtypes of matrix-sized tensors that a micro batch saves for its backward pass."""
    weights = [("", shard, shard.local) for shard in model.shards]
    Copies(plan.topology(dist.get_rank()), CPU).compare(weights, "step 0", with_states=False)
    whole = torch.cat([s.values.flatten() for s in model.shards if s.is_primary_replica])
    norm = parameter_norm(model.shards, CPU)
    assert norm.isfinite() and norm > whole.norm() / 2
    packed = [s for s in model.shards if s.quantized]
    saved_dtypes: set[torch.dtype] = set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 2 and tensor.numel() >= 128 * 64 and not tensor.requires_grad:
            saved_dtypes.add(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.forward_backward(rank_data(plan).train.at(0))
    held = sum(s.local.nbytes for s in model.shards)
    matrices, bytes_of_them = sum(s.values.numel() for s in packed), sum(s.local.nbytes for s in packed)
    for module in model.chunks[0].modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    gathered = sum(parameter.nbytes for parameter in model.chunks[0].parameters())
    return held, gathered, matrices, bytes_of_them, saved_dtypes
