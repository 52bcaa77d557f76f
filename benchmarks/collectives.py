"""Measure latency and bandwidth of each collective by parallel axis and message size."""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from functools import partial
from pathlib import Path

from benchmarks.harness.arguments import parse_layout, split_words
from benchmarks.harness.environments import torch_version
from benchmarks.results import ROOT, command_line, commit, describe_machine
from megatron_llama.cli import main as launch
from megatron_llama.parallel import open_device, process_groups
from megatron_llama.plan import Plan
from megatron_llama.system.exit_status import EXIT_FAILED
from megatron_llama.system.files import write_atomically
from megatron_llama.system.tables import markdown_table
from megatron_llama.tools.common import MOCK_RUN
from megatron_llama.tools.doctor.ranks import Rate, rates_of_groups, slowest_groups
from megatron_llama.topology import AXIS_NAMES

HEAD = ("layout", "axis", "collective", "ranks", "bytes", "time", "algorithm", "bus")

EXPLANATION = """\
Medians of calls after a barrier, in fp32; the time of a call is the slowest rank's. Algorithm bandwidth is bytes over
time. Bus bandwidth multiplies it by 2 (n-1)/n for all_reduce and (n-1)/n for all_gather and reduce_scatter.

"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add(
        "--layouts",
        type=split_words,
        default=["tp2", "dp2", "pp2"],
        help="layouts, one run each, for example tp2,dp2,tp2dp2",
    )
    add("--smallest", type=int, default=4096, help="smallest message, bytes (default %(default)s)")
    add("--largest", type=int, default=64 << 20, help="largest message, bytes (default %(default)s)")
    add("--factor", type=int, default=8, help="factor between message sizes (default %(default)s)")
    add("--device", default="cpu", help="device whose backend is measured (default cpu: shared memory and gloo)")
    add("--output", type=Path, default=ROOT / "runs/benchmarks/collectives.md", help="path of the page")


def run(args: argparse.Namespace) -> int:
    """Measure, print and write; return 1 if a layout failed."""
    sizes = [args.smallest]
    while args.factor > 1 and sizes[-1] * args.factor <= args.largest:
        sizes.append(sizes[-1] * args.factor)
    rows: list[list[str]] = []
    failed = []
    layouts = {name: parse_layout(name) for name in args.layouts}
    for number, (name, layout) in enumerate(layouts.items()):
        sys.stderr.write(f"{number}/{len(layouts)} layouts: {name} ...\n")
        with tempfile.TemporaryDirectory() as folder:
            axes = [f"trainer.{axis}={getattr(layout, axis)}" for axis in AXIS_NAMES]
            settings = [
                "model=llama_2m",
                f"device={args.device}",
                "trainer.micro_batch_size=1",
                f"run.dir={folder}/run",
            ]
            batch = f"trainer.global_batch_size={layout.dp}"
            status = launch([*settings, *axes, batch, *MOCK_RUN], partial(_measure, sizes, Path(folder)))
            if status:
                failed.append(name)
                continue
            rows += rate_rows(name, pickle.loads((Path(folder) / "rates").read_bytes()))
    text = "\n".join(_page(args, rows)) + "\n"
    write_atomically(args.output, text)
    sys.stdout.write(text)
    sys.stderr.writelines(f"excluded: {name}: a rank failed, see above\n" for name in failed)
    return EXIT_FAILED if failed else 0


def _measure(sizes: Sequence[int], folder: Path, plan: Plan) -> None:
    """Measure all sizes over each axis with more than one rank; rank 0 writes the rates of the slowest groups."""
    topology, (device, torch_device) = plan.topology(int(os.environ["RANK"])), open_device(plan)
    with process_groups(plan, topology, device, torch_device):
        rates = rates_of_groups(sizes, device.synchronize, torch_device)
    if topology.rank == 0:
        (folder / "rates").write_bytes(pickle.dumps(slowest_groups(rates)))


def rate_rows(layout: str, rates: Iterable[Rate]) -> Iterator[list[str]]:
    """Yield rows of HEAD, with bandwidths in GB/s."""
    for rate in rates:
        yield [
            layout,
            rate.axis,
            rate.kind,
            str(rate.ranks),
            f"{rate.size:,}",
            f"{rate.seconds * 1e6:,.0f} us",
            f"{rate.algorithm_bandwidth / 1e9:.3f} GB/s",
            f"{rate.bus_bandwidth / 1e9:.3f} GB/s",
        ]


def _page(args: argparse.Namespace, rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield from [f"# Collectives ({date.today()})", ""]
    yield f"Machine: {describe_machine(args.device)}. torch {torch_version()}, commit {commit()}."
    yield from ["", f"    {command_line()}", ""]
    yield from EXPLANATION.splitlines()
    yield from markdown_table(HEAD, rows)
