"""Verify that scripts/tune.py finds settings within 5 % of the best under a memory limit.

    python -m benchmarks.verify.tuner [--memory 700] [--trials 8] [--steps 5]

Runs the tuner, then all candidates, then the tuner's choice and the best candidate alternately, five times each. Takes
about twenty minutes on two idle cores.

As root, the limit is a cgroup (v1 or v2) of --memory MiB. Otherwise the address space of each process is limited
(ulimit -v) to --memory MiB plus the address space that torch maps; the page reports the kind of limit.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.help_format import HelpFormatter
from benchmarks.results import ROOT, conditions
from megatron_llama.system.errors import run_main
from megatron_llama.system.files import read_json
from megatron_llama.system.progress import ProgressBar
from megatron_llama.system.tables import gib, markdown_table
from megatron_llama.tools.cluster_settings import TuneConfig
from megatron_llama.tools.tune import objectives
from megatron_llama.tools.tune.candidates import Candidate, Tuner, fixed_settings
from megatron_llama.tools.tune.trial import DONE, MEMORY, TrialOutcome, run_trial

WORDS = (
    "model=llama_2m model.vocab_size=4096 data=mock device=cpu data.seq_length=512 trainer.global_batch_size=8 "
    "trainer.zero=1 trainer.vpp=1 logging.tensorboard=false"
).split()
TORCH_MAPS = 6 << 30
"""Address space that a rank maps without tensors: libraries and thread stacks."""
WITHIN = 0.05
TURNS = 5
Run = tuple[Candidate, TrialOutcome]


def main() -> int:
    """Run all trials and print the page; return 0 if the tuner's choice is within 5 % of the best."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--memory", type=int, default=700, help="memory limit, MiB (default 700)")
    parser.add_argument("--trials", type=int, default=8, help="trials of the tuner (default 8)")
    parser.add_argument("--steps", type=int, default=5, help="steps per trial (default 5)")
    parser.add_argument("--out", type=Path, help="also write the page to this file")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="prove_tuner"))
    name = f"prove_tuner_{os.getpid()}"
    written = ROOT / "conf" / "experiment" / f"{name}.yaml"
    begun = time.monotonic()
    try:
        with limited(arguments.memory << 20) as limit:
            words = [f"tune.name={name}", f"tune.trials={arguments.trials}", f"tune.steps={arguments.steps}"]
            words += [f"tune.dir={folder / 'tuner'}"]
            command = [sys.executable, str(ROOT / "scripts" / "tune.py"), *WORDS, *words]
            done = subprocess.run(command, capture_output=True, text=True)
            sys.stdout.write(done.stdout + done.stderr)
            if done.returncode:
                return done.returncode
            tuned_seconds = time.monotonic() - begun
            request = objectives.read_request([*WORDS, *words, "tune.overwrite=true"])
            tuner = Tuner(request.config, fixed_settings(request.config, list(request.overrides)), request.target)
            runs = exhaustive(tuner.enumerate(memory_factor=0.0).candidates, request.tune, folder)
            key = best_of_journal(folder / "tuner" / "trials.json")
            chosen, best = next(run for run in runs if run[0].key == key), runs[0]
            pairs = alternately([chosen[0], best[0]], request.tune, folder) if chosen is not best else []
        seconds = (tuned_seconds, time.monotonic() - begun)
        lines = [*heading(arguments, limit, seconds), *result_lines(runs, chosen, pairs)]
    finally:
        written.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")
    return int(loss(pairs) > WITHIN)


@contextlib.contextmanager
def limited(size: int) -> Iterator[str]:
    """Limit the memory of this process and its children to ``size`` bytes; yield a description of the limit."""
    for tree, file, number in (("memory", "memory.limit_in_bytes", 1), (".", "memory.max", 2)):
        group = Path("/sys/fs/cgroup") / tree / f"prove_tuner_{os.getpid()}"
        try:
            group.mkdir()
            (group / file).write_text(str(size))
            (group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        try:
            yield f"a cgroup (v{number}) of {gib(size)}"
        finally:
            (group.parent / "cgroup.procs").write_text(str(os.getpid()))
            for _ in range(50):  # killed processes may not have ended yet
                with contextlib.suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(0.1)
        return
    resource.setrlimit(resource.RLIMIT_AS, (TORCH_MAPS + size, TORCH_MAPS + size))
    yield f"ulimit -v: {gib(size)} plus {gib(TORCH_MAPS)} that torch maps"


def exhaustive(every: list[Candidate], tune: TuneConfig, folder: Path) -> list[Run]:
    """Run all candidates one after another; return them with their outcomes, the fastest first."""
    runs: list[Run] = []
    with ProgressBar("candidates", "trials", len(every)) as bar:
        for number, each in enumerate(every, 1):
            runs.append((each, run_trial(each, WORDS, tune, folder / "trial", None, 1)))
            bar.show(number, f"{each.key}: {runs[-1][1]}")
    return sorted(runs, key=step_seconds)


def alternately(both: list[Candidate], tune: TuneConfig, folder: Path) -> list[tuple[float, float]]:
    """Run both candidates alternately, TURNS times; return pairs of seconds per step."""
    runs = [
        [run_trial(each, WORDS, tune, folder / "trial", None, 1).seconds or 0.0 for each in both] for _ in range(TURNS)
    ]
    return [(first, second) for first, second in runs]


def best_of_journal(path: Path) -> str:
    """Return the settings that the tuner chose: the fastest trial."""
    trials = [each for each in read_json(path)["trials"] if each["outcome"]["status"] == DONE]
    return str(min(trials, key=lambda each: each["outcome"]["seconds"])["settings"])


def step_seconds(run: Run) -> float:
    """Return the measured seconds per step; infinity if the trial failed."""
    return run[1].seconds or float("inf")


def loss(pairs: list[tuple[float, float]]) -> float:
    """Return the relative slowdown of the tuner's choice; 0 if it is the best candidate.

    Compares the fastest time of each: near the limit the system reclaims pages, and single times vary by a multiple.
    """
    if not pairs:
        return 0.0
    ours, best = (min(times) for times in zip(*pairs, strict=True))
    return ours / best - 1


def heading(arguments: argparse.Namespace, limit: str, seconds: tuple[float, float]) -> Iterator[str]:
    """Yield the conditions: command, machine, limit, and the ``seconds`` of the tuner and of everything."""
    command = f"python -m benchmarks.verify.tuner --memory {arguments.memory} --trials {arguments.trials}"
    yield from ("# The tuner under a memory limit, compared with all candidates", "")
    yield from (f"    {command} --steps {arguments.steps}", "", conditions(), f"Limit: {limit}. `{' '.join(WORDS)}`.")
    yield f"The tuner took {seconds[0]:.0f} s; tuner and all candidates took {seconds[1]:.0f} s."


def result_lines(runs: list[Run], chosen: Run, pairs: list[tuple[float, float]]) -> Iterator[str]:
    """Yield the comparison of the tuner's choice with the best candidate, and the table of all candidates."""
    failed = sum(outcome.status == MEMORY for _, outcome in runs)
    yield f"{len(runs)} valid candidates; {failed} of them ran out of memory."
    yield f"The tuner chose `{chosen[0].key}`; the best candidate is `{runs[0][0].key}`."
    yield f"In single runs, the choice is slower by {step_seconds(chosen) / step_seconds(runs[0]) - 1:.1%}. Pairs:"
    yield f"{', '.join(f'{one:.3f} / {other:.3f} s' for one, other in pairs) or 'not needed'}. Fastest runs:"
    yield from (f"**{loss(pairs):+.1%}** ({'within' if loss(pairs) <= WITHIN else 'NOT within'} 5 %).", "")
    rows = []
    for each, outcome in runs:
        marks = " (tuner's choice)" * (each == chosen[0])
        measured = f"{outcome.seconds:.3f}" if outcome.seconds else outcome.status
        name = f"`{each.key.replace('trainer.', '')}`{marks}"
        rows.append((name, f"{each.seconds:.3f}", measured, gib(each.required_bytes)))
    yield from markdown_table(("settings", "forecast, s", "measured, s", "memory, forecast"), rows)


if __name__ == "__main__":
    run_main(main)
