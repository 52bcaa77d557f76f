"""Measure the time of a comparison of copies against the time of a training step.

    python -m benchmarks.verify.copies > table.md
    python -m benchmarks.verify.copies --pairs 2 --cases "llama_2m trainer.tp=2"

Two ranks run pairs of a step without and a step with a comparison, alternately in both orders. The cost of an interval
is the median difference of the pairs, and the median time of the comparison itself, divided by the steps between.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
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
    from megatron_llama.launch.world import find_world
    from megatron_llama.tools.steps import rank_results

    model, *settings = case.split()
    words = [f"model={model}", "data=mock", "device=cpu", f"trainer.steps={WARM_UP + 2 * pairs}", *settings]
    plan = find_world(cli.parse_overrides(words), None).plan()
    status, times = rank_results(plan, partial(time_steps, pairs))
    return None if status else times[0]


def time_steps(pairs: int, plan: Plan) -> tuple[list[float], list[float], list[float]]:
    """Run the steps of one rank; return their times."""
    import torch.distributed as dist

    from megatron_llama.parallel import open_device
    from megatron_llama.tools.steps import open_rank

    without, with_comparison, comparison = list[float](), list[float](), list[float]()
    with open_rank(plan, int(os.environ["RANK"]), *open_device(plan)) as steps:
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
    return without, with_comparison, comparison


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
