"""Command line of ``scripts/traffic.py``: predict and count the bytes that each rank sends in a training step."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator, Sequence

from megatron_llama import cli
from megatron_llama.arch.lora_targets import layer_kinds
from megatron_llama.config import ConfigError, Problem
from megatron_llama.launch.world import find_world
from megatron_llama.plan import Plan, layout_lines
from megatron_llama.system.exit_status import EXIT_FAILED
from megatron_llama.system.tables import format_ranges, text_table
from megatron_llama.tools.common import MOCK_RUN, run_tool
from megatron_llama.tools.forecast import traffic as forecast
from megatron_llama.tools.planned_run import read_planned_run

HEAD = "bytes per training step and rank"


def main(argv: Sequence[str]) -> int:
    """Run ``scripts/traffic.py`` with ``argv``; return the exit status."""
    return run_tool("traffic", argv, _run, {"--measure": bool})


def _run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    more = [*MOCK_RUN, "data.name=traffic", "checkpoint.every_steps=null", f"dry_run={not arguments.measure}"]
    if arguments.measure:
        return _measure(find_world(cli.parse_overrides([*overrides, *more]), None).plan())
    run = read_planned_run(overrides, more)
    lines = [*run.hardware.head(), *predicted_lines(run.world.plan(), run.hardware.title)]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def predicted_lines(plan: Plan, hardware: str) -> Iterator[str]:
    """Yield the predicted table of each distinct group of ranks; the operations of each row follow it."""
    yield from (*layout_lines(plan, hardware), HEAD)
    if often := plan.config.trainer.check_copies_every:
        for operation in forecast.comparison_of_copies(plan):
            kind = f"world {operation.kind} of {operation.payload:,}"
            yield f"every {often:,} steps in addition, {operation.label}: {kind}"
    for ranks, sent in groups_of_ranks(plan):
        traffic = forecast.totals(sent)
        amounts = [
            (f"{amount.calls:,}", f"{amount.payload:,}", f"{forecast.wire_bytes(line, amount.payload):,.0f}")
            for line, amount in traffic.items()
        ]
        head, *rows = _table(["calls", "payload", "wire"], list(traffic), amounts)
        yield from ("", f"rank {format_ranges(ranks)}", head)
        for line, row in zip(traffic, rows, strict=True):
            yield row
            yield from (f"{'':8}{o.label}: {o.calls:,} x {o.payload:,}" for o in sent if o.key == line)


def _table(head: Sequence[str], lines: Sequence[forecast.TrafficKey], amounts: Sequence[Sequence[str]]) -> list[str]:
    rows = [(*map(str, line), *amount) for line, amount in zip(lines, amounts, strict=True)]
    return [f"  {row}" for row in text_table([("axis", "kind", "ranks", *head), *rows], left=2)]


def compared_lines(by_rank: Sequence[Sequence[forecast.Traffic]]) -> Iterator[str]:
    """Yield tables of predicted and counted bytes; ranks with equal traffic share a table.

    ``by_rank`` has for each rank the predicted traffic, then the traffic of each counted step.
    """
    for number, rank_traffic in enumerate(by_rank):
        if rank_traffic not in by_rank[:number]:
            yield ""
            yield f"rank {format_ranges([rank for rank, other in enumerate(by_rank) if other == rank_traffic])}"
            lines = list(dict.fromkeys(line for traffic in rank_traffic for line in traffic))
            amounts = []
            for line in lines:
                predicted, *counted = (traffic.get(line, (0, 0)) for traffic in rank_traffic)
                payloads = (f"{payload:,}" for _, payload in (predicted, *counted))
                differs = any(amount != predicted for amount in counted)
                mark = f"DIFFERS, calls {[calls for calls, _ in counted]}" if differs else ""
                amounts.append((f"{predicted[0]:,}", *payloads, mark))
            steps = (f"step {step}" for step in range(1, len(rank_traffic)))
            yield from _table(["calls", "predicted", *steps, ""], lines, amounts)


def _measure(plan: Plan) -> int:
    """Run the ranks here, print the comparison and return the exit status."""
    from megatron_llama.tools.measured_steps import count_on_rank, rank_results

    status, counts = rank_results(plan, count_on_rank)
    if status:
        return status
    by_rank = [[forecast.totals(operations_of_rank(plan, rank)), *steps] for rank, steps in enumerate(counts)]
    agree = all(step == predicted for predicted, *counted in by_rank for step in counted)  # to the byte and to the call
    verdict = "every byte and every call as predicted" if agree else "NOT as predicted"
    sys.stdout.write("\n".join([*layout_lines(plan), HEAD, *compared_lines(by_rank), "", verdict]) + "\n")
    return 0 if agree else EXIT_FAILED


def operations_of_rank(plan: Plan, rank: int) -> list[forecast.Operation]:
    """Return the operations of ``rank`` in a training step."""
    topology = plan.topology(rank)
    place = topology.place
    return forecast.step_operations(plan, place["pp"], topology.shard_rank, place["tp"], topology.replica_rank)


def groups_of_ranks(plan: Plan) -> list[tuple[list[int], list[forecast.Operation]]]:
    """Group the ranks by equal operations: (ranks, operations)."""
    if plan.config.trainer.exact:
        rule = "the table has no rows for the messages of exact mode"
        raise ConfigError([Problem("trainer.exact", True, rule, "write trainer.exact=false")])
    kinds = layer_kinds(plan.model, plan.config.finetune, range(plan.model.num_hidden_layers))
    if len(kinds) > 1:
        rule = "the table has one row for all blocks, and the adapters differ between layers"
        raise ConfigError([Problem("finetune.lora_target_modules", None, rule, "give all layers the same adapters")])
    if tokens := plan.config.finetune.trainable_token_indices:
        rule = "the table has no rows for trained embeddings of tokens"
        raise ConfigError([Problem("finetune.trainable_token_indices", tokens, rule, "omit it for this table")])
    # Operations depend only on these coordinates: a few calls for thousands of ranks.
    operations_at = functools.cache(lambda *place: tuple(forecast.step_operations(plan, *place)))
    groups: dict[tuple[forecast.Operation, ...], list[int]] = {}
    for rank in range(plan.world_size):
        topology = plan.topology(rank)
        divides = plan.config.optim.row.gathers_matrices
        tp_rank = topology.place["tp"] if plan.exchanges_signs or divides else 0
        replica = topology.replica_rank if divides else 0
        operations = operations_at(topology.place["pp"], topology.shard_rank, tp_rank, replica)
        groups.setdefault(operations, []).append(rank)
    return [(ranks, list(shared)) for shared, ranks in groups.items()]
