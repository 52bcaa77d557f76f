"""Attention inside documents: document by document, behind a dense mask, and over the whole sequence."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F

from megatron_llama.model.attention import attend, mask_of, seen
from megatron_llama.model.document_mask import Documents
from megatron_llama.plan.attention import Pattern
from scripts.results import markdown_table

HEADS, KV_HEADS, HEAD_DIM, REPEATS = 8, 4, 64, 5
HEAD = ("sequence", "documents", "whole sequence, causal", "dense mask", "document by document")


def describe(parser: argparse.ArgumentParser) -> None:
    """The sub-command's arguments."""
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048], help="tokens in a sequence")
    parser.add_argument("--documents", type=int, nargs="+", default=[1, 4, 16], help="documents in a sequence")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")


def run(args: argparse.Namespace) -> int:
    """Measure and print: processor time of forward and backward of one layer's attention, on one thread, medians."""
    torch.set_num_threads(1)
    for line in markdown_table(HEAD, _rows(args)):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    return 0


def _rows(args: argparse.Namespace) -> Iterator[list[str]]:
    dtype = getattr(torch, args.dtype)
    for length in args.lengths:
        for count in args.documents:
            borders = np.sort(np.random.default_rng(count).choice(np.arange(1, length), count - 1, replace=False))
            sizes = np.diff([0, *borders, length])
            documents = Documents.of(torch.from_numpy(np.repeat(np.arange(count), sizes))[None])
            q, k, v = (torch.randn(1, heads, length, HEAD_DIM, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
            ways = (
                lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
                lambda q, k, v, documents=documents: _dense(q, k, v, mask_of(documents.positions(), Pattern(), documents.ids)),
                lambda q, k, v, documents=documents: attend(q, k, v, seen(documents.ids, documents, Pattern(), "tiles", False)),
            )
            yield [str(length), str(count), *(f"{seconds * 1e3:.1f} ms" for seconds in _medians(ways, q, k, v))]


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """With all scores, behind a mask, and heads repeated."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _medians(ways: tuple[Callable[..., torch.Tensor], ...], *inputs: torch.Tensor) -> list[float]:
    """Of each way, measured in turn, so that other load on the machine slows all of them alike."""
    times: list[list[float]] = [[] for _ in ways]
    leaves = [x.requires_grad_() for x in inputs]
    for _ in range(REPEATS):
        for way, found in zip(ways, times, strict=True):
            start = time.process_time()  # which other programs on the machine change little
            way(*leaves).sum().backward()
            found.append(time.process_time() - start)
            for leaf in leaves:
                leaf.grad = None
    return [statistics.median(found) for found in times]
