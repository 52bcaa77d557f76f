"""``scripts/traffic.py``: the bytes that each rank sends in a training step, predicted, and counted on this machine."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_llama.launch import cli
from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_USER

if TYPE_CHECKING:
    from megatron_llama.devices import Device
    from megatron_llama.plan import Plan
    from megatron_llama.plan.traffic import Operation, Traffic

MEASURE = "--measure"
USAGE = f"""\
python scripts/traffic.py [{MEASURE}] [group=choice ...] [section.setting=value ...]

Prints how many bytes each rank sends in a training step of `python train.py` with the same settings, by parallel axis
and kind of collective; docs/traffic.md has the formulas. trainer.dp=N speaks of machines that are not here.

  {MEASURE}   also run two steps here, on made-up data, and compare with what really passed; every byte must agree
  --help      this text

  payload     all_reduce: bytes of the buffer; all_gather: of the result; reduce_scatter: of the input; send, recv: of
              the message; per step
  wire        what this rank sends for it in a ring: 2 (p-1)/p, (p-1)/p, (p-1)/p of it among p ranks; a message once

Examples
  python scripts/traffic.py model=llama7b trainer.tp=8 trainer.dp=16 trainer.precision=bf16
  python scripts/traffic.py {MEASURE} trainer.tp=2 trainer.pp=2

Exit status: 0; 1 what was counted is not what was predicted; 2 a mistake in what was asked; else a failure.
"""
# What no byte of a step depends on. Said last, so that it wins.
FORCED = (
    "data.mock=true",
    "data.prefixes=[]",
    "data.tokenizer=null",
    "data.prepare=null",
    "trainer.epochs=null",
    "data.name=traffic",
    "logging.tensorboard=false",
    "logging.sample_prompts=[]",
    "checkpoint.every_steps=null",
    "trainer.max_restarts=0",
)
WIDE, NARROW = 15, 8


def main(argv: Sequence[str]) -> int:
    """Runs ``scripts/traffic.py`` with ``argv``; returns the exit status."""
    if {"--help", "-h"} & set(argv):
        sys.stdout.write(USAGE)
        return 0
    # Imported here: --help needs none of it.
    from megatron_llama.config import ConfigError, Problem, format_problems
    from megatron_llama.plan import resolve

    measure = MEASURE in argv
    overrides = [argument for argument in argv if argument != MEASURE]
    try:
        config = cli.composed([*overrides, *FORCED, f"dry_run={str(not measure).lower()}"])
        decision = cli.decide(config, None)
        if decision.problem is not None:
            raise ConfigError([decision.problem])
        if config.finetune.method == "lora":
            rule = "what LoRA sends is not predicted: its own products, and no gradients of frozen weights"
            raise ConfigError([Problem("finetune.method", "lora", rule, "write finetune=full for that of all weights")])
        plan = resolve(decision.config, decision.world_size, decision.machine)
        if not measure:
            sys.stdout.write("\n".join(predicted_lines(plan)) + "\n")
            return 0
        assert decision.device is not None, "a run knows its device"
        return _measure(plan, decision.device)
    except ConfigError as error:
        sys.stderr.write(format_problems(error) + "\n")
        return EXIT_USER


def predicted_lines(plan: Plan) -> Iterator[str]:
    """The predicted table of each kind of rank, each line followed by what it is the sum of."""
    from megatron_llama.plan.traffic import compact, groups_of_ranks, totals, wire

    yield from _head(plan)
    for ranks, operations in groups_of_ranks(plan):
        yield ""
        yield f"rank {compact(ranks)}"
        yield _row("axis", "kind", "ranks", "calls", "payload", "wire")
        for line, amount in totals(operations).items():
            sent = f"{wire(line, amount.payload):,.0f}"
            yield _row(*line, f"{amount.calls:,}", f"{amount.payload:,}", sent)
            yield from _reasons([o for o in operations if o.line == line])


def _reasons(operations: Sequence[Operation]) -> Iterator[str]:
    for o in operations:
        yield f"{'':8}{o.what}: {o.calls:,} x {o.payload:,}"


def _head(plan: Plan) -> Iterator[str]:
    trainer = plan.config.trainer
    grid = f"pp {trainer.pp}" + (f" (x {trainer.vpp} virtual)" if trainer.vpp > 1 else "")
    shard = f" in groups of {plan.shard_size}" if 1 < plan.shard_size < plan.dp else ""
    yield f"{plan.model.name}: {grid} x dp {plan.dp} x tp {trainer.tp}{' + sp' if plan.sp else ''} = {plan.world_size}"
    yield (
        f"zero {trainer.zero}{shard}, {trainer.precision}, recompute {trainer.recompute}, "
        f"{plan.num_microbatches} micro batches of {trainer.micro_batch_size} x {plan.config.data.seq_length:,} tokens"
    )
    yield "bytes per training step and rank"


def _row(axis: object, kind: object, ranks: object, calls: object, *amounts: object) -> str:
    return f"  {axis:<6}{kind:<{WIDE}}{ranks:>6}{calls:>{NARROW}}" + "".join(f"{a:>{WIDE + 3}}" for a in amounts)


@dataclass(frozen=True)
class Comparison:
    """What one rank was to send and what it sent, in each step counted."""

    predicted: Traffic
    counted: list[Traffic]

    @property
    def agrees(self) -> bool:
        """To the byte and to the call, in every step."""
        return all(step == self.predicted for step in self.counted)


def compared_lines(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Predicted beside counted, for all ranks; those that are alike stand together."""
    from megatron_llama.plan.traffic import compact

    alike: list[tuple[Comparison, list[int]]] = []
    for rank, comparison in enumerate(comparisons):
        same = next((ranks for other, ranks in alike if other == comparison), None)
        if same is None:
            alike.append((comparison, [rank]))
        else:
            same.append(rank)
    for comparison, ranks in alike:
        yield ""
        yield f"rank {compact(ranks)}"
        yield _row("axis", "kind", "ranks", "calls", "predicted", *_steps("counted", comparison))
        yield from _compared(comparison)


def _steps(word: str, comparison: Comparison) -> list[str]:
    return [f"{word}, step {number}" for number in range(1, len(comparison.counted) + 1)]


def _compared(comparison: Comparison) -> Iterator[str]:
    everything = (comparison.predicted, *comparison.counted)
    for line in dict.fromkeys(line for traffic in everything for line in traffic):
        wanted, *got = (traffic.get(line, (0, 0)) for traffic in everything)
        mark = "" if all(amount == wanted for amount in got) else f"   DIFFERS, calls {[calls for calls, _ in got]}"
        yield _row(*line, f"{wanted[0]:,}", f"{wanted[1]:,}", *(f"{payload:,}" for _, payload in got)) + mark


def _measure(plan: Plan, device: Device) -> int:
    """Runs the ranks here; prints the comparison and returns the exit status."""
    from megatron_llama.launch.start import start_ranks
    from megatron_llama.launch.variables import variables
    from megatron_llama.plan.traffic import operations, totals

    environment = variables(device, plan)
    if device.forkable:
        os.environ.update(environment)
        import megatron_llama.tools.traffic.count_steps  # noqa: F401  imported once here, and not in each rank
    with tempfile.TemporaryDirectory() as folder:
        work = partial(count_one_rank, plan, Path(folder))
        status = start_ranks(
            work, plan.world_size, fork=device.forkable, environment=environment, output_dir=Path(folder)
        )
        if status:
            return status
        counted = [_read(Path(folder), rank) for rank in range(plan.world_size)]
    comparisons = [Comparison(totals(operations(plan, rank)), steps) for rank, steps in enumerate(counted)]
    agree = all(comparison.agrees for comparison in comparisons)
    verdict = "every byte and every call as predicted" if agree else "NOT as predicted"
    sys.stdout.write("\n".join([*_head(plan), *compared_lines(comparisons), "", verdict]) + "\n")
    return 0 if agree else EXIT_FAILED


def count_one_rank(plan: Plan, folder: Path) -> None:
    """What each rank does: counts, and leaves it in ``folder``."""
    from megatron_llama.devices import get_device
    from megatron_llama.tools.traffic.count_steps import count_steps

    device, rank = get_device(plan.config.device.name), int(os.environ["RANK"])
    torch_device = device.enter(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    steps = count_steps(plan, rank, device, torch_device)
    _path(folder, rank).write_text(json.dumps([[[*line, *amount] for line, amount in s.items()] for s in steps]))


def _read(folder: Path, rank: int) -> list[Traffic]:
    from megatron_llama.plan.traffic import Amount, Line

    steps = json.loads(_path(folder, rank).read_text())
    return [{Line(*row[:3]): Amount(*row[3:]) for row in step} for step in steps]


def _path(folder: Path, rank: int) -> Path:
    return folder / f"traffic-{rank}.json"
