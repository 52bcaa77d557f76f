"""JSONL, .csv, .parquet, .arrow and text, compressed or not, to Megatron's indexed datasets.

    python data_prep/preprocess.py --input A.jsonl B.jsonl.zst folder/ 'glob*.json.gz' \\
        --tokenizer-model tokenizer.model --append-eod --output-prefix out/book --workers 8

Writes out/book_text_document.bin, .idx and, as the sign that all is complete, .json. Killed at any moment, the same
command goes on where it was. Flags keep the names and meaning that Megatron's and NeMo's preprocessing gave them.
"""

import os
import sys

if __package__ in (None, ""):  # run as a script: this folder holds inspect.py, which must not hide Python's own
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
from collections.abc import Sequence
from dataclasses import fields

from data_prep.lib.input_files import TEXT_SUFFIXES
from data_prep.lib.job import RunOptions, add_run_flags
from data_prep.lib.sets import TextOptions, make_text_set
from megatron_llama.system.errors import UserError, run_main


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    result = argparse.ArgumentParser(
        prog="preprocess.py",
        description=(__doc__ or "").partition("\n\n")[0],
        epilog="Formats, bad lines and failures: docs/guides/data/data.md",
    )
    data = result.add_argument_group("input")
    data.add_argument(
        "--input", nargs="+", required=True, metavar="PATH", help="files, folders, patterns, - for a pipe"
    )
    data.add_argument(
        "--json-keys", nargs="+", metavar="KEY", help="a dataset for each (default: text; content for OSCAR's own)"
    )
    data.add_argument(
        "--text-suffixes", nargs="+", default=list(TEXT_SUFFIXES), metavar="S", help="files that are one document"
    )
    tokenizer = result.add_argument_group("tokenizer")
    tokenizer.add_argument("--tokenizer-library", help="sentencepiece (default), huggingface, tiktoken")
    tokenizer.add_argument("--tokenizer-type", help="a Hugging Face folder, or Megatron's name for a tokenizer")
    tokenizer.add_argument("--tokenizer-model", metavar="PATH", help=".model file, or a Hugging Face folder")
    tokenizer.add_argument("--append-eod", action="store_true", help="end each document with the end-of-text token")
    tokenizer.add_argument(
        "--encoder",
        choices=["auto", "sentencepiece", "gigatoken", "kitoken"],
        default="auto",
        help="for sentencepiece models; auto: the fastest that proves identical at the start",
    )
    output = result.add_argument_group("output and run")
    add_run_flags(data, output, "PATH_KEY_document.bin ...")
    output.add_argument(
        "--block-mib", type=float, default=RunOptions.block_mib, help="text that a worker takes at a time (default 4)"
    )
    known = result.add_argument_group("known from Megatron and NeMo, without effect here")
    known.add_argument("--dataset-impl", choices=["mmap"], default="mmap", help="the only one there is")
    for flag in ("--log-interval", "--partitions", "--make-vocab-size-divisible-by", "--vocab-size"):
        known.add_argument(flag, type=int, help=argparse.SUPPRESS)
    for flag in ("--need-pad-id", "--keep-sequential-samples", "--split-sentences", "--prepend-bos", "--ftfy"):
        known.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    args = parser().parse_args(arguments)
    if args.split_sentences:
        raise UserError("--split-sentences is for BERT; there are no sentences here, only documents")
    if args.prepend_bos or args.ftfy:
        raise UserError("--prepend-bos and --ftfy are not done here: text goes in as it is, documents end with EOD")
    text = TextOptions(**{one.name: getattr(args, one.name) for one in fields(TextOptions)})
    make_text_set(text, RunOptions.of(args), print)
    return 0


if __name__ == "__main__":
    run_main(main)
