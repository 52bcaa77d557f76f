"""Shares the lines of a fine-tuning set out over training and validation, in files of their own.

The lines stay as they are, so an evaluation can read them too. Which go where is a function of the seed and of how many
there are; each part keeps the order of the input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from data_prep.lib.sources import Source, read_lines
from megatron_llama.system.errors import UserError
from megatron_llama.system.files import atomic_open

PARTS = ("train", "validation")


def split_lines(sources: Sequence[Source], sizes: Sequence[int], prefix: Path, tables: bool, seed: int) -> list[Path]:
    """Writes <prefix>_train and <prefix>_validation (.tsv for ``tables``, else .jsonl) with ``sizes`` lines each.

    Raises:
        UserError: there are not that many lines, or the tables' headers differ.
    """
    headers = {header_of(source) for source in sources} if tables else set()
    if len(headers) > 1:
        raise UserError("--split: the tables have different headers")
    count = sum(1 for source in sources for _ in _records(source, tables))
    if sum(sizes) > count:
        raise UserError(f"--split {','.join(map(str, sizes))} needs {sum(sizes):,} lines, and there are {count:,}")
    part_of = np.full(count, len(sizes), dtype=np.int8)
    order = np.random.RandomState(seed).permutation(count)
    start = 0
    for part, size in enumerate(sizes):
        part_of[order[start : start + size]] = part
        start += size
    paths = [prefix.with_name(f"{prefix.name}_{part}{'.tsv' if tables else '.jsonl'}") for part in PARTS]
    with ExitStack() as stack:
        files = [stack.enter_context(atomic_open(path)) for path in paths]
        for file in files:
            for header in headers:
                file.write(header + b"\n")
        lines = (line for source in sources for line in _records(source, tables))
        for part, line in zip(part_of.tolist(), lines, strict=True):
            if part < len(files):
                files[part].write(line + b"\n")
    return paths


def header_of(source: Source) -> bytes:
    """The first line of a table.

    Raises:
        UserError: the file is empty.
    """
    for line in read_lines(source):
        return line.removesuffix(b"\r")
    raise UserError(f"{source.path} is empty: a table begins with the names of its columns")


def _records(source: Source, tables: bool) -> Iterator[bytes]:
    """Lines that hold something, without a table's header."""
    for number, line in enumerate(read_lines(source)):
        if not (tables and number == 0) and line and not line.isspace():
            yield line
