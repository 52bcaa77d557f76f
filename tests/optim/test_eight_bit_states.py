"""Optimizer states in 8 bits: torchao's arithmetic, and checkpoints. test_layouts.py compares layouts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_llama.arch.hf_tp_mapping import Rectangle
from megatron_llama.checkpoint import state as contents
from megatron_llama.checkpoint.folder import find_checkpoint
from megatron_llama.checkpoint.manifest import read_manifest
from megatron_llama.config.precision import STATE_BLOCK
from megatron_llama.devices import get_device
from megatron_llama.devices.cpu.kernels import CpuKernels
from megatron_llama.optim import build_optimizer
from megatron_llama.optim.adam import adam_update, adamw_update
from megatron_llama.optim.eight_bit_states import BlockwiseState, levels_on
from megatron_llama.optim.low_precision import ElementwiseOptimizer
from megatron_llama.parallel import ParallelModel, Shard
from megatron_llama.plan import Plan
from megatron_llama.plan.memory import rank_memory
from tests.checkpoint.runner import assert_same, run
from tests.compiled import needs_compiler, prepare_rank
from tests.optim.given_gradients import elementwise_inputs
from tests.oracle import CPU, make_plan, on_ranks_by_plan, rank_groups, rank_model
from tests.ranks import run_ranks

EAGER, COMPILED = (get_device("cpu").kernels(compiled) for compiled in (False, True))
LEVELS = {signed: levels_on(CPU, signed=signed) for signed in (True, False)}
# Two blocks of a row on each of two tensor-parallel ranks; k_proj and v_proj alone would be too small for 8 bits.
WIDE = ("model.hidden_size=128", "model.intermediate_size=128", "model.num_hidden_layers=2")
EIGHT = (*WIDE, "optim.state_bits=8")
LORA = ["finetune=lora", "finetune.lora_rank=32", "finetune.lora_target_modules=all-linear", "init_from=null"]


def random(rows: int, columns: int, seed: int = 1) -> torch.Tensor:
    """Values of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-9, 1, (rows, columns), generator=generator)
    return torch.randn(rows, columns, generator=generator) * 10.0**exponents


def moments(signed: bool) -> torch.Tensor:
    """Values of a first or a second moment, with a row of zeros."""
    values = random(300, 256) if signed else random(300, 256).square()
    values[7] = 0
    return values


def near_boundaries(signed: bool) -> Iterator[torch.Tensor]:
    """Blocks whose scale is 1, with a value at a boundary of two levels, or next to it."""
    near = LEVELS[signed].boundaries[:-1]
    for part in (torch.nextafter(near, near - 1), near, torch.nextafter(near, near + 1)):
        rows = torch.ones(len(near), STATE_BLOCK)
        rows[:, 5] = part
        yield rows


@pytest.mark.parametrize("signed", [True, False])
def test_codes_and_scales_are_torchaos(signed: bool) -> None:
    torchao = pytest.importorskip("torchao.optim.subclass_8bit", reason="torchao is an extra")
    for values in (moments(signed), *near_boundaries(signed)):
        theirs = torchao.OptimState8bit.zeros(values.shape, signed, STATE_BLOCK)
        theirs.copy_(values)
        ours = BlockwiseState(values, LEVELS[signed])
        ours[:] = values
        assert torch.equal(ours.codes, theirs.codes) and torch.equal(ours.scales.flatten(), theirs.scale)
        assert torch.equal(ours[:], theirs.dequantize())


def test_every_level_is_kept_and_what_is_not_finite_stays_so() -> None:
    for signed in (True, False):
        values = LEVELS[signed].values
        rows = torch.ones(256, STATE_BLOCK)
        rows[:, 0] = values
        state = BlockwiseState(rows, LEVELS[signed])
        state[:] = rows
        assert torch.equal(state[:], rows) and torch.equal(state.codes[:, 0].int(), torch.arange(256).int())
    rows[3, 5], rows[4, 40 % STATE_BLOCK] = torch.nan, torch.inf
    state[:] = rows
    assert not state[3:5].isfinite().any() and torch.equal(state[5:], rows[5:])


def test_rows_that_are_left_out_keep_their_bits() -> None:
    state, other = (BlockwiseState(random(4, 256), LEVELS[True]) for _ in range(2))
    state[:] = other[:] = -random(4, 256).abs()  # the largest of a block is negative, and is no level
    codes, scales = state.codes.clone(), state.scales.clone()
    state.assign(slice(0, 4), torch.full((4, 256), torch.nan), unless=torch.tensor(True))
    assert torch.equal(state.codes, codes) and torch.equal(state.scales, scales)
    state.assign(slice(1, 3), random(2, 256, seed=2), unless=torch.tensor(False))
    other[1:3] = random(2, 256, seed=2)
    assert torch.equal(state.codes, other.codes) and torch.equal(state.scales, other.scales)


@needs_compiler
@pytest.mark.parametrize("signed", [True, False])
def test_the_kernel_has_the_same_bits(signed: bool) -> None:
    values = moments(signed)
    values[8, 40], values[9, 40], values[10, 255] = torch.nan, torch.inf, -torch.inf if signed else torch.inf
    plain, kernel = (BlockwiseState(values, LEVELS[signed], kernels) for kernels in (EAGER, COMPILED))
    assert COMPILED._uses_cpp(kernel.codes) and not EAGER._uses_cpp(plain.codes)
    for state in (plain, kernel):
        state[:] = values
        state[3:5] = values[100:102]
        state.assign(slice(5, 7), values[:2], unless=torch.tensor(True))
        state.assign(slice(15, 17), values[:2], unless=torch.tensor(False))
    scales = kernel.scales
    assert torch.equal(scales.nan_to_num(-1), plain.scales.nan_to_num(-1)) and not scales[8:11].isfinite().all()
    finite = scales.isfinite().repeat_interleave(STATE_BLOCK, 1)  # of another block codes are whatever NaN gives
    assert finite.sum() == values.numel() - 3 * STATE_BLOCK
    assert torch.equal(kernel.codes[finite], plain.codes[finite]) and torch.equal(kernel[:][finite], plain[:][finite])
    assert not kernel[:][~finite].isfinite().any() and torch.equal(kernel[2:4], kernel[:][2:4])
    for rows in near_boundaries(signed):
        plain, kernel = (BlockwiseState(rows, LEVELS[signed], kernels) for kernels in (EAGER, COMPILED))
        plain[:] = kernel[:] = rows
        assert torch.equal(plain.codes, kernel.codes)


@needs_compiler
def test_compiled_runs_update_by_it_and_others_do_not() -> None:
    for compiled in (True, False):
        assert run_ranks(_by_kernel, 1, make_plan(1, *EIGHT, f"trainer.compile={compiled}"))[0] == {compiled}


def _by_kernel(rank: int, plan: Plan) -> set[bool]:
    prepare_rank(plan)
    with rank_groups(plan, rank):
        states = [state for _, _, state in build_optimizer(plan, rank_model(plan, rank)).states()]
        return {
            isinstance(state.kernels, CpuKernels) and state.kernels._uses_cpp(state.codes)
            for state in states
            if isinstance(state, BlockwiseState)
        }


@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_updates_are_torchaos(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torchao = pytest.importorskip("torchao.optim", reason="torchao is an extra")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(CpuKernels, "rows_at_once", lambda kernels, width: (1 << 9) // width)
    start = random(48, 128)
    local, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    settings = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    kind = {"adamw": torchao.AdamW8bit, "adam": torchao.Adam8bit}[name]
    reference = kind([theirs], **settings, block_size=STATE_BLOCK)
    rectangles = [Rectangle("a", (48, 128), (0, 0), (0, 0), (48, 128))]
    inputs = elementwise_inputs(
        local, name, rectangles, state_dtype=torch.float32, stochastic=False, seed=1, in_blocks=True
    )
    ours = ElementwiseOptimizer(inputs, {"adamw": adamw_update, "adam": adam_update}[name], **settings)
    for step in range(12):
        gradient = torch.randn(48, 128, generator=torch.Generator().manual_seed(step))
        local.grad, theirs.grad = gradient.clone(), gradient * 0.5
        ours.step(factor=torch.tensor(0.5))
        reference.step()
        torch.testing.assert_close(local, theirs, rtol=1e-5, atol=1e-6)
        for moment in ("exp_avg", "exp_avg_sq"):
            state = ours.state[local][moment]
            assert isinstance(state, BlockwiseState)
            # The two multiply in another order, so that a value in thousands falls on another side of a border.
            assert (state.codes != reference.state[theirs][moment].codes).float().mean() < 2e-3


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(1, []), (2, ["trainer.tp=2"]), (2, ["trainer.zero=2"]), (2, ["trainer.pp=2", *LORA])],
    ids=["one process", "tp2", "dp2, zero 2", "pp2, LoRA"],
)
def test_bytes_are_the_plans(ranks: int, layout: list[str]) -> None:
    settings = ([], ["optim.name=sgd"], ["trainer.precision=bf16_sr"])
    plans = [make_plan(ranks, *EIGHT, *layout, *more) for more in settings]
    for rank, sizes in enumerate(on_ranks_by_plan(_bytes, plans)):
        stage = plans[0].topology(rank).place["pp"]
        assert sizes == [rank_memory(plan, plan.stages[stage]).optimizer for plan in plans]


def _bytes(plan: Plan, model: ParallelModel) -> int:
    return sum(map(_state_bytes, build_optimizer(plan, model).states()))


def _state_bytes(entry: tuple[str, Shard, torch.Tensor | BlockwiseState]) -> int:
    state = entry[2]
    parts = (state.codes, state.scales) if isinstance(state, BlockwiseState) else (state,)
    return sum(part.nbytes for part in parts)


def test_any_layout_reads_the_same_codes_and_32_bits_their_values(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = run(2, tmp_path / "run", *EIGHT, "trainer.tp=2", until=2)
    stored = read_manifest(find_checkpoint(tmp_path / "run")).stored
    weight = "model.layers.1.mlp.down_proj.weight"
    states = [stored.tensors[f"optimizer.exp_avg{part}.{weight}"] for part in ("", contents.SCALE)]
    assert [(part.dtype, part.shape) for part in states] == [(torch.uint8, (128, 128)), (torch.float32, (128, 4))]
    saved = [f"checkpoint.resume={tmp_path}/run/checkpoints/step_00000002", "checkpoint.save_last=false"]
    assert_same(run(2, tmp_path / "other", *EIGHT, *saved, "trainer.pp=2").tensors, before.tensors)
    assert "optim.state_bits" not in capfd.readouterr().err
    assert_same(run(2, tmp_path / "wide", *WIDE, *saved, "trainer.zero=3").tensors, before.tensors)
    assert "optim.state_bits: from 8 to null" in capfd.readouterr().err


def test_from_32_bits_each_block_is_quantized(tmp_path: Path) -> None:
    fp32_run = run(2, tmp_path / "run", *WIDE, "trainer.zero=3", until=2).tensors
    saved = [f"checkpoint.resume={tmp_path}/run/checkpoints/step_00000002", "checkpoint.save_last=false"]
    eight_bit = run(2, tmp_path / "narrow", *EIGHT, *saved, "trainer.tp=2").tensors
    assert fp32_run.keys() == eight_bit.keys()
    for name, values in fp32_run.items():
        if "/" in name and values.dim() == 2:
            state = BlockwiseState(values, LEVELS[not name.startswith("exp_avg_sq/")])
            state[:] = values
            assert torch.equal(eight_bit[name], state[:]) and not torch.equal(values, state[:]), name
        else:
            assert torch.equal(eight_bit[name], values), name
