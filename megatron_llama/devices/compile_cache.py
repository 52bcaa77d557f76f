"""The folder of compiled code: private, and replaced by a temporary one if its disk is full or read-only.

A temporary folder also replaces the default folder if other users can change it.
"""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_llama.config import ConfigError, Problem
from megatron_llama.devices.private_folder import exposure, make_private
from megatron_llama.devices.processor import instruction_set
from megatron_llama.system.files import process_folder, user_cache

if TYPE_CHECKING:
    from megatron_llama.config import Config
    from megatron_llama.devices.base import Device

SETTING = "trainer.compile_cache"
FOLDER = "MEGATRON_LLAMA_COMPILE_FOLDER"
"""Variable with the temporary folder that replaces trainer.compile_cache, for the ranks of this launcher."""
FREE_BYTES = 64 << 20
"""Free space below which a disk counts as full. A block's graphs need a few MiB."""
_CHECKED: set[Path] = set()
"""Folders whose files this process has checked. Others cannot change them later."""
_UNUSABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def compile_folder(config: Config) -> Path:
    """Return the folder of compiled code: trainer.compile_cache, or the temporary folder that replaces it."""
    return Path(os.environ.get(FOLDER) or str(config.trainer.compile_cache))


def open_compile_cache(device: Device, config: Config, *, is_named: bool = True) -> dict[str, str]:
    """Create the folders of compiled code; return the variables of the compilers.

    Args:
        is_named: The user has set trainer.compile_cache. If other users can change the default folder, as in containers
            whose HOME belongs to another user, a temporary folder replaces it.

    Raises:
        ConfigError: Another user owns a folder or file that the user has set, or can change it.
    """
    folder = compile_folder(config)
    exposed = None if is_named or folder in _CHECKED else exposure(folder, contents=True)
    if exposed is None:
        check_private(device, folder, contents=True)
    reason = _unusable(folder) if exposed is None else exposed[0]
    if reason is None:
        return device.compile_environment(folder)
    temporary = _temporary_folder(str(folder), reason)
    if exposed is not None:
        check_private(device, temporary)  # and folders in variables of the user
    return {**device.compile_environment(temporary), FOLDER: str(temporary)}


def check_private(device: Device, folder: Path, *, contents: bool = False) -> None:
    """Check ``folder`` and the compilers' folders that the user has set. Raises ConfigError if others can change them.

    Args:
        contents: Check all files in the folders too.
    """
    folders = {SETTING: folder}
    for name in device.compile_environment(folder):
        if value := os.environ.get(name):
            folders[name] = Path(os.path.abspath(value.partition(",")[0]))  # Gaudi's has options after the path
    problems = []
    for name, path in folders.items():
        if problem := exposure(path, contents=contents and path not in _CHECKED):
            rule = f"holds code that the run executes, but {problem[0]}"
            other = f"write {SETTING}=PATH, such as a folder in your home" if name == SETTING else f"unset {name}"
            problems.append(Problem(name, str(path), rule, "; or ".join(filter(None, (problem[1], other)))))
    if problems:
        raise ConfigError(problems)
    if contents:
        _CHECKED.update(folders.values())


def confine_inductor() -> None:
    """Move the folders that Inductor creates in /tmp under a guessable name, of precompiled headers and others.

    Inductor (torch 2.11 to 2.13) ignores TORCHINDUCTOR_CACHE_DIR for them. They need 150 MiB and depend on torch and
    compiler only, so the runs of a user share them. Requires TORCHINDUCTOR_CACHE_DIR.
    """
    from torch._inductor import codecache
    from torch._inductor.runtime import cache_dir_utils, runtime_utils

    folder = Path(user_cache("headers")) / instruction_set()
    try:
        usable = exposure(folder, contents=True) is None and _unusable(folder) is None
    except ConfigError:
        usable = False
    if not usable:
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    for module in (cache_dir_utils, runtime_utils, codecache):
        setattr(module, "default_cache_dir", lambda: str(folder))  # noqa: B010  mypy: not exported
    codecache._HEADER_DIR = str(folder / "precompiled_headers")
    codecache._HEADER_LOCK_DIR = str(folder / "precompiled_headers" / "locks")


def _unusable(folder: Path) -> str | None:
    """Create ``folder``; return None if files can be written there, else the reason.

    Raises:
        ConfigError: The path is not a folder.
    """
    try:
        make_private(folder)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 16))
        status = os.statvfs(folder)
    except OSError as error:
        if error.errno in _UNUSABLE:
            return str(error.strerror)
        rule = f"cannot create the folder: {error.strerror}"
        raise ConfigError([Problem(SETTING, str(folder), rule, f"write another {SETTING}=PATH")]) from error
    free = status.f_bavail * status.f_frsize
    return f"only {free >> 20} MiB are free" if free < FREE_BYTES else None


@cache
def _temporary_folder(folder: str, reason: str) -> Path:
    """Create a private folder for one run of this process, and report it."""
    temporary = process_folder("compile-")
    sys.stderr.write(
        f"{SETTING}={folder}: {reason}.\n"
        f"This run compiles into {temporary} and removes it at its end,\n"
        f"so the next run compiles again; write another {SETTING}=PATH\n"
        f"to keep the compiled code, or free disk space if it is full.\n"
    )
    return temporary
