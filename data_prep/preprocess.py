"""Tokenize JSONL, CSV, Parquet, Arrow and text files into Megatron's indexed datasets.

    python data_prep/preprocess.py --input A.jsonl B.jsonl.zst folder/ 'glob*.json.gz' \\
        --tokenizer-model tokenizer.model --append-eod --output-prefix out/book --workers 8

Input files may be compressed. Writes out/book_text_document.bin and .idx, and last .json, the manifest of a complete
dataset. Rerun the same command to resume an interrupted run. Flags have the names and meaning of Megatron's and NeMo's
preprocessing.
"""

import os
import sys

if __package__ in (None, ""):  # run as a script: keep inspect.py in this folder from hiding the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

    import megatron_llama  # noqa: F401  (ends the program at Ctrl-C while it imports the rest)

import argparse
from collections.abc import Sequence
from dataclasses import fields

from data_prep.lib.find_inputs import TEXT_SUFFIXES
from data_prep.lib.next_command import next_training
from data_prep.lib.run_options import RunOptions, add_run_flags, add_token_flags, collect, parser_with_input, reject
from data_prep.lib.sft_and_text_sets import TextOptions, make_text_set
from megatron_llama.system.errors import run_main

UNSUPPORTED = {
    "split_sentences": "datasets hold documents. Remove the flag",
    "ftfy": "text is tokenized unchanged. Remove the flag",
}
"""Flags of Megatron and NeMo that are rejected, and why."""


def parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    result, data = parser_with_input(__doc__, "Formats, bad lines and failures: docs/guides/data/data.md")
    add = data.add_argument
    text = "JSON keys of the text, one dataset per key (default: text, raw_content or content)"
    add("--json-keys", nargs="+", metavar="KEY", help=text)
    text = "suffixes of files that are one document each (default .txt)"
    add("--text-suffixes", nargs="+", default=list(TEXT_SUFFIXES), metavar="S", help=text)
    tokenizer = result.add_argument_group("tokenizer")
    add = tokenizer.add_argument
    add("--tokenizer-library", help="sentencepiece, huggingface or tiktoken (default: detected)")
    add("--tokenizer-type", help="Hugging Face folder, or a tokenizer type of Megatron")
    add("--tokenizer-model", metavar="PATH", help=".model file or Hugging Face folder")
    add_token_flags(tokenizer)
    add("--append-eod", action="store_true", help="append the end-of-text token to each document")
    text = "begin each document with the begin-of-text token, as Llama 2 and 3 were pretrained"
    add("--prepend-bos", action="store_true", help=text)
    text = "for sentencepiece models; auto picks the fastest encoder whose ids match sentencepiece's (default auto)"
    add("--encoder", choices=["auto", "sentencepiece", "gigatoken", "kitoken"], default="auto", help=text)
    output = result.add_argument_group("output and run")
    add_run_flags(data, output, "PATH_KEY_document.bin ...")
    output.add_argument(
        "--block-mib", type=float, default=RunOptions.block_mib, help="MiB of text per worker task (default 4)"
    )
    add = result.add_argument_group("accepted for compatibility with Megatron and NeMo, no effect").add_argument
    add("--dataset-impl", choices=["mmap"], default="mmap", help="only mmap is supported")
    for flag in ("--log-interval", "--partitions", "--make-vocab-size-divisible-by", "--vocab-size"):
        add(flag, type=int, help=argparse.SUPPRESS)
    for flag in ("--need-pad-id", "--keep-sequential-samples", "--split-sentences", "--ftfy"):
        add(flag, action="store_true", help=argparse.SUPPRESS)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = parser().parse_args(arguments)
    unsupported = [name for name in UNSUPPORTED if vars(args)[name]]
    problems = [f"--{name.replace('_', '-')} is not supported: {UNSUPPORTED[name]}" for name in unsupported]
    text = collect(problems, lambda: TextOptions(**{one.name: vars(args)[one.name] for one in fields(TextOptions)}))
    options = collect(problems, lambda: RunOptions.of(args))
    if text is not None:
        collect(problems, lambda: text.tokenizer)
    reject(problems)
    assert text is not None and options is not None, "otherwise there are problems"
    prefixes = make_text_set(text, options, print)
    if prefixes and (command := next_training(prefixes, text.tokenizer_name)):
        print(command)
    return 0


if __name__ == "__main__":
    run_main(main)
