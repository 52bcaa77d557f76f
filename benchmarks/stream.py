"""Measure time and memory of the pretraining sample stream until the first batch, at several positions of a run.

The data is a blend of four synthetic datasets with the weights of RedPajama-1T: real .idx files and sparse .bin files.
Each row is a separate process that plans a run, checks the data and reads a global batch. Order "megatron" is
megatron-core's shuffle of all epochs together. Imports are not counted. Memory is the peak above the memory after
imports. Resident memory includes mapped pages: the 64 MiB of each dataset whose ids are checked, and the samples.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT, command_line, conditions
from megatron_llama.system.errors import UserError
from megatron_llama.system.files import write_atomically
from megatron_llama.system.tables import markdown_table, short_count

LENGTH, GLOBAL_BATCH = 4096, 256
HEAD = (
    *("order", "tokens of the run", "tokens consumed", "index files", "s to the first batch", "CPU s"),
    *("MiB allocated", "MiB resident", "CPU ms per later batch"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--tokens", default="10e9", help="tokens of all datasets together (default 10e9)")
    parser.add_argument("--run-tokens", default="1e12", help="tokens of the longest run (default 1e12)")
    parser.add_argument("--limit-gib", type=float, default=8, help="memory limit of a process, GiB (default 8)")
    parser.add_argument("--folder", type=Path, help="folder for temporary files")
    parser.add_argument("--report", type=Path, help="also write the table to this file")


def run(args: argparse.Namespace) -> int:
    """Create the datasets, measure, and print the table."""
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        documents, blend = make_datasets(folder, int(float(args.tokens)))
        lines = list(_heading(args, documents))
        for line in markdown_table(HEAD, _rows(args, folder, blend)):
            print(line, flush=True)
            lines.append(line)
    if args.report:
        write_atomically(args.report, "\n".join(lines) + "\n")
    return 0


def make_datasets(folder: Path, total: int) -> tuple[int, list[Any]]:
    """Create datasets of ``total`` tokens with log-normal document lengths, 812 tokens on average.

    Returns:
        The number of documents, and the value of data.prefixes.
    """
    import numpy as np

    from data_prep.lib.download import shares
    from megatron_llama.corpus.indexed_format import write_index

    weights = shares(["common_crawl", "c4", "wikipedia", "arxiv"])
    random, documents, blend = np.random.default_rng(0), 0, list[Any]()
    for name, weight in weights.items():
        lengths = np.maximum(1, random.lognormal(6.2, 1.0, int(total / len(weights) / 812))).astype("<i4")
        documents += len(lengths)
        lengths.tofile(folder / "lengths")
        with open(folder / f"{name}.idx", "wb") as file:
            _, tokens = write_index(file, folder / "lengths", np.dtype("<u2"))
        with open(folder / f"{name}.bin", "wb") as file:
            file.truncate(2 * tokens)
        blend += [weight, str(folder / name)]
    return documents, blend


def _heading(args: argparse.Namespace, documents: int) -> Iterator[str]:
    yield conditions(("numpy", "torch", "megatron-core"))
    yield f"`{command_line()}`"
    yield ""
    yield (
        f"{short_count(float(args.tokens))} tokens in {documents:,} documents of four datasets, sequences of {LENGTH}, "
        f"global batches of {GLOBAL_BATCH}; a process may allocate {args.limit_gib:g} GiB."
    )
    yield ""


def _rows(args: argparse.Namespace, folder: Path, blend: list[Any]) -> Iterator[list[str]]:
    longest = float(args.run_tokens)
    for consumed in (0.0, longest / 2, longest - 10 * LENGTH * GLOBAL_BATCH):
        for cached in (False, True):
            yield _row(args, folder, blend, "epochs", longest, consumed, cached)
    for length in (longest / 100, longest / 30, longest / 10, longest):
        for cached in (False, True):
            row = _row(args, folder, blend, "megatron", length, 0.0, cached)
            yield row
            if not row[-1]:
                break  # the build failed, so there is no cache to read


def _row(
    args: argparse.Namespace, folder: Path, blend: list[Any], order: str, length: float, consumed: float, cached: bool
) -> list[str]:
    samples, first = int(length / LENGTH) // GLOBAL_BATCH * GLOBAL_BATCH, int(consumed / LENGTH)
    first -= first % GLOBAL_BATCH
    cache = folder / f"cache-{order}-{samples}-{first}"
    call = (json.dumps(blend), str(cache), order, samples, first, args.limit_gib)
    program = f"from benchmarks.stream import measure; measure{call!r}"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, cwd=ROOT)
    files = "read" if cached else "built"
    words = [order, *(f"{tokens / 1e9:,.0f} B" for tokens in (length, consumed)), files]
    if done.returncode:
        reason = "out of memory" if "MemoryError" in done.stderr or done.returncode < 0 else done.stderr[-200:]
        return [*words, reason, "", "", "", ""]
    figures = json.loads(done.stdout.splitlines()[-1])
    sizes = (f"{figures[key] / 2**20:,.0f}" for key in ("allocated", "resident"))
    return [*words, f"{figures['seconds']:.1f}", f"{figures['cpu']:.1f}", *sizes, f"{1000 * figures['batch']:.0f}"]


def measure(blend: str, cache: str, order: str, samples: int, first: int, limit_gib: float) -> None:
    """Print seconds and bytes until the first batch, and CPU seconds per later batch. Runs in a separate process."""
    import torch
    import torch.distributed as dist

    from megatron_llama.config import Config
    from megatron_llama.data.checks import check_data
    from megatron_llama.data.megatron_order import build_megatron
    from megatron_llama.data.pretraining_samples import build_streams
    from megatron_llama.plan import resolve

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    limit = int(limit_gib * 2**30) + _size("VmData")
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    before, peak, is_done = {name: _size(name) for name in ("RssAnon", "VmRSS")}, [0], threading.Event()

    def watch() -> None:
        while not is_done.wait(0.005):
            peak[0] = max(peak[0], _size("RssAnon"))

    threading.Thread(target=watch, daemon=True).start()
    start, cpu = time.monotonic(), time.process_time()
    config = Config()
    config.data.mock, config.data.prefixes, config.data.cache_dir = False, json.loads(blend), cache
    config.data.seq_length, config.data.split, config.model.vocab_size = LENGTH, "980,10,10", 32000
    config.trainer.global_batch_size, config.trainer.steps = GLOBAL_BATCH, samples // GLOBAL_BATCH
    plan = resolve(config, 1)
    stream: Any
    if order == "epochs":
        stream = build_streams(plan)[0]
    else:
        assert not check_data(plan.config)
        stream = build_megatron(plan, samples, 0)[0]

    def batch(number: int) -> torch.Tensor:
        return torch.stack([stream[first + number * GLOBAL_BATCH + n]["tokens"] for n in range(GLOBAL_BATCH)])

    assert batch(0).shape == (GLOBAL_BATCH, LENGTH)
    figures = {"seconds": time.monotonic() - start, "cpu": time.process_time() - cpu}
    is_done.set()
    figures |= {"allocated": peak[0] - before["RssAnon"], "resident": _size("VmHWM") - before["VmRSS"]}
    cpu = time.process_time()
    for number in range(1, 6):
        batch(number)
    print(json.dumps({**figures, "batch": (time.process_time() - cpu) / 5}))


def _size(name: str) -> int:
    """Read a field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return 1024 * int(line.split()[1])
    raise UserError(f"/proc/self/status has no {name}: this benchmark requires Linux")
