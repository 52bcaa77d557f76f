"""Training steps without the files of a run, for tools that measure a step."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_llama.checkpoint.checkpointer import Checkpointer
from megatron_llama.data.batches import Data, build_data
from megatron_llama.devices import Device
from megatron_llama.launch.start import LocalRanks, start_ranks
from megatron_llama.optim import Optimizer, build_optimizer
from megatron_llama.optim.norm import parameter_norm
from megatron_llama.parallel import ParallelModel, build_model, process_groups
from megatron_llama.plan import Plan
from megatron_llama.topology import Topology
from megatron_llama.train.loop import training_step
from megatron_llama.train.step_checks import StepGuard


@dataclass
class Steps:
    """Steps of the training loop, without metrics and checkpoints."""

    plan: Plan
    model: ParallelModel
    optimizer: Optimizer
    batches: Any
    """Source of a step's micro batches: ``Batches``, or an object with its method ``at``."""
    checkpointer: Checkpointer
    guard: StepGuard

    def run(self, step: int) -> float:
        """Run step ``step``, counted from 1, and return its loss. All ranks must call it."""
        metrics = training_step(step, self.plan, self.model, self.optimizer, self.batches, self.guard)
        if self.plan.config.logging.parameter_norm:
            parameter_norm(self.model.shards, self.model.device)
        self.checkpointer.after_step(step)
        return metrics["reduced_train_loss"]


@contextmanager
def open_steps(
    plan: Plan,
    topology: Topology,
    model: ParallelModel,
    optimizer: Optimizer,
    data: Data,
    batches: Any = None,
) -> Iterator[Steps]:
    """Yield steps that log, save and compare nothing.

    They train on ``batches`` or ``data``, at random-LTD's largest length.
    """
    with tempfile.TemporaryDirectory() as folder:
        without_saves = replace(plan.config.checkpoint, every_steps=None, every_minutes=0.0)
        trainer = replace(plan.config.trainer, check_copies_every=None)
        run = replace(plan.config.run, dir=folder)
        config = replace(plan.config, run=run, checkpoint=without_saves, trainer=trainer)
        checkpointer = Checkpointer(replace(plan, config=config), topology, model, optimizer, data)
        guard = StepGuard(plan.config.trainer.skip_nonfinite_steps)
        yield Steps(plan, model, optimizer, batches or data.train.with_length(), checkpointer, guard)


@contextmanager
def open_rank(plan: Plan, rank: int, device: Device, torch_device: torch.device) -> Iterator[Steps]:
    """Build the model, the optimizer and the data of a rank, and yield its steps. All ranks must call it."""
    topology = plan.topology(rank)
    with process_groups(plan, topology, device, torch_device):
        model = build_model(plan, topology, device, torch_device)
        optimizer, data = build_optimizer(plan, model), build_data(plan, topology, torch_device)
        with open_steps(plan, topology, model, optimizer, data) as steps:
            yield steps


def rank_results(plan: Plan, work: Callable[[Plan], Any]) -> tuple[int, list[Any]]:
    """Start the ranks of a plan here; return the exit status and the results of ``work``, [] if a rank failed.

    Raises ConfigError as ``start_ranks``.
    """
    with tempfile.TemporaryDirectory() as folder:
        share = LocalRanks(plan.world_size, output_dir=Path(folder))
        if status := start_ranks(plan, partial(_store_result, work, Path(folder)), share):
            return status, []
        files = [Path(folder) / f"{rank}.pickle" for rank in range(plan.world_size)]
        return 0, [pickle.loads(file.read_bytes()) for file in files]


def _store_result(work: Callable[[Plan], Any], folder: Path, plan: Plan) -> None:
    (folder / f"{os.environ['RANK']}.pickle").write_bytes(pickle.dumps(work(plan)))
