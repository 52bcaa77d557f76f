"""Make Python look like macOS to train.py: no Linux-only functions, no /proc, /sys and /dev/shm, no os.fork.

Python imports this file at its start if its folder is in PYTHONPATH. torch and gloo are unchanged.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import io
import os
import resource
import signal
import sys
import sysconfig
import types
from collections.abc import Callable
from typing import Any

REMOVED: dict[Any, str] = {
    os: "memfd_create pidfd_open sched_getaffinity sched_setaffinity posix_fallocate posix_fadvise fdatasync eventfd "
    "copy_file_range splice getresuid setresuid",
    signal: "pidfd_send_signal sigtimedwait sigwaitinfo",
    resource: "prlimit RLIMIT_SIGPENDING RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_RTPRIO RLIMIT_RTTIME RLIMIT_OFILE",
}
READS: dict[Any, str] = {os: "open stat lstat readlink listdir scandir statvfs access", io: "open", builtins: "open"}
HIDDEN = ("/proc", "/sys", "/dev/shm")
NOT_IN_LIBC = ("prctl", "mallopt", "malloc_trim", "mallinfo", "mallinfo2", "gnu_get_libc_version")


def without_hidden(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, for which the hidden folders do not exist."""

    def call(path: Any, *args: Any, **more: Any) -> Any:
        if isinstance(path, str | bytes | os.PathLike):
            name = os.fsdecode(path)
            if any(name == folder or name.startswith(folder + "/") for folder in HIDDEN):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return function(path, *args, **more)

    return call


def reject_fork() -> int:
    raise AssertionError("os.fork after torch's import aborts on macOS")


class Library(ctypes.CDLL):
    def __getattr__(self, name: str) -> Any:
        if name in NOT_IN_LIBC:
            raise AttributeError(name)
        return super().__getattr__(name)


for module, names in REMOVED.items():
    for removed in names.split():
        if hasattr(module, removed):
            delattr(module, removed)
for module, names in READS.items():
    for read in names.split():
        setattr(module, read, without_hidden(getattr(module, read)))
os.fork = reject_fork
ctypes.CDLL = Library  # type: ignore[misc]

# The standard library reads these under another sys.platform.
os.environ.setdefault("_PYTHON_SYSCONFIGDATA_NAME", sysconfig._get_sysconfigdata_name())  # type: ignore[attr-defined]
proxies: Any = types.ModuleType("_scproxy")
proxies._get_proxy_settings = proxies._get_proxies = dict
sys.modules["_scproxy"] = proxies
sys.modules["wandb"] = None  # type: ignore[assignment]  # megatron-core imports it, which fails under the stand-in
sys.platform = "darwin"
