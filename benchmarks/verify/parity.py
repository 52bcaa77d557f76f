"""Compare all layouts of tests/layouts with the one-process oracle; print a Markdown table of differences.

    python -m benchmarks.verify.parity --exact docs/results/exact.txt > table.md

Takes about twenty minutes on two cores. The table of exact mode comes from `python -m benchmarks.verify.exact`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.help_format import HelpFormatter
from benchmarks.results import conditions
from megatron_llama.system.errors import run_main
from megatron_llama.system.tables import markdown_table

KINDS = ("losses", "norms", "first_grads", "last_grads", "weights")
COLUMNS = ("layout", "ranks", "losses", "gradient norms", "gradients, step 1", "gradients, step 3", "weights, step 3")


def exact_results(page: str) -> dict[str, str]:
    """Return the result of each row in a page of benchmarks.verify.exact: 0, or the first cell that is not 0.

    The cells "own" (the row has its own precision) and "–" (not run) are no results.
    """
    lines = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| layout |")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    results = {name: [cell for cell in cells if cell not in ("own", "–")] for name, _, *cells in rows}
    return {name: next((cell for cell in cells if cell != "0"), "0") for name, cells in results.items() if cells}


def main() -> int:
    """Print the table; return 1 if a difference exceeds the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--rows", nargs="+", default=[""], metavar="TEXT", help="only rows with one of the texts")
    parser.add_argument("--exact", type=Path, metavar="PAGE", help="adds the column of exact mode from this page")
    args = parser.parse_args()
    from tests.compiled import REASON
    from tests.layouts.table import LAYOUTS, rejection
    from tests.oracle import TOLERANCE, oracle, run_layout, worst

    exact = exact_results(args.exact.read_text(encoding="utf-8")) if args.exact is not None else None
    print(f"{conditions()} `python -m benchmarks.verify.parity`\n")
    print("\n".join(markdown_table((*COLUMNS, *(["exact"] * (exact is not None))), [])))
    failed = False
    for name, ranks, layout, model in (row for row in LAYOUTS if any(text in row[0] for text in args.rows)):
        if REASON is not None and "trainer.compile=true" in layout:
            sys.stderr.write(f"{name}: skipped. {REASON}\n")
            continue
        differences = worst(run_layout(ranks, *layout, *model), oracle(*model))
        failed |= any(differences[kind] > TOLERANCE for kind in KINDS)
        cells = ["0" if differences[kind] == 0 else f"{differences[kind]:.1e}" for kind in KINDS]
        if exact is not None:
            cells.append(rejection(layout, model) or exact.get(name, "not run"))
        print(f"| {name} | {ranks} | {' | '.join(cells)} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    run_main(main)
