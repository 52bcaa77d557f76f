"""Count launches, bytes and waits of a training step of Llama 7B's blocks with device=cuda; forecast its MFU on H100.

    python -m benchmarks launches [--lengths 4096 8192] [--write PAGE]

Needs no GPU: runs on the runtime of tests/cuda, with a CUDA build of torch. Steps with one and with two blocks are
counted; their difference is the work of a block. Eager operators are counted by the memory of their arguments, Triton
kernels by Inductor's estimate. The forecast uses the planner's rates for matmuls, attention and memory.
"""

from __future__ import annotations

import argparse
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import ROOT, command_line, conditions, publish
from megatron_llama.system.tables import markdown_table
from megatron_llama.tools.forecast.hardware import devices
from megatron_llama.tools.forecast.step_time import FLASH_BACKWARD, MEMORY_REACH, load_constants, matmul_seconds
from tests.cuda.build import missing
from tests.cuda.harness import Runtime, open_runtime, train_words
from tests.cuda.in_process import ACCESSES
from tests.cuda.log import Call, kernel_class, read_logs

HIDDEN, HEADS, HEAD_DIM, VOCABULARY = 4096, 32, 128, 32000
TOKENS = 16384
"""Tokens of a micro batch, which is also the step: four sequences of 4,096."""
OPTIMIZER = ("_fused_", "_foreach_")
"""Beginnings of names of operators of the optimizer."""
MEASURED_STEP = 2
LARGEST = 5  # losses in the page
NOT_ELEMENTWISE = (
    *("mm", "addmm", "bmm", "_flash_attention", "_scaled_dot_product", "_efficient_attention"),
    "_unsafe_view",
)
"""Beginnings of names of operators that are matmuls or attention, or move nothing."""
MODES = {"eager": "false", "compiled": "true"}


@dataclass(frozen=True)
class Work:
    """Work of a step, or of one block in it."""

    launches: Counter[str]
    """Kernels by class. Matmuls count as launches too."""
    matmuls: Counter[tuple[int, int, int]]
    """Number of GEMMs by (m, n, k)."""
    moved: Counter[str]
    """Bytes that other operators read and write, by operator or Triton kernel."""
    waits: int
    streams: Counter[str]
    """Kernels, matmuls and copies by stream."""

    @classmethod
    def of(cls, calls: Sequence[Call]) -> Work:
        """Count the calls of a log."""
        launches = Counter(kernel_class(call.fields["name"]) for call in calls if call.name == "KERNEL")
        matmuls: Counter[tuple[int, int, int]] = Counter()
        for call in (call for call in calls if call.name == "GEMM"):
            m, n, k = map(int, call.fields["shape"].split(","))
            matmuls[m, n, k] += call.number("batches")
        launches["matmul"] += matmuls.total()
        moved: Counter[str] = Counter()
        for call in calls:
            if call.name == "ACCESS" and not call.fields["name"].startswith(NOT_ELEMENTWISE):
                moved[call.fields["name"]] += sum(map(_size, (call.fields["read"], call.fields["written"])))
            elif call.name == "MARK" and call.fields.get("event") == "triton":
                moved[call.fields["kernel"]] += call.number("bytes")
        on_stream = (call for call in calls if call.name in ("KERNEL", "GEMM", "COPY"))
        streams = Counter(f"stream {call.fields['stream']}: {call.name.lower()}" for call in on_stream)
        return cls(launches, matmuls, moved, sum(call.name == "SYNC" for call in calls), streams)

    def megabytes(self, optimizer: bool) -> float:
        """Return the MB that elementwise operators move: the optimizer's, or all others."""
        return sum(size for name, size in self.moved.items() if name.startswith(OPTIMIZER) == optimizer) / 1e6

    def __sub__(self, other: Work) -> Work:
        """Return the additional work. Counts that differ by less than nothing are dropped."""
        return Work(
            self.launches - other.launches,
            self.matmuls - other.matmuls,
            self.moved - other.moved,
            self.waits - other.waits,
            self.streams - other.streams,
        )


def _size(ranges: str) -> int:
    return sum(int(part.split(",")[1]) for part in ranges.split(";") if part)


def count(runtime: Runtime, folder: Path, length: int, mode: str, layers: int) -> Work:
    """Count a step of a model with ``layers`` blocks. Logs of an earlier call in ``folder`` are counted again."""
    batch = TOKENS // length
    overrides = (
        *("model=llama7b", f"model.num_hidden_layers={layers}", f"model.max_position_embeddings={length}"),
        *(f"data.seq_length={length}", f"trainer.micro_batch_size={batch}", f"trainer.global_batch_size={batch}"),
        *(f"trainer.steps={MEASURED_STEP}", f"trainer.compile={MODES[mode]}", "trainer.precision=bf16"),
    )
    runs = folder / f"{mode}-{length}-{layers}"
    logs = read_logs(runs / "log0")
    if not (logs and MEASURED_STEP in logs[0].steps):
        # Inductor estimates the bytes of its kernels only if it may benchmark them.
        settings = {ACCESSES: "1", "TORCHINDUCTOR_BENCHMARK_KERNEL": "1"}
        shutil.rmtree(runs, ignore_errors=True)
        logs = runtime.start(train_words(runs, overrides), runs, 1, settings).check().logs
        print(runs.name, "counted", flush=True)
    return Work.of(logs[0].steps[MEASURED_STEP])


@dataclass(frozen=True)
class Forecast:
    """Seconds of a step of ``blocks`` blocks on H100: at the peak, and lost."""

    ideal: float
    lost: Mapping[str, float]

    @property
    def mfu(self) -> float:
        """FLOPs with causal attention over the peak."""
        return self.ideal / (self.ideal + sum(self.lost.values()))


def forecast(block: Work, rest: Work, length: int, mode: str, blocks: int) -> Forecast:
    """Forecast a step from the work of a block and of everything else in a step."""
    device, constants = devices()["h100"], load_constants()
    peak, rate = device.peaks["bf16"], device.bandwidth * MEMORY_REACH

    def matmuls(work: Work) -> tuple[float, float]:
        shapes = work.matmuls.items()
        ideal = sum(number * 2 * m * n * k / peak for (m, n, k), number in shapes)
        real = sum(number * matmul_seconds(m, k, n, "bf16", device, constants) for (m, n, k), number in shapes)
        return ideal, real

    (inside, inside_real), (head, head_real) = matmuls(block), matmuls(rest)
    scores = 4 * TOKENS * length * HEADS * HEAD_DIM / 2 / peak  # seconds at the peak of a forward pass
    short = (1 + constants["tile.attention"] / length) * (1 + constants["tile.head"] / HEAD_DIM)
    attention = scores * (1 + FLASH_BACKWARD) * short / constants["attention.flash"]
    launches = blocks * block.launches.total() + rest.launches.total()
    lost = {
        "block matmuls below the peak": blocks * (inside_real - inside),
        "head matmuls below the peak": head_real - head,
        "attention (FlashAttention 2) below the peak": blocks * (attention - 3 * scores),
        "elementwise kernels of the blocks": 1e6 * blocks * block.megabytes(optimizer=False) / rate,
        "loss, casts of weights and other elementwise kernels": 1e6 * rest.megabytes(optimizer=False) / rate,
        "optimizer": 1e6 * (blocks * block.megabytes(optimizer=True) + rest.megabytes(optimizer=True)) / rate,
        "gaps between kernels": launches * constants[f"gap.{mode}"],
        "host work once per step": constants["launch.step"],
    }
    ideal = blocks * (inside + 3 * scores) + head
    host = launches * constants["host.operation"] / device.host_speed
    lost["launches that the host issues too late"] = max(0.0, host - ideal - sum(lost.values()))
    return Forecast(ideal, lost)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192], help="tokens per sequence")
    parser.add_argument("--blocks", type=int, default=8, help="blocks of the forecast's model (default 8)")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "launches", help="folder of the logs")
    parser.add_argument("--write", type=Path, help="write the page to this file instead of printing it")


def run(args: argparse.Namespace) -> int:
    """Count, forecast and write the page; return 1 where the runtime cannot be used."""
    if reason := missing():
        print(reason)
        return 1
    rows, losses, streams = list[tuple[str, ...]](), list[tuple[str, ...]](), Counter[str]()
    with open_runtime(args.output / "libraries") as runtime:
        for length in args.lengths:
            for mode in MODES:
                one, two = (count(runtime, args.output, length, mode, layers) for layers in (1, 2))
                block, rest = two - one, one - (two - one)
                expected = forecast(block, rest, length, mode, args.blocks)
                rows.append(_row(f"{mode}, {length:,}", one, block, rest, expected))
                losses += _losses(f"{mode}, {length:,}", expected)
                streams.update(one.streams)
    publish(_page(args, rows, losses, streams), args.write)
    return 0


def _row(name: str, one: Work, block: Work, rest: Work, expected: Forecast) -> tuple[str, ...]:
    return (
        name,
        *(f"{work.launches.total():,} ({work.matmuls.total():,})" for work in (block, rest)),
        *(f"{work.megabytes(optimizer=False) / 1000:.1f}" for work in (block, rest)),
        str(one.waits),
        f"{expected.mfu:.0%}",
    )


def _losses(name: str, expected: Forecast) -> Iterator[tuple[str, ...]]:
    total = expected.ideal + sum(expected.lost.values())
    for loss, seconds in sorted(expected.lost.items(), key=lambda item: -item[1])[:LARGEST]:
        yield name, loss, f"{1000 * seconds:.1f}", f"{seconds / total:.1%}"


def _page(
    args: argparse.Namespace, rows: list[tuple[str, ...]], losses: list[tuple[str, ...]], streams: Counter[str]
) -> str:
    """Return the page in Markdown."""
    head = (
        *("step, tokens per sequence", "launches of a block (GEMMs)", "launches of the rest (GEMMs)"),
        *("GB moved by a block", "GB moved by the rest", "waits per step", "MFU forecast"),
    )
    used = sorted({name.partition(":")[0] for name in streams})
    lines = [
        "# Launches of a step with device=cuda\n",
        f"{conditions()} No GPU: the runtime of tests/cuda counts the calls. Command:\n",
        f"    {command_line()}\n",
        f"Llama 7B's blocks (hidden 4,096, FFN 11,008, 32 heads), vocabulary {VOCABULARY:,}, bf16 with fp32 master "
        f"weights, one micro batch of {TOKENS:,} tokens per step, one rank, no recomputation. A block includes the "
        "casts and gradient sums of its weights. Bytes are the whole memory of the arguments and results of operators "
        "other than matmuls, attention and the optimizer, so an index into the logits counts too much. The forecast "
        f"has {args.blocks} blocks on one H100, uses the planner's rates, and was not compared with a GPU.\n",
        *markdown_table(head, rows),
        f"\nAll kernels, matmuls and copies of one rank are on {', '.join(used)}: no operations of the step overlap on "
        "the device. The host runs ahead of the device until the one read of the step.\n",
        f"## The {LARGEST} largest losses\n",
        *markdown_table(("step", "loss", "ms", "share of the step"), losses),
    ]
    return "\n".join(lines) + "\n"
