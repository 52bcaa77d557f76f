"""How far a tool is, on stderr: a bar on a terminal; where the output goes to a file, only the lines that stay."""
from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from megatron_llama.checkpoint.checkpointer import Checkpointer
from megatron_llama.data.batches import Data
from megatron_llama.model.inputs import MicroBatch
from megatron_llama.optim import Optimizer
from megatron_llama.optim.norm import parameter_norm
from megatron_llama.parallel import ParallelModel
from megatron_llama.plan import Plan
from megatron_llama.topology import Topology
from megatron_llama.train.console import duration
from megatron_llama.train.loop import training_step
from megatron_llama.train.sanity import FiniteCheck


class Bar:
    """The bar of one part of the work. It is drawn when it is told something, by no thread: what is measured meanwhile
    is not disturbed."""

    def __init__(self, what: str, unit: str, total: int | None) -> None:
        self._unit, self._total, self._begun, self._first = unit, total, time.monotonic(), 0
        self._console = Console(stderr=True)
        columns = (TextColumn(what), BarColumn(bar_width=24), TextColumn("{task.fields[text]}"))
        self._bar = Progress(*columns, console=self._console, auto_refresh=False, transient=True)
        self._task = self._bar.add_task(what, total=total, text="")

    def start_at(self, done: int) -> None:
        """What was done before takes no part in the rate."""
        self._first = done
        self.show(done)

    def show(self, done: int, now: str = "") -> None:
        """How much is done, how fast, how long the rest takes, and what is being done ``now``."""
        seconds, fresh = time.monotonic() - self._begun, done - self._first
        text = f"{done:,}{f' of {self._total:,}' if self._total else ''} {self._unit}"
        if fresh > 0 and seconds > 0:
            rate = fresh / seconds
            text += f", {rate:,.0f} a second" if rate >= 1 else f", {seconds / fresh:.0f} s each"
            if self._total:
                text += f", {duration(seconds / fresh * (self._total - done))} left"
        self._bar.update(self._task, completed=done, text=f"{text}{'  ' + now if now else ''}", refresh=True)

    def say(self, line: str) -> None:
        """A line that stays."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def bar(what: str, unit: str, total: int | None = None) -> Iterator[Bar]:
    """A bar for the time of the block; nothing but lines where stderr is no terminal."""
    made = Bar(what, unit, total)
    if sys.stderr.isatty():
        with made._bar:
            yield made
    else:
        yield made


# What tools override in a run whose ranks they start without training anything.


NO_FILES = ("data.mock=true", "data.prefixes=[]", "data.tokenizer=null", "data.prepare=null")
# The graphs and the collectives of a step depend on none of it. Placed last on the command line, so that it wins.
MOCK_RUN = (
    *NO_FILES,
    "trainer.epochs=null",
    "trainer.max_restarts=0",
    "logging.tensorboard=false",
    "logging.csv=false",
    "logging.wandb=off",
    "logging.sample_prompts=[]",
)


# The steps of ``train`` without its files: what tools watch that measure a step.


class StepBatches(Protocol):
    """A step's micro batches, as ``Batches`` gives them."""

    def at(self, consumed_samples: int) -> Sequence[MicroBatch]: ...


@dataclass
class Steps:
    """All that ``train`` does in a step but for metrics and checkpoints."""

    plan: Plan
    model: ParallelModel
    optimizer: Optimizer
    batches: StepBatches
    checkpointer: Checkpointer
    finite: FiniteCheck

    def run(self, step: int) -> float:
        """Step ``step``, counted from 1; returns its loss. All ranks must call it."""
        metrics = training_step(step, self.plan, self.model, self.optimizer, self.batches, self.finite)  # type: ignore[arg-type]
        if self.plan.config.logging.parameter_norm:
            parameter_norm(self.model.shards, self.model.device)
        self.checkpointer.after_step(step)
        return metrics["reduced_train_loss"]


@contextmanager
def steps_of(
    plan: Plan,
    topology: Topology,
    model: ParallelModel,
    optimizer: Optimizer,
    data: Data,
    batches: StepBatches | None = None,
) -> Iterator[Steps]:
    """Steps that log and save nothing, on ``batches`` or those of ``data``, at random-LTD's largest length."""
    with tempfile.TemporaryDirectory() as folder:
        without_saves = replace(plan.config.checkpoint, every_steps=None)
        config = replace(plan.config, run=replace(plan.config.run, dir=folder), checkpoint=without_saves)
        checkpointer = Checkpointer(replace(plan, config=config), topology, model, optimizer, data)
        finite = FiniteCheck(plan.config.trainer.skip_nonfinite_steps)
        yield Steps(plan, model, optimizer, batches or data.train.with_length(), checkpointer, finite)
