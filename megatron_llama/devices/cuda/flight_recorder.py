"""Reader of PyTorch's NCCL flight recorder: a rank's last collectives, for hang reports.

A thread of NCCL's process group stores the last collectives in a ring buffer and dumps them when a process writes to a
named pipe. So it works while the rank's Python hangs. Names and format: ProcessGroupNCCL.cpp and FlightRecorder.hpp of
PyTorch. Not run on hardware.
"""

from __future__ import annotations

import io
import os
import pickle
from functools import cache
from pathlib import Path
from typing import Any

from megatron_llama.system.files import process_folder, read_whole

EVENTS = 2000
MOST_BYTES = 256 << 20
MOST_LINES = 12


def recorder_environment() -> dict[str, str]:
    """Return the variables of ranks that this process watches: the launcher's ranks, or the rank itself."""
    prefix = str(_prefix())
    return {
        # Names since torch 2.9. Later versions warn about the older names, TORCH_NCCL_TRACE_BUFFER_SIZE and
        # TORCH_NCCL_DEBUG_INFO_TEMP_FILE.
        "TORCH_FR_BUFFER_SIZE": str(EVENTS),
        "TORCH_FR_DUMP_TEMP_FILE": prefix,
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": prefix,
    }


def request_dump(rank: int) -> bool:
    """Request a dump of a rank's collectives. Returns False if the rank has no recorder."""
    try:
        pipe = os.open(f"{_prefix()}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # no recorder, or the process has ended
        return False
    try:
        os.write(pipe, b"1\n")
    except OSError:
        return False
    finally:
        os.close(pipe)
    return True


def collectives(rank: int) -> str:
    """Return a rank's last finished and its unfinished collectives, one per line. Empty before the dump is written."""
    try:
        entries = _NoClasses(io.BytesIO(read_whole(Path(f"{_prefix()}{rank}"), MOST_BYTES))).load()["entries"]
        finished = [entry for entry in entries if entry["state"] == "completed"]
        waiting = [entry for entry in entries if entry["state"] != "completed"]
        return "\n".join(map(_line, [*finished[-1:], *waiting[:MOST_LINES]]))
    except (OSError, pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, IndexError, AttributeError):
        return ""  # incomplete, or of another version; the hang report has the stacks


def remove_recordings(rank: int) -> None:
    """Remove a rank's pipe and dump."""
    for name in (f"{_prefix()}{rank}", f"{_prefix()}{rank}.pipe"):
        Path(name).unlink(missing_ok=True)


class _NoClasses(pickle.Unpickler):
    """Unpickler of dicts, lists, strings and numbers only, because other pickles can run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a flight recorder dump")


def _line(entry: dict[str, Any]) -> str:
    number = entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"]
    group = entry["process_group"][1] or entry["process_group"][0]
    return f"{entry['profiling_name']} {number} in group {group}, of {entry['input_sizes']}: {entry['state']}"


def _prefix() -> Path:
    return _folder(os.getpid()) / "collectives-"


@cache
def _folder(pid: int) -> Path:
    """Create the folder of this process for files that PyTorch does not remove."""
    return process_folder()
