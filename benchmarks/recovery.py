"""Measure the time from a fault of a training run to its next completed step, by part.

    python -m benchmarks recovery [--faults "rank killed" hang] [--repeats 5] [--compile] [--write PAGE]

Starts train.py on this machine (Linux): llama_15m, dp 2, mock data. The parts follow from the phases that ranks record
for their launcher (system/phase.py), read from /proc, and from starts.jsonl. The slowest rank counts.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import ROOT, command_line, conditions, publish
from megatron_llama.launch.start_log import read_starts
from megatron_llama.system.files import remove_orphans, wait_for_lock
from megatron_llama.system.phase import read_phase
from megatron_llama.system.tables import markdown_table

RANKS, HANG_SECONDS, SAVED_EVERY = 2, 20, 3
SETTINGS = (
    "model=llama_15m data=mock device=cpu trainer.dp=2 data.seq_length=128 trainer.global_batch_size=4 "
    f"trainer.micro_batch_size=2 trainer.steps=100000 trainer.max_restarts=1000 checkpoint.every_steps={SAVED_EVERY} "
    f"checkpoint.keep=3 trainer.hang_timeout_seconds={HANG_SECONDS}"
).split()
# A step above the mean of the last four to eight is a spike. The first checkpoint is older than the first spike.
REWINDS = ("trainer.spike_guard=rewind", "trainer.spike_factor=1e-6", "trainer.spike_window=8")
PARTS = ("detection", "stop", "start", "imports", "groups", "build", "load", "first step")
DETECTION, STOP, START, IMPORTS, GROUPS, BUILD, LOAD, FIRST_STEP, DONE = range(9)
PHASES = {
    STOP: ("rewinding",),
    START: ("the start of its process",),
    IMPORTS: ("importing the program",),
    GROUPS: ("opening the device", "meeting the other ranks"),
    BUILD: ("building", "opening the data", "hashing the data"),
    LOAD: ("loading",),
    FIRST_STEP: ("the first measurements", "step "),
}
"""First words of the phases of each part."""
REACTIONS = ("saving", "rewinding", "leaving")
"""First words of the phases with which a running rank reacts to a fault."""
POLL_SECONDS, LIMIT_SECONDS = 0.01, 400.0
NOT_MEASURED = {"node lost under SLURM": "this benchmark starts no SLURM job"}


class Timeline:
    """Times at which the last of the ranks reached each part."""

    def __init__(self, fault: float) -> None:
        self.times = {DETECTION: fault}
        self._first_steps: dict[int, str] = {}

    def reach(self, part: int, now: float) -> None:
        """Note that a part begins, and that earlier ones have ended."""
        for each in range(part + 1):
            self.times.setdefault(each, now)

    def note_phases(self, phases: Mapping[int, str], now: float) -> None:
        """Note the current phases of the new ranks, by the inode of their records."""
        if len(phases) == RANKS:
            self.reach(min(self._part(rank, name) for rank, name in phases.items()), now)

    def _part(self, rank: int, name: str) -> int:
        first = self._first_steps.get(rank)
        if first is None and name.startswith("step "):
            first = self._first_steps[rank] = name
        if first is not None:
            return FIRST_STEP if name == first else DONE
        return next((part for part, words in PHASES.items() if name.startswith(words)), DETECTION)

    @property
    def seconds(self) -> list[float]:
        """Seconds of each of PARTS, then of all together."""
        parts = [self.times[part + 1] - self.times[part] for part in range(DONE)]
        return [*parts, sum(parts)]


def read_phases(launcher: int) -> dict[int, str]:
    """Return the phase of each rank of a launcher, by the inode of its record in memory."""
    phases = {}
    with suppress(OSError):  # the launcher has ended
        for link in Path(f"/proc/{launcher}/fd").iterdir():
            with suppress(OSError, ValueError):  # closed, or not written yet
                if os.readlink(link).startswith("/memfd:phase"):
                    with link.open("rb") as file:
                        phases[os.fstat(file.fileno()).st_ino] = read_phase(file.fileno()).name
    return phases


def is_gone(pid: int) -> bool:
    """Return whether a process has ended and was reaped, or has lost its launcher."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return True
    return state == "Z" and parent == "1"


class Run:
    """A run of train.py in ``folder`` through all its starts. Ends with the ``with`` block."""

    def __init__(self, folder: Path, overrides: Sequence[str]) -> None:
        self.folder, self.output, self.starts = folder, folder.with_suffix(".out"), 0
        self._words = [sys.executable, "train.py", *SETTINGS, *overrides, f"run.dir={folder}"]
        self.start()

    def start(self) -> None:
        """Start the command."""
        with self.output.open("ab") as file:
            self.launcher = subprocess.Popen(self._words, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)
        self.starts += 1

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.launcher.kill()
        self.launcher.wait()
        with suppress(FileNotFoundError), (self.folder / ".lock").open() as file:  # none if its settings are rejected
            wait_for_lock(file)  # until its ranks have ended too

    @property
    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted((self.folder / "checkpoints").glob("step_*"))

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks."""
        pid = self.launcher.pid
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()][:RANKS]

    def poll(self, ready: Callable[[], object], may_end: bool = False) -> None:
        """Wait until ``ready()``. Ends the benchmark after LIMIT_SECONDS, or if the launcher has ended."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not ready():
            if time.monotonic() > deadline or (self.launcher.poll() is not None and not may_end):
                raise SystemExit(f"the run does not train:\n{self.output.read_text(errors='replace')[-3000:]}")
            time.sleep(POLL_SECONDS)

    def wait_for_steps(self) -> None:
        """Wait until two checkpoints are complete and the ranks are in the middle of steps that do not save."""
        newest = self.checkpoints[-1:]

        def is_training() -> bool:
            phases, saved = list(read_phases(self.launcher.pid).values())[-RANKS:], self.checkpoints
            if len(saved) < 2 or saved[-1:] == newest or any((self.folder / "checkpoints").glob(".step_*")):
                return False
            return all(name == f"step {int(saved[-1].name[5:]) + 2}" for name in phases)

        self.poll(is_training)


def kill_rank(run: Run) -> None:
    """Kill rank 1."""
    os.kill(run.ranks()[1], signal.SIGKILL)


def kill_rank_and_damage(run: Run) -> None:
    """Cut off a file of the newest checkpoint, then kill rank 1."""
    path = next(run.checkpoints[-1].glob("*.safetensors"))
    os.truncate(path, path.stat().st_size // 2)
    kill_rank(run)


@dataclass(frozen=True)
class Fault:
    """A fault, and whether the benchmark starts the command again after it."""

    inject: Callable[[Run], None] | None
    """None: the run rewinds by itself."""
    relaunches: bool = False
    overrides: Sequence[str] = ()


FAULTS = {
    "rank killed": Fault(kill_rank),
    "hang": Fault(lambda run: os.kill(run.ranks()[1], signal.SIGSTOP)),
    "rank killed, newest checkpoint damaged": Fault(kill_rank_and_damage),
    "launcher killed": Fault(lambda run: os.kill(run.launcher.pid, signal.SIGKILL), relaunches=True),
    "rank killed, copies in memory": Fault(kill_rank, overrides=("checkpoint.memory_every_steps=1",)),
    "SIGTERM": Fault(lambda run: os.kill(run.launcher.pid, signal.SIGTERM), relaunches=True),
    "loss spike, rewind": Fault(None, overrides=(*REWINDS, "trainer.spike_rewinds=1000")),
}


def measure(run: Run, fault: Fault) -> list[float]:
    """Inject the fault into a training run; return the seconds of its parts and their sum."""
    old, ranks, starts = set[int](), list[int](), run.starts
    if fault.inject is None:
        run.poll(lambda: any(name.startswith("rewinding") for name in read_phases(run.launcher.pid).values()))
    else:
        run.wait_for_steps()
        old, ranks = set(read_phases(run.launcher.pid)), run.ranks()
    timeline = Timeline(time.time())
    if fault.inject is not None:
        fault.inject(run)

    def is_over() -> bool:
        now, phases = time.time(), read_phases(run.launcher.pid)
        reacts = any(phases[rank].startswith(REACTIONS) for rank in old & phases.keys())
        if not ranks or reacts or any(map(is_gone, ranks)):
            timeline.reach(STOP, now)
        if ranks and all(map(is_gone, ranks)) and (run.launcher.poll() is not None or not fault.relaunches):
            timeline.reach(START, now)
            if fault.relaunches and run.starts == starts:
                run.start()
        if run.starts > starts:  # the launcher imports torch for its ranks, after the line of the start
            times = [each.time for each in read_starts(run.folder)[0] if each.pid == run.launcher.pid]
            timeline.times |= dict.fromkeys([IMPORTS] * len(times), max(times, default=now))
        timeline.note_phases({rank: name for rank, name in phases.items() if rank not in old}, now)
        return DONE in timeline.times

    run.poll(is_over, may_end=fault.relaunches)
    return timeline.seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--faults", nargs="+", choices=FAULTS, default=[*FAULTS], metavar="NAME", help="; ".join(FAULTS)
    )
    parser.add_argument("--repeats", type=int, default=5, help="times that each fault is injected (default 5)")
    parser.add_argument("--compile", action="store_true", help="compile the model; restarts find a filled cache")
    parser.add_argument("--write", type=Path, help="write the page to this file instead of printing it")
    parser.add_argument("overrides", nargs="*", help="changes of the settings, as for train.py")


def run(args: argparse.Namespace) -> int:
    """Measure each fault and print or write the page."""
    results: dict[str, list[list[float]]] = {name: [] for name in args.faults}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, repeats) in enumerate(results.items()):
            fault = FAULTS[name]
            overrides = [f"trainer.compile={str(args.compile).lower()}", *fault.overrides, *args.overrides]
            with Run(Path(folder) / str(number), overrides) as training:
                for repeat in range(args.repeats):
                    repeats.append(measure(training, fault))
                    seconds = " ".join(f"{part:.2f}" for part in repeats[-1])
                    print(f"{name} {repeat + 1}: {seconds}", file=sys.stderr, flush=True)
    remove_orphans()  # copies in memory
    mode = "compiled, with a filled cache" if args.compile else "eager"
    lines = ["# Recovery from faults\n", f"{conditions()}\n", f"    {command_line()}\n"]
    publish("\n".join([*lines, f"Seconds, {mode}:\n", *table(results)]) + "\n", args.write)
    return 0


def table(results: Mapping[str, Sequence[Sequence[float]]]) -> Iterator[str]:
    """Yield the lines of the table: the median of each part, and median, minimum and maximum of the sums."""
    rows = []
    for name, repeats in results.items():
        *parts, total = zip(*repeats, strict=True)
        spread = f"{statistics.median(total):.1f} ({min(total):.1f} to {max(total):.1f})"
        rows.append([name, *(f"{statistics.median(part):.2f}" for part in parts), spread])
    rows += [[name, *[""] * len(PARTS), f"not measured: {reason}"] for name, reason in NOT_MEASURED.items()]
    yield from markdown_table(("fault", *PARTS, "total"), rows)
