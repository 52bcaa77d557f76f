"""Divide a dataset by the length of its documents, to train on long documents more often.

    python data_prep/split_by_length.py corpora/book_text_document --at 4096 32768

Writes one dataset for each range of lengths, here corpora/book_below_4096_text_document,
book_4096_to_32768_text_document and book_from_32768_text_document, with all documents in their order. Prints the share
of the tokens in each one. Weights of data.prefixes above these shares upsample long documents.
"""

import os
import sys

if __package__ in (None, ""):  # run as a script: keep inspect.py in this folder from hiding the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

    import megatron_llama  # noqa: F401  (ends the program at Ctrl-C while it imports the rest)

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.lib.next_command import blend_words, new_model_words, next_command
from data_prep.lib.output_files import open_local, publish, read_manifest
from megatron_llama.config.data_settings import MASK_SUFFIX, TEXT_SUFFIX
from megatron_llama.corpus.indexed_format import IndexedDataset, write_index
from megatron_llama.system.errors import UserError, run_main
from megatron_llama.system.files import FolderTaken, scratch_folder, sha256_file, write_atomically
from megatron_llama.system.rerun_command import ArgumentParser
from megatron_llama.system.tables import text_table


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("prefix", help="dataset path, with or without .bin or .idx")
    text = "lengths at which to divide; a document of exactly this length belongs to the longer ones"
    parser.add_argument("--at", type=int, nargs="+", required=True, metavar="TOKENS", help=text)
    parser.add_argument("--overwrite", action="store_true", help="replace existing datasets")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = parser().parse_args(arguments)
    if args.at != sorted(set(args.at)) or args.at[0] < 1:
        given = " ".join(map(str, args.at))
        raise UserError(f"--at must have increasing lengths of at least 1, not {given}")
    dataset = open_local(args.prefix)
    if Path(dataset.prefix + MASK_SUFFIX + ".idx").exists():
        raise UserError(f"{dataset.prefix} is a fine-tuning set: only datasets of preprocess.py are divided")
    prefixes = output_prefixes(dataset.prefix, args.at)
    existing = [prefix for prefix in prefixes if Path(prefix + ".idx").exists()]
    if existing and not (args.overwrite or _work_folder(prefixes).exists()):  # a killed run's, which also may be half
        raise UserError(f"{', '.join(existing)} exist already: write --overwrite to replace them")
    try:
        counts = split(dataset, args.at, prefixes)
    except FolderTaken:
        raise UserError(f"another process divides {dataset.prefix} now: wait for its end") from None
    total = max(1, sum(tokens for _, tokens in counts))
    rows = [("dataset", "documents", "tokens", "share")]
    for prefix, (documents, tokens) in zip(prefixes, counts, strict=True):
        rows.append((prefix, f"{documents:,}", f"{tokens:,}", f"{tokens / total:.1%}"))
    print("\n".join(text_table(rows, left=1)))
    blend = [x for prefix, (_, n) in zip(prefixes, counts, strict=True) if n for x in (round(n / total, 4), prefix)]
    if blend:
        print("The weights are the natural shares. A larger last weight upsamples long texts.")
        manifest = read_manifest(dataset.prefix)
        model = new_model_words(manifest["tokenizer"], manifest["vocab_size"]) if manifest else []
        print(next_command("train.py", [*blend_words(blend, "980,10,10"), *model]))
    return 0


def output_prefixes(prefix: str, at: Sequence[int]) -> list[str]:
    """Return the prefixes of the datasets, from short to long documents."""
    suffix = TEXT_SUFFIX if prefix.endswith(TEXT_SUFFIX) else ""
    ranges = [f"below_{at[0]}", *(f"{a}_to_{b}" for a, b in zip(at, at[1:], strict=False)), f"from_{at[-1]}"]
    return [f"{prefix.removesuffix(suffix)}_{each}{suffix}" for each in ranges]


def _work_folder(prefixes: Sequence[str]) -> Path:
    return Path(prefixes[0]).with_name(f".{Path(prefixes[0]).name}.split")


def document_lengths(dataset: IndexedDataset) -> np.ndarray:
    """Return the tokens of each document, int64 [documents]."""
    ends = np.concatenate([[0], np.cumsum(dataset.index.lengths, dtype=np.int64)])
    return np.diff(ends[np.asarray(dataset.index.document_indices)])


def split(dataset: IndexedDataset, at: Sequence[int], prefixes: Sequence[str]) -> list[tuple[int, int]]:
    """Write the datasets; return (documents, tokens) of each. No file has its final name before all are written."""
    lengths = document_lengths(dataset)
    ends = np.cumsum(lengths)
    part_of = np.searchsorted(np.asarray(at), lengths, side="right")
    folder, names = Path(dataset.prefix).parent, [Path(prefix).name for prefix in prefixes]
    with scratch_folder(_work_folder(prefixes)) as work:
        manifest = read_manifest(dataset.prefix)
        for number, name in enumerate(names):
            with open(work / f"{name}.bin", "wb") as file:
                for first, last in _runs(part_of == number):
                    dataset.tokens[int(ends[first] - lengths[first]) : int(ends[last])].tofile(file)
            chosen = lengths[part_of == number].astype("<i4")
            chosen.tofile(work / "lengths")
            with open(work / f"{name}.idx", "wb") as file:
                write_index(file, work / "lengths", dataset.index.dtype)
            if manifest is not None:
                described = _manifest(manifest, dataset.prefix, at, chosen, [work / f"{name}{s}" for s in _FILES])
                write_atomically(work / f"{name}.json", json.dumps(described, indent=1) + "\n")
        _publish(work, folder, names)
    return [(int((part_of == n).sum()), int(lengths[part_of == n].sum())) for n in range(len(names))]


_FILES = (".bin", ".idx")


def _publish(work: Path, folder: Path, names: list[str]) -> None:
    """Move the datasets to their final names; ``publish`` moves datasets with a manifest."""
    publish(work, folder, names)
    for name in names:  # a dataset of another program has no manifest
        for suffix in _FILES:
            if (work / f"{name}{suffix}").exists():
                os.replace(work / f"{name}{suffix}", folder / f"{name}{suffix}")


def _runs(chosen: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of each run of adjacent documents in a mask, last inclusive."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], chosen.astype(np.int8), [0]])))
    for first, end in zip(edges[::2], edges[1::2], strict=True):
        yield int(first), int(end) - 1


def _manifest(
    whole: dict[str, Any], prefix: str, at: Sequence[int], lengths: np.ndarray, files: Sequence[Path]
) -> dict[str, Any]:
    """Return a part's manifest: the whole dataset's, with the part's counts, sizes and hashes."""
    written = int(np.count_nonzero(lengths))
    return {
        **{key: value for key, value in whole.items() if key != "text_bytes"},
        "documents_read": len(lengths),
        "documents_written": written,
        "documents_empty": len(lengths) - written,
        "documents_skipped": 0,
        "skipped": {},
        "quarantine": None,
        "tokens": int(lengths.sum(dtype=np.int64)),
        "divided": {"dataset": os.path.abspath(prefix), "at": list(at), "sha256": whole.get("sha256")},
        "bytes": {suffix: path.stat().st_size for suffix, path in zip(_FILES, files, strict=True)},
        "sha256": {suffix: sha256_file(path) for suffix, path in zip(_FILES, files, strict=True)},
    }


if __name__ == "__main__":
    run_main(main)
