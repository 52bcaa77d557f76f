"""Compare the speed of preprocess.py with Megatron's preprocess_data.py and with plain sentencepiece.

All programs process the same JSONL. Each round runs all programs, so that other load on the machine affects all of
them. The table gives medians over rounds: wall time, and CPU seconds of all processes. Outputs are compared byte by
byte.
"""

from __future__ import annotations

import argparse
import contextlib
import filecmp
import itertools
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.results import ROOT, conditions
from data_prep.lib.find_inputs import find_sources
from data_prep.lib.input_readers import read_lines
from megatron_llama.system.errors import MachineError, UserError
from megatron_llama.system.files import write_atomically
from megatron_llama.system.tables import markdown_table

PROGRAM = "data_prep/preprocess.py"
# A minimal baseline: each process tokenizes every second line and writes the tokens to a file.
PLAIN_SENTENCEPIECE = """
import json, multiprocessing, sys
import numpy as np, sentencepiece
source, model, out, workers = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
def work(part):
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=model)
    eos = tokenizer.eos_id()
    with open(source, "rb") as file, open(f"{out}.{part}.bin", "wb") as target:
        for number, line in enumerate(file):
            if number % workers == part:
                ids = tokenizer.encode(json.loads(line)["text"])
                target.write(np.array(ids + [eos], dtype=np.uint16).tobytes())
with multiprocessing.get_context("fork").Pool(workers) as pool:
    pool.map(work, range(workers))
"""


@dataclass
class Row:
    """One program and its measurements."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    megabytes: float = 0.0
    walls: list[float] = field(default_factory=list)
    cpus: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)

    @property
    def wall(self) -> float:
        """Median wall time, seconds."""
        return statistics.median(self.walls)

    @property
    def cpu(self) -> float:
        """Median CPU seconds of all processes."""
        return statistics.median(self.cpus)

    def once(self, folder: Path, peak: bool = False) -> None:
        """Run the program in an empty folder. Raises MachineError, with the end of the output, if it fails."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start = time.monotonic()
        log = folder / "log"
        with open(log, "wb") as output:
            process = subprocess.Popen(
                self.command, stdout=output, stderr=output, cwd=ROOT, env={**os.environ, **self.environment}
            )
            if peak:
                self.peaks.append(_watch_memory(process))
            process.wait()
        self.walls.append(time.monotonic() - start)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if process.returncode:
            raise MachineError(f"{self.name} failed: {log.read_text(errors='replace')[-500:]}")


def _watch_memory(process: subprocess.Popen) -> int:
    """Return the peak proportional set size of a process and its children, in bytes."""
    peak = 0
    while process.poll() is None:
        total, pids = 0, [str(process.pid)]
        with contextlib.suppress(OSError):  # the process may end at any time
            pids += Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in pids:
            with contextlib.suppress(OSError):
                match = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
                total += 1024 * int(match[1]) if match else 0
        peak = max(peak, total)
        time.sleep(0.1)
    return peak


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("--input", nargs="+", required=True, help="JSONL files, plain or compressed, or folders")
    add("--tokenizer-model", required=True, help="sentencepiece model")
    add("--megatron", help="checkout of Megatron-LM that runs in this Python (default: no row)")
    add("--before", type=Path, metavar="CHECKOUT", help="another checkout of this project (default: no row)")
    add("--repeat", type=int, default=5, help="rounds (default 5)")
    add("--sizes", type=int, nargs="*", default=[1, 4, 16], help="file sizes of the scaling table, as multiples")
    add("--workers", type=int, nargs="*", default=[1, 2], help="numbers of workers of the scaling table")
    add("--folder", type=Path, help="folder for temporary files")
    add("--report", type=Path, help="also write the table to this file")


def run(args: argparse.Namespace) -> int:
    """Run all programs and print the tables."""
    if args.repeat < 1:
        raise UserError("--repeat must be at least 1")
    if args.before and not (args.before / PROGRAM).is_file():
        raise UserError(f"--before {args.before} is no checkout of this project")
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        source = folder / "all.jsonl"
        with open(source, "wb") as file:  # one plain file, which all programs can read
            lines_of_all = itertools.chain.from_iterable(map(read_lines, find_sources(args.input).sources))
            file.writelines(line + b"\n" for line in lines_of_all if line.strip())
        lines = [*_heading(args, source), *_peers(args, source, folder), *_scaling(args, source, folder)]
    print("\n".join(lines))
    if args.report:
        write_atomically(args.report, "\n".join(lines) + "\n")
    return 0


def _heading(args: argparse.Namespace, source: Path) -> list[str]:
    return [
        "# Preprocessing speed",
        "",
        conditions(("sentencepiece", "gigatoken", "kitoken", "orjson", "numpy")),
        "",
        f"One JSONL file of {source.stat().st_size / 1e6:.1f} MB. Whole processes; medians of {args.repeat} rounds, "
        "each with all rows. CPU seconds include child processes.",
        "",
    ]


def _ours(source: Path, args: argparse.Namespace, out: Path, workers: int, *more: str, root: Path = ROOT) -> list[str]:
    return [
        *(sys.executable, str(root / PROGRAM), "--input", str(source), "--append-eod"),
        *("--tokenizer-model", os.path.abspath(args.tokenizer_model), "--workers", str(workers)),
        *("--output-prefix", str(out / "x"), *more),
    ]


def _peers(args: argparse.Namespace, source: Path, folder: Path) -> list[str]:
    """Return the table of all programs, with ratios to the first row."""
    model = os.path.abspath(args.tokenizer_model)
    outs = [folder / f"row{number}" for number in range(5)]
    plain = [sys.executable, "-c", PLAIN_SENTENCEPIECE, str(source), model, str(outs[1] / "x"), "2"]
    exact = _ours(source, args, outs[2], 2, "--encoder", "sentencepiece")
    rows = [
        Row("preprocess.py, 2 workers", _ours(source, args, outs[0], 2)),
        Row("plain sentencepiece, 2 processes", plain),
        Row("preprocess.py --encoder sentencepiece, 2 workers", exact),
    ]
    if args.before:
        root = args.before.absolute()
        command = _ours(source, args, outs[3], 2, root=root)
        rows.append(Row("preprocess.py of --before, 2 workers", command, {"PYTHONPATH": str(root)}))
    notes, tool = list[str](), Path(args.megatron or "") / "tools" / "preprocess_data.py"
    if args.megatron and tool.is_file():
        command = [sys.executable, str(tool), "--input", str(source), "--output-prefix", str(outs[len(rows)] / "x")]
        command += ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model]
        command += ["--append-eod", "--workers", "2", "--log-interval", "1000000"]
        environment = {"PYTHONPATH": os.path.abspath(args.megatron)}
        rows.append(Row("Megatron preprocess_data.py, 2 workers", command, environment))
    else:
        notes.append("No row for Megatron's preprocess_data.py: --megatron names no checkout of Megatron-LM.")
    for _ in range(args.repeat):
        for row, out in zip(rows, outs, strict=False):
            row.once(out)
    size = source.stat().st_size / 1e6
    table = []
    wall, cpu = rows[0].wall, rows[0].cpu
    for row in rows:
        numbers = (f"{row.wall:.2f}", f"{size / row.wall:.1f}", f"{row.wall / wall:.1f}")
        table.append((row.name, *numbers, f"{row.cpu:.2f}", f"{row.cpu / cpu:.1f}"))
    lines = [*markdown_table(("program", "s", "MB/s", "times ours", "CPU s", "times ours"), table)]
    lines += ["", "All times, in seconds:"]
    lines += [f"- {row.name}: {', '.join(f'{value:.2f}' for value in row.walls)}" for row in rows]
    for out, row in zip(outs[2:], rows[2:], strict=False):
        same = all(
            filecmp.cmp(outs[0] / f"x_text_document{end}", out / f"x_text_document{end}", shallow=False)
            for end in (".bin", ".idx")
        )
        notes.append(f"Output of {row.name}: {'byte-identical to' if same else 'DIFFERENT from'} the first row's.")
    return [*lines, "", *notes, ""]


def _scaling(args: argparse.Namespace, source: Path, folder: Path) -> list[str]:
    """Return the table of speed and memory by file size and number of workers."""
    content = source.read_bytes()
    size, rows = len(content) / 1e6, []
    for copies in args.sizes:
        path = folder / f"{copies}x.jsonl"
        with open(path, "wb") as target:
            target.writelines([content] * copies)
        rows.append(Row(f"{copies}x, 2 workers", _ours(path, args, folder / "scale", 2), megabytes=copies * size))
    for workers in args.workers:
        command = _ours(source, args, folder / "scale", workers)
        rows.append(Row(f"1x, {workers} worker{'s' * (workers > 1)}", command, megabytes=size))
    rounds = min(3, args.repeat)
    for _ in range(rounds):
        for row in rows:
            row.once(folder / "scale", peak=True)
    table = []
    for row in rows:
        size, peak = row.megabytes, max(row.peaks) / 1e6
        numbers = (f"{size:.0f}", f"{row.wall:.2f}", f"{size / row.wall:.1f}", f"{1000 * row.cpu / size:.1f}")
        table.append((row.name, *numbers, f"{peak:.0f}"))
    head = ("file, workers", "MB", "s", "MB/s", "CPU ms per MB", "peak MB")
    return [f"## Scaling (median of {rounds})", "", *markdown_table(head, table)]
