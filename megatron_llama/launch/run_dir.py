"""The run's folder: its name, the lock that keeps a second run out, and what is written into it before the start."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_llama.config import Config, ConfigError, Plan, Problem, format_plan, to_yaml
from megatron_llama.launch.world import Place

LOCK_NAME = ".lock"
_STORE_KEY = "megatron_llama/run.dir"


def default_dir(config: Config, suffix: str) -> str:
    """The folder of a run whose config names none."""
    return f"runs/{config.model.name}-{config.data.name}-{suffix}"


def default_dir_by_time(config: Config) -> str:
    """The folder of a run that this process starts: the time tells it from the last one."""
    return default_dir(config, time.strftime("%Y%m%d-%H%M%S"))


def default_dir_for_all(config: Config, place: Place) -> str:
    """The same folder on all ranks of a job that torchrun or srun started.

    A job's own name is best: the job that is started again finds its checkpoints. Else rank 0 says the time to the
    others through torchrun's store; a starter with neither can't have them agree, and the user has to choose.
    """
    if place.job is not None:
        return default_dir(config, place.job)
    if place.world_size == 1:
        return default_dir_by_time(config)
    if not place.has_store:
        rule = "ranks started one by one, without a job name, can't agree on a folder for the run"
        raise ConfigError([Problem("run.dir", None, rule, "write run.dir=runs/NAME")])
    from torch.distributed import TCPStore

    store = TCPStore(place.master_addr, place.master_port, is_master=False)
    if place.rank == 0:
        # Kept where it was set before: ranks that torchrun starts again go on in the folder of the first attempt.
        store.compare_set(_STORE_KEY, "", default_dir_by_time(config))
    return store.get(_STORE_KEY).decode()


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
def outputs(folder: Path) -> Iterator[Path]:
    """A folder for what ranks above 0 print; what stays empty is removed at the end."""
    place = folder / "ranks"
    place.mkdir(exist_ok=True)
    yield place
    for path in place.iterdir():
        if path.stat().st_size == 0:
            path.unlink()
    if not any(place.iterdir()):
        place.rmdir()


def record(plan: Plan, folder: Path) -> str:
    """Writes what this run is: ``config.yaml`` with every value and ``plan.txt``, whose text is returned."""
    text = format_plan(plan).rstrip() + "\n"
    write_atomically(folder / "config.yaml", to_yaml(plan.config))
    write_atomically(folder / "plan.txt", text)
    return text


def write_atomically(path: Path, text: str) -> None:
    """Puts ``text`` at ``path``, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _taken(folder: Path) -> ConfigError:
    """The error of a folder that another run is writing to."""
    try:
        owner = (folder / LOCK_NAME).read_text(encoding="utf-8").strip()
    except OSError:
        owner = ""
    rule = f"another run is writing to this folder{f' ({owner})' if owner else ''}"
    return ConfigError([Problem("run.dir", str(folder), rule, "wait for it to end, or write another run.dir=PATH")])
