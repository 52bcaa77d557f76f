"""Fuzz all code that reads untrusted files with damaged and malicious files.

    python -m tests.fuzz --seconds 600
    python -m tests.fuzz --only config.json --seed 7      one target, from one seed
    python -m tests.fuzz --case FOLDER --only recipe      repeat a stored case

A result or one error message is correct. An exception, a crash, or too much time or memory is a finding. Its files,
minimized by hypothesis, and its traceback are stored in --keep, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from megatron_llama.system.errors import run_main  # noqa: E402
from megatron_llama.system.tables import text_table  # noqa: E402
from tests.fuzz.runner import Target, fuzz, read_case  # noqa: E402
from tests.fuzz.targets import TARGETS  # noqa: E402

ROUND = 100
"""Cases drawn with one seed."""


def main() -> int:
    """Run the command line; return 1 if there are findings."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="total time, shared by the targets (default 60)")
    parser.add_argument("--rounds", type=int, help=f"maximum rounds per target, {ROUND} cases each (default: no limit)")
    parser.add_argument("--only", nargs="+", metavar="TARGET", help="; ".join(target.name for target in TARGETS))
    parser.add_argument("--seed", type=int, help="seed of the first round (default: the time)")
    parser.add_argument("--keep", type=Path, default=Path("runs/fuzz"), help="folder of findings (default runs/fuzz)")
    parser.add_argument("--case", type=Path, metavar="FOLDER", help="run this case once; name its target with --only")
    arguments = parser.parse_args()
    targets = [target for target in TARGETS if arguments.only is None or target.name in arguments.only]
    if not targets:
        parser.error(f"--only: choose from {', '.join(target.name for target in TARGETS)}")
    if arguments.case is not None:
        with tempfile.TemporaryDirectory() as folder:
            read_case(targets[0], Path(shutil.copytree(arguments.case, Path(folder) / "case")))
        return 0
    first = int(time.time()) if arguments.seed is None else arguments.seed
    last = first + arguments.rounds - 1 if arguments.rounds else None
    seconds = arguments.seconds / len(targets)
    rows = [(target.name, *_fuzz_for(target, seconds, first, last, arguments.keep)) for target in targets]
    table = [("target", "seeds", "cases", "seconds", "findings"), *(tuple(map(str, row)) for row in rows)]
    print("\n".join(text_table(table, left=2)))
    return int(any(row[-1] for row in rows))


def _fuzz_for(target: Target, seconds: float, first: int, last: int | None, keep: Path) -> tuple[str, int, int, int]:
    """Run rounds until the last one, the time limit, or a finding; return (seeds, cases, seconds, findings)."""
    begin, cases, number = time.monotonic(), 0, first
    while True:
        with tempfile.TemporaryDirectory() as folder:
            outcome = fuzz(target, Path(folder), number, ROUND)
            cases += outcome.cases
            if outcome.finding is not None:
                stored = keep / f"{target.name.replace(' ', '_')}-{number}"
                shutil.rmtree(stored, ignore_errors=True)
                shutil.copytree(Path(folder) / "kept", stored / "case")
                (stored / "finding.txt").write_text(outcome.finding, encoding="utf-8")
                print(
                    f"{target.name}, seed {number}: {outcome.finding.strip().splitlines()[-1]} ({stored})", flush=True
                )
        over = number == last or time.monotonic() - begin >= seconds
        if outcome.finding is not None or over:
            spent = round(time.monotonic() - begin)
            return f"{first}-{number}" if number > first else str(first), cases, spent, int(outcome.finding is not None)
        number += 1


if __name__ == "__main__":
    run_main(main)
