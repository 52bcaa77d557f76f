"""Compare all layouts of tests/layouts with the one-process oracle; print a Markdown table of differences.

    python -m benchmarks.verify.parity > table.md

Takes about two minutes on two cores.
"""

from __future__ import annotations

import argparse
import platform
import sys
from importlib.metadata import version

from benchmarks.help_format import HelpFormatter
from benchmarks.results import commit
from megatron_llama.system.errors import run_main
from megatron_llama.system.tables import markdown_table

KINDS = ("losses", "norms", "first_grads", "last_grads", "weights")


def main() -> int:
    """Print the table; return 1 if a difference exceeds the tolerance."""
    argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter).parse_args()
    from tests.compiled import REASON
    from tests.layouts.table import LAYOUTS
    from tests.oracle import TOLERANCE, oracle, run_layout, worst

    print(
        f"{platform.machine()}, Python {platform.python_version()}, torch {version('torch')}, "
        f"megatron-core {version('megatron-core')}, commit {commit()}, `python -m benchmarks.verify.parity`\n"
    )
    columns = ("losses", "gradient norms", "gradients, step 1", "gradients, step 3", "weights after 3 steps")
    print("\n".join(markdown_table(("layout", "ranks", *columns), [])))
    failed = False
    for name, ranks, layout, model in LAYOUTS:
        if REASON is not None and "trainer.compile=true" in layout:
            sys.stderr.write(f"{name}: skipped. {REASON}\n")
            continue
        differences = worst(run_layout(ranks, *layout, *model), oracle(*model))
        failed |= any(differences[kind] > TOLERANCE for kind in KINDS)
        cells = " | ".join("0" if differences[kind] == 0 else f"{differences[kind]:.1e}" for kind in KINDS)
        print(f"| {name} | {ranks} | {cells} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    run_main(main)
