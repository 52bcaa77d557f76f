"""Compare the layouts of tests/layouts in exact mode with one process, bit by bit; print a Markdown table.

    python -m benchmarks.verify.exact > table.md

Takes about half an hour on two cores. Environment variables choose the kernels of an older processor, for example
ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2.
"""

from __future__ import annotations

import argparse
import shlex
import sys

from benchmarks.help_format import HelpFormatter
from benchmarks.results import commit, describe_machine
from megatron_llama.system.errors import run_main
from megatron_llama.system.tables import markdown_table

PRECISIONS = {"fp32": [], "bf16": ["trainer.precision=bf16"]}


def main() -> int:
    """Print the table; return 1 if a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps of a run (default 20)")
    parser.add_argument("--rows", nargs="+", default=[""], metavar="TEXT", help="only rows with one of the texts")
    args = parser.parse_args()
    from tests.layouts.table import EXACT, exact_rows
    from tests.layouts.test_exact import differing
    from tests.oracle import Result, run_layout

    device, command = "cpu", shlex.join(["python", "-m", "benchmarks.verify.exact", *sys.argv[1:]])
    print(f"{describe_machine(device)}, commit {commit()}, {args.steps} steps, `{command}`\n")
    print("\n".join(markdown_table(("layout", "ranks", *PRECISIONS), [])))
    expected: dict[tuple[str, ...], Result] = {}
    failed = False
    for name, ranks, layout, model in (row for row in exact_rows() if any(text in row[0] for text in args.rows)):
        cells = []
        for precision in PRECISIONS.values():
            if precision and any(override.startswith("trainer.precision") for override in (*layout, *model)):
                cells.append("own")
                continue
            key = (*model, *precision)
            if key not in expected:
                expected[key] = run_layout(1, EXACT, *key, steps=args.steps)
            others = differing(run_layout(ranks, EXACT, *layout, *key, steps=args.steps), expected[key])
            cells.append(f"{len(others)} tensors" if others else "0")
            failed |= bool(others)
            for other in others[:3]:
                sys.stderr.write(f"{name}: {other}\n")
        print(f"| {name} | {ranks} | {' | '.join(cells)} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    run_main(main)
