"""Compare attention with document masks and sparse patterns with a dense mask: CPU time and saved bytes.

    python -m benchmarks attention --plot attention.png

Measures forward and backward of one layer's attention in one thread. Values are medians of interleaved runs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.results import figure
from megatron_llama.arch.pattern import Pattern
from megatron_llama.devices import HOST, get_device
from megatron_llama.devices.visibility import Documents, dense_mask
from megatron_llama.system.tables import markdown_table

HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64
MIB = 2**20
HEAD = ("sequence", "mask", "share", "dense mask", "ours", "times faster", "dense saves", "ours saves")


@dataclass(frozen=True)
class MaskCase:
    """Documents and sparse pattern that define a mask."""

    name: str
    pattern: Pattern = Pattern()
    documents: int = 1


CASES = (
    MaskCase("causal"),
    MaskCase("4 documents", documents=4),
    MaskCase("16 documents", documents=16),
    MaskCase("64 documents", documents=64),
    MaskCase("window of 256", Pattern(window=256)),
    MaskCase("window of 256, 4 documents", Pattern(window=256), documents=4),
    MaskCase("blocks of 64, 4 local, 1 global", Pattern(block=64, local_blocks=4, global_blocks=1)),
)


@dataclass(frozen=True)
class AttentionCost:
    """Time and memory of one implementation."""

    seconds: float
    saved_bytes: int
    """Bytes saved for the backward pass, with the mask and without q, k and v."""


Way = Callable[[Tensor, Tensor, Tensor], Tensor]
ResultsByMask = dict[str, list[tuple[int, AttentionCost, AttentionCost]]]
"""(sequence length, dense, ours) by the mask's name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096], help="tokens per sequence")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs (default 3)")
    parser.add_argument("--plot", type=Path, help="write a plot of times and bytes to this file")


def run(args: argparse.Namespace) -> int:
    """Measure, print and draw."""
    torch.set_num_threads(1)
    results: ResultsByMask = {}
    for line in markdown_table(HEAD, _rows(args, results)):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    if args.plot:
        _draw(args.plot, results)
    return 0


def _rows(args: argparse.Namespace, results: ResultsByMask) -> Iterator[list[str]]:
    for length in args.lengths:
        for case in CASES:
            boundaries = np.sort(
                np.random.default_rng(1).choice(np.arange(1, length), case.documents - 1, replace=False)
            )
            sizes = np.diff([0, *boundaries, length])
            documents = Documents.of(torch.from_numpy(np.repeat(np.arange(case.documents), sizes))[None])
            mask = dense_mask(documents.positions(), case.pattern, documents.ids)
            dense, ours = _costs(_dense(mask), _ours(case, documents), getattr(torch, args.dtype), length, args.repeats)
            results.setdefault(case.name, []).append((length, dense, ours))
            yield [
                f"{length}",
                case.name,
                f"{mask.sum().item() / (length * (length + 1) / 2):.0%}",
                f"{dense.seconds * 1e3:.1f} ms",
                f"{ours.seconds * 1e3:.1f} ms",
                f"{dense.seconds / ours.seconds:.1f}",
                f"{dense.saved_bytes / MIB:.1f} MiB",
                f"{ours.saved_bytes / MIB:.1f} MiB",
            ]


def _dense(mask: Tensor) -> Way:
    """Return attention with repeated heads and a dense mask, which is built once for all layers."""

    def way(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return way


def _ours(case: MaskCase, documents: Documents) -> Way:
    kernels = get_device(HOST).kernels(compiled=False)
    visible = kernels.visible(documents.ids, documents if case.documents > 1 else None, case.pattern)
    return lambda q, k, v: kernels.attend(q, k, v, visible)


def _costs(dense: Way, ours: Way, dtype: torch.dtype, length: int, repeats: int) -> tuple[AttentionCost, AttentionCost]:
    """Measure both alternately, so that other load on the machine affects both."""
    sizes = (HEADS, KV_HEADS, KV_HEADS)
    inputs = [torch.randn(length, 1, n, HEAD_DIM, dtype=dtype).permute(1, 2, 0, 3).requires_grad_() for n in sizes]
    input_pointers = {x.untyped_storage().data_ptr() for x in inputs}
    times: tuple[list[float], list[float]] = ([], [])
    saved_bytes = [0, 0]
    for _ in range(repeats + 1):  # the first run is not counted
        for number, way in enumerate((dense, ours)):
            storages: dict[int, int] = {}

            def note(x: Tensor, storages: dict[int, int] = storages) -> Tensor:
                storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
                return x

            start = time.process_time()  # less sensitive to other load than wall time
            with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
                out = way(*inputs)
            torch.autograd.grad(out, inputs, out)
            times[number].append(time.process_time() - start)
            saved_bytes[number] = sum(size for pointer, size in storages.items() if pointer not in input_pointers)
    medians = [statistics.median(seconds[1:]) for seconds in times]
    return AttentionCost(medians[0], saved_bytes[0]), AttentionCost(medians[1], saved_bytes[1])


def _draw(path: Path, results: ResultsByMask) -> None:
    with figure(path, 1, 2, figsize=(11, 4.5)) as panels:
        for axes, title, of in zip(
            panels,
            ("ms of forward and backward", "MiB saved for the backward pass"),
            (lambda cost: cost.seconds * 1e3, lambda cost: cost.saved_bytes / MIB),
            strict=True,
        ):
            for name, costs in results.items():
                axes.plot([c[0] for c in costs], [of(c[2]) for c in costs], marker="o", label=name)
            dense = results[CASES[0].name]
            lengths = [c[0] for c in dense]
            axes.plot(lengths, [of(c[1]) for c in dense], "k--", marker="x", label="dense mask")
            axes.set(xscale="log", yscale="log", xlabel="tokens of the sequence", title=title)
            axes.set_xticks(lengths, [str(length) for length in lengths])
            axes.minorticks_off()
        panels[0].legend(fontsize=8)
