"""The run folder: name, lock against a second run, config.yaml and plan.txt."""

from __future__ import annotations

import glob
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_llama.checkpoint import BEST, POINTER
from megatron_llama.config import Config, ConfigError, Problem
from megatron_llama.config.stored_settings import NAME, has_run
from megatron_llama.launch.start_log import Start
from megatron_llama.plan import Plan, format_plan
from megatron_llama.plan.format_plan import PLAN_FILE, write_config_and_plan
from megatron_llama.system.exit_status import STATUS_VARIABLE
from megatron_llama.system.files import DRAFT, try_lock, write_atomically
from megatron_llama.system.wrapping import wrap
from megatron_llama.train.metrics_file import METRICS_FILE
from megatron_llama.train.sinks import CSV_FILE

LOCK_NAME = ".lock"
OPENED_FILES = (LOCK_NAME, METRICS_FILE, CSV_FILE)
"""Files that a run opens for writing, which could block on a pipe or follow a link. It replaces other files."""
WRITTEN_FILES = (*OPENED_FILES, NAME, PLAN_FILE, f"checkpoints/{POINTER}", f"checkpoints/{BEST}")
WRITTEN_FOLDERS = ("checkpoints", "ranks")
SHARED_LIMIT_SECONDS = 60.0
"""Network disks show new files of another machine within this time."""
_SHARED_POLL_SECONDS = 0.2


def choose_run_dir(plan: Plan) -> None:
    """Set run.dir if it is unset, and report it to the batch script."""
    config = plan.config
    config.run.dir = config.run.dir or default_run_dir(config, os.environ.get("SLURM_JOB_ID"))
    report_to_batch_script("running", config.run.dir)


def run_dir_name(config: Config, suffix: str) -> str:
    """Return the default run folder with a suffix. Names of a recipe cannot lead out of runs/."""
    names = (re.sub(r"[^\w.-]+", "_", name) for name in (config.model.name, config.data.name))
    return f"runs/{'-'.join(names)}-{suffix}"


def default_run_dir(config: Config, job: str | None) -> str:
    """Return the default run folder. Called only on the first process of a job.

    The name has the time of the first start, because Slurm may reuse job ids. A job requeued by Slurm continues in the
    newest folder of its id.
    """
    if job is None:
        return _new_run_dir(config, "")
    stem = re.sub(r"[^\w.-]", "_", job)
    if os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
        earlier = Path("runs").glob(f"{glob.escape(Path(run_dir_name(config, stem)).name)}-*")
        folders = sorted(str(path) for path in earlier if re.fullmatch(r"\d{8}-\d{6}", path.name[-15:]))
        if folders:
            return max(folders, key=lambda path: path[-15:])
    return _new_run_dir(config, f"{stem}-")


def _new_run_dir(config: Config, stem: str) -> str:
    """Return the run folder of this second, or of the next one without a folder.

    After a clock is set back, and in the hour that the end of summer time repeats, the folder may be of another run,
    which this run would resume.
    """
    now = int(time.time())
    while os.path.lexists(name := run_dir_name(config, stem + time.strftime("%Y%m%d-%H%M%S", time.localtime(now)))):
        now += 1
    return name


@contextmanager
def claim_run_dir(folder: Path) -> Iterator[None]:
    """Create and lock ``folder`` for the ``with`` block.

    Raises ConfigError if another run has the lock, or if a run cannot be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if problems := list(_wrong_entries(folder)):
            raise ConfigError(problems)
        # Forked ranks inherit the file with the lock, which is released when the last process ends.
        lock = open(folder / LOCK_NAME, "a+", encoding="utf-8")
    except OSError as error:
        rule, instead = f"cannot write to the run folder: {error.strerror}", "write another run.dir=PATH"
        raise ConfigError([Problem("run.dir", str(folder), rule, instead)]) from error
    with lock:
        locked = try_lock(lock)
        lock.seek(0)
        owner = lock.read().strip()
        if locked is False or (locked is None and _is_running(owner)):
            rule = f"is locked by another run{f' ({owner})' if owner else ''}"
            instead = "wait until it ends, or write another run.dir=PATH"
            raise ConfigError([Problem("run.dir", str(folder), rule, instead)])
        if locked is None:
            text = f"WARNING: the disk of {folder} has no locks: a run of another host in that folder is not detected"
            text += f"; the last one there was {owner}." if owner else "."
            sys.stderr.write(wrap(text) + "\n")
        with suppress(OSError):  # on a full disk the lock works without its owner's name
            lock.truncate(0)
            os.write(lock.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
        _delete_drafts(folder, locked)
        try:
            yield
        finally:
            _delete_drafts(folder, locked)
        if locked is None:
            with suppress(OSError):
                lock.truncate(0)


def _delete_drafts(folder: Path, locked: bool | None) -> None:
    """Delete the drafts that killed processes left in a locked folder."""
    with suppress(OSError):
        for draft in folder.glob(f".*{DRAFT}") if locked else ():
            draft.unlink(missing_ok=True)


def _is_running(owner: str) -> bool:
    """Return whether the owner of a lock file, "process PID on HOST", runs on this host."""
    match = re.fullmatch(r"process (\d+) on (.*)", owner)
    return match is not None and Start(0.0, host=match[2], pid=int(match[1])).is_running


def check_shared(run_dir: str) -> Problem | None:
    """Return the problem of a run folder that process 0 has locked and this node does not see."""
    folder, deadline = Path(run_dir), time.monotonic() + SHARED_LIMIT_SECONDS
    while not (folder / LOCK_NAME).exists():
        if time.monotonic() > deadline:
            rule = f"is not shared: {socket.gethostname()} does not see the files of the first node"
            return Problem("run.dir", run_dir, rule, "write run.dir=PATH on a disk that all nodes mount at that path")
        with suppress(OSError):
            os.listdir(folder.parent)  # NFS caches missing names until the folder is read
        time.sleep(_SHARED_POLL_SECONDS)
    return None


def _wrong_entries(folder: Path) -> Iterator[Problem]:
    """Yield a problem for each folder in place of a file that the run writes, the reverse, and a read-only folder."""
    if not os.access(folder, os.W_OK):  # also of root: an immutable folder, a read-only disk
        yield Problem("run.dir", str(folder), "is not writable", "write another run.dir=PATH")
    for name in (*WRITTEN_FILES, *WRITTEN_FOLDERS):
        path, kind = folder / name, ""
        if name in WRITTEN_FOLDERS:
            if os.path.lexists(path) and not os.access(path, os.W_OK):
                kind = "not writable"
            if os.path.lexists(path) and not os.path.isdir(path):
                kind = "not a folder"
        elif name in OPENED_FILES and path.is_symlink():  # writing would change a file elsewhere
            kind = "a link"
        elif os.path.isdir(path):
            kind = "a folder"
        elif name in OPENED_FILES and os.path.lexists(path) and not path.is_file():
            kind = "not a regular file"
        if kind:
            instead = f"move {path} away, or write another run.dir=PATH"
            yield Problem("run.dir", str(folder), f"its {name} is {kind}", instead)


def report_to_batch_script(status: int | str, folder: str | None = None) -> None:
    """Write "running" or the exit status, and the run folder, to the batch script's status file, if any."""
    path = os.environ.get(STATUS_VARIABLE)
    if path:
        previous = Path(path).read_text(encoding="utf-8").splitlines()[1:] if os.path.exists(path) else []
        write_atomically(Path(path), "\n".join([str(status), folder or (previous or [""])[0]]) + "\n")


def open_plan(plan: Plan, prints_plan: bool = True) -> str:
    """Return the text of the plan, or a line with its path if not ``prints_plan``.

    Writes config.yaml and plan.txt of a new run, so that a failed start has them too. The files of an existing run are
    replaced by rank 0, when the start is accepted.
    """
    if not has_run(plan.run_dir) and not (plan.run_dir / METRICS_FILE).exists():
        write_config_and_plan(plan)
    return format_plan(plan) if prints_plan else f"plan: {plan.run_dir / PLAN_FILE}\n"


@contextmanager
def rank_outputs(folder: Path, ranks: range) -> Iterator[Path]:
    """Create the folder for the output of ``ranks`` above 0; remove empty files at the end.

    Under a batch script each start has a separate folder.
    """
    status_file = os.environ.get(STATUS_VARIABLE)
    output_dir = Path(status_file).parent if status_file else folder / "ranks"
    output_dir.mkdir(exist_ok=True)
    yield output_dir
    for path in (output_dir / f"rank_{rank:05d}.txt" for rank in ranks):
        with suppress(OSError):  # a read-only disk; an empty file is harmless
            if path.exists() and path.stat().st_size == 0:
                path.unlink()
    with suppress(OSError):  # not empty, or used by another machine
        output_dir.rmdir()
