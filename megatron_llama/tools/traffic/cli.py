"""``scripts/traffic.py``: the bytes that each rank sends in a training step, predicted, and counted on this machine."""
from __future__ import annotations

import functools
import itertools
import os
import pickle
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_llama import cli
from megatron_llama.plan import Plan
from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_USER
from megatron_llama.system.tables import text_table
from megatron_llama.tools.common import MOCK_RUN
from megatron_llama.tools.forecast.traffic import Operation, step_operations

if TYPE_CHECKING:
    pass
    from megatron_llama.tools.forecast.traffic import Traffic, TrafficKey


MEASURE = "--measure"
USAGE = f"""\
python scripts/traffic.py [{MEASURE}] [group=choice ...] [section.setting=value ...]

Prints how many bytes each rank sends in a training step of `python train.py` with the same settings, by parallel axis
and kind of collective; docs/guides/tools/traffic.md has the formulas. trainer.dp=N predicts for machines that are not
here.

  {MEASURE}   also run two steps here, on random data, and compare with what was really sent; every byte must agree
  --help      this text

  payload     all_reduce: bytes of the buffer; all_gather: of the result; reduce_scatter: of the input; send, recv: of
              the message; per step
  wire        what this rank sends for it in a ring: 2 (p-1)/p, (p-1)/p, (p-1)/p of it among p ranks; a message once

Examples
  python scripts/traffic.py model=llama7b trainer.tp=8 trainer.dp=16 trainer.precision=bf16
  python scripts/traffic.py {MEASURE} trainer.tp=2 trainer.pp=2

Exit status: 0; 1 what was counted is not what was predicted; 2 a config that can't work; else a failure.
"""


def main(argv: Sequence[str]) -> int:
    """Runs ``scripts/traffic.py`` with ``argv``; returns the exit status."""
    if {"--help", "-h"} & set(argv):
        sys.stdout.write(USAGE)
        return 0
    # Imported here: --help needs none of it.
    from megatron_llama.config import ConfigError, format_problems
    from megatron_llama.launch.world import find_world

    measure = MEASURE in argv
    overrides = [argument for argument in argv if argument != MEASURE]
    try:
        config = cli.parse_overrides(
            [*overrides, *MOCK_RUN, "data.name=traffic", "checkpoint.every_steps=null", f"dry_run={not measure}"]
        )
        plan = find_world(config, None).plan()
        if not measure:
            sys.stdout.write("\n".join(predicted_lines(plan)) + "\n")
            return 0
        return _measure(plan)
    except ConfigError as error:
        sys.stderr.write(format_problems(error) + "\n")
        return EXIT_USER


def predicted_lines(plan: Plan) -> Iterator[str]:
    """The predicted table of each kind of rank, each line followed by the operations that it is the sum of."""
    from megatron_llama.tools.forecast.traffic import totals, wire_bytes

    yield from _head(plan)
    for ranks, sent in groups_of_ranks(plan):
        found = totals(sent)
        amounts = [
            (f"{amount.calls:,}", f"{amount.payload:,}", f"{wire_bytes(line, amount.payload):,.0f}")
            for line, amount in found.items()
        ]
        head, *rows = _table(["calls", "payload", "wire"], list(found), amounts)
        yield from ("", f"rank {compact(ranks)}", head)
        for line, row in zip(found, rows, strict=True):
            yield row
            yield from (f"{'':8}{o.label}: {o.calls:,} x {o.payload:,}" for o in sent if o.key == line)


def _table(head: Sequence[str], lines: Sequence[TrafficKey], amounts: Sequence[Sequence[str]]) -> list[str]:
    rows = [(*map(str, line), *amount) for line, amount in zip(lines, amounts, strict=True)]
    return [f"  {row}" for row in text_table([("axis", "kind", "ranks", *head), *rows], left=2)]


def _head(plan: Plan) -> Iterator[str]:
    from megatron_llama.plan import layout_lines

    yield from layout_lines(plan)
    yield "bytes per training step and rank"


def compared_lines(found: Sequence[Sequence[Traffic]]) -> Iterator[str]:
    """Predicted beside counted, for all ranks; equal ones share a table.

    ``found`` has for each rank what it is predicted to send, then what it sent in each counted step.
    """

    for number, of_rank in enumerate(found):
        if of_rank not in found[:number]:
            yield ""
            yield f"rank {compact([rank for rank, other in enumerate(found) if other == of_rank])}"
            lines = list(dict.fromkeys(line for traffic in of_rank for line in traffic))
            amounts = []
            for line in lines:
                predicted, *counted = (traffic.get(line, (0, 0)) for traffic in of_rank)
                payloads = (f"{payload:,}" for _, payload in (predicted, *counted))
                differs = any(amount != predicted for amount in counted)
                mark = f"DIFFERS, calls {[calls for calls, _ in counted]}" if differs else ""
                amounts.append((f"{predicted[0]:,}", *payloads, mark))
            steps = (f"counted, step {step}" for step in range(1, len(of_rank)))
            yield from _table(["calls", "predicted", *steps, ""], lines, amounts)


def _measure(plan: Plan) -> int:
    """Runs the ranks here; prints the comparison and returns the exit status."""
    from megatron_llama.launch.start import Share, start_ranks
    from megatron_llama.tools.forecast.traffic import totals

    with tempfile.TemporaryDirectory() as folder:
        entry, share = partial(count_one_rank, Path(folder)), Share(plan.world_size, output_dir=Path(folder))
        if status := start_ranks(plan, entry, share):
            return status
        found = [
            [totals(operations_of_rank(plan, rank)), *pickle.loads((Path(folder) / f"{rank}.pickle").read_bytes())]
            for rank in range(plan.world_size)
        ]
    agree = all(step == predicted for predicted, *counted in found for step in counted)  # to the byte and to the call
    verdict = "every byte and every call as predicted" if agree else "NOT as predicted"
    sys.stdout.write("\n".join([*_head(plan), *compared_lines(found), "", verdict]) + "\n")
    return 0 if agree else EXIT_FAILED


def count_one_rank(folder: Path, plan: Plan) -> None:
    """What each rank does: counts, and writes the result to ``folder``."""
    from megatron_llama.devices import get_device
    from megatron_llama.tools.traffic.count import count_steps

    device, rank = get_device(plan.config.device.name), int(os.environ["RANK"])
    torch_device = device.enter(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(count_steps(plan, rank, device, torch_device)))


# The predicted operations of each rank, and which ranks have the same.


def operations_of_rank(plan: Plan, rank: int) -> list[Operation]:
    """All that ``rank`` takes part in during a training step."""
    topology = plan.topology(rank)
    return step_operations(plan, topology.place["pp"], topology.shard_rank)


def groups_of_ranks(plan: Plan) -> list[tuple[list[int], list[Operation]]]:
    """Every rank, together with those that have the same operations: (ranks, operations of each)."""
    # Of a rank's coordinates only these two matter: a few calls for thousands of ranks.
    found = functools.cache(lambda pp_rank, shard_rank: tuple(step_operations(plan, pp_rank, shard_rank)))
    groups: dict[tuple[Operation, ...], list[int]] = {}
    for rank in range(plan.world_size):
        topology = plan.topology(rank)
        groups.setdefault(found(topology.place["pp"], topology.shard_rank), []).append(rank)
    return [(ranks, list(shared)) for shared, ranks in groups.items()]


def compact(ranks: Sequence[int]) -> str:
    """0-3, 8-11 for the ranks 0 1 2 3 8 9 10 11."""
    # Within a span of successive ranks, rank minus position is constant.
    spans = itertools.groupby(enumerate(sorted(ranks)), lambda item: item[1] - item[0])
    ends = [(span[0][1], span[-1][1]) for span in (list(items) for _, items in spans)]
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ends)
