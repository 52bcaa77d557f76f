"""One rank without peers trains as ``fully_shard`` over one rank; ``build_model`` executes the steps of plan.txt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_llama.devices.cpu import kernels
from megatron_llama.devices.cpu.device import Cpu
from megatron_llama.parallel import ParallelModel, assembly, data_parallel
from megatron_llama.plan import Plan
from megatron_llama.plan.build_steps import applied_steps, build_steps
from megatron_llama.plan.plan import COPIES, SHARDS
from tests.compiled import needs_compiler
from tests.layouts.table import DROPPING
from tests.oracle import (
    CPU,
    make_plan,
    on_ranks,
    on_ranks_by_plan,
    rank_batches,
    rank_groups,
    rank_model,
    run_layout,
    worst,
)
from tests.paths import ROOT
from tests.ranks import run_ranks
from tests.rows import each_layout


@each_layout(__file__, "one data-parallel rank")
def test_a_run_is_bit_identical_to_fully_shards(ranks: int, layout: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_plan(ranks, *layout).storage.kind == COPIES
    monkeypatch.setattr(kernels, "ADDED_AT_ONCE", 50)  # which divides no weight
    actual = run_layout(ranks, *layout, steps=2)
    stored = Plan.storage.fget  # type: ignore[attr-defined]
    apart = {"keeps_bf16_grads": False, "frees_embedding": False}
    monkeypatch.setattr(Plan, "storage", property(lambda plan: replace(stored(plan), kind=SHARDS, **apart)))
    assert set(worst(actual, run_layout(ranks, *layout, steps=2)).values()) == {0.0}


def test_the_buffer_of_gradients_is_used_in_two_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    # fully_shard requests the input in the compute stream and the result in its reduction stream, which reads the
    # buffer last. The allocator must not reuse the memory before.
    recorded, stream = [], object()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: recorded.append((self, stream)))
    for asynchronous in (False, True):
        monkeypatch.setattr(Cpu, "asynchronous", asynchronous)
        reduction = data_parallel._NoReduction()
        buffer = reduction.allocate((4,), dtype=torch.float32, device=CPU)
        assert recorded == []
        assert reduction.allocate((4,), dtype=torch.float32, device=CPU) is buffer
        assert [(each is buffer, used) for each, used in recorded] == [(True, stream)] * asynchronous
        assert reduction.allocate((4,), dtype=torch.float32, device=CPU) is not buffer


def test_zero_3_with_one_rank_records_the_buffers_of_each_micro_batch() -> None:
    plan = make_plan(1, "trainer.zero=3", "trainer.precision=bf16")
    assert plan.num_microbatches > 1
    (count,) = on_ranks(_recorded_buffers, plan)
    assert count == plan.num_microbatches * (plan.model.num_hidden_layers + 2), "embedding, blocks, norm with head"


def _recorded_buffers(plan: Plan, model: ParallelModel) -> int:
    """Return the number of recorded buffers in a step, as if the CPU ran asynchronously."""
    recorded, batches = list[torch.Tensor](), rank_batches(plan).at(0)
    with (
        patch.object(Cpu, "asynchronous", True),
        patch.object(torch.accelerator, "current_stream", lambda: None),
        patch.object(torch.Tensor, "record_stream", lambda self, stream: recorded.append(self)),
    ):
        model.forward_backward(batches)
    return len(recorded)


@pytest.mark.parametrize("tied", [False, True])
def test_memory_of_the_copies(tied: bool) -> None:
    """Copies have memory in a pass only. The embedding's is freed once it has been read, unless something reads it
    again: the head of tied embeddings, or the next micro batch."""
    settings = ("trainer.precision=bf16", f"model.tie_word_embeddings={tied}")
    plans = [make_plan(1, *settings, f"trainer.micro_batch_size={size}") for size in (8, 2)]
    one, several = on_ranks_by_plan(_memory, plans)[0]
    for memory in (one, several):
        assert memory["before"] == memory["after"] == 0
        assert memory["embedding, validation"] > 0
    assert several["inside"] == several["masters"] // 2
    assert (one["embedding, training"] == 0) == (not tied)
    assert several["embedding, training"] > 0


def _memory(plan: Plan, model: ParallelModel) -> dict[str, int]:
    """Return the model's bytes: all copies before, inside and after a training pass; the masters; the embedding's copy
    when the first block begins, in training and in a validation with two batches."""
    (chunk,), (copies,), batches = model.chunks, model.compute_copies, rank_batches(plan)
    assert copies is not None
    inside: list[int] = []
    embedding: list[int] = []

    def size() -> int:
        return sum(copy.untyped_storage().size() for copy in copies.master_of)

    def at_first_block(*_: object) -> None:
        inside.append(size())
        embedding.append(chunk.embed_tokens.weight.untyped_storage().size())

    next(iter(chunk.layers.values())).register_forward_pre_hook(at_first_block)
    memory = {"before": size(), "masters": sum(master.nbytes for master in copies.master_of.values())}
    model.forward_backward(batches.at(0))
    memory |= {"inside": inside[0], "after": size(), "embedding, training": embedding[-1]}
    model.forward_backward([*batches.at(0), *batches.at(8)], train=False)
    return memory | {"embedding, validation": embedding[-1]}


TABLES = assembly.PARTS, assembly.LAYERS, assembly.WRAPPERS, assembly.CHUNKS
BY_LAYOUT = {"tp", "pp"}
"""Steps without a function: the topology and megatron-core's settings."""
LORA = ("finetune=lora", "finetune.frozen_dtype=fp32")
ROWS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "plain": ((), "", ("attend=CpuKernels.attend, rotate=rotate", "activation=swiglu")),
    "exact": (("trainer.exact=true",), "exact", ("ExactColumnLinear", "ExactNorm", "ExactHead", "attend=SharedHeads")),
    "compiled": (
        ("trainer.compile=true", "trainer.recompute=selective"),
        "recompute selective · compile",
        ("ColumnLinear(in_features=32, out_features=64, bias=False, TP=1, traceable_matmul)", "wrapped by recompute"),
    ),
    "float8": (("trainer.float8=rowwise",), "float8 rowwise", ("TP=1, _linear)",)),
    "LoRA": (LORA, "LoRA 8", ("LoraLinear",)),
    "wrapped": (
        ("trainer.mlp_chunks=2", "trainer.recompute=full", DROPPING, "trainer.offload=[activations]"),
        "MLP in 2 chunks · recompute full · random-LTD · offload activations",
        ("wrapped by recompute full, random-LTD, offload", "wrapped by 2 chunks"),
    ),
    "QK-Clip": (("optim.qk_clip=10",), "QK-Clip", ("CpuKernels.attend",)),
}


def _build(rank: int, plan: Plan) -> tuple[list[str], str]:
    """Return the executed steps, and the model's text."""
    executed: list[str] = []

    def recorded(name: str, function: Any) -> Any:
        return lambda *inputs: executed.append(name) or function(*inputs)

    for table in TABLES:
        for name, function in list(table.items()):
            table[name] = recorded(name, function)  # in this forked rank only
    with rank_groups(plan, rank):
        return executed, repr(rank_model(plan, rank).chunks[0])


@needs_compiler
@pytest.mark.parametrize(("settings", "applied", "shown"), ROWS.values(), ids=ROWS)
def test_the_applied_steps_are_executed(settings: tuple[str, ...], applied: str, shown: tuple[str, ...]) -> None:
    plan = make_plan(1, *settings)
    steps = applied_steps(plan)
    assert " · ".join(steps.values()) == applied
    ((executed, text),) = run_ranks(_build, 1, plan)
    assert set(executed) == steps.keys() - BY_LAYOUT
    assert not [part for part in shown if part not in text], text


def test_each_step_has_a_function() -> None:
    names = list(build_steps(make_plan(1)))
    for table in TABLES:
        assert [name for name in names if name in table] == list(table), "in the steps' order"
    assert {name for table in TABLES for name in table} | BY_LAYOUT == set(names)
    tour = " ".join((ROOT / "docs/design/tour.md").read_text(encoding="utf-8").split())
    assert f"in this order: {', '.join(names)}." in tour
