"""Dtypes of each precision, read from the live tensors of a training step, for each ZeRO stage and between two micro
batches."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from megatron_llama.arch.parameters import StageParameters
from megatron_llama.config.precision import PRECISIONS
from megatron_llama.optim import build_optimizer
from megatron_llama.parallel import ParallelModel
from megatron_llama.plan import Plan
from megatron_llama.plan.memory import rank_memory
from tests.oracle import make_plan, rank_batches, rank_groups, rank_model
from tests.ranks import run_ranks

F, B = "float32", "bfloat16"


@dataclass(frozen=True)
class Expected:
    """A row of the table, as the recipe of each name has it."""

    products: str
    """Weights and gradients of the layers."""
    sums: str
    """Gradients summed over micro batches and ranks."""
    master: str | None
    moments: str


TABLE = {
    "fp32": Expected(F, F, None, F),
    "bf16": Expected(B, F, F, F),
    "bf16_sr": Expected(B, B, None, B),
    "bf16_pure": Expected(B, B, None, B),
    "bf16SR": Expected(B, B, None, B),
    "fp32_OptStates": Expected(B, B, None, F),
    "fp32_ZeroOptMaster": Expected(B, B, F, F),
    "fp32_ZeroOptMasterGradAcc": Expected(B, F, F, F),
    "megatron_amp_O2": Expected(B, F, F, F),
}
STOCHASTIC = {"bf16_sr", "bf16SR", "fp32_OptStates", "fp32_ZeroOptMaster"}


@dataclass
class Observed:
    """Dtypes by kind, and bytes on this rank."""

    dtypes: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    weight_bytes: int = 0
    gradient_bytes: int = 0
    moment_bytes: int = 0
    planned: tuple[int, int, int] = (0, 0, 0)

    def add(self, kind: str, *tensors: torch.Tensor) -> None:
        """Record the dtypes of tensors."""
        self.dtypes[kind] |= {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}


def test_the_table_has_every_name() -> None:
    assert TABLE.keys() == PRECISIONS.keys()
    assert {name for name, precision in PRECISIONS.items() if precision.stochastic} == STOCHASTIC
    for alias, same in (("bf16SR", "bf16_sr"), ("fp32_ZeroOptMasterGradAcc", "bf16"), ("megatron_amp_O2", "bf16")):
        assert PRECISIONS[alias] is PRECISIONS[same]
    plan = make_plan(1, "trainer.precision=bf16SR")
    assert plan.config.trainer.precision == "bf16SR" and plan.precision.name == "bf16_sr"


@pytest.mark.parametrize(
    "zero", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow), 3]
)
def test_live_tensors_have_the_dtypes_of_the_table(zero: int) -> None:
    chosen = list(TABLE) if zero == 1 else [name for name in TABLE if PRECISIONS[name].name == name]
    layout = (f"trainer.zero={zero}", "trainer.micro_batch_size=1")
    plans = [make_plan(2, *layout, f"trainer.precision={name}") for name in chosen]
    first, second = run_ranks(_look, 2, plans)
    assert first == second
    for name, actual in zip(chosen, first, strict=True):
        expected = TABLE[name]
        stored = expected.master or expected.products
        # fully_shard casts reduced gradients to the parameter's dtype and adds the next micro batch to them: with fp32
        # masters these sums are fp32, even if the precision requests bf16.
        sums = {"whole sums": {expected.sums}} if zero < 2 else {"sharded sums": {stored}}
        assert actual.dtypes == sums | {
            "weights of the layers": {expected.products},
            "activations": {expected.products},
            "sent": {expected.sums},
            "stored": {stored},
            "moments": {expected.moments},
            "gradients for the optimizer": {stored},
        }, name
        assert (actual.weight_bytes, actual.gradient_bytes, actual.moment_bytes) == actual.planned, name


def _look(rank: int, plans: list[Plan]) -> list[Observed]:
    answers = []
    all_reduce, reduce_scatter = dist.all_reduce, DefaultReduceScatter.__call__
    with rank_groups(plans[0], rank):
        for plan in plans:
            model, actual = rank_model(plan, rank), Observed()
            optimizer, batches = build_optimizer(plan, model), rank_batches(plan).at(0)
            assert len(batches) > 2
            dist.all_reduce = _watched(all_reduce, actual)
            DefaultReduceScatter.__call__ = _watched(reduce_scatter, actual)  # type: ignore[method-assign]
            _watch_forwards(model, actual)
            model.forward_backward(batches)
            dist.all_reduce = all_reduce
            grads = [shard.grad for shard in model.shards if shard.grad is not None]
            assert len(grads) == len(model.shards)
            actual.add("gradients for the optimizer", *grads)
            actual.gradient_bytes = max(actual.gradient_bytes, sum(grad.nbytes for grad in grads))
            optimizer.step(optimizer.gradient_norm())
            actual.add("stored", *(shard.local for shard in model.shards))
            actual.weight_bytes += sum(shard.local.nbytes for shard in model.shards)
            moments = [moment for _, _, moment in optimizer.states()]
            actual.add("moments", *moments)
            actual.moment_bytes = sum(moment.nbytes for moment in moments)
            held = sum(shard.parameter.numel() for shard in model.shards)
            memory = rank_memory(plan, StageParameters(held, held, 0))
            actual.planned = (memory.weights, memory.gradients, memory.optimizer)
            answers.append(actual)
    return answers


def _watched(reduce: Any, actual: Observed) -> Any:
    """Wrap a collective to record the dtypes that it sends. Scalars and int64 tensors are the loss and token counts."""

    def watched(*args: Any, **kwargs: Any) -> Any:
        tensor = kwargs["input_tensor"] if "input_tensor" in kwargs else args[0]
        if tensor.dim() and tensor.dtype != torch.int64 and dist.get_world_size(kwargs.get("group")) > 1:
            actual.add("sent", tensor)
        return reduce(*args, **kwargs)

    return watched


def _watch_forwards(model: ParallelModel, actual: Observed) -> None:
    """Look at weights, activations and gradients when a block runs in the second micro batch."""
    (chunk,) = model.chunks
    blocks = list(chunk.layers.values())
    calls = {"chunk": 0}

    def before_chunk(*_: Any) -> None:
        calls["chunk"] += 1
        if calls["chunk"] == 2:
            _look_at_gradients(chunk, actual)

    def after_block(block: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        if calls["chunk"] == 2:
            actual.add("activations", output)

    def inside(module: torch.nn.Module, inputs: tuple) -> None:
        if calls["chunk"] == 2 and isinstance(getattr(module, "weight", None), torch.Tensor):
            actual.add("weights of the layers", module.weight)  # type: ignore[arg-type]

    chunk.register_forward_pre_hook(before_chunk, prepend=True)
    for block in blocks:
        block.register_forward_hook(after_block)
        for module in block.modules():
            if not isinstance(module, FSDPModule):
                module.register_forward_pre_hook(inside)


def _look_at_gradients(chunk: torch.nn.Module, actual: Observed) -> None:
    whole: list[torch.Tensor] = []
    sharded: list[torch.Tensor] = []
    states = {module._get_fsdp_state() for module in chunk.modules() if isinstance(module, FSDPModule)}
    groups = {group for state in states for group in state._fsdp_param_groups}  # norm and head share one
    for param in (param for group in groups for param in group.fsdp_params):
        summed = param.unsharded_accumulated_grad
        summed = param._unsharded_param.grad if summed is None else summed
        if summed is not None:
            whole.append(summed)
        if param.sharded_param.grad is not None:
            sharded.append(param.sharded_param.grad.to_local())
        gathered = [t for t in param.all_gather_outputs if t.untyped_storage().size()]
        actual.weight_bytes += sum(t.nbytes for t in gathered)
    for kind, grads in (("whole sums", whole), ("sharded sums", sharded)):
        if grads:
            actual.add(kind, *grads)
    actual.gradient_bytes = sum(t.nbytes for t in [*whole, *sharded])
