"""Trained models whose copies of weights and optimizer states are compared and flipped, in ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_llama.checkpoint.checkpointer import Checkpointer
from megatron_llama.data.batches import build_data
from megatron_llama.devices import get_device
from megatron_llama.optim import build_optimizer
from megatron_llama.parallel import build_model, process_groups
from megatron_llama.parallel.replicas import Key
from megatron_llama.plan import Plan
from megatron_llama.system.errors import TrainingFault
from megatron_llama.tools.forecast.traffic import Traffic
from megatron_llama.tools.traffic.count import TrafficCounter
from tests.model.llamas import CPU


class Flip(NamedTuple):
    """A bit flipped on one rank, and the answer of the next comparison."""

    key: Key
    rank: int
    step: int
    message: str


class Trained:
    """A rank's model and optimizer. Ranks call each method together."""

    def __init__(self, plan: Plan, rank: int, folder: Path) -> None:
        device, topology = get_device("cpu"), plan.topology(rank)
        plan.config.run.dir = str(folder)
        self.plan, self.rank, self.step = plan, rank, 0
        self.model = build_model(plan, topology, device, CPU)
        self.optimizer = build_optimizer(plan, self.model)
        data = build_data(plan, topology, CPU)
        self.batches = data.train
        self.checkpointer = Checkpointer(plan, topology, self.model, self.optimizer, data)
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
    flat = tensor.detach().view(-1).view(torch.uint8)
    flat[number // 8] ^= 1 << number % 8


def flips(rank: int, plan: Plan, folder: Path, count: int, seed: int) -> list[Flip]:
    """Train two steps, flip bits of weights and states alternately, and train another step without a difference."""
    with process_groups(plan, plan.topology(rank), get_device("cpu"), CPU):
        trained = Trained(plan, rank, folder)
        trained.train(2)
        generator = random.Random(seed)
        answers = [trained.flip(generator, states=number % 2 == 1) for number in range(count)]
        trained.train(1)
        return answers


def rows_compared(rank: int, plan: Plan, folder: Path) -> tuple[int, int]:
    """Return the rows of this rank's weights, and the rows of the parts that are compared."""
    with process_groups(plan, plan.topology(rank), get_device("cpu"), CPU):
        trained = Trained(plan, rank, folder)
        parts = trained.copies._slices(("", shard, shard.local) for shard in trained.model.shards)
        return sum(len(shard.local) for shard in trained.model.shards), sum(len(part) for _, part in parts)


def steps(rank: int, plan: Plan, folder: Path, count: int) -> tuple[int, int, Traffic]:
    """Train and compare; return the numbers of tensors and of tensors with copies, and a comparison's traffic."""
    with process_groups(plan, plan.topology(rank), get_device("cpu"), CPU):
        trained = Trained(plan, rank, folder)
        trained.train(count)
        with TrafficCounter() as counter:
            trained.checkpointer.compare_copies(count + 1)
        return len(trained.tensors()), len(trained.copied()), counter.take()
