"""Run the doctor on four nodes with injected faults: python -m benchmarks.verify.doctor

Runs tests/slurm/test_doctor.py, which needs root and a SLURM, and writes the doctor's pages to --output.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

from benchmarks.harness.environments import torch_version
from benchmarks.help_format import HelpFormatter
from benchmarks.results import ROOT, commit, describe_machine
from megatron_llama.system.errors import run_main
from megatron_llama.system.files import write_atomically

HEAD = """\
# The doctor on four nodes, with injected faults ({day})

Machine: {machine}. Four virtual nodes of a real SLURM with separate networks share its cores and disk. {other}. torch
{torch}, commit {commit}.

    python -m benchmarks.verify.doctor

Faults (tests/slurm/faulty_nodes):

* blocked port: an nft rule on n3
* slow link: `tc qdisc ... tbf` (this kernel has no netem)
* full disk: a tmpfs of 1 MiB
* wrong clock and wrong version of torch: shifted in one node's processes

tests/slurm/test_doctor.py also checks that both sides report a node that cannot connect, and that run.slurm ends with
status 2. {verdict}

"""


def main() -> int:
    """Run the tests and write the page; return the tests' status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "runs/benchmarks/doctor.md", help="path of the page")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        pages = Path(folder) / "pages"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "slurm", str(ROOT / "tests/slurm/test_doctor.py")]
        tested = commit()
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "DOCTOR_REPORT": str(pages)}, capture_output=True, text=True
        )
        sys.stdout.write(done.stdout[-3000:])
        if not pages.exists():
            return done.returncode or 1
        load = f"Load {os.getloadavg()[1]:.0f}, other processes included"
        text = HEAD.format(
            day=date.today(),
            machine=describe_machine("cpu"),
            other=load,
            torch=torch_version(),
            commit=tested,
            verdict=f"pytest: {done.stdout.strip().splitlines()[-1].strip('= ')}.",
        )
        write_atomically(args.output, text + pages.read_text(encoding="utf-8").rstrip() + "\n")
    return done.returncode


if __name__ == "__main__":
    run_main(main)
