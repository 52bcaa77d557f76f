"""Attention inside documents and with patterns against a dense mask: processor time, and bytes kept for the backward.

    python -m benchmarks attention --plot attention.png

One layer's attention, forward and backward, one thread, medians; the ways in turn.
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
HEAD = ("sequence", "what is seen", "share", "dense mask", "ours", "times faster", "dense keeps", "ours keeps")


@dataclass(frozen=True)
class Case:
    """What the tokens of a sequence see."""

    name: str
    pattern: Pattern = Pattern()
    documents: int = 1


CASES = (
    Case("all before it"),
    Case("4 documents", documents=4),
    Case("16 documents", documents=16),
    Case("64 documents", documents=64),
    Case("window of 256", Pattern(window=256)),
    Case("window of 256, 4 documents", Pattern(window=256), documents=4),
    Case("blocks of 64, 4 local, 1 global", Pattern(block=64, local_blocks=4, global_blocks=1)),
)


@dataclass(frozen=True)
class Cost:
    """Of one way."""

    seconds: float
    kept: int
    """Bytes that the backward pass keeps beside q, k and v; the mask is among them."""


Way = Callable[[Tensor, Tensor, Tensor], Tensor]
Found = dict[str, list[tuple[int, Cost, Cost]]]
"""By case, (tokens of the sequence, dense, ours)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The sub-command's arguments."""
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096], help="tokens in a sequence")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--plot", type=Path, help="picture of times and bytes over the sequence's length")


def run(args: argparse.Namespace) -> int:
    """Measure and print, and draw."""
    torch.set_num_threads(1)
    found: Found = {}
    for line in markdown_table(HEAD, _rows(args, found)):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    if args.plot:
        _draw(args.plot, found)
    return 0


def _rows(args: argparse.Namespace, found: Found) -> Iterator[list[str]]:
    for length in args.lengths:
        for case in CASES:
            borders = np.sort(np.random.default_rng(1).choice(np.arange(1, length), case.documents - 1, replace=False))
            sizes = np.diff([0, *borders, length])
            documents = Documents.of(torch.from_numpy(np.repeat(np.arange(case.documents), sizes))[None])
            mask = dense_mask(documents.positions(), case.pattern, documents.ids)
            dense, ours = _costs(_dense(mask), _ours(case, documents), getattr(torch, args.dtype), length, args.repeats)
            found.setdefault(case.name, []).append((length, dense, ours))
            yield [
                f"{length}",
                case.name,
                f"{mask.sum().item() / (length * (length + 1) / 2):.0%}",
                f"{dense.seconds * 1e3:.1f} ms",
                f"{ours.seconds * 1e3:.1f} ms",
                f"{dense.seconds / ours.seconds:.1f}",
                f"{dense.kept / MIB:.1f} MiB",
                f"{ours.kept / MIB:.1f} MiB",
            ]


def _dense(mask: Tensor) -> Way:
    """With heads repeated, behind a mask that is made once for all layers."""

    def way(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return way


def _ours(case: Case, documents: Documents) -> Way:
    kernels = get_device(HOST).kernels(compiled=False)
    visible = kernels.visible(documents.ids, documents if case.documents > 1 else None, case.pattern)
    return lambda q, k, v: kernels.attend(q, k, v, visible)


def _costs(dense: Way, ours: Way, dtype: torch.dtype, length: int, repeats: int) -> tuple[Cost, Cost]:
    """Measured in turn, so that other load on the machine slows both alike."""
    sizes = (HEADS, KV_HEADS, KV_HEADS)
    inputs = [torch.randn(length, 1, n, HEAD_DIM, dtype=dtype).permute(1, 2, 0, 3).requires_grad_() for n in sizes]
    own = {x.untyped_storage().data_ptr() for x in inputs}
    times: tuple[list[float], list[float]] = ([], [])
    kept = [0, 0]
    for _ in range(repeats + 1):  # the first one is not counted
        for number, way in enumerate((dense, ours)):
            storages: dict[int, int] = {}

            def note(x: Tensor, storages: dict[int, int] = storages) -> Tensor:
                storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
                return x

            start = time.process_time()  # which other programs on the machine change little
            with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
                out = way(*inputs)
            torch.autograd.grad(out, inputs, out)
            times[number].append(time.process_time() - start)
            kept[number] = sum(size for pointer, size in storages.items() if pointer not in own)
    medians = [statistics.median(found[1:]) for found in times]
    return Cost(medians[0], kept[0]), Cost(medians[1], kept[1])


def _draw(path: Path, found: Found) -> None:
    with figure(path, 1, 2, figsize=(11, 4.5)) as panels:
        for axes, title, of in zip(
            panels,
            ("ms of forward and backward", "MiB kept for the backward pass"),
            (lambda cost: cost.seconds * 1e3, lambda cost: cost.kept / MIB),
            strict=True,
        ):
            for name, costs in found.items():
                axes.plot([c[0] for c in costs], [of(c[2]) for c in costs], marker="o", label=name)
            dense = found[CASES[0].name]
            lengths = [c[0] for c in dense]
            axes.plot(lengths, [of(c[1]) for c in dense], "k--", marker="x", label="dense mask")
            axes.set(xscale="log", yscale="log", xlabel="tokens of the sequence", title=title)
            axes.set_xticks(lengths, [str(length) for length in lengths])
            axes.minorticks_off()
        panels[0].legend(fontsize=8)
