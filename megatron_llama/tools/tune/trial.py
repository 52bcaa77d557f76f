"""Trial of a candidate: a few steps of ``train.py`` in a process or SLURM job, and its outcome."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_llama.cli import CONF_DIR
from megatron_llama.config import load_config
from megatron_llama.config.conf_folders import EXPERIMENT
from megatron_llama.config.problems import ConfigError, Problem
from megatron_llama.config.settings_table import FREE_DICT, get, put, settings_by_name
from megatron_llama.system.files import read_json, write_atomically
from megatron_llama.system.programs import OWN_CONF, ROOT
from megatron_llama.system.signals import exit_with_parent
from megatron_llama.tools.cluster_settings import TuneConfig
from megatron_llama.tools.common import MOCK_RUN, ONLY_STEPS, call_slurm, nest, submit_job
from megatron_llama.tools.tune.candidates import Candidate
from megatron_llama.train.metrics_file import METRICS_FILE, read_metrics

DONE, MEMORY, SLOW, FAILED = "done", "out of memory", "too slow", "failed"
TRIAL_OVERRIDES = (
    *(*MOCK_RUN, *ONLY_STEPS, "data.name=tuning"),
    *("dry_run=false", "trainer.hang_timeout_seconds=null", "hook.on_event=null"),
)
"""Overrides of a trial: no files, checkpoints or validation."""
SLOW_FACTOR = 2.0
"""A trial is stopped if its fastest step takes this many times the best step so far."""
_NO_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|MemoryError|bad_alloc|RESOURCE_EXHAUSTED"
    r"|the heaviest rank(?: \([^)]*\))? needs",
    re.IGNORECASE,
)
_POLL_SECONDS = 0.2
_MESSAGE_LENGTH = 300


@dataclass(frozen=True)
class TrialOutcome:
    """Outcome of a trial."""

    status: str
    """DONE, MEMORY, SLOW or FAILED."""
    seconds: float | None = None
    """Median seconds of the timed steps."""
    memory: int | None = None
    """Bytes that rank 0 reported: peak allocated on a device, resident set on a host."""
    message: str = ""
    """Reason of a failure, one line. Its key in ``trials.json`` is ``said``."""
    times: int = 1
    """Number of trials. ``seconds`` is the minimum over them, because other load only adds time."""

    def as_json(self) -> dict[str, Any]:
        return {{"message": "said"}.get(name, name): value for name, value in asdict(self).items()}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> TrialOutcome:
        return TrialOutcome(**{{"said": "message"}.get(name, name): value for name, value in content.items()})


def run_trial(
    candidate: Candidate, overrides: Sequence[str], tune: TuneConfig, folder: Path, best: float | None, nodes: int
) -> TrialOutcome:
    """Run a trial in a run folder; an interruption ends its processes.

    ``best`` is the time of the fastest step so far in seconds, None before the first trial.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in (folder / METRICS_FILE, folder / "output.txt"):
        old.unlink(missing_ok=True)
    run = [f"trainer.steps={tune.steps + 1}", f"run.dir={json.dumps(str(folder))}"]
    command = [*overrides, *TRIAL_OVERRIDES, *candidate.key.split(), *run]
    trial = SlurmJob(command, folder, tune.sbatch, nodes) if tune.jobs else Process(command, folder)
    deadline = time.monotonic() + 60 * tune.trial_minutes
    status, ended = None, ""
    try:
        while (status := trial.poll()) is None:
            times = _times(folder) if best is not None else []
            is_slow = best is not None and len(times) > 1 and min(times) > SLOW_FACTOR * best
            if is_slow or time.monotonic() > deadline:
                ended = SLOW
                break
            time.sleep(_POLL_SECONDS)
    finally:
        trial.kill()
    return read_outcome(status, ended, folder)


def read_outcome(status: int | None, ended: str, folder: Path) -> TrialOutcome:
    """Return the outcome of a trial from its exit status, output and metrics."""
    times, output = _times(folder), folder / "output.txt"
    text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
    seconds = statistics.median(times) if times else None
    memory = max((record["peak_memory_bytes"] or 0 for record in _records(folder)), default=None)
    if status == 0:
        return TrialOutcome(DONE, seconds, memory)
    if ended:
        return TrialOutcome(ended, seconds, memory)
    if status in (-signal.SIGKILL, 128 + signal.SIGKILL) or _NO_MEMORY.search(text):
        return TrialOutcome(MEMORY, None, memory)
    return TrialOutcome(FAILED, None, memory, _reason(text))


def _reason(output: str) -> str:
    """Return one line of a failed run's output: the rule that it breaks, or the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    rules = [line.removeprefix("rule").strip() for line in lines if line.startswith("rule ")]
    return (rules or lines[-1:] or ["no output"])[0][:_MESSAGE_LENGTH]


def _records(folder: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(OSError, ValueError):
        return read_metrics(folder / METRICS_FILE)
    return []


def _times(folder: Path) -> list[float]:
    """Return the seconds of each step except the first, which is the warm-up."""
    return [record["step_time_s"] for record in _records(folder)[1:]]


class Process:
    """``python train.py`` on this machine; it ends with this process."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        parent = os.getpid()

        def prefer_as_oom_victim() -> None:
            exit_with_parent(parent)
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")  # the OOM killer then ends the trial, not the search

        with (folder / "output.txt").open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(ROOT / "train.py"), *command],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=prefer_as_oom_victim,
            )

    def poll(self) -> int | None:
        """Return the exit status (negative signal number if a signal ended it); None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """End all its processes."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # its ranks end with it
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


_RUNNING = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED", "RESIZING", "SIGNALING")


class SlurmJob:
    """``sbatch run.slurm`` on ``nodes`` nodes, without requeue: a failure is a result."""

    def __init__(self, command: Sequence[str], folder: Path, options: str, nodes: int) -> None:
        given = shlex.join([f"--nodes={nodes}", "--no-requeue", f"--output={folder / 'output.txt'}"])
        problem = Problem("tune.jobs", True, "", "run this on a host with sbatch, or write tune.sbatch=OPTIONS")
        self.number = submit_job(f"{given} {options}", command, problem, MAX_RESTARTS="0")

    def poll(self) -> int | None:
        """Return the exit status as ``Process``."""
        shown = call_slurm(["scontrol", "-o", "show", "job", self.number])
        facts = dict(re.findall(r"(\S+?)=(\S*)", shown.stdout))
        if facts.get("JobState") in _RUNNING:
            return None
        if facts.get("JobState") == "OUT_OF_MEMORY":
            return -signal.SIGKILL
        code, _, number = facts.get("ExitCode", "1:0").partition(":")  # SLURM forgot the job: count it as failed
        return -int(number) if number not in ("", "0") else int(code)

    def kill(self) -> None:
        """Cancel the job."""
        if self.poll() is None:
            call_slurm(["scancel", self.number])


# Experiment files: train.py experiment=<name>.
GROUPS = tuple(sorted(path.name for path in CONF_DIR.iterdir() if path.is_dir() and path.name != EXPERIMENT))
NOT_IN_EXPERIMENT = ("allow_targets", "dry_run", "hook.on_event", "run.dir")


def experiment_path(name: str) -> Path:
    """Return the path of an experiment."""
    return OWN_CONF / EXPERIMENT / f"{name}.yaml"


def check_name(name: str, overwrite: bool) -> list[Problem]:
    """Return the problems of the name of a new experiment."""
    if not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
        return [Problem("tune.name", name, "must be letters, digits, _, - and .", "write tune.name=my_run")]
    if experiment_path(name).exists() and not overwrite:
        rule = f"{experiment_path(name)} exists"
        return [Problem("tune.name", name, rule, "write another tune.name, or tune.overwrite=true")]
    return []


def experiment_text(
    overrides: Sequence[str], settings: Mapping[str, Any], comment: Sequence[str], always: Collection[str] = ()
) -> str:
    """Return the text of an experiment: config groups of the command line, and all settings that differ from them.

    Settings in ``always`` are written in any case.
    """
    picked: dict[str, str] = {}
    for text in overrides:
        group, equals, choice = text.lstrip("+").partition("=")
        if equals and group in GROUPS and (CONF_DIR / group / f"{choice}.yaml").exists():
            picked[group] = choice
    plain = load_config([f"{group}={choice}" for group, choice in picked.items()], CONF_DIR)
    config = load_config(overrides, CONF_DIR)
    for name, value in settings.items():
        put(config, name, value)
    different: dict[str, Any] = {}
    for name in [*settings_by_name(), FREE_DICT]:
        if get(config, name.rpartition(".")[0]) is None or name in NOT_IN_EXPERIMENT:
            continue
        if name not in always and get(plain, name) == get(config, name):
            continue
        different[name] = get(config, name)
    lines = ["# @package _global_", *(f"# {line}".rstrip() for line in comment)]
    lines += ["defaults:", *(f"  - override /{group}: {choice}" for group, choice in picked.items())] if picked else []
    body = yaml.safe_dump(nest(different), sort_keys=False, allow_unicode=True, width=120) if different else ""
    return "\n".join([*lines, "", body])


# Record of trials, from which an interrupted search resumes.
TRIALS_FILE = "trials.json"
_INPUTS = {"words": "the command line", "steps": "tune.steps", "machine": "the machine"}
"""Names of a journal's inputs in messages."""


class Journal:
    """``trials.json`` in the folder of a search, complete after each trial."""

    def __init__(self, folder: Path, inputs: Mapping[str, Any]) -> None:
        """Read the trials of an interrupted search.

        Args:
            folder: folder of the search.
            inputs: values that the trials depend on.

        Raises ConfigError if the file cannot be read, or is of another search.
        """
        self.path, self.inputs = folder / TRIALS_FILE, dict(inputs)
        self._trials: dict[str, TrialOutcome] = {}
        if not self.path.exists():
            return
        advice = "write another tune.dir=PATH, or remove that folder to start a new search"
        try:
            content = read_json(self.path)
            self._trials = {each["settings"]: TrialOutcome.from_json(each["outcome"]) for each in content["trials"]}
            before = content["asked"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            rule = f"cannot read {TRIALS_FILE}: {error}"
            raise ConfigError([Problem("tune.dir", str(folder), rule, advice)]) from error
        if before != self.inputs:
            names = [name for name in self.inputs if before.get(name) != self.inputs[name]]
            different = ", ".join(_INPUTS.get(name, name) for name in names) or "its settings"
            rule = f"contains another search, which differs in {different}"
            raise ConfigError([Problem("tune.dir", str(folder), rule, advice)])

    def recorded(self, candidates: Sequence[Candidate]) -> dict[str, tuple[Candidate, TrialOutcome]]:
        """Return the recorded trials by ``Candidate.key``, in their order."""
        by_key = {each.key: each for each in candidates}
        return {key: (by_key[key], outcome) for key, outcome in self._trials.items() if key in by_key}

    def add(self, candidate: Candidate, outcome: TrialOutcome) -> None:
        """Add a trial and write the file; raise OSError if that fails."""
        self._trials[candidate.key] = outcome
        trials = [{"settings": key, "outcome": each.as_json()} for key, each in self._trials.items()]
        write_atomically(self.path, json.dumps({"asked": self.inputs, "trials": trials}, indent=1) + "\n")
