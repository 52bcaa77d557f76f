"""What a rank's NCCL was doing, from PyTorch's flight recorder: the last collectives, for a report on a hang.

A thread of NCCL's process group keeps the last collectives in a ring and writes them down when somebody writes to a
named pipe, so it works where the rank's Python is stuck. Names and format: ProcessGroupNCCL.cpp and
FlightRecorder.hpp of PyTorch. Not run on hardware.
"""

from __future__ import annotations

import atexit
import io
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

from megatron_llama.system.files import read_whole

EVENTS = 2000
MOST_BYTES = 256 << 20
MOST_LINES = 12


def recorder_environment() -> dict[str, str]:
    """The variables of ranks whose watcher is this process: the starter of the ranks, or the rank itself."""
    prefix = str(_prefix())
    atexit.register(_remove_pipes, _prefix())  # PyTorch leaves them
    return {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": str(EVENTS),
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": prefix,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": prefix,
    }


def ask_for_collectives(rank: int) -> bool:
    """Has a rank write down its collectives; whether there is somebody to ask."""
    try:
        pipe = os.open(f"{_prefix()}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # no recorder, or it has ended
        return False
    try:
        os.write(pipe, b"1\n")
    except OSError:
        return False
    finally:
        os.close(pipe)
    return True


def collectives(rank: int) -> str:
    """The unfinished collectives of a rank, and the last finished one, as lines; empty while nothing is written."""
    try:
        content = read_whole(Path(f"{_prefix()}{rank}"), MOST_BYTES)
        entries = _NoClasses(io.BytesIO(content)).load()["entries"]
        finished = [entry for entry in entries if entry["state"] == "completed"]
        waiting = [entry for entry in entries if entry["state"] != "completed"]
        return "\n".join(map(_line, [*finished[-1:], *waiting[:MOST_LINES]]))
    except (OSError, pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, IndexError, AttributeError):
        return ""  # still being written, or of another version: the report has the stacks


def remove_recordings(rank: int) -> None:
    """Removes the pipe and what was written."""
    for name in (f"{_prefix()}{rank}", f"{_prefix()}{rank}.pipe"):
        Path(name).unlink(missing_ok=True)


class _NoClasses(pickle.Unpickler):
    """A recording is made of dictionaries, lists, texts and numbers; a pickle of anything else could run programs."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a recording")


def _line(entry: dict[str, Any]) -> str:
    number = entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"]
    group = entry["process_group"][1] or entry["process_group"][0]
    return f"{entry['profiling_name']} {number} in group {group}, of {entry['input_sizes']}: {entry['state']}"


def _remove_pipes(prefix: Path) -> None:
    for path in prefix.parent.glob(f"{prefix.name}*.pipe"):
        path.unlink(missing_ok=True)


def _prefix() -> Path:
    return Path(tempfile.gettempdir()) / f"megatron_llama-{os.getuid()}-{os.getpid()}-collectives-"
