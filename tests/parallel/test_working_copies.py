"""A rank without data-parallel peers casts its weights itself, and trains as ``fully_shard`` over one rank does."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from megatron_llama.data.batches import Batches
from megatron_llama.devices import get_device
from megatron_llama.devices.cpu import kernels
from megatron_llama.devices.cpu.device import Cpu
from megatron_llama.parallel import build_model, fsdp, process_groups
from megatron_llama.plan import Plan
from megatron_llama.plan.storage import COPIES, SHARDS
from tests.oracle import RaggedSamples, make_plan, run_layout, worst
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, ["trainer.precision=bf16"]),
        (1, ["trainer.precision=fp32_ZeroOptMaster"]),  # micro batches are summed in bf16 ...
        (1, ["trainer.precision=fp32_ZeroOptMaster", "trainer.zero=2"]),  # ... and here in fp32
        (2, ["trainer.precision=bf16", "trainer.pp=2", "model.tie_word_embeddings=true", "trainer.recompute=full"]),
    ],
)
def test_to_the_bit(ranks: int, layout: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
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
    cpu = torch.device("cpu")
    for asynchronous in (False, True):
        monkeypatch.setattr(Cpu, "asynchronous", asynchronous)
        reduction = fsdp._NoReduction()
        buffer = reduction.allocate((4,), dtype=torch.float32, device=cpu)
        assert recorded == []
        assert reduction.allocate((4,), dtype=torch.float32, device=cpu) is buffer
        assert [(each is buffer, used) for each, used in recorded] == [(True, stream)] * asynchronous
        assert reduction.allocate((4,), dtype=torch.float32, device=cpu) is not buffer


def test_zero_3_with_one_rank_records_the_buffers_of_each_micro_batch() -> None:
    plan = make_plan(1, "trainer.zero=3", "trainer.precision=bf16")
    assert plan.num_microbatches > 1
    (count,) = run_ranks(_recorded_buffers, 1, plan)
    assert count == plan.num_microbatches * (plan.model.num_hidden_layers + 2), "embedding, blocks, norm with head"


def _recorded_buffers(rank: int, plan: Plan) -> int:
    """Return the number of recorded buffers in a step, as if the CPU ran asynchronously."""
    topology, device, cpu = plan.topology(rank), get_device("cpu"), torch.device("cpu")
    recorded: list[torch.Tensor] = []
    with process_groups(plan, topology, device, cpu):
        model = build_model(plan, topology, device, cpu)
        batches = Batches(RaggedSamples(16, 64), plan, topology, cpu).at(0)
        with (
            patch.object(Cpu, "asynchronous", True),
            patch.object(torch.accelerator, "current_stream", lambda: None),
            patch.object(torch.Tensor, "record_stream", lambda self, stream: recorded.append(self)),
        ):
            model.forward_backward(batches)
    return len(recorded)


def test_zero_3_and_fp32_have_none() -> None:
    for layout in (["trainer.precision=bf16", "trainer.zero=3"], ["trainer.precision=fp32"]):
        assert make_plan(1, *layout).storage.kind != COPIES
    assert make_plan(2, "trainer.precision=bf16").storage.kind == SHARDS


def test_copies_have_memory_in_a_pass_only() -> None:
    (before, inside, after, masters) = run_ranks(_bytes, 1, make_plan(1, "trainer.precision=bf16"))[0]
    assert before == after == 0
    assert inside == masters // 2


@pytest.mark.parametrize(("tied", "freed"), [(False, True), (True, False)])
def test_the_embeddings_copy_is_freed_once_it_has_been_read(tied: bool, freed: bool) -> None:
    plan = make_plan(1, "trainer.precision=bf16", "trainer.micro_batch_size=8", f"model.tie_word_embeddings={tied}")
    at_first_block, in_validation = run_ranks(_table_bytes, 1, plan)[0]
    assert (at_first_block == 0) == freed
    assert in_validation > 0
    several = make_plan(1, "trainer.precision=bf16", f"model.tie_word_embeddings={tied}")
    assert run_ranks(_table_bytes, 1, several)[0][0] > 0


def _table_bytes(rank: int, plan: Plan) -> tuple[int, int]:
    """Bytes of the embedding's copy when the first block begins, in training and in a validation of two batches."""
    topology, device, cpu = plan.topology(rank), get_device("cpu"), torch.device("cpu")
    with process_groups(plan, topology, device, cpu):
        model = build_model(plan, topology, device, cpu)
        (chunk,), actual = model.chunks, []
        block = next(iter(chunk.layers.values()))
        block.register_forward_pre_hook(lambda *_: actual.append(chunk.embed_tokens.weight.untyped_storage().size()))
        batches = Batches(RaggedSamples(16, 64), plan, topology, cpu)
        model.forward_backward(batches.at(0))
        trained = actual[-1]
        model.forward_backward([*batches.at(0), *batches.at(8)], train=False)
        return trained, actual[-1]


def _bytes(rank: int, plan: Plan) -> tuple[int, int, int, int]:
    """Bytes of the copies before a pass, in its first forward and after it; and of the masters."""
    topology, device, cpu = plan.topology(rank), get_device("cpu"), torch.device("cpu")
    with process_groups(plan, topology, device, cpu):
        model = build_model(plan, topology, device, cpu)
        copies = model.compute_copies[0]
        assert copies is not None

        def held() -> int:
            return sum(copy.untyped_storage().size() for copy in copies.master_of)

        actual = [held()]
        block = next(iter(model.chunks[0].layers.values()))
        block.register_forward_pre_hook(lambda *_: actual.append(held()))
        batches = Batches(RaggedSamples(16, 64), plan, topology, cpu).at(0)
        model.forward_backward(batches[:1])
        return actual[0], actual[1], held(), sum(master.nbytes for master in copies.master_of.values())
