"""Checks of rank 0's host before the ranks start: disk space, limits of the shell, account of Weights & Biases."""

from __future__ import annotations

import netrc
import os
import resource
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlparse

from megatron_llama.config import ConfigError, Problem
from megatron_llama.config.stored_settings import checkpoint_folder, list_steps
from megatron_llama.plan import Plan
from megatron_llama.plan.memory import DiskUse, disk_use
from megatron_llama.system.object_store import missing_package
from megatron_llama.system.tables import gib
from megatron_llama.system.wrapping import fill

MIN_FILES = 256
"""Open files with which gloo can connect a few ranks; with fewer it aborts or hangs. The doctor warns below 4,096."""
MIN_FILE_BYTES = 1 << 20
"""Size of a log of a short run."""
WANDB_HOST = "api.wandb.ai"
WANDB_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
WANDB_OFF = ("offline", "dryrun", "disabled")


def check_start(plan: Plan, folder: Path) -> str:
    """Return the line on disk space for the plan. Raises ConfigError if the run cannot succeed on this host."""
    saved, problems = [], list[Problem]()
    try:
        saved = [] if plan.config.checkpoint.resume == "never" else list_steps(checkpoint_folder(folder, plan.config))
    except OSError as error:
        if (url := plan.config.checkpoint.dir) is not None:
            rule, instead = missing_package(url) or (f"cannot be read: {error.strerror}", "correct it, or try again")
            problems.append(Problem("checkpoint.dir", url, rule, instead))
    use, free = disk_use(plan, saved[0] if saved else 0, len(saved)), shutil.disk_usage(folder).free
    problems += _check_disk(folder, use, free)
    problems += _check_limits(use.checkpoint // plan.world_size if use.sure else 0)
    problems += check_wandb(plan, os.environ)
    if problems:
        raise ConfigError(problems)
    return fill("  disk          ", f"{use.describe()} · {gib(free)} free") + "\n"


def _check_disk(folder: Path, use: DiskUse, free: int) -> Iterator[Problem]:
    """Yield the problem of a disk that is certainly too small."""
    if use.sure_bytes > free:
        export = f", {gib(use.export)} for exported weights" if use.export else ""
        parts = f"{use.sure} x {gib(use.checkpoint)} for checkpoints{export}, {gib(use.logs)} for logs"
        rule = f"its disk has {gib(free)} free, and the run writes {gib(use.sure_bytes)}: {parts}"
        fewer = ", or keep fewer checkpoints (checkpoint.keep=1)" * (use.sure > 1)
        yield Problem("run.dir", str(folder), rule, f"free disk space, or write another run.dir=PATH{fewer}")


def _check_limits(part: int) -> Iterator[Problem]:
    """Yield the problems of limits with which ranks cannot meet, or cannot write ``part`` bytes of a checkpoint."""
    files, size = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE))
    if files != resource.RLIM_INFINITY and files < MIN_FILES:
        rule = f"the ranks' connections need more open files, at least {MIN_FILES}"
        yield Problem("ulimit -n", files, rule, "run `ulimit -n 65536` before this command, or `ulimit -n hard`")
    if size != resource.RLIM_INFINITY and size < max(part, MIN_FILE_BYTES):
        rule = f"files can have {gib(size)}, and the run writes files of {gib(max(part, MIN_FILE_BYTES))}"
        yield Problem("ulimit -f", f"{size} bytes", rule, "run `ulimit -f unlimited` before this command")


def check_wandb(plan: Plan, environ: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the problem of Weights & Biases without an API key, for which its package would ask in each rank."""
    mode = environ.get("WANDB_MODE", "").lower() or plan.config.logging.wandb
    if plan.config.logging.wandb != "online" or mode in WANDB_OFF or any(environ.get(name) for name in WANDB_KEYS):
        return
    home = Path(environ.get("HOME", "~")).expanduser()
    host = urlparse(environ.get("WANDB_BASE_URL", "")).hostname or WANDB_HOST
    files = [Path(environ["NETRC"])] if environ.get("NETRC") else [home / ".netrc", home / "_netrc"]
    for file in files:
        try:
            hosts = netrc.netrc(str(file)).hosts
        except (OSError, netrc.NetrcParseError):
            continue
        if host in hosts or any("wandb" in name for name in hosts):
            return
    instead = "run `wandb login`, or set WANDB_API_KEY, or set WANDB_MODE=offline, or write logging.wandb=off"
    yield Problem("logging.wandb", "online", f"needs an API key for {host}, and there is none on this host", instead)
