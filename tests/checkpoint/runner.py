"""Save in one layout, load in another, and compare whole tensors by Hugging Face name; runs of train.py as jobs."""

from __future__ import annotations

import fcntl
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_llama.checkpoint.checkpointer import Checkpointer
from megatron_llama.checkpoint.folder import find_checkpoint
from megatron_llama.checkpoint.foreign.detect import open_foreign
from megatron_llama.checkpoint.manifest import read_manifest
from megatron_llama.checkpoint.tensor_source import CorruptFile
from megatron_llama.cli import main
from megatron_llama.config import ConfigError, ModelConfig, load_config
from megatron_llama.optim import build_optimizer
from megatron_llama.optim.eight_bit_states import BlockwiseState
from megatron_llama.parallel import ParallelModel
from megatron_llama.plan import Plan, resolve
from megatron_llama.plan.data_schedules import BatchSchedule
from megatron_llama.system.object_store import RemotePath
from megatron_llama.train import loop
from megatron_llama.train.metrics_file import read_metrics
from megatron_llama.train.run_rank import run_rank
from tests.messages import unwrap
from tests.oracle import SHAPE, assemble, rank_data, rank_groups, rank_model, rectangles
from tests.paths import CONF
from tests.processes import Launcher, wait_until
from tests.ranks import run_ranks

SMALL = (*(word for word in SHAPE if "micro_batch" not in word), "trainer.micro_batch_size=4", "optim.lr=0.003")
Tensors = dict[str, torch.Tensor]
Tamper = Callable[[Checkpointer], None]
Work = Callable[[Plan], None]


@dataclass
class Run:
    """Result of a run: losses by step, and whole tensors at its end; moments are named like
    exp_avg/model.norm.weight."""

    started_at: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    tensors: Tensors = field(default_factory=dict)
    updates: int = 0
    lr: float = 0.0
    random: list[float] = field(default_factory=list)
    """Random number of each rank at the end."""


def make_plan(world_size: int, run_dir: Path, *overrides: str) -> Plan:
    """The small model in a layout."""
    return resolve(load_config([*SMALL, f"run.dir={run_dir}", *overrides], CONF), world_size)


def run(world_size: int, run_dir: Path, *overrides: str, until: int = 0, tamper: Tamper | None = None) -> Run:
    """Resume, train up to step ``until``, and save, on forked ranks. ``tamper`` gets the checkpointer on each rank
    first."""
    answers = run_ranks(_rank, world_size, make_plan(world_size, run_dir, *overrides), until, tamper)
    first = answers[0][0]
    assert all(answer[0].losses == first.losses for answer in answers)
    first.random = [answer[0].random[0] for answer in answers]
    first.tensors, _ = assemble([answer[1] for answer in answers])
    return first


def _rank(rank: int, plan: Plan, until: int, tamper: Tamper | None) -> tuple[Run, list]:
    with resumed(rank, plan, tamper) as (model, checkpointer, batches):
        optimizer, data = checkpointer.optimizer, checkpointer.data
        result = Run(started_at=batches.start.step)
        for step in range(result.started_at + 1, until + 1):
            result.losses[step] = model.forward_backward(data.train.at(batches.after(step - 1).samples)).item()
            optimizer.step(optimizer.gradient_norm())
            checkpointer.after_step(step)
        checkpointer.finish(max(until, result.started_at))
        result.updates, result.lr = optimizer.updates, optimizer.lr
        result.random = [torch.rand(()).item()]
        held = rectangles(model.shards, lambda shard: shard.local)
        for kind, shard, moment in optimizer.states():
            values = moment[:] if isinstance(moment, BlockwiseState) else moment
            parts = rectangles([shard], lambda _, values=values: values)  # type: ignore[misc]
            held += [(f"{kind}/{name}", *rest) for name, *rest in parts]
        return result, held


@contextmanager
def resumed(
    rank: int, plan: Plan, tamper: Tamper | None = None
) -> Iterator[tuple[ParallelModel, Checkpointer, BatchSchedule]]:
    """Build a rank's model, optimizer and data, and load a checkpoint; inside, the rank has its process groups."""
    with rank_groups(plan, rank):
        model = rank_model(plan, rank)
        checkpointer = Checkpointer(plan, plan.topology(rank), model, build_optimizer(plan, model), rank_data(plan))
        if tamper is not None:
            tamper(checkpointer)
        yield model, checkpointer, checkpointer.resume().batches


def assert_same(ours: Tensors, theirs: Tensors) -> None:
    """Check that names are equal and tensors bit-identical."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), f"{name} differs"


def flip(path: Path, position: int = -100) -> None:
    """Flip a bit of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


class Bomb:
    """Leaves a file where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return (Path.touch, (self.trace,))


def rejection(folder: Path, model: ModelConfig, *, resumes: bool = True, reads: bool = True) -> str:
    """Open another program's folder, and read its tensors; return the message of the error, "" if there is none."""
    try:
        tensors = open_foreign(folder, model, resumes=resumes).tensors
        for name in tensors.tensors if reads else ():
            tensors.rows(name)
    except (ConfigError, CorruptFile) as error:
        return unwrap(str(error))
    return ""


QUIET = ("device.peak_tflops=0.01", "logging.tensorboard=false")


class Job(Launcher):
    """A forked ``python train.py`` with these arguments. ``prepare`` is called first; ``work`` replaces run_rank."""

    def __init__(
        self,
        run_dir: Path,
        *overrides: str,
        work: Callable[[Plan], None] | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self.run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)

        def program() -> int:
            torch.set_num_threads(1)
            if prepare is not None:
                prepare()
            return main([*SMALL, *QUIET, f"run.dir={run_dir}", *overrides], work)

        super().__init__(program, run_dir.parent, run_dir.name + ".out")

    def kill(self) -> None:
        """kill -9, and wait until its ranks have gone too: they hold the folder's lock until then."""
        super().kill()
        lock = self.run_dir / ".lock"
        if lock.exists():
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX)

    @property
    def output(self) -> str:
        return self.out.read_text(errors="replace") if self.out.exists() else ""


def run_job(run_dir: Path, *overrides: str, status: int = 0, **started: Any) -> str:
    """Run a job to its end, check its exit status, and return its output."""
    job = Job(run_dir, *overrides, **started)
    assert job.wait() == status, job.output
    return job.output


def with_each_step(act: Callable[[int, Path], None]) -> Work:
    """The work of a rank that calls ``act(step, run_dir)`` before each step."""

    def work(plan: Plan) -> None:
        step, run_dir = loop.training_step, Path(str(plan.config.run.dir))

        def training_step(number: int, *more: Any) -> Any:
            act(number, run_dir)
            return step(number, *more)

        loop.training_step = training_step  # type: ignore[assignment]
        run_rank(plan)

    return work


def kill_in_each_part(run_dir: Path, chance: random.Random, *settings: str) -> None:
    """Kill a run of six steps at three random moments, each in another part of it."""
    reached = 0
    for held in (2, 4, 6):  # a step that this attempt does not come through, so that it can't end before it is killed
        job = Job(run_dir, *settings, work=with_each_step(lambda step, _: time.sleep(600 * (step == held))))  # noqa: B023
        try:
            wait_until(lambda: len(losses(run_dir)) > reached, lambda: job.output)  # noqa: B023  called at once
            time.sleep(chance.uniform(0, 0.4))
        finally:
            job.kill()
        reached = max(reached, len(losses(run_dir)))


def losses(run_dir: Path) -> list[tuple[int, float]]:
    """(step, loss) of each whole line of metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    records = read_metrics(path) if path.exists() else []
    return [(record["step"], record["reduced_train_loss"]) for record in records]


def tensors_of(checkpoint: Path | RemotePath) -> Tensors:
    """Every tensor of a checkpoint."""
    stored = read_manifest(checkpoint).stored
    return {name: stored.rows(name) for name in stored.tensors}


def final_tensors(run_dir: Path) -> Tensors:
    """Every tensor of the newest checkpoint."""
    return tensors_of(find_checkpoint(run_dir))


def leftovers(run_dir: Path) -> list[str]:
    """Files and folders of a run that only exist while something is written."""
    return [str(path) for path in run_dir.rglob("*") if path.name.startswith(".") and path.name != ".lock"]
