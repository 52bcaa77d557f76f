"""Measure the time of a comparison of copies against the time of a training step.

    python -m benchmarks.verify.copies > table.md
    python -m benchmarks.verify.copies --pairs 2 --cases "llama_2m trainer.tp=2"

Two ranks run pairs of a step without and a step with a comparison, alternately in both orders. The cost of an interval
is the median difference of the pairs, and the median time of the comparison itself, divided by the steps between.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.help_format import HelpFormatter
from benchmarks.results import commit, describe_machine
from megatron_llama.plan import Plan
from megatron_llama.system.errors import run_main
from megatron_llama.system.tables import markdown_table

CASES = [
    f"{model} {layout}"
    for model in ("llama_2m", "llama_15m", "llama_56m")
    for layout in ("trainer.tp=2", "trainer.zero=0 trainer.dp=2")
]
WARM_UP = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--pairs", type=int, default=12, help="pairs of steps per case")
    parser.add_argument("--cases", nargs="+", default=CASES, help="a model and its settings, in one argument")
    args = parser.parse_args(argv)
    print(f"{describe_machine('cpu')}, commit {commit()}, `python -m benchmarks.verify.copies`\n")
    head = ["case", "step", "comparison", "median difference of pairs", "cost of every 100 steps"]
    rows = []
    for case in args.cases:
        if (times := measure(case, args.pairs)) is None:
            return 1
        without, with_comparison, comparison = times
        step, alone = median(without), median(comparison)
        difference = median(b - a for a, b in zip(without, with_comparison, strict=True))
        cells = [f"{step * 1e3:.1f} ms", f"{alone * 1e3:.2f} ms", f"{difference * 1e3:.2f} ms"]
        rows.append([f"`{case}`", *cells, f"{alone / step:.3f} %"])
    print("\n".join(markdown_table(head, rows)))
    return 0


def measure(case: str, pairs: int) -> tuple[list[float], list[float], list[float]] | None:
    """Return seconds of steps without and with a comparison, and of comparisons, on rank 0; None if a rank failed."""
    from megatron_llama import cli
    from megatron_llama.launch.start import Share, start_ranks
    from megatron_llama.launch.world import find_world

    model, *settings = case.split()
    words = [f"model={model}", "data=mock", "device=cpu", f"trainer.steps={WARM_UP + 2 * pairs}", *settings]
    plan = find_world(cli.parse_overrides(words), None).plan()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times.json"
        if start_ranks(plan, partial(time_steps, file, pairs), Share(plan.world_size, output_dir=Path(folder))):
            return None
        without, with_comparison, comparison = json.loads(file.read_text())
        return without, with_comparison, comparison


def time_steps(file: Path, pairs: int, plan: Plan) -> None:
    """Run the steps of one rank; rank 0 writes their times to ``file``."""
    import torch.distributed as dist

    from megatron_llama.data.batches import build_data
    from megatron_llama.optim import build_optimizer
    from megatron_llama.parallel import build_model, open_device, process_groups
    from megatron_llama.tools.steps import open_steps

    topology, (device, torch_device) = plan.topology(int(os.environ["RANK"])), open_device(plan)
    without, with_comparison, comparison = list[float](), list[float](), list[float]()
    with process_groups(plan, topology, device, torch_device):
        model = build_model(plan, topology, device, torch_device)
        optimizer, data = build_optimizer(plan, model), build_data(plan, topology, torch_device)
        with open_steps(plan, topology, model, optimizer, data) as steps:
            for step in range(1, WARM_UP + 1):
                steps.run(step)
                steps.checkpointer.compare_copies(step)
            for step in range(WARM_UP + 1, WARM_UP + 2 * pairs + 1):
                compares = step % 4 in (0, 1)  # without, with, with, without
                dist.barrier()
                start = time.perf_counter()
                steps.run(step)
                between = time.perf_counter()
                if compares:
                    steps.checkpointer.compare_copies(step)
                    comparison.append(time.perf_counter() - between)
                (with_comparison if compares else without).append(time.perf_counter() - start)
    if topology.rank == 0:
        file.write_text(json.dumps([without, with_comparison, comparison]))


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
