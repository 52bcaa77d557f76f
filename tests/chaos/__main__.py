"""Inject faults into small training runs on this machine.

    python -m tests.chaos FOLDER --faults 300

Faults are kill -9, signals, a stopped process, a full or read-only disk, damaged files, garbage to open ports, broken
connections and clock jumps. Each occurs at a random time of a run in one of four layouts. The same command then
restarts the run. Losses and final tensors must be bit-identical to an undisturbed run. A run must not hang or leave
processes or partial files, and its exit status must be correct. Folders of failed runs are retained.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.help_format import HelpFormatter
from megatron_llama.system.errors import run_main
from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_USER
from megatron_llama.system.tables import markdown_table
from tests.chaos.interposer import Interposer, build

if TYPE_CHECKING:  # it needs torch, which --help does not
    from tests.chaos.campaign import Campaign

INTERPOSER_MISSING = "MEGATRON_LLAMA_CHAOS_WITHOUT"


def main(argv: Sequence[str]) -> int:
    """Run ``python -m tests.chaos`` with ``argv``; return 0 if all checks passed."""
    arguments = _parser().parse_args(argv)
    folder: Path = arguments.folder.resolve()
    if Interposer.loaded() is None and INTERPOSER_MISSING not in os.environ:
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            sys.stderr.write(f"{folder}: {error.strerror}\n")
            return EXIT_USER
        variables = build(folder)
        if isinstance(variables, str):
            variables = {INTERPOSER_MISSING: variables}
        # LD_PRELOAD takes effect at start, so restart this program. One thread: ranks share the cores.
        os.environ.update(variables, OMP_NUM_THREADS="1")
        os.execv(sys.executable, [sys.executable, "-m", "tests.chaos", *argv])
    # Import all modules of a run: each start is a fork of this process, so it imports nothing.
    import gc

    import matplotlib.pyplot  # noqa: F401
    import torch
    import torch.utils.tensorboard  # noqa: F401

    import megatron_llama.train.run_rank  # noqa: F401
    from tests.chaos.campaign import DAMAGE, KINDS_OF_FAULT, Campaign

    torch.set_num_threads(1)
    os.register_at_fork(before=gc.freeze, after_in_parent=gc.unfreeze)  # a collection in a fork would copy all pages
    kinds = arguments.only.split(",") if arguments.only else list(KINDS_OF_FAULT)
    if DAMAGE in kinds and "_copies" in arguments.layouts:
        _parser().error("damage needs layouts without copies in memory")
    begin = time.monotonic()
    campaign = Campaign(folder, arguments.layouts.split(","), kinds, arguments.seed, Interposer.loaded())
    _report(f"seed {arguments.seed}; undisturbed runs took {time.monotonic() - begin:.0f} s")
    for kind in set(kinds) - set(campaign.kinds):
        _report(f"skipped: {kind}: {os.environ[INTERPOSER_MISSING]}")
    begin = time.monotonic()
    for done, line in enumerate(campaign.run(arguments.faults), start=1):
        rate = done / (time.monotonic() - begin)
        left = (arguments.faults - done) / rate
        _report(f"{line}  [{60 * rate:.1f} faults/min, {left / 60:.0f} min left]")
    _report("\n".join(summary(campaign)))
    return EXIT_FAILED if campaign.failures else 0


def _report(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def summary(campaign: Campaign) -> list[str]:
    """Return a Markdown table of the outcomes by kind, and the failures."""
    rows = (
        (kind, str(counts.total()), ", ".join(f"{outcome}: {count}" for outcome, count in sorted(counts.items())))
        for kind, counts in campaign.outcomes.items()
    )
    lines = [*markdown_table(("kind", "faults", "outcomes"), rows)]
    lines.append(f"\nLongest from a fault to the end of the run: {campaign.longest:.0f} s")
    return lines + [f"BROKEN {failure}" for failure in campaign.failures]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("folder", type=Path, help="new folder for the runs")
    parser.add_argument("--faults", type=int, default=100, help="number of faults (default 100)")
    parser.add_argument("--seed", type=int, default=1, help="seed of times and kinds (default 1)")
    parser.add_argument(
        "--only", metavar="KINDS", help="kinds to inject, from kill,term,stop,pause,disk,garbage,drop,clock,damage"
    )
    layouts = "layouts (default %(default)s; with copies in memory only: tp2_copies,pp2_copies,dp2_zero3_copies)"
    parser.add_argument("--layouts", default="single,tp2,pp2,dp2_zero3", help=layouts)
    return parser


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
