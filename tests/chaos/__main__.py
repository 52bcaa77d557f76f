"""Faults to small runs on this machine, several hundred of them: python -m tests.chaos FOLDER --faults 300

Each fault (kill -9, signals, a stopped process, a full or read-only disk, damaged files, garbage to open ports, broken
connections, jumps of the clock) comes at a random moment of a run in one of four layouts. Then the run is started again
by the same command. Nothing may be lost: losses and final tensors must be those of a run that was left alone, to the
last bit. Nothing may hang, no process or half file may stay, and the exit status must be the right one. The folders of
runs that broke a promise are kept.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_llama.system.errors import run_main
from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_USER
from tests.chaos.interposer import Interposer, build

if TYPE_CHECKING:  # it needs torch, which --help does not
    from tests.chaos.campaign import Campaign

INTERPOSER_MISSING = "MEGATRON_LLAMA_CHAOS_WITHOUT"


def main(argv: Sequence[str]) -> int:
    """Runs ``python -m tests.chaos`` with ``argv``; the exit status is 0 where every promise was kept."""
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
        # Loaded before the C library, so this program starts anew with it. One thread: ranks share two cores or more.
        os.environ.update(variables, OMP_NUM_THREADS="1")
        os.execv(sys.executable, [sys.executable, "-m", "tests.chaos", *argv])
    # Everything that a run imports: each start is a fork of this process, which takes no time.
    import gc

    import matplotlib.pyplot  # noqa: F401
    import torch
    import torch.utils.tensorboard  # noqa: F401

    import megatron_llama.train.run_rank  # noqa: F401
    from tests.chaos.campaign import KINDS_OF_FAULT, Campaign

    torch.set_num_threads(1)
    os.register_at_fork(before=gc.freeze, after_in_parent=gc.unfreeze)  # a collection in a fork would copy all pages
    kinds = arguments.only.split(",") if arguments.only else list(KINDS_OF_FAULT)
    begin = time.monotonic()
    campaign = Campaign(folder, arguments.layouts.split(","), kinds, arguments.seed, Interposer.loaded())
    _tell(f"seed {arguments.seed}; undisturbed runs took {time.monotonic() - begin:.0f} s")
    for kind in set(kinds) - set(campaign.kinds):
        _tell(f"left out: {kind}: {os.environ[INTERPOSER_MISSING]}")
    begin = time.monotonic()
    for done, line in enumerate(campaign.run(arguments.faults), start=1):
        rate = done / (time.monotonic() - begin)
        left = (arguments.faults - done) / rate
        _tell(f"{line}  [{60 * rate:.1f} faults/min, {left / 60:.0f} min left]")
    _tell("\n".join(summary(campaign)))
    return EXIT_FAILED if campaign.failures else 0


def _tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def summary(campaign: Campaign) -> list[str]:
    """A table by kind, in Markdown, and what failed."""
    lines = [
        "| kind | faults | ended by it | unharmed | told | not seen | resumed before | broken promises | statuses |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, t in campaign.tallies.items():
        statuses = ", ".join(f"{status}: {count}" for status, count in sorted(t.statuses.items()))
        cells = (kind, t.faults, t.ended, t.unharmed, t.told, t.unseen, t.resumed, t.broken, statuses)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines.append(f"\nLongest from a fault to the end of the run: {campaign.longest:.0f} s")
    return lines + [f"BROKEN {failure}" for failure in campaign.failures]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the runs are written; must not be there yet")
    parser.add_argument("--faults", type=int, default=100, help="how many (default 100)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments and the kinds (default 1)")
    parser.add_argument(
        "--only", metavar="KINDS", help="some kinds: kill,term,stop,pause,disk,garbage,drop,clock,damage"
    )
    parser.add_argument("--layouts", default="single,tp2,pp2,dp2_zero3", help="default: %(default)s")
    return parser


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
