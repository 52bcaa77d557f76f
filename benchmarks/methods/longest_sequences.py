"""Write the table of the longest sequences by hardware, devices, ZeRO stage, context parallelism and recomputation.

    python -m benchmarks longest_sequences --zero 3 --write docs/results/longest_sequences.md

The rows are the table of `scripts/tune.py objective=max_seq_len`, for one machine of each kind.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks.methods import variants
from benchmarks.results import command_line
from megatron_llama.system.tables import GIB, markdown_table
from megatron_llama.tools.tune.candidates import fixed_settings
from megatron_llama.tools.tune.longest import sequence_rows, sequence_table
from megatron_llama.tools.tune.objectives import TuneRequest, read_request

MACHINES = {"a100": "8 A100 80GB", "h100": "8 H100 80GB", "trn2": "16 Trainium 2", "gaudi3": "8 Gaudi 3"}
"""Titles by name in the hardware table; one machine has this number of devices."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--model", default="llama3_8b", help="preset of the model (default llama3_8b)")
    parser.add_argument("--machines", nargs="+", default=list(MACHINES), choices=list(MACHINES), help="default: all")
    parser.add_argument("--zero", type=int, choices=range(4), help="only the rows of this ZeRO stage")
    parser.add_argument("--write", type=Path, help="write the page to this file instead of printing it")


def run(args: argparse.Namespace) -> int:
    """Compute the tables, and print or write the page."""
    variants.publish("\n".join(_page(args)) + "\n", args.write)
    return 0


def request_of(model: str, machine: str) -> TuneRequest:
    """Return the request of ``scripts/tune.py`` for one machine."""
    words = [f"model={model}", "data=mock", "trainer.global_batch_size=16", "trainer.precision=bf16"]
    return read_request(["objective=max_seq_len", *words, f"cluster.device={machine}", "cluster.nodes=1"])


def rows_of(request: TuneRequest, zero: int | None = None) -> list[list[str]]:
    """Return the rows of the table, the head first. With ``zero``, only rows of this ZeRO stage."""
    fixed = fixed_settings(request.config, list(request.overrides))
    if zero is not None:
        fixed["trainer.zero"] = zero
    return sequence_rows(sequence_table(request.config, fixed, request.target, lambda done: None))


def _page(args: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of the page in Markdown."""
    yield "# Longest sequences by devices, ZeRO stage, context parallelism and recomputation\n"
    yield f"{variants.conditions()} Command:\n"
    yield f"    {command_line()}\n"
    yield (
        f"The longest `data.seq_length` of {args.model} that fits on one machine. All rows are the planner's memory, "
        "which is within 10 % of a step. bf16 with fp32 masters and AdamW, one sequence per micro batch, 16 sequences "
        "per step, no tensor or pipeline parallelism. Columns are numbers of ranks; a Trainium 2 has four.\n"
    )
    yield (
        "cp 1: all ranks are data-parallel. cp all: all ranks share each sequence. LoRA has the default rank and "
        "modules. offload: `trainer.offload=[activations]`, without a limit of the host's memory. A dash: the weights "
        "and states do not fit. Sequences longer than the model's context need `model.rope_scaling` or a larger "
        "`model.max_position_embeddings`.\n"
    )
    for machine in args.machines:
        request = request_of(args.model, machine)
        memory = request.target.usable_bytes / GIB
        yield f"## {MACHINES[machine]}\n"
        yield f"{memory:.1f} GiB usable per rank, {request.target.ranks} ranks.\n"
        head, *rows = rows_of(request, args.zero)
        yield from markdown_table(head, rows)
        yield ""
