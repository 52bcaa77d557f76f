"""Limits of the shell: one message with the limit and the command that raises it, no traceback."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from megatron_llama.launch.rank import describe
from megatron_llama.system import limits
from tests.paths import ROOT

TINY = {"-v": 300_000 << 10, "-d": 200_000 << 10, "-s": 64 << 10, "-u": 40}


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Return the soft limits, by kind, which a test may set."""
    soft: dict[int, int] = {}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft.get(kind, resource.RLIM_INFINITY),) * 2)
    return soft


@pytest.mark.parametrize("option", ["-v", "-d"])
def test_a_run_with_too_little_memory_ends_before_torch(option: str) -> None:
    line = f"ulimit {option} {TINY[option] >> 10}; exec {sys.executable} train.py data=mock device=cpu"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=100, cwd=ROOT)
    message = " ".join(done.stderr.split())
    assert done.returncode == 1 and message.startswith("The launch failed: The shell has the limit ulimit"), message
    assert f"ulimit {option} {TINY[option] >> 10} (" in message and f"Type ulimit {option} unlimited" in message


@pytest.mark.parametrize(
    ("error", "option"),
    [
        (MemoryError(), "-v"),
        (RuntimeError("Resource temporarily unavailable"), "-d"),
        (RuntimeError("can't start new thread"), "-u"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"), "-d"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "-v"),
        (OSError(12, "Cannot allocate memory"), "-v"),
    ],
)
def test_an_error_that_a_limit_explains(error: Exception, option: str, limited: dict[int, int]) -> None:
    assert limits.explain_limit(error) is None, "without a limit it is another fault"
    kind = limits._LIMITS[option][0]
    assert kind is not None
    limited[kind] = TINY[option]
    message = limits.explain_limit(error)
    assert message is not None and f"ulimit {option} " in message and f"Type ulimit {option} unlimited" in message
    report = describe(error)
    assert (report.kind, report.code, report.text) == ("error", 1, message)


def test_other_errors_are_not_explained(limited: dict[int, int]) -> None:
    limited.update({resource.RLIMIT_AS: TINY["-v"], resource.RLIMIT_NPROC: 60_000})
    assert limits.explain_limit(ValueError("wrong")) is None and limits.explain_limit(RuntimeError("")) is None
    del limited[resource.RLIMIT_AS]
    assert limits.explain_limit(MemoryError()) is None, "the usual limit of processes is no limit of memory"


def test_a_crash_names_small_limits(limited: dict[int, int]) -> None:
    limited[resource.RLIMIT_STACK] = 8 << 20
    assert limits.explain_crash() == "" and limits.check_run() is None
    limited[resource.RLIMIT_STACK] = TINY["-s"]
    assert "ulimit -s 64 (0.0625 MiB of stack)" in limits.explain_crash()


def test_a_run_may_open_many_files() -> None:
    program = "import resource; from megatron_llama.system.limits import raise_file_limit; raise_file_limit()"
    line = f"ulimit -Sn 99; ulimit -Hn 999; {sys.executable} -c '{program}; print(resource.getrlimit(7))'"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "(999, 999)\n" and resource.RLIMIT_NOFILE == 7
