"""Command line of ``scripts/prove_gpu.py``: run all parts, print the table, write the page and the folder."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_llama.system.command import ArgumentParser
from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_INTERRUPTED
from megatron_llama.system.programs import name_commands
from megatron_llama.system.wrapping import fill, wrap
from megatron_llama.tools.common import show_line

if TYPE_CHECKING:
    from megatron_llama.tools.prove_gpu.checks import Earlier, Part, PartResult
    from megatron_llama.tools.prove_gpu.session import Session

    Save = Callable[[Sequence[PartResult]], object]

MINUTES = 10.0
MOST_MINUTES = 24 * 60.0
RESULTS = Path("runs/prove_gpu")
SEND = (
    "Send back the folder. It contains the page, results and environment as JSON, and logs, settings, plans, metrics "
    "and traces of the runs, but no weights and no data. Private paths, and names of user and machine, are replaced."
)
USAGE = """\
usage: python scripts/prove_gpu.py [--minutes N] [--parts A,B]
                                   [--output FOLDER] [--resume]
                                   [--archive FILE] [--device NAME] [--small]

Check this program on the GPUs of this machine. A failing part does not stop
the others. Prints a table with one row per part, and writes a folder to send
back: a dated page, results and environment as JSON, logs, plans, metrics and
traces. Needs no network, no dataset and no model files.

  environment  versions, driver, GPUs, compiler, a first matmul
  smoke        train a small Llama
  parity       losses of layouts and options against recorded ones of a CPU
  attention    every attention kernel and precision against fp64 on the CPU
  resume       a stopped and continued run is bit-identical
  memory       peak memory against the plan's forecast
  compile      losses and speed with and without torch.compile
  float8       losses and speed with and without trainer.float8
  benchmark    speed, MFU and a trace of layers of 1 B and 7 B Llamas, with the
               installed of transformers and torchtitan

  --minutes N       time of the whole command (default: 10); checks that do not
                    fit are reported as not run
  --parts A,B       run these parts only; environment always runs
  --output FOLDER   folder of the results (default: a new folder in
                    runs/prove_gpu)
  --resume          continue in the --output FOLDER of a stopped command: only
                    checks without a result run
  --archive FILE    also pack the folder as FILE (.tar.gz) after each check
  --device NAME     device to check (default: the first accelerator of this
                    machine); cpu compares the CPU with itself
  --small           small shapes, to test this command; implied by --device cpu
  --help            show this text

Exit status: 0 no part failed, 1 a part failed, 2 a user error or no GPU.
docs/design/gpu.md explains the parts. Not run on hardware.
"""


def parts() -> tuple[Part[Session], ...]:
    """Return all parts in their order."""
    from megatron_llama.tools.prove_gpu import attention, benchmark, environment, parity, training
    from megatron_llama.tools.prove_gpu.checks import Check, Outcome, Part

    def one(name: str, run: Callable[[Session], Outcome]) -> Callable[[Session], list[Check[Session]]]:
        return lambda session: [Check(name, run)]

    return (
        Part("environment", "Versions, driver, devices and compiler.", 0.5, environment.checks),
        Part(
            "smoke", "A small Llama trains: finite losses that fall, and a checkpoint.", 1, one("smoke", training.smoke)
        ),
        Part("parity", "Losses and gradient norms against recorded ones of one CPU process.", 4, parity.checks),
        Part("attention", "Attention kernels, forward and backward, against fp64 on the CPU.", 1.5, attention.checks),
        Part("resume", "A stopped and continued run against an uninterrupted one, bitwise.", 2, training.resume),
        Part("memory", "Peak memory of tensors against the plan's forecast.", 2, training.memory),
        Part("compile", "Runs with torch.compile against eager runs.", 2, one("compile", training.compilation)),
        Part("float8", "Runs with float8 matmuls against bf16.", 2, training.float8),
        Part("benchmark", "Speed of layers of a 7 B and a 1 B Llama, and of installed peers.", 4, benchmark.checks),
    )


def main(argv: Sequence[str]) -> int:
    """Run ``scripts/prove_gpu.py`` with ``argv``; return the exit status."""
    if {"--help", "-h"} & set(argv):
        sys.stdout.write(name_commands(USAGE))
        return 0
    arguments, selected = _read_arguments(argv)
    with tempfile.TemporaryDirectory(prefix="prove-gpu-") as work:
        return _run(arguments, selected, Path(work), argv)


def _read_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[Part[Session]]]:
    """Return the arguments and the requested parts. Raises UserError."""
    from megatron_llama.config.settings import DEVICES
    from megatron_llama.system.errors import UserError

    parser = ArgumentParser(usage=name_commands(USAGE), add_help=False, allow_abbrev=False)
    add = parser.add_argument
    add("--minutes", type=float, default=MINUTES)
    add("--parts")
    add("--output", type=Path)
    add("--resume", action="store_true")
    add("--archive", type=Path)
    add("--device", default="auto")
    add("--small", action="store_true")
    arguments, unknown = parser.parse_known_args(argv)
    problems = [f"there is no argument {word}: see --help" for word in unknown]
    if not 0 < arguments.minutes <= MOST_MINUTES:
        rule = f"must be above 0 and at most {MOST_MINUTES:g}"
        problems.append(f"--minutes {arguments.minutes:g} {rule}: write --minutes 10")
    if arguments.device not in DEVICES:
        problems.append(f"--device {arguments.device} is unknown: write one of {', '.join(DEVICES)}")
    everything = parts()
    names = [part.name for part in everything]
    requested = names if arguments.parts is None else ["environment", *arguments.parts.split(",")]
    for name in requested:
        if name not in names:
            problems.append(f"--parts {name} is unknown: write some of {','.join(names)}")
    output = arguments.output
    if arguments.resume and output is None:
        problems.append("--resume needs --output FOLDER, the folder of the stopped command")
    elif output is not None and output.exists() and not (output.is_dir() and arguments.resume):
        if not output.is_dir() or any(output.iterdir()):
            problems.append(f"--output {output} exists and is not empty: name a new folder, or add --resume")
    if arguments.archive is not None and not arguments.archive.absolute().parent.is_dir():
        problems.append(f"--archive {arguments.archive}: there is no folder {arguments.archive.parent}")
    if problems:
        raise UserError("\n".join(problems))
    return arguments, [part for part in everything if part.name in requested]


def _run(arguments: argparse.Namespace, selected: Sequence[Part[Session]], work: Path, argv: Sequence[str]) -> int:
    """Run the parts in the folder ``work``; print and write the results."""
    from megatron_llama.system.errors import UserError
    from megatron_llama.tools.prove_gpu.checks import CheckFailed, Clock
    from megatron_llama.tools.prove_gpu.page import last_line, pack, read_results, write_files
    from megatron_llama.tools.prove_gpu.session import Session

    folder = arguments.output or RESULTS / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    session = Session(folder.absolute(), work, Clock(60 * arguments.minutes), arguments.device, small=arguments.small)
    show_line("examining the environment")
    try:
        facts = session.module("environment", "environment", arguments.device)
    except CheckFailed as failure:
        raise UserError(f"torch does not work here: {failure}") from None
    if "missing" in facts:
        if not arguments.resume:
            shutil.rmtree(folder)  # only the log of the environment
        raise UserError(f"no GPU to check: {facts['missing']}")
    session.environment, session.device = facts, facts["device"]
    session.small = session.small or not session.is_accelerator
    facts["small"], command = session.small, f"{name_commands('python scripts/prove_gpu.py')} {shlex.join(argv)}"

    def save(results: Sequence[PartResult]) -> Path:
        path = write_files(folder, facts, results, command, session.redact)
        if arguments.archive is not None:
            pack(folder, arguments.archive)
        return path

    earlier = read_results(folder, session.small) if arguments.resume else {}
    results, status = _run_selected(selected, session, save, earlier)
    path = save(results)
    sys.stdout.write(f"\n{wrap(last_line(results))}\n\n  page    {path}\n  folder  {folder}\n\n")
    sys.stdout.write(fill("", SEND) + "\n")
    sys.stdout.flush()
    return status


def _run_selected(
    selected: Sequence[Part[Session]], session: Session, save: Save, earlier: Earlier
) -> tuple[list[PartResult], int]:
    """Run the parts, printing a row for each; return the results and the exit status."""
    from megatron_llama.system.progress import duration
    from megatron_llama.tools.prove_gpu.checks import Status, run_parts
    from megatron_llama.tools.prove_gpu.page import table_lines

    def show(text: str) -> None:
        show_line(f"{text}, at most {duration(session.clock.left)} left")

    def print_row(part: PartResult | None) -> None:
        show_line("")
        sys.stdout.write("\n".join(table_lines(part)) + "\n")
        sys.stdout.flush()

    def save_part(part: PartResult) -> None:
        save([*results, part])

    results: list[PartResult] = []
    print_row(None)
    try:
        for result in run_parts(selected, session, session.clock, show, save_part, earlier):
            results.append(result)
            print_row(result)
    except KeyboardInterrupt:
        return results, EXIT_INTERRUPTED
    return results, EXIT_FAILED if any(part.status == Status.FAILED for part in results) else 0
