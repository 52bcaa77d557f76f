"""train.py on other systems: without Linux-only facilities, as on macOS arm64, and with a clock that jumps.

No test ran on macOS itself.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_llama.devices import get_device
from megatron_llama.system.ulimits import usable_cores
from megatron_llama.train.metrics_file import read_metrics
from tests.data.files import numbered, write_indexed
from tests.golden import GoldenFiles
from tests.oracle import SHAPE
from tests.paths import ROOT
from tests.processes import run_command

LINUX_ONLY = """prctl\\( /dev/shm /proc/ /sys/ sched_getaffinity sched_setaffinity memfd_create pidfd posix_fallocate
    fdatasync mallopt libc\\.so|malloc_trim|mallinfo|prlimit|eventfd|posix_fadvise
    copy_file_range|sigtimedwait|O_DIRECT\\b|O_TMPFILE ru_maxrss""".split()


def test_linux_only_calls_have_a_known_place() -> None:
    """The page lists the files that call Linux-only facilities; docs/reference/devices.md describes the fallbacks."""
    sources = [*(ROOT / "megatron_llama").rglob("*.py"), *(ROOT / "data_prep").rglob("*.py"), ROOT / "train.py"]
    names = {path.relative_to(ROOT).as_posix().removeprefix("megatron_llama/"): path for path in sources}
    texts = {name: path.read_text() for name, path in sorted(names.items()) if not name.startswith("tools/")}
    page = ""
    for pattern in LINUX_ONLY:
        page += f"{pattern}\n" + "".join(f"    {name}\n" for name, text in texts.items() if re.search(pattern, text))
    GoldenFiles.check("launch/linux_only.txt", page)


def test_cores_without_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert usable_cores() == [0, 1, 2] and get_device("cpu").count() == 3


def train(folder: Path, site: Path, words: list[str]) -> list[dict[str, Any]]:
    """Run train.py with the sitecustomize.py of a folder; return the lines of metrics.jsonl."""
    variables = {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]), "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, str(ROOT / "train.py"), *words, f"run.dir={folder}/run"]
    done = run_command(*command, cwd=folder, timeout=300, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "-" not in "".join(line.rpartition("tokens/s")[2] for line in done.stdout.splitlines() if "step " in line)
    return read_metrics(folder / "run/metrics.jsonl")


@pytest.mark.slow
def test_a_run_without_linux_facilities(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "text", numbered(60))
    words = [*SHAPE[1:], f"data.prefixes=[{prefix}]", "data=redpajama", "trainer.dp=2", "trainer.steps=2"]
    words += ["data.split='80,20,0'", "model.vocab_size=4000", "device.peak_tflops=0.01"]
    records = train(tmp_path, Path(__file__).parent / "macos", words)
    assert [record["step"] for record in records] == [1, 2]
    # macOS counts bytes. The stand-in leaves Linux's KiB: the value is too small by 1024.
    assert records[-1]["peak_memory_bytes"] < resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 50
    assert (tmp_path / "run" / "checkpoints" / "step_00000002" / "checkpoint.json").is_file()


CLOCK = """
import time

now = [-1e7]

def jump_back():
    now[0] -= 100.0
    return now[0]

time.time = jump_back
time.time_ns = lambda: int(1e9 * jump_back())
"""


@pytest.mark.slow
def test_a_clock_before_1970_that_jumps_back(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(CLOCK)
    words = ["model=llama_2m", "data=mock", "device=cpu", "data.seq_length=16", "trainer.global_batch_size=2"]
    words += ["trainer.steps=4", "trainer.val_every_steps=2", "checkpoint.every_steps=2"]
    records = train(tmp_path, tmp_path, words)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    for name in ("throughput", "tokens_per_second", "step_time_s", "mfu"):
        assert all(record[name] > 0 for record in records), name
