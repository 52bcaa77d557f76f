"""How often the host waits for the device in a step, counted on a CPU."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_llama.devices.attention_inputs import Documents
from megatron_llama.devices.cpu.device import Cpu
from megatron_llama.devices.cuda.kernels import CudaKernels
from megatron_llama.model import quantized
from megatron_llama.optim import build_optimizer
from megatron_llama.parallel import ParallelModel
from megatron_llama.parallel.compare_copies import Copies
from megatron_llama.parallel.parallelize import init_weights
from megatron_llama.plan import Plan
from megatron_llama.train import sample_text
from megatron_llama.train.loop import read_scalars
from megatron_llama.train.run_rank import run_rank
from tests.oracle import CPU, make_plan, on_ranks, rank_groups, rank_model
from tests.ranks import run_ranks


class Operators(TorchDispatchMode):
    """Counts operators, and blocking copies apart."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        blocks = name == "copy_" and not ((kwargs or {}).get("non_blocking") or True in args[2:])
        self.counts[f"{name}, blocking" if blocks else name] += 1
        return func(*args, **(kwargs or {}))


def test_scalars_are_read_exactly_in_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    floats = [0.1, float("inf"), float("nan"), -0.0, 1e-45]
    integers = [2**53 + 1, 0, -1]
    reads: list[torch.Tensor] = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(tensor) or tolist(tensor))
    values, counts = read_scalars([torch.tensor(x) for x in floats], [torch.tensor(x) for x in integers])
    assert len(reads) == 1
    assert counts == integers
    expected, got = torch.tensor(floats), torch.tensor(values)
    assert torch.equal(got.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("world", [1, 2])
def test_steps_do_not_synchronize_with_the_whole_device(tmp_path: Path, world: int) -> None:
    few, many = (
        run_ranks(_calls, world, make_plan(world, f"trainer.steps={steps}", f"run.dir={tmp_path / str(steps)}"))
        for steps in (1, 4)
    )
    assert few == many


def _calls(rank: int, plan: Plan) -> int:
    """Return the number of calls of ``synchronize`` in a run."""
    os.environ["LOCAL_WORLD_SIZE"] = str(plan.world_size)
    calls = []
    Cpu.synchronize = lambda self: calls.append(1)  # type: ignore[method-assign]
    run_rank(plan)
    return len(calls)


def test_copies_are_compared_in_one_transfer() -> None:
    """Each rank of zero 0 has a copy of all weights. One rank has no peers to compare with."""
    assert run_ranks(_transfers, 2, make_plan(2, "trainer.zero=0")) == [[(1, 1), (0, 1), (1, 1)]] * 2
    assert run_ranks(_transfers, 1, make_plan(1)) == [[(0, 0)] * 3]


def _transfers(rank: int, plan: Plan) -> list[tuple[int, int]]:
    """Return the gathers of objects and the reads of a first, a second and a different comparison of copies."""
    counts = []
    with rank_groups(plan, rank):
        shards, gather = rank_model(plan, rank).shards, dist.all_gather_object
        copies, gathers = Copies(plan.topology(rank), CPU), list[Any]()

        def gathered(*arguments: Any) -> None:
            gathers.append(arguments)
            with patch.object(torch.Tensor, "tolist", tolist):
                gather(*arguments)

        tolist = torch.Tensor.tolist
        for with_states in (False, False, True):
            reads = list[Any]()
            gathers.clear()
            with (
                patch.object(torch.Tensor, "tolist", lambda tensor, to=reads: to.append(tensor) or tolist(tensor)),
                patch.object(dist, "all_gather_object", gathered),
            ):
                copies.compare([("", s, s.local) for s in shards], "step 1", with_states=with_states)
            counts.append((len(gathers), len(reads)))
    return counts


def test_initial_weights_and_update_counts_do_not_block() -> None:
    (initial, restored, read), updates = on_ranks(_host_copies, make_plan(1))[0]
    assert initial["copy_"] == 4 * (2 + 3 + 1 + 2 + 1) + 3, "each rectangle, without waiting"
    assert restored["lift_fresh"] == 0 and restored["full"] > 10
    assert read["_local_scalar_dense"] == 1
    assert updates == 7


def _host_copies(plan: Plan, model: ParallelModel) -> tuple[list[Counter[str]], int]:
    """Return the operators of filling the weights, restoring the count of updates, and reading it."""
    counts, optimizer = [], build_optimizer(plan, model)
    Cpu.pins_memory = True
    torch.Tensor.pin_memory = lambda self: self  # type: ignore[method-assign,assignment]
    with Operators() as operators:
        init_weights(model.shards, plan)
    counts.append(operators.counts)
    with Operators() as operators:
        optimizer.restore(7, 7)
    counts.append(operators.counts)
    with Operators() as operators:
        updates = optimizer.updates
    return [*counts, operators.counts], updates


def test_levels_of_quantized_weights_are_built_once_per_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "_PAIRS", {})
    scales = torch.tensor([0.5, 2.0]).view(torch.uint8)
    codes = torch.arange(64, dtype=torch.uint8) * 3
    packed = torch.cat((codes, scales))[None]
    results, counts = [], []
    for _ in range(2):
        with Operators() as operators:
            results.append(quantized.dequantize(packed, "nf4", torch.float32))
        counts.append(operators.counts)
    assert counts[0]["lift_fresh"] == counts[1]["lift_fresh"] == 0, "no values of the host"
    assert counts[0]["arange"] == 1 and not counts[1]["arange"] and not counts[1]["where"]
    levels = torch.tensor(quantized._NF4)
    nibbles = torch.stack((codes >> 4, codes & 15), dim=1).flatten().int()
    expected = levels[nibbles] * torch.tensor([0.5, 2.0]).repeat_interleave(64)
    assert torch.equal(results[0][0], expected) and torch.equal(results[1], results[0])


def test_sequences_of_one_document_copy_nothing_to_the_device() -> None:
    with Operators() as operators:
        documents = Documents.whole(2, 8, torch.device("meta"))
    assert not operators.counts["_to_copy"] and documents.cu_seqlens.device.type == "meta"
    assert documents.host_cu_seqlens.tolist() == [0, 8, 16]
    assert Documents.whole(2, 8, CPU).cu_seqlens.tolist() == [0, 8, 16]


@pytest.mark.parametrize("layout", ["", "trainer.tp=2", "trainer.tp=2 trainer.sp=false", "trainer.pp=2"])
def test_samples_gather_the_logits_of_one_position(layout: str) -> None:
    world = 2 if layout else 1
    shapes, ids, expected = on_ranks(_sample, make_plan(world, *layout.split()))[-1]
    assert set(shapes) == {(1, 2, 64 // (2 if "tp" in layout else 1))}
    assert ids == expected


def _sample(plan: Plan, model: ParallelModel) -> tuple[list[tuple[int, ...]], list[list[int]], list[list[int]]]:
    """Return the shapes of gathered logits; the ids sampled from them, and from the logits of all positions."""
    shapes, gather = [], sample_text.gather_from_tensor_model_parallel_region
    prompts = [[1, 2, 3], [4]]

    def gathered(logits: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(logits.shape))
        return gather(logits)

    def select_last(tokens: torch.Tensor, token_index: torch.Tensor) -> torch.Tensor | None:
        logits = model.logits(tokens)
        return None if logits is None else logits[token_index, torch.arange(2)][None]

    with patch.object(sample_text, "gather_from_tensor_model_parallel_region", gathered):
        ids = sample_text._extend(prompts, plan, model, 5, 60)
    whole = SimpleNamespace(device=CPU, logits=select_last)
    return shapes, ids, sample_text._extend(prompts, plan, whole, 5, 60)  # type: ignore[arg-type]


def test_norms_take_one_launch_for_all_tensors_on_cuda() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(*shape, generator=generator) for shape in ((64, 96), (96,), (33, 7), (0, 4))]
    with Operators() as operators:
        (norms,) = CudaKernels().norms(parts)
    assert norms.dtype == torch.float32
    assert norms.tolist() == pytest.approx([part.double().norm().item() for part in parts[:3]], rel=1e-6)
    assert operators.counts == {"_foreach_norm": 1, "stack": 1}
    mixed = [parts[0], parts[1].bfloat16(), parts[2], parts[0].bfloat16()]
    with Operators() as operators:
        norms = torch.cat(CudaKernels().norms(mixed))
    expected = [mixed[i].double().norm().item() for i in (0, 2, 1, 3)]
    assert norms.tolist() == pytest.approx(expected, rel=1e-6)
    assert operators.counts["_foreach_norm"] == 2
    assert CudaKernels().norms([]) == []
