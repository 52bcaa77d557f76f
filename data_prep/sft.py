"""Conversations, pairs and labelled tables to a fine-tuning set: tokens, and masks of what is to be learned.

    python data_prep/sft.py --input chat.jsonl.gz folder/ --tokenizer-model HF_FOLDER --seq-length 2048 \\
        --output-prefix datasets/chat/chat

Writes datasets/chat/chat_sft.bin, .idx (tokens, one sequence an example), chat_sft_mask.bin, .idx (1 where a token is
to be learned) and, as the sign that all is complete, .json beside both. Killed at any moment, the same command goes on
where it was. docs/guides/data/sft_data.md has the formats, the templates and what counts as a bad record.
"""

import os
import sys

if __package__ in (None, ""):  # run as a script: this folder holds inspect.py, which must not hide Python's own
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from data_prep.lib.job import RunOptions, add_run_flags
from data_prep.lib.records import FORMATS
from data_prep.lib.sets import ExampleOptions, find_record_files, make_sft_set
from data_prep.lib.sources import PARTS, split_lines
from megatron_llama.config.settings import CHAT_TEMPLATES, LABEL_TEMPLATES
from megatron_llama.system.errors import UserError, run_main


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    result = argparse.ArgumentParser(
        prog="sft.py",
        description=(__doc__ or "").partition("\n\n")[0],
        epilog="docs/guides/data/sft_data.md has the formats, the templates, and what counts as a bad record.",
    )
    data = result.add_argument_group("input")
    data.add_argument("--input", nargs="+", required=True, metavar="PATH", help="files, folders, patterns; - is stdin")
    data.add_argument("--format", choices=FORMATS, default="auto", help="default: by each record's keys, and .tsv")
    data.add_argument("--template", choices=LABEL_TEMPLATES, help="how a labelled table's lines are asked")
    data.add_argument("--split", metavar="N,M", help="N lines for training and M for validation, drawn by --seed")
    data.add_argument("--seed", type=int, default=1234, help="of --split (default 1234)")
    example = result.add_argument_group("examples")
    example.add_argument("--tokenizer-model", required=True, metavar="PATH", help=".model file, or Hugging Face folder")
    example.add_argument("--chat-template", choices=CHAT_TEMPLATES, default="own", help="default: the tokenizer's own")
    example.add_argument("--seq-length", type=int, required=True, help="tokens of a training sequence")
    example.add_argument(
        "--too-long", choices=["bad", "truncate"], default="bad", help="what is longer is a bad line, or cut"
    )
    example.add_argument("--train-on-inputs", action="store_true", help="loss on all tokens, not on answers alone")
    example.add_argument(
        "--add-bos",
        action=argparse.BooleanOptionalAction,
        help="begin a named template's examples with the begin-of-text token (default: where the tokenizer does)",
    )
    output = result.add_argument_group("output and run")
    add_run_flags(data, output, "PATH_sft.bin ...")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    args = parser().parse_args(arguments)
    examples = ExampleOptions(**{one.name: getattr(args, one.name) for one in fields(ExampleOptions)})
    options = RunOptions.of(args)
    if args.split is None:
        make_sft_set(args.input, examples, options, print)
        return 0
    sizes = args.split.split(",")
    if len(sizes) != 2 or not all(size.strip().isdecimal() and int(size) > 0 for size in sizes):
        raise UserError(f"--split {args.split}: write two numbers of lines, such as 4463,1000")
    sources = find_record_files(args.input, examples, print).sources
    tables = {examples.is_table(source) for source in sources}
    if len(tables) > 1:
        raise UserError("--split: the input mixes tables and records")
    paths = split_lines(sources, [*map(int, sizes)], Path(args.output_prefix), tables.pop(), args.seed)
    for part, path in zip(PARTS, paths, strict=True):
        make_sft_set([str(path)], examples, replace(options, output_prefix=f"{args.output_prefix}_{part}"), print)
    return 0


if __name__ == "__main__":
    run_main(main)
