"""Verify the data preparation on whole datasets, which takes too long for the test suite.

    python -m benchmarks.verify.data identity \\
        --input data/redpajama_mini --tokenizer-model tokenizer.model
    python -m benchmarks.verify.data disk --input ... --tokenizer-model ...

identity: compare all token ids with sentencepiece, and both files with megatron-core's builder, byte by byte.

disk: fill a small tmpfs (needs root), enlarge it, and resume.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.help_format import HelpFormatter
from benchmarks.results import ROOT
from megatron_llama.system.errors import MachineError, UserError, run_main
from megatron_llama.system.files import sha256_file

if TYPE_CHECKING:
    import numpy.typing as npt


def preprocess(*args: object) -> subprocess.CompletedProcess[str]:
    """Run preprocess.py as a subprocess."""
    command = [sys.executable, str(ROOT / "data_prep/preprocess.py"), "--append-eod", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True)


def identity(args: argparse.Namespace) -> Iterator[str]:
    """Compare the output of each input file, and of all files as one dataset; yield a line for each."""
    import numpy as np

    from data_prep.lib.find_inputs import find_sources
    from data_prep.lib.input_readers import read_lines
    from megatron_llama.text.tokenizer import read_sentencepiece

    processor = read_sentencepiece(Path(args.tokenizer_model))
    everything: list[npt.NDArray] = []
    sources = find_sources([args.input]).sources
    with tempfile.TemporaryDirectory() as name:
        prefix = Path(name) / "x"
        for source in sources:
            documents = []
            for line in read_lines(source):
                if line.strip():
                    ids = processor.encode(json.loads(line)["text"])
                    documents.append(np.array(ids + [processor.eos_id()] if ids else [], dtype=np.uint16))
            everything += documents
            yield _compare(args, [source.path], prefix, documents)
        if len(sources) > 1:
            yield _compare(args, [args.input], prefix, everything)


def _compare(args: argparse.Namespace, inputs: list[str], prefix: Path, documents: list[npt.NDArray]) -> str:
    """Prepare ``inputs``; compare both files with the files that megatron-core's builder writes for ``documents``."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    done = preprocess(
        *("--input", *inputs, "--tokenizer-model", args.tokenizer_model, "--output-prefix", prefix, "--overwrite"),
        *("--workers", args.workers, "--json-keys", "text"),
    )
    if done.returncode:
        raise MachineError(done.stderr)
    reference = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for ids in documents:
        reference.add_document(ids, [len(ids)] if len(ids) else [])
    reference.finalize(f"{prefix}.idx")
    for end in (".bin", ".idx"):
        if Path(f"{prefix}_text_document{end}").read_bytes() != Path(f"{prefix}{end}").read_bytes():
            raise MachineError(f"{inputs}: {end} differs from the reference")
    encoder = json.loads(Path(f"{prefix}_text_document.json").read_bytes())["encoder"]
    digest = sha256_file(Path(f"{prefix}.bin"))[:16]
    name = os.path.relpath(inputs[0], args.input)
    return (
        f"{name}: {len(documents):,} documents, {sum(map(len, documents)):,} tokens by {encoder}: "
        f"ids, .bin and .idx identical (sha256 of the .bin {digest}...)"
    )


def disk(args: argparse.Namespace) -> Iterator[str]:
    """Fill a small tmpfs, enlarge it and resume; compare with an uninterrupted run."""
    if os.geteuid() != 0:
        raise UserError("mounting a small tmpfs needs root")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = folder / "small"
        small.mkdir()
        base = ["--input", args.input, "--tokenizer-model", args.tokenizer_model, "--workers", args.workers]
        base += ["--checkpoint-seconds", 0.2]
        preprocess(*base, "--output-prefix", folder / "whole")
        size = Path(f"{folder}/whole_text_document.bin").stat().st_size
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size // 2}", "none", str(small)], check=True)
        try:
            full = preprocess(*base, "--output-prefix", small / "x")
            yield f"disk of half the size needed: status {full.returncode}, {full.stderr.strip().splitlines()[-1]}"
            visible = [path.name for path in small.iterdir() if not path.name.startswith(".")]
            if full.returncode != 1 or visible or "Traceback" in full.stderr:
                raise MachineError(f"expected status 1, no files and no traceback, got: {visible} {full.stderr}")
            subprocess.run(["mount", "-o", f"remount,size={2 * size + 2**24}", str(small)], check=True)
            done = preprocess(*base, "--output-prefix", small / "x")
            yield f"enlarged disk: status {done.returncode}, {done.stdout.splitlines()[0]}"
            for end in (".bin", ".idx"):
                a, b = Path(f"{folder}/whole_text_document{end}"), Path(f"{small}/x_text_document{end}")
                if a.read_bytes() != b.read_bytes():
                    raise MachineError(f"{end} differs from an uninterrupted run's")
            yield "both files identical to an uninterrupted run's"
        finally:
            subprocess.run(["umount", str(small)], check=False)


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("check", choices=["identity", "disk"], help="check to run")
    parser.add_argument("--input", required=True, help="raw data file or folder")
    parser.add_argument("--tokenizer-model", required=True, help="sentencepiece model of fewer than 65,500 tokens")
    parser.add_argument("--workers", type=int, default=2, help="worker processes (default 2)")
    args = parser.parse_args()
    for line in {"identity": identity, "disk": disk}[args.check](args):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    run_main(main)
