"""The run's folder: its name, the lock that keeps a second run out, and what is written into it before the start."""

from __future__ import annotations

import glob
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_llama.config import Config, ConfigError, Problem, to_yaml
from megatron_llama.plan import Plan, format_plan
from megatron_llama.system.files import DRAFT, try_lock, write_atomically
from megatron_llama.train.metrics_file import METRICS_FILE

LOCK_NAME = ".lock"
# Names a file for the exit status of the run and its folder: a batch script learns from it whether all went well.
STATUS_VARIABLE = "MEGATRON_LLAMA_STATUS"


def choose_run_dir(plan: Plan) -> None:
    """Gives a run without a folder one, and reports it to a batch script."""
    config = plan.config
    config.run.dir = config.run.dir or default_run_dir(config, os.environ.get("SLURM_JOB_ID"))
    report_to_batch_script("running", config.run.dir)


def run_dir_name(config: Config, suffix: str) -> str:
    """The folder of a run whose config names none."""
    return f"runs/{config.model.name}-{config.data.name}-{suffix}"


def default_run_dir(config: Config, job: str | None) -> str:
    """The folder of a run without one, which may be part of the named job. Only the job's first process asks.

    Slurm's job numbers start again when its state is lost, so the name holds the time of the first start too. A job
    that Slurm starts again goes on in the newest folder of its number.
    """
    if job is None:
        return run_dir_name(config, time.strftime("%Y%m%d-%H%M%S"))  # the time tells it from the last one
    stem = re.sub(r"[^\w.-]", "_", job)
    if os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
        earlier = Path("runs").glob(f"{glob.escape(Path(run_dir_name(config, stem)).name)}-*")
        found = sorted(str(path) for path in earlier if re.fullmatch(r"\d{8}-\d{6}", path.name[-15:]))
        if found:
            return max(found, key=lambda path: path[-15:])
    return run_dir_name(config, f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}")


@contextmanager
def claim_run_dir(folder: Path) -> Iterator[None]:
    """Makes ``folder`` and keeps every other run out of it until the end, or until this process is gone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Forked ranks inherit the file, and with it the lock: it is free when the last of them has gone.
        lock = open(folder / LOCK_NAME, "a+", encoding="utf-8")
    except OSError as error:
        rule, instead = f"the run's folder can't be written: {error.strerror}", "write another run.dir=PATH"
        raise ConfigError([Problem("run.dir", str(folder), rule, instead)]) from error
    if (metrics := folder / METRICS_FILE).exists() and not metrics.is_file():
        rule, instead = f"{METRICS_FILE} in it is no regular file, and the run would wait for it", "remove it"
        raise ConfigError([Problem("run.dir", str(folder), rule, instead)])
    with lock:
        locked = try_lock(lock)
        if locked is False:
            lock.seek(0)
            owner = lock.read().strip()
            rule = f"another run is writing to this folder{f' ({owner})' if owner else ''}"
            instead = "wait for it to end, or write another run.dir=PATH"
            raise ConfigError([Problem("run.dir", str(folder), rule, instead)])
        with suppress(OSError):  # on a full disk the lock holds all the same; its owner's name is a courtesy
            lock.truncate(0)
            os.write(lock.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
        for draft in folder.glob(f".*{DRAFT}") if locked else ():  # of a start that was killed
            draft.unlink(missing_ok=True)
        yield


def report_to_batch_script(status: int | str, folder: str | None = None) -> None:
    """Writes the state of the run, "running" or its exit status, to the file that a batch script named, if any."""
    path = os.environ.get(STATUS_VARIABLE)
    if path:
        known = Path(path).read_text(encoding="utf-8").splitlines()[1:] if os.path.exists(path) else []
        write_atomically(Path(path), "\n".join([str(status), folder or (known or [""])[0]]) + "\n")


def write_config_and_plan(plan: Plan, folder: Path) -> str:
    """Writes what this run is: ``config.yaml`` with every value and ``plan.txt``, whose text is returned."""
    text = format_plan(plan).rstrip() + "\n"
    try:
        write_atomically(folder / "config.yaml", to_yaml(plan.config))
        write_atomically(folder / "plan.txt", text)
    except OSError as error:
        rule, instead = f"can't be written: {error.strerror}", "make room there, or write another run.dir=PATH"
        raise ConfigError([Problem("run.dir", str(folder), rule, instead)]) from error
    return text


@contextmanager
def rank_outputs(folder: Path, ranks: range) -> Iterator[Path]:
    """A folder for the output of ``ranks`` above 0; empty files in it are removed at the end. Under a batch script each
    start has one of its own."""
    status_file = os.environ.get(STATUS_VARIABLE)
    output_dir = Path(status_file).parent if status_file else folder / "ranks"
    output_dir.mkdir(exist_ok=True)
    yield output_dir
    for path in (output_dir / f"rank_{rank:05d}.txt" for rank in ranks):
        with suppress(OSError):  # the disk has become read-only: an empty file is no reason to fail
            if path.exists() and path.stat().st_size == 0:
                path.unlink()
    with suppress(OSError):  # something was printed, or another machine's ranks still print
        output_dir.rmdir()
