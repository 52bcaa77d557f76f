"""One trial: a few steps of ``train.py`` in a process of its own or as a SLURM job, and how it ended."""
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from megatron_llama.cli import CONF_DIR
from megatron_llama.config import load_config
from megatron_llama.config.fields import FREE_DICT, get, settings_by_name
from megatron_llama.config.load_config import EXPERIMENT
from megatron_llama.config.problems import ConfigError, Problem
from megatron_llama.system.files import read_json, write_atomically
from megatron_llama.system.signals import exit_with_parent
from megatron_llama.tools.common import MOCK_RUN
from megatron_llama.tools.settings import TuneConfig
from megatron_llama.tools.tune.candidates import Candidate
from megatron_llama.train.metrics_file import METRICS_FILE, read_metrics

ROOT = CONF_DIR.parent
DONE, MEMORY, SLOW, FAILED = "done", "out of memory", "too slow", "failed"
NOT_NEEDED = (
    *MOCK_RUN,
    "data.name=tuning",
    "dry_run=false",
    "optim.warmup_steps=0",
    "optim.constant_steps=0",
    "trainer.val_every_steps=null",
    "trainer.hang_timeout_seconds=null",
    "checkpoint.every_steps=null",
    "checkpoint.save_last=false",
    "checkpoint.export_hf=false",
    "checkpoint.resume=never",
)
"""What a trial leaves out: files, checkpoints and validation take no part in the time of a step."""
SLOWER = 2.0
"""A trial whose fastest step takes so many times as long as the best one so far is ended early."""
_NO_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|MemoryError|bad_alloc|RESOURCE_EXHAUSTED"
    r"|the heaviest rank(?: \([^)]*\))? needs",
    re.IGNORECASE,
)
_POLL_SECONDS = 0.2
_WORDS_KEPT = 300


@dataclass(frozen=True)
class TrialOutcome:
    """How a trial ended."""

    status: str
    """done, out of memory, too slow or failed."""
    seconds: float | None = None
    """Of a step: the median of those that were timed."""
    memory: int | None = None
    """Bytes that the first rank has reported: of a device the most allocated, of a host's rank the resident set."""
    said: str = ""
    """Of a trial that failed: why, in a line."""
    times: int = 1
    """How often it was tried; ``seconds`` are those of the fastest time, since other work can only add to them."""


class Attempt(Protocol):
    """A trial that was started."""

    def poll(self) -> int | None:
        """Its exit status, minus the signal's number where one ended it; None while it runs."""

    def kill(self) -> None:
        """Ends all of it."""


def run_trial(
    candidate: Candidate, words: Sequence[str], tune: TuneConfig, folder: Path, best: float | None, nodes: int
) -> TrialOutcome:
    """Tries a candidate: ``words`` of the user's command line with its settings, in ``folder``.

    ``best`` are the seconds of the fastest step so far. Raises KeyboardInterrupt, after ending the trial.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in (folder / METRICS_FILE, folder / "output.txt"):
        old.unlink(missing_ok=True)
    settings = candidate.key.split()
    command = [*words, *NOT_NEEDED, *settings, f"trainer.steps={tune.steps + 1}", f"run.dir={json.dumps(str(folder))}"]
    if tune.jobs:
        attempt: Attempt = SlurmJob(command, folder, tune.sbatch, nodes)
    else:
        attempt = Process(command, folder)
    deadline = time.monotonic() + 60 * tune.trial_minutes
    status, ended = None, ""
    try:
        while (status := attempt.poll()) is None:
            if time.monotonic() > deadline:
                ended = SLOW
            elif best is not None and len(times := _times(folder)) > 1 and min(times) > SLOWER * best:
                ended = SLOW
            if ended:
                break
            time.sleep(_POLL_SECONDS)
    finally:
        attempt.kill()
    return judge(status, ended, folder)


def judge(status: int | None, ended: str, folder: Path) -> TrialOutcome:
    """How a trial ended, by its exit status, what it printed and its metrics."""
    times, output = _times(folder), folder / "output.txt"
    said = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
    seconds = statistics.median(times) if times else None
    memory = max((record["peak_memory_bytes"] or 0 for record in _records(folder)), default=None)
    if status == 0:
        return TrialOutcome(DONE, seconds, memory)
    if ended:
        return TrialOutcome(ended, seconds, memory)
    if status in (-signal.SIGKILL, 128 + signal.SIGKILL) or _NO_MEMORY.search(said):
        return TrialOutcome(MEMORY, None, memory)
    return TrialOutcome(FAILED, None, memory, _reason(said))


def _reason(said: str) -> str:
    """Of what a run printed before it failed, one line: the rule that it breaks, else its last words."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    rules = [line.removeprefix("rule").strip() for line in lines if line.startswith("rule ")]
    return (rules or lines[-1:] or ["it said nothing"])[0][:_WORDS_KEPT]


def _records(folder: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(OSError, ValueError):
        return read_metrics(folder / METRICS_FILE)
    return []


def _times(folder: Path) -> list[float]:
    """Seconds of each step but the first, which also warms up."""
    return [record["step_time_s"] for record in _records(folder)[1:]]


class Process:
    """``python train.py`` on this machine, which ends with this process."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        starter = os.getpid()

        def first_to_go() -> None:
            exit_with_parent(starter)
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")  # where memory ends the kernel takes the trial, not the search

        with (folder / "output.txt").open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(ROOT / "train.py"), *command],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=first_to_go,
            )

    def poll(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # its ranks end with it
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


_RUNNING = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED", "RESIZING", "SIGNALING")


class SlurmJob:
    """``sbatch run.slurm`` on some nodes. Never queued again: what it lacks the search wants to know."""

    def __init__(self, command: Sequence[str], folder: Path, options: str, nodes: int) -> None:
        output = f"--output={folder / 'output.txt'}"
        submit = ["sbatch", "--parsable", f"--nodes={nodes}", "--no-requeue", output, *shlex.split(options)]
        try:
            done = self._call([*submit, "run.slurm", *command], MAX_RESTARTS="0")
        except OSError as error:
            raise ConfigError([self._problem(f"sbatch can't be started: {error.strerror}")]) from error
        if done.returncode:
            raise ConfigError([self._problem(f"sbatch refuses: {(done.stderr or done.stdout).strip()}")])
        self.number = done.stdout.strip().partition(";")[0]

    @staticmethod
    def _problem(rule: str) -> Problem:
        return Problem("tune.jobs", True, rule, "start this where sbatch works, or write tune.sbatch=OPTIONS for it")

    @staticmethod
    def _call(words: Sequence[str], **more: str) -> subprocess.CompletedProcess[str]:
        variables: Mapping[str, str] = {**os.environ, **more}
        return subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, stdin=subprocess.DEVNULL)

    def poll(self) -> int | None:
        shown = self._call(["scontrol", "-o", "show", "job", self.number])
        facts = dict(re.findall(r"(\S+?)=(\S*)", shown.stdout))
        if facts.get("JobState") in _RUNNING:
            return None
        if facts.get("JobState") == "OUT_OF_MEMORY":
            return -signal.SIGKILL
        code, _, number = facts.get("ExitCode", "1:0").partition(":")  # a job that is forgotten has not told
        return -int(number) if number not in ("", "0") else int(code)

    def kill(self) -> None:
        if self.poll() is None:
            self._call(["scancel", self.number])


# Writes settings as an experiment: a file that ``train.py`` takes as experiment=<name>.


GROUPS = tuple(sorted(path.name for path in CONF_DIR.iterdir() if path.is_dir() and path.name != EXPERIMENT))
NEVER = ("allow_targets", "dry_run", "run.dir")
"""Of a command line, not of a recipe."""


def experiment_path(name: str) -> Path:
    """Where the experiment of this name lies."""
    return CONF_DIR / EXPERIMENT / f"{name}.yaml"


def check_name(name: str, overwrite: bool) -> list[Problem]:
    """What is wrong with the name of an experiment that is to be written."""
    if not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
        return [Problem("tune.name", name, "must be letters, digits, _, - and .", "write tune.name=my_run")]
    if experiment_path(name).exists() and not overwrite:
        rule = f"{experiment_path(name)} is there already"
        return [Problem("tune.name", name, rule, "write another tune.name, or tune.overwrite=true to replace it")]
    return []


def experiment_text(words: Sequence[str], settings: Mapping[str, Any], comment: Sequence[str]) -> str:
    """The file: the groups that the command line ``words`` picks, and every setting that is not what they say."""
    picked: dict[str, str] = {}
    for word in words:
        group, equals, choice = word.lstrip("+").partition("=")
        if equals and group in GROUPS and (CONF_DIR / group / f"{choice}.yaml").exists():
            picked[group] = choice
    plain = load_config([f"{group}={choice}" for group, choice in picked.items()], CONF_DIR)
    config = load_config(words, CONF_DIR)
    for name, value in settings.items():
        section, _, key = name.rpartition(".")
        setattr(get(config, section), key, value)
    different: dict[str, Any] = {}
    for name in [*settings_by_name(), FREE_DICT]:
        parent = get(config, name.rpartition(".")[0])
        if parent is None or name in NEVER or get(plain, name) == get(config, name):
            continue
        _put(different, name.split("."), get(config, name))
    lines = ["# @package _global_", *(f"# {line}".rstrip() for line in comment)]
    lines += ["defaults:", *(f"  - override /{group}: {choice}" for group, choice in picked.items())] if picked else []
    body = yaml.safe_dump(different, sort_keys=False, allow_unicode=True, width=120) if different else ""
    return "\n".join([*lines, "", body])


def _put(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Sets a value in nested mappings."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


# The trials of a search, in a file that is whole after each of them: a search that was interrupted goes on.


FILE = "trials.json"


class Journal:
    """``trials.json`` in the folder of a search."""

    def __init__(self, folder: Path, asked: Mapping[str, Any]) -> None:
        """Reads what is there. ``asked`` is what trials depend on: those of another search are refused with a
        ConfigError, as is a file that can't be read."""
        self.path, self.asked = folder / FILE, dict(asked)
        self._trials: dict[str, TrialOutcome] = {}
        if not self.path.exists():
            return
        advice = "write another tune.dir=PATH, or remove that folder to begin again"
        try:
            found = read_json(self.path)
            self._trials = {each["settings"]: TrialOutcome(**each["outcome"]) for each in found["trials"]}
            before = found["asked"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError([Problem("tune.dir", str(folder), f"{FILE} can't be read: {error}", advice)]) from error
        if before != self.asked:
            differ = ", ".join(name for name in self.asked if before.get(name) != self.asked[name]) or "what was asked"
            rule = f"has the trials of another search, which differs in {differ}"
            raise ConfigError([Problem("tune.dir", str(folder), rule, advice)])

    def known(self, candidates: Sequence[Candidate]) -> list[tuple[Candidate, TrialOutcome]]:
        """Trials of earlier starts, in their order."""
        by_key = {each.key: each for each in candidates}
        return [(by_key[key], outcome) for key, outcome in self._trials.items() if key in by_key]

    def add(self, candidate: Candidate, outcome: TrialOutcome) -> None:
        """Adds a trial. Raises OSError."""
        self._trials[candidate.key] = outcome
        trials = [{"settings": key, "outcome": asdict(each)} for key, each in self._trials.items()]
        write_atomically(self.path, json.dumps({"asked": self.asked, "trials": trials}, indent=1) + "\n")
