"""Run a training step of a long sequence over context-parallel ranks under a memory limit.

    python -m benchmarks.verify.long_step --output runs/benchmarks/long_step
    python -m benchmarks.verify.long_step --length 8192 --window 1024 --limit-mib 1250
    python -m benchmarks.verify.long_step --window 0

Runs one step of llama_15m in fp32 with full recomputation twice under one limit: with cp 2, and as one process.
The limit is RLIMIT_DATA of each process: private writable memory, resident or not, with libraries. Thread stacks have
2 MiB. The last run must fail for lack of memory. A thread of each rank samples glibc's counters for the peak of live
memory, which is compared with the plan and with a rehearsal. ``--window 0`` is full causal attention, whose FLOPs grow
with the square of the length.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.help_format import HelpFormatter
from benchmarks.results import ROOT, conditions
from megatron_llama.devices.cpu.device import Cpu
from megatron_llama.system.errors import run_main
from megatron_llama.system.files import write_atomically
from megatron_llama.system.tables import markdown_table
from megatron_llama.train.metrics_file import METRICS_FILE, read_metrics

_SAMPLED, _LIMIT = "LONG_STEP_SAMPLES", "LONG_STEP_LIMIT"
"""Environment variables of ``sampled_train``: folder of the samples, and the limit in bytes."""
_SECONDS_BETWEEN = 0.005
MIB = 2**20


class Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def heap_counters() -> Mallinfo:
    """Return glibc's counters of this process, in bytes: ``fordblks`` is free memory of the heap."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    counters: Mallinfo = mallinfo()
    return counters


def live_bytes() -> int:
    """Return the bytes that this process has allocated and not freed, by glibc's counters."""
    counters = heap_counters()
    return int(counters.uordblks + counters.hblkhd)


def sampled_train() -> None:
    """Run train.py with the arguments of this process. Each rank writes its peak to a file of ``_SAMPLED``."""
    enter = Cpu.enter

    def enter_and_sample(device: Cpu, local_rank: int, local_ranks: int) -> Any:
        torch_device = enter(device, local_rank, local_ranks)
        if limit := int(os.environ.get(_LIMIT, 0)):
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        file = Path(os.environ[_SAMPLED]) / f"rank_{os.environ['RANK']}.json"
        threading.Thread(target=_sample, args=(file,), daemon=True).start()
        return torch_device

    Cpu.enter = enter_and_sample  # type: ignore[method-assign, assignment]
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")


def _sample(file: Path) -> None:
    first = peak = live_bytes()
    written = 0
    while True:
        peak = max(peak, live_bytes())
        if peak > written + MIB:
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            file.write_text(json.dumps({"before": first, "peak": peak, "resident": resident}), encoding="utf-8")
            written = peak
        time.sleep(_SECONDS_BETWEEN)


def _small_stacks() -> None:
    """Limit the stacks of threads, whose number depends on the machine's cores."""
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (2 * MIB, most))


def settings(args: argparse.Namespace, cp: int) -> list[str]:
    """Return the settings of one step with ``cp`` ranks."""
    window = [f"model.sliding_window={args.window}"] if args.window else []
    return [
        "model=llama_15m",
        "data=mock",
        "device=cpu",
        f"data.seq_length={args.length}",
        f"model.max_position_embeddings={args.length}",
        *window,
        f"trainer.cp={cp}",
        "trainer.steps=1",
        "trainer.micro_batch_size=1",
        "trainer.global_batch_size=1",
        "trainer.recompute=full",
        "checkpoint.save_last=false",
        *args.overrides,
    ]


def train(words: Sequence[str], limit: int, folder: Path) -> tuple[int, str, list[dict[str, int]]]:
    """Run a step. Returns (exit status, end of the output, samples by rank)."""
    folder.mkdir()
    code = "from benchmarks.verify.long_step import sampled_train; sampled_train()"
    environment = {**os.environ, _SAMPLED: str(folder), _LIMIT: str(limit)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", code, *words, f"run.dir={folder / 'run'}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, preexec_fn=_small_stacks)
    samples = [json.loads(file.read_text()) for file in sorted(folder.glob("rank_*.json"))]
    return done.returncode, done.stdout[-2000:] + done.stderr[-4000:], samples


def forecast(words: Sequence[str]) -> tuple[int, int]:
    """Return the plan's and the rehearsal's peak of a rank in bytes."""
    from megatron_llama.plan.memory import stage_footprints
    from megatron_llama.tools.rehearse.cli import read_rehearsal
    from megatron_llama.tools.rehearse.rehearsal import rehearse

    plan, *_ = read_rehearsal(list(words))
    return stage_footprints(plan)[0].total, rehearse(plan, 0).peak


def out_of_memory(status: int, output: str) -> bool:
    """Return whether a run failed because an allocation was refused."""
    return status != 0 and any(text in output for text in ("can't allocate memory", "Cannot allocate", "MemoryError"))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the steps and the rehearsal; return the numbers of the page."""
    limit = args.limit_mib * MIB
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        status, output, samples = train(settings(args, 2), limit, folder / "cp2")
        if status:
            raise SystemExit(f"cp 2 under {args.limit_mib} MiB ended with status {status}:\n{output}")
        record = read_metrics(folder / "cp2" / "run" / METRICS_FILE)[-1]
        alone, message, _ = train(settings(args, 1), limit, folder / "cp1")
    planned, rehearsed = forecast(settings(args, 2))
    return {
        "length": args.length,
        "window": args.window,
        "limit": limit,
        "planned": planned,
        "rehearsed": rehearsed,
        "peaks": [each["peak"] - each["before"] for each in samples],
        "before": [each["before"] for each in samples],
        "resident": [each["resident"] for each in samples],
        "seconds": record["step_time_s"],
        "loss": record["reduced_train_loss"],
        "alone_status": alone,
        "alone_out_of_memory": out_of_memory(alone, message),
    }


def page(args: argparse.Namespace, result: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the page."""
    yield from [f"# A step of {args.length:,} tokens under a memory limit", "", conditions()]
    options = f"--length {args.length} --window {args.window} --limit-mib {args.limit_mib} --output {args.output}"
    yield from ["", f"    python -m benchmarks.verify.long_step {options}", ""]
    attention = f"a sliding window of {args.window:,} tokens" if args.window else "full causal attention"
    yield f"llama_15m in fp32 on 2 ranks (cp 2), {attention}, full recomputation, one step."
    yield f"The limit is RLIMIT_DATA of each process: {args.limit_mib:,} MiB."
    yield f"The step took {result['seconds']:,.0f} s."
    ended = "fails for lack of memory" if result["alone_out_of_memory"] else f"ends: {result['alone_status']}"
    yield f"One process without cp {ended} under the same limit."
    yield "Measured: the peak of allocated bytes by glibc's counters, less the bytes before the model (imports)."
    peak = max(result["peaks"])
    rows = [
        ["measured", f"{peak / MIB:,.0f}", ""],
        ["plan", f"{result['planned'] / MIB:,.0f}", f"{result['planned'] / peak - 1:+.1%}"],
        ["rehearsal", f"{result['rehearsed'] / MIB:,.0f}", f"{result['rehearsed'] / peak - 1:+.1%}"],
        ["resident, with libraries", f"{max(result['resident']) / MIB:,.0f}", ""],
    ]
    yield from ["", *markdown_table(("peak of a rank", "MiB", "difference from measured"), rows)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return 1 if the run without cp did not run out of memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--length", type=int, default=131072, help="tokens of the sequence (default 131072)")
    parser.add_argument("--window", type=int, default=4096, help="sliding window; 0: full attention (default 4096)")
    parser.add_argument("--limit-mib", type=int, default=3584, help="RLIMIT_DATA of a process (default 3584)")
    parser.add_argument("--output", type=Path, help="path of the page, without .md")
    parser.add_argument("overrides", nargs="*", help="more settings, as for train.py")
    args = parser.parse_args(argv)
    result = measure(args)
    text = "\n".join(page(args, result)) + "\n"
    if args.output is not None:
        write_atomically(args.output.with_suffix(".md"), text)
    sys.stdout.write(json.dumps(result) + "\n" + text)
    return 0 if result["alone_out_of_memory"] else 1


if __name__ == "__main__":
    run_main(main)
