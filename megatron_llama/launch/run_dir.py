"""The run's folder: its name, the lock that keeps a second run out, and what is written into it before the start."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_llama.config import Config, ConfigError, Problem, to_yaml
from megatron_llama.plan import Plan, format_plan
from megatron_llama.system.files import write_atomically

LOCK_NAME = ".lock"
# Names a file for the exit status of the run and its folder: a batch script learns from it whether all went well.
STATUS_VARIABLE = "MEGATRON_LLAMA_STATUS"


def default_dir(config: Config, suffix: str) -> str:
    """The folder of a run whose config names none."""
    return f"runs/{config.model.name}-{config.data.name}-{suffix}"


def default_dir_by_time(config: Config) -> str:
    """The folder of a run that this process starts: the time tells it from the last one."""
    return default_dir(config, time.strftime("%Y%m%d-%H%M%S"))


def default_dir_of_job(config: Config, job: str | None) -> str:
    """The folder of a run that is, or is part of, the named job; for its first process, which tells the others.

    Slurm's job numbers start again when its state is lost, so the name holds the time of the first start too. A job
    that Slurm starts again goes on in the newest folder of its number.
    """
    if job is None:
        return default_dir_by_time(config)
    stem = re.sub(r"[^\w.-]", "_", job)
    if os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
        earlier = Path("runs").glob(f"{glob.escape(Path(default_dir(config, stem)).name)}-*")
        found = sorted(str(path) for path in earlier if re.fullmatch(r"\d{8}-\d{6}", path.name[-15:]))
        if found:
            return max(found, key=lambda path: path[-15:])
    return default_dir(config, f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}")


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Makes ``folder`` and keeps every other run out of it until the end, or until this process is gone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Forked ranks inherit the file, and with it the lock: it is free when the last of them has gone.
        lock = open(folder / LOCK_NAME, "a+", encoding="utf-8")
    except OSError as error:
        rule, instead = f"the run's folder can't be written: {error.strerror}", "write another run.dir=PATH"
        raise ConfigError([Problem("run.dir", str(folder), rule, instead)]) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise _taken(folder) from error
            # Some network file systems have no locks; that must not stop a run.
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        yield


@contextmanager
def outputs(folder: Path, ranks: range) -> Iterator[Path]:
    """A folder for what ``ranks`` above 0 print; what stays empty of it is removed at the end. A batch script has one
    for each start."""
    told = os.environ.get(STATUS_VARIABLE)
    place = Path(told).parent if told else folder / "ranks"
    place.mkdir(exist_ok=True)
    yield place
    for path in (place / f"rank_{rank:05d}.txt" for rank in ranks):
        if path.exists() and path.stat().st_size == 0:
            path.unlink()
    try:
        place.rmdir()
    except OSError:  # something was printed, or another machine's ranks still print
        pass


def tell_batch_script(status: int | str, folder: str | None = None) -> None:
    """Leaves the state of the run, "running" or its exit status, where the batch script said, if one did."""
    path = os.environ.get(STATUS_VARIABLE)
    if path:
        known = Path(path).read_text(encoding="utf-8").splitlines()[1:] if os.path.exists(path) else []
        write_atomically(Path(path), "\n".join([str(status), folder or (known or [""])[0]]) + "\n")


def record(plan: Plan, folder: Path) -> str:
    """Writes what this run is: ``config.yaml`` with every value and ``plan.txt``, whose text is returned."""
    text = format_plan(plan).rstrip() + "\n"
    write_atomically(folder / "config.yaml", to_yaml(plan.config))
    write_atomically(folder / "plan.txt", text)
    return text


def _taken(folder: Path) -> ConfigError:
    """The error of a folder that another run is writing to."""
    try:
        owner = (folder / LOCK_NAME).read_text(encoding="utf-8").strip()
    except OSError:
        owner = ""
    rule = f"another run is writing to this folder{f' ({owner})' if owner else ''}"
    return ConfigError([Problem("run.dir", str(folder), rule, "wait for it to end, or write another run.dir=PATH")])
