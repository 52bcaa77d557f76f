"""Train a small Llama in any layout and bring back everything that the layout must not change, under Hugging Face's
names."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_llama.config import load_config
from megatron_llama.data.batches import Batches, Data, build_data
from megatron_llama.data.curriculum_order import levels_of
from megatron_llama.devices import get_device
from megatron_llama.optim import Optimizer, build_optimizer
from megatron_llama.parallel import ParallelModel, Shard, build_model, process_groups
from megatron_llama.parallel.compiling import Compiler
from megatron_llama.parallel.groups import Groups
from megatron_llama.plan import Plan, resolve
from tests.compiled import SECONDS, prepare_rank
from tests.parallel.symmetric_memory import fused_products
from tests.paths import CONF
from tests.ranks import run_ranks

CPU = torch.device("cpu")
STEPS = 3
SHAPE = tuple(
    "data=mock device=cpu model.vocab_size=64 model.hidden_size=32 model.intermediate_size=64 model.num_hidden_layers=4"
    " model.num_attention_heads=4 model.num_key_value_heads=2 data.seq_length=16 trainer.global_batch_size=8"
    " trainer.micro_batch_size=2 trainer.steps=20".split()
)
SMALL = (
    *SHAPE,
    "model.initializer_range=0.1",  # at 0.02 so small a model is almost linear and would hide errors
    "optim.lr=0.001",
    "optim.eps=1e-6",  # at 1e-8 a weight whose gradient is about as small would be moved by the rounding of sums
)

Tensors = dict[str, torch.Tensor]


@dataclass
class Result:
    """Result of a run: values per step, and tensors by Hugging Face name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    initial: Tensors = field(default_factory=dict)
    first_grads: Tensors = field(default_factory=dict)
    last_grads: Tensors = field(default_factory=dict)
    weights: Tensors = field(default_factory=dict)
    states: Tensors = field(default_factory=dict)
    """Optimizer states, by torch's name and Hugging Face name."""
    copies: int = 0
    """Rectangles held by several ranks, all equal."""
    fused: int = 0
    """Matmuls with a fused gather or scatter per rank (trainer.async_tp)."""


class RaggedSamples:
    """Random tokens with a different number of loss tokens per sample, which exposes a mean of means.

    With ``documents``, a sample has documents of uneven lengths.
    """

    once = False

    def __init__(self, seq_length: int, vocab_size: int, documents: bool = False) -> None:
        self.seq_length, self.vocab_size, self.documents = seq_length, vocab_size, documents

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> Tensors:
        generator = torch.Generator().manual_seed(index)
        text = torch.randint(0, self.vocab_size, (self.seq_length + 1,), generator=generator)
        counted = torch.arange(self.seq_length) < 1 + (7 * index) % self.seq_length
        sample = {"tokens": text[:-1], "labels": text[1:], "loss_mask": counted.float()}
        if self.documents:  # a boundary at a quarter of the sequence, and others in between
            places = torch.arange(self.seq_length)
            ends = [self.seq_length // 4, self.seq_length // 4 + 1 + index % 5, self.seq_length - 3 - index % 2]
            sample["documents"] = sum((places >= end).long() for end in ends)
        return sample


def make_plan(world_size: int, *overrides: str) -> Plan:
    """Plan the small model in a layout."""
    return resolve(load_config([*SMALL, *overrides], CONF), world_size)


@contextmanager
def rank_groups(plan: Plan, rank: int) -> Iterator[Groups]:
    """Create the process groups of a forked rank."""
    with process_groups(plan, plan.topology(rank), get_device("cpu"), CPU) as groups:
        yield groups


def rank_model(plan: Plan, rank: int, compiler: Compiler | None = None) -> ParallelModel:
    """Build the model of a rank, inside ``rank_groups``."""
    return build_model(plan, plan.topology(rank), get_device("cpu"), CPU, compiler)


def on_ranks(function: Callable[..., Any], plan: Plan, *args: Any) -> list[Any]:
    """Return the results of ``function(plan, model, *args)`` on the forked ranks of a plan, inside ``rank_groups``."""
    return [result for (result,) in on_ranks_by_plan(function, [plan], *args)]


def on_ranks_by_plan(function: Callable[..., Any], plans: Sequence[Plan], *args: Any) -> list[list[Any]]:
    """Return the results of ``on_ranks`` for plans that share a layout: one list per rank."""
    return run_ranks(_with_models, plans[0].world_size, function, plans, args)


def _with_models(rank: int, function: Callable[..., Any], plans: Sequence[Plan], args: tuple[Any, ...]) -> list[Any]:
    with rank_groups(plans[0], rank):
        return [function(plan, rank_model(plan, rank), *args) for plan in plans]


def batches_of(samples: Any, plan: Plan) -> Batches:
    """Return the batches of these samples for this forked rank."""
    return Batches(samples, plan, plan.topology(dist.get_rank()), CPU)


def rank_data(plan: Plan) -> Data:
    """Return the data of this forked rank."""
    return build_data(plan, plan.topology(dist.get_rank()), CPU)


def rank_batches(plan: Plan) -> Batches:
    """Return the batches of ``RaggedSamples`` for this forked rank."""
    data = plan.config.data
    samples = RaggedSamples(data.length, plan.model.vocab_size, documents=data.document_mask)
    topology = plan.topology(dist.get_rank())
    return Batches(samples, plan, topology, CPU, random_ltd=plan.random_ltd, levels=levels_of(plan))


Tamper = Callable[[ParallelModel], None]


def run_layout(world_size: int, *overrides: str, steps: int = STEPS, tamper: Tamper | None = None) -> Result:
    """Train ``steps`` steps on ``world_size`` forked ranks. ``tamper`` may break the model on each rank after it is
    built."""
    plan = make_plan(world_size, *overrides)
    seconds = SECONDS if plan.config.trainer.compile else max(120, 30 * steps)
    answers = run_ranks(train_rank, world_size, plan, steps, tamper, timeout=seconds)
    result = Result(losses=answers[0][0], norms=answers[0][1], fused=answers[0][2])
    for answer in answers:
        assert answer[:2] == answers[0][:2], "ranks disagree about loss or gradient norm"
    for index, name in enumerate(("initial", "first_grads", "last_grads", "states", "weights"), start=3):
        tensors, copies = assemble([answer[index] for answer in answers])
        setattr(result, name, tensors)
        result.copies += copies
    return result


class SharedResults:
    """Results of one process that the workers of a run of the tests share."""

    folder: Path | None = None
    """Set by tests/conftest.py."""


@cache
def oracle(*overrides: str) -> Result:
    """Train in one process."""
    if SharedResults.folder is None:
        return run_layout(1, *overrides)
    path = SharedResults.folder / f"oracle_{sha256(repr(overrides).encode()).hexdigest()}"
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(pickle.dumps(run_layout(1, *overrides)))
        part.rename(path)
    result: Result = pickle.loads(path.read_bytes())
    return result


def train_rank(rank: int, plan: Plan, steps: int, tamper: Tamper | None) -> tuple:
    prepare_rank(plan)
    torch.use_deterministic_algorithms(plan.config.trainer.deterministic)  # fills new memory with NaN
    with rank_groups(plan, rank):
        model = rank_model(plan, rank)
        optimizer = build_optimizer(plan, model)
        if tamper is not None:
            tamper(model)
        batches = rank_batches(plan)
        initial = rectangles(model.shards, lambda shard: shard.local)
        losses, norms, grads = [], [], []
        for step in range(steps):
            losses.append(model.forward_backward(batches.at(step * plan.config.trainer.global_batch_size)).item())
            norm = optimizer.gradient_norm()
            norms.append(norm.item())
            grads.append(rectangles(model.shards, lambda shard: shard.grad))
            optimizer.step(norm)
        weights = rectangles(model.shards, lambda shard: shard.local)
        return losses, norms, fused_products(), initial, grads[0], grads[-1], states_of(optimizer), weights


def states_of(optimizer: Optimizer) -> list[tuple]:
    """Return (state and name, global shape, offset, values) of this rank's optimizer states in floats, in exact mode.

    Without it, 1-bit Adam's states differ between ranks.
    """
    if not optimizer.model.plan.config.trainer.exact:
        return []
    return [
        (f"{kind} of {part.name}", part.global_shape, part.offset, values[part.local_slices].clone())
        for kind, shard, values in optimizer.states()
        if isinstance(values, torch.Tensor)
        for part in shard.rectangles
    ]


def rectangles(shards: Iterable[Shard], of: Callable[[Shard], torch.Tensor | None]) -> list[tuple]:
    """Return (name, global shape, offset, values) of all rectangles of these shards of a rank."""
    results = []
    for shard in shards:
        tensor = of(shard)
        assert tensor is not None, f"{shard.name} has no gradient"
        for rectangle in shard.rectangles:
            values = tensor[rectangle.local_slices].clone()
            results.append((rectangle.name, rectangle.global_shape, rectangle.offset, values))
    return results


def assemble(ranks: list[list[tuple]]) -> tuple[Tensors, int]:
    """Assemble whole tensors from all ranks. Checks that no value is missing and that copies are bit-identical."""
    tensors: Tensors = {}
    held: dict[str, torch.Tensor] = {}
    copies = 0
    for name, shape, offset, values in (rectangle for rank in ranks for rectangle in rank):
        whole = tensors.setdefault(name, torch.full(shape, torch.nan))
        covered = held.setdefault(name, torch.zeros(shape, dtype=torch.bool))
        where = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
        if covered[where].any():
            assert covered[where].all() and torch.equal(whole[where], values), f"copies of {name} at {offset} differ"
            copies += 1
        whole[where] = values
        covered[where] = True
    for name, covered in held.items():
        assert covered.all(), f"no rank holds all of {name}"
    return tensors, copies


TOLERANCE = 1e-5  # fp32; sums in another order


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """‖a-b‖ / ‖b‖."""
    return ((a - b).norm() / b.norm().clamp(min=1e-30)).item()


def worst(result: Result, expected: Result) -> dict[str, float]:
    """Return the largest relative difference of each kind."""
    results = {
        kind: max(abs(a - b) / abs(b) for a, b in zip(getattr(result, kind), getattr(expected, kind), strict=True))
        for kind in ("losses", "norms")
    }
    for kind in ("first_grads", "last_grads", "weights"):
        ours, theirs = getattr(result, kind), getattr(expected, kind)
        assert ours.keys() == theirs.keys()
        results[kind] = max(distance(ours[name], theirs[name]) for name in theirs)
    return results
