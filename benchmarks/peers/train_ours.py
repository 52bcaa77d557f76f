"""This project: the launcher starts the ranks, which train the task in any layout with the steps of `train`."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.task import Facts, TrainingTask, checksum
from benchmarks.harness.worker import Ranks, serve
from megatron_llama.cli import main as launch
from megatron_llama.config.problems import write_override
from megatron_llama.devices.cpu import attention as attention_cpu
from megatron_llama.devices.cpu.matmul import by_amx
from megatron_llama.model.inputs import MicroBatch
from megatron_llama.parallel import open_device, process_groups
from megatron_llama.parallel.groups import gather_objects
from megatron_llama.plan import Plan
from megatron_llama.system import phase
from megatron_llama.tools.common import MOCK_RUN
from megatron_llama.tools.measured_steps import Steps, build_steps
from megatron_llama.topology import AXIS_NAMES


def overrides(task: TrainingTask, run_dir: str) -> list[str]:
    """Return train.py's overrides that train the task."""
    trainer = {axis: getattr(task.layout, axis) for axis in AXIS_NAMES} | {"steps": 1000000, "seed": task.seed}
    trainer |= {"micro_batch_size": task.micro_batch_size, "global_batch_size": task.batch_size, "zero": task.zero}
    trainer |= {"precision": task.precision, "recompute": task.recompute, "compile": task.mode == "compiled"}
    optim = task.optimizer | {"state_bits": None if task.state_bits == 32 else task.state_bits, "warmup_steps": 0}
    model = {name: value for name, value in task.model.items() if name != "name"}
    sections = {"model": model, "trainer": trainer, "optim": optim}
    settings = [write_override(f"{section}.{name}", x) for section, of in sections.items() for name, x in of.items()]
    return [
        *(f"model={task.preset}", f"device={task.device}", f"data.seq_length={task.seq_length}", "optim=constant"),
        *(*settings, f"trainer.compile_cache={task.cache}", f"run.dir={run_dir}", *MOCK_RUN),
        *("checkpoint.every_steps=null", "checkpoint.every_minutes=0"),
    ]


def _attention(task: TrainingTask, dtype: torch.dtype) -> str:
    """Return the name of the attention kernels, for the facts."""
    head_dim = task.model.get("head_dim") or task.model["hidden_size"] // task.model["num_attention_heads"]
    q = torch.empty(1, 1, task.seq_length, head_dim, dtype=dtype, device=task.device)
    if task.mode == "compiled" and attention_cpu.serves(q):
        return "custom FlashAttention for CPU"
    if not attention_cpu.is_faster(q):
        return "scaled_dot_product_attention"
    return "chunked" if not by_amx(dtype) else "scaled_dot_product_attention forward, chunked backward"


class TaskBatches:
    """The task's tokens, split among ranks in the order of data/batches.py."""

    def __init__(self, task: TrainingTask, plan: Plan, dp_rank: int, device: torch.device) -> None:
        self.task, self.plan, self.dp_rank, self.device = task, plan, dp_rank, device

    def at(self, consumed_samples: int) -> Sequence[MicroBatch]:
        """Return this rank's micro batches of the step after ``consumed_samples`` samples."""
        text = self.task.text(consumed_samples // self.task.batch_size + 1)
        size, dp, length = self.plan.config.trainer.micro_batch_size, self.task.layout.dp, self.task.seq_length
        batches = []
        for first in range(self.dp_rank * size, self.task.batch_size, dp * size):
            rows = text[first : first + size]
            sizes = torch.tensor([size * length, size * length**2])
            mask = torch.ones(size, length)
            batch = MicroBatch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), mask, sizes)
            batches.append(batch.to(self.device))
        return batches


class OurRanks(Ranks):
    """Communication between the ranks over torch.distributed."""

    def __init__(self, rank: int) -> None:
        self.is_first = rank == 0

    def share(self, receive: Callable[[], Any]) -> Any:
        phase.enter("waiting for its turn", phase.UNWATCHED)
        values = [receive() if self.is_first else None]
        dist.broadcast_object_list(values, src=0)
        phase.enter("its turn", phase.PATIENT)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        return gather_objects(value)


class OurTrainer:
    """Training steps of one rank."""

    def __init__(self, task: TrainingTask, plan: Plan, steps: Steps, ranks: Ranks) -> None:
        self.steps, trained = steps, steps.model.trained
        counted = sum(part.numel() for shard in trained for part in shard.owned(shard.local))
        tokens = task.text(1)[:, :-1]
        self.facts = Facts(
            parameters=sum(ranks.gather(counted)),
            weight_dtype=" ".join(sorted({str(shard.local.dtype).removeprefix("torch.") for shard in trained})),
            compute_dtype=plan.precision.compute_dtype,
            tokens_per_step=plan.tokens_per_step,
            tokens_checksum=checksum(tokens),
            optimizer="AdamW, fused" if task.state_bits == 32 else f"AdamW, {task.state_bits}-bit states",
            clip=plan.config.optim.clip,
            attention=_attention(task, getattr(torch, plan.precision.compute_dtype)),
            versions={"torch": torch.__version__, "megatron-core": version("megatron-core")},
        )

    def step(self, number: int) -> float:
        return self.steps.run(number)


def train_rank(task: TrainingTask, plan: Plan) -> None:
    """Build and serve one rank; the entry point of each rank."""
    rank = int(os.environ["RANK"])
    topology, (device, torch_device) = plan.topology(rank), open_device(plan)
    with process_groups(plan, topology, device, torch_device):
        ranks = OurRanks(rank)
        device.seed(plan.config.trainer.seed)
        batches = TaskBatches(task, plan, topology.place["dp"], torch_device)
        with build_steps(plan, topology, device, torch_device, batches) as steps:
            serve(task, lambda: OurTrainer(task, plan, steps, ranks), ranks)


def main() -> int:
    """Start the ranks of the task on the command line; return the exit status."""
    # By this module's name: spawned ranks cannot import __main__.
    from benchmarks.peers.train_ours import train_rank

    task = TrainingTask.from_json(sys.argv[1])
    os.environ["OMP_NUM_THREADS"] = str(max(1, task.threads // task.layout.ranks))
    with tempfile.TemporaryDirectory() as folder:
        return launch(overrides(task, str(Path(folder) / "run")), partial(train_rank, task))


if __name__ == "__main__":
    sys.exit(main())
