"""Copies of weights and optimizer states are compared by digests: each changed bit is found and named."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from megatron_llama import devices
from megatron_llama.checkpoint.checkpointer import Checkpointer
from megatron_llama.devices.cpu.device import Cpu
from megatron_llama.optim import build_optimizer
from megatron_llama.parallel import ParallelModel, compare_copies
from megatron_llama.parallel.compare_copies import Key, _mix, _sums
from megatron_llama.plan import Plan, format_plan
from megatron_llama.system.errors import TrainingFault
from megatron_llama.tools.forecast.traffic import Traffic, comparison_of_copies, totals
from megatron_llama.tools.measured_steps import TrafficCounter
from tests.oracle import make_plan, on_ranks, rank_data
from tests.rows import read_layouts, rows

TIED = "model.tie_word_embeddings=true"
LAYOUTS, QUICK = read_layouts(__file__, "copies")
FLIPS = 5


class Flip(NamedTuple):
    """A bit flipped on one rank, and the answer of the next comparison."""

    key: Key
    rank: int
    step: int
    message: str


class Trained:
    """A rank's model and optimizer. Ranks call each method together."""

    def __init__(self, plan: Plan, model: ParallelModel, folder: Path) -> None:
        plan.config.run.dir = str(folder)
        self.plan, self.model, self.rank, self.step = plan, model, dist.get_rank(), 0
        self.optimizer = build_optimizer(plan, self.model)
        data = rank_data(plan)
        self.batches = data.train
        self.checkpointer = Checkpointer(plan, plan.topology(self.rank), self.model, self.optimizer, data)
        self.copies = self.checkpointer._copies

    def train(self, steps: int) -> None:
        """Run steps and compare the copies after each."""
        for _ in range(steps):
            self.model.forward_backward(self.batches.at(self.step * self.plan.config.trainer.global_batch_size))
            self.optimizer.step(self.optimizer.gradient_norm())
            self.step += 1
            self.checkpointer.compare_copies(self.step)

    def copied(self) -> dict[Key, torch.Tensor]:
        """Return this rank's tensors of which another rank has a copy."""
        tensors, groups = self.tensors(), self.copies._groups[True]
        return {key: tensors[key] for group in groups for key in group.keys}

    def tensors(self) -> dict[Key, torch.Tensor]:
        """Return this rank's weights and states by key."""
        parts = [("", shard, shard.local) for shard in self.model.shards]
        return dict(self.copies._slices([*parts, *self.optimizer.tensors()]))

    def flip(self, generator: random.Random, *, states: bool) -> Flip:
        """Flip a random bit of a weight or state on a random rank, compare, and flip it back."""
        rank, choice, bit = generator.randrange(self.plan.world_size), generator.random(), generator.random()
        places = [(key, tensor) for key, tensor in self.copied().items() if bool(key.kind) == states]
        key, tensor = places[int(choice * len(places))] if places else (None, None)
        chosen = [key]
        dist.broadcast_object_list(chosen, src=rank)
        self.step += 1
        message = ""
        if self.rank == rank and tensor is not None:
            flip_bit(tensor, int(bit * tensor.numel() * tensor.element_size() * 8))
        try:
            self.checkpointer.compare_copies(self.step)
        except TrainingFault as fault:
            message = str(fault)
        if self.rank == rank and tensor is not None:
            flip_bit(tensor, int(bit * tensor.numel() * tensor.element_size() * 8))
        assert chosen[0] is not None, f"rank {rank} has no copy"
        return Flip(chosen[0], rank, self.step, message)


def flip_bit(tensor: torch.Tensor, number: int) -> None:
    """Flip bit ``number`` of a contiguous tensor, in place."""
    tensor.detach().view(-1).view(torch.uint8)[number // 8] ^= 1 << number % 8


def flips(plan: Plan, model: ParallelModel, folder: Path, count: int, seed: int) -> list[Flip]:
    """Train two steps, flip bits of weights and states alternately, and train another step without a difference."""
    trained, generator = Trained(plan, model, folder), random.Random(seed)
    trained.train(2)
    answers = [trained.flip(generator, states=number % 2 == 1) for number in range(count)]
    trained.train(1)
    return answers


def rows_compared(plan: Plan, model: ParallelModel, folder: Path) -> tuple[int, int]:
    """Return the rows of this rank's weights, and the rows of the parts that are compared."""
    parts = Trained(plan, model, folder).copies._slices(("", shard, shard.local) for shard in model.shards)
    return sum(len(shard.local) for shard in model.shards), sum(len(part) for _, part in parts)


def steps(plan: Plan, model: ParallelModel, folder: Path, count: int) -> tuple[int, int, Traffic]:
    """Train and compare; return the numbers of tensors and of tensors with copies, and a comparison's traffic."""
    trained = Trained(plan, model, folder)
    trained.train(count)
    with TrafficCounter() as counter:
        trained.checkpointer.compare_copies(count + 1)
    return len(trained.tensors()), len(trained.copied()), counter.take()


@pytest.mark.parametrize(("world", "layout"), rows(LAYOUTS.items(), QUICK))
def test_flipped_bits_are_found_and_named(world: int, layout: list[str], tmp_path: Path) -> None:
    """Each QUICK row flips 5 bits, so 10 flips run with each `make test`."""
    results = on_ranks(flips, make_plan(world, *layout), tmp_path, FLIPS, len(layout) + world)
    for answers in zip(*results, strict=True):
        (message,) = {flip.message for flip in answers}
        flip = answers[0]
        assert f"step {flip.step}: the copies of {flip.key} on " in message, (flip, message)
        assert f"rank {flip.rank} " in message or f"rank {flip.rank}," in message, (flip, message)
        assert "resumes from the newest one" in message and "more tensors" not in message


@pytest.mark.parametrize(("world", "layout"), rows(LAYOUTS.items(), {"pp2·dp2, zero 0, tied"}))
def test_copies_stay_equal_and_send_the_predicted_bytes(world: int, layout: list[str], tmp_path: Path) -> None:
    plan = make_plan(world, *layout, "optim.warmup_steps=1")
    predicted = totals(comparison_of_copies(plan))
    for tensors, copied, traffic in on_ranks(steps, plan, tmp_path, 8):
        assert traffic == predicted != {}
        assert copied == tensors if plan.data_ranks > plan.shard_size else 0 < copied < tensors


@pytest.mark.parametrize(
    ("world", "overrides", "line"),
    [
        (1, [], None),
        (2, ["trainer.zero=1"], None),
        (2, ["trainer.pp=2"], None),
        (2, ["trainer.tp=2"], "every 100 steps"),
        (2, ["trainer.zero=0"], "every 100 steps"),
        (4, ["trainer.pp=2", TIED, "trainer.check_copies_every=1"], "every 1 step"),
        (2, ["trainer.zero=0", "trainer.check_copies_every=0"], "before each save"),
    ],
)
def test_the_plan_names_the_interval(world: int, overrides: list[str], line: str | None) -> None:
    page = format_plan(make_plan(world, *overrides))
    assert f"copies compared {line}\n" in page if line else "copies" not in page


def test_rows_that_pad_the_vocabulary_are_compared(tmp_path: Path) -> None:
    plan = make_plan(4, "trainer.tp=2", "trainer.zero=0", "model.vocab_size=61")
    for rows_of_weights, compared in on_ranks(rows_compared, plan, tmp_path):
        assert compared == rows_of_weights


def test_a_device_without_int64_sums_compares_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(2, "trainer.zero=0")
    on_device = on_ranks(flips, plan, tmp_path, 2, 7)
    monkeypatch.setattr(Cpu, "sums_int64", False)
    monkeypatch.setattr(compare_copies, "devices", SimpleNamespace(of=devices.of, HOST="cpu:0"))  # not "cpu"
    assert on_ranks(flips, plan, tmp_path, 2, 7) == on_device


def digest(tensor: torch.Tensor) -> int:
    return int(_mix(_sums(tensor)))


@pytest.mark.parametrize("shape", [(1,), (5,), (7, 5), (8, 6), (33, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_digest_changes_with_each_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.randint(0, 255, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    digests = {digest(values)}
    bits = range(values.numel() * values.element_size() * 8)
    for bit in bits[:: max(1, len(bits) // 200)]:
        flip_bit(values, bit)
        digests.add(digest(values))
        flip_bit(values, bit)
    assert len(digests) == 1 + len(bits[:: max(1, len(bits) // 200)])


def test_digest_changes_with_swapped_elements() -> None:
    """The swap of x and -x differs in one bit per element, and linear sums of words would miss it."""
    generator, expected = random.Random(0), torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    for number in range(300):
        values = expected.clone()
        flat = values.view(-1)
        first, second = generator.sample(range(len(flat)), 2)
        if number % 2:
            flat[first] = -flat[second]
        before = digest(values)
        flat[first], flat[second] = flat[second].clone(), flat[first].clone()
        assert digest(values) != before
    for order in ([1, 0, *range(2, 16)], [*range(15, -1, -1)]):
        assert digest(expected[order]) != digest(expected)
    assert digest(expected.roll(1, 1)) != digest(expected)
    large = torch.randn(9, 6, generator=torch.Generator().manual_seed(0))
    for part in (large[3:5], large[1:2], large[2]):
        assert digest(part) == digest(part.clone())
