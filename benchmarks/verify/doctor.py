"""Run the doctor on four nodes with injected faults: python -m benchmarks.verify.doctor

Runs tests/slurm/test_doctor.py, which needs root and a SLURM, and writes the doctor's pages to docs/results/doctor.md.
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
from benchmarks.results import ROOT, commit, describe_machine
from megatron_llama.system.errors import run_main
from megatron_llama.system.files import write_atomically

HEAD = """\
# The doctor on four nodes, with faults put in ({day})

Machine: {machine}; four virtual nodes of a real SLURM, each with a network of its own, sharing its cores and its disk.
{other}. torch {torch}, commit {commit}.

    python -m benchmarks.verify.doctor

The blocked port is a rule of nft on n3; the slow link is `tc qdisc ... tbf` (this kernel has no netem); the full disk
is a tmpfs of 1 MiB; the clock and the version of torch are shifted in one node's processes (tests/slurm/faulty_nodes).
tests/slurm/test_doctor.py also checks that a node which can't even come is named by both sides, and that run.slurm
ends with status 2. {verdict}

"""


def main() -> int:
    """Runs the tests and writes the page; the tests' status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/results/doctor.md")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        pages = Path(folder) / "pages"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "slurm", str(ROOT / "tests/slurm/test_doctor.py")]
        begun = commit()
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "DOCTOR_REPORT": str(pages)}, capture_output=True, text=True
        )
        sys.stdout.write(done.stdout[-3000:])
        if not pages.exists():
            return done.returncode or 1
        load = f"Load {os.getloadavg()[1]:.0f}, others' work included"
        text = HEAD.format(
            day=date.today(),
            machine=describe_machine("cpu"),
            other=load,
            torch=torch_version(),
            commit=begun,
            verdict=f"pytest: {done.stdout.strip().splitlines()[-1].strip('= ')}.",
        )
        write_atomically(args.output, text + pages.read_text(encoding="utf-8").rstrip() + "\n")
    return done.returncode


if __name__ == "__main__":
    run_main(main)
