"""Tokenize conversations, prompt-answer pairs and labelled tables into a fine-tuning dataset with loss masks.

    python data_prep/sft.py --input chat.jsonl.gz folder/ --tokenizer-model HF_FOLDER --seq-length 2048 \\
        --output-prefix corpora/chat/chat

Writes corpora/chat/chat_sft.bin and .idx (tokens, one sequence per example), chat_sft_mask.bin and .idx (1 where a
token has loss), and last the .json manifests. Rerun the same command to resume an interrupted run.
"""

import os
import sys

if __package__ in (None, ""):  # run as a script: keep inspect.py in this folder from hiding the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

    import megatron_llama  # noqa: F401  (ends the program at Ctrl-C while it imports the rest)

import argparse
import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from data_prep.lib.input_readers import PARTS, split_lines
from data_prep.lib.next_command import next_training
from data_prep.lib.record_formats import FORMATS
from data_prep.lib.run_options import RunOptions, add_run_flags, add_token_flags, collect, parser_with_input, reject
from data_prep.lib.sft_and_text_sets import ExampleOptions, find_record_files, make_sft_set
from megatron_llama.config.settings import CHAT_TEMPLATES, LABEL_TEMPLATES
from megatron_llama.system.errors import UserError, run_main
from megatron_llama.system.object_store import hide_credentials, is_url


def parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    result, data = parser_with_input(__doc__, "Formats, templates and bad records: docs/guides/data/sft_data.md")
    add = data.add_argument
    add("--format", choices=FORMATS, default="auto", help="record format (default auto: detected from keys and suffix)")
    add("--template", choices=LABEL_TEMPLATES, help="prompt template of labelled rows (.tsv, CSV, Parquet, JSON)")
    add("--split", metavar="N,M", help="draw N lines for training and M for validation")
    add("--seed", type=int, default=1234, help="seed of --split (default 1234)")
    example = result.add_argument_group("examples")
    add = example.add_argument
    add("--tokenizer-model", required=True, metavar="PATH", help=".model file or Hugging Face folder")
    add_token_flags(example)
    names = f"{', '.join(CHAT_TEMPLATES)} or FILE.jinja (default own: the tokenizer's)"
    add("--chat-template", default="own", metavar="NAME", help=names)
    add("--chat-template-kwargs", type=json_object, default={}, metavar="JSON", help="variables of a Jinja template")
    add("--response-marker", metavar="TEXT", help="--format text: loss only after this text's last occurrence")
    add("--seq-length", type=int, required=True, help="tokens per training sequence")
    text = "longer examples are bad records or are truncated (default bad)"
    add("--too-long", choices=["bad", "truncate"], default="bad", help=text)
    add("--train-on-inputs", action="store_true", help="compute the loss on all tokens, not only on answers")
    text = "begin a named template's examples with the begin-of-text token (default: as the tokenizer does)"
    add("--add-bos", action=argparse.BooleanOptionalAction, help=text)
    add_run_flags(data, result.add_argument_group("output and run"), "PATH_sft.bin ...")
    return result


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object of the command line."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"""write a JSON object, such as '{{"enable_thinking": false}}', not {text}""")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = parser().parse_args(arguments)
    problems: list[str] = []
    examples = collect(problems, lambda: ExampleOptions(**{f.name: vars(args)[f.name] for f in fields(ExampleOptions)}))
    options = collect(problems, lambda: RunOptions.of(args))
    sizes = [] if args.split is None else args.split.split(",")
    if sizes and (len(sizes) != 2 or not all(size.strip().isdecimal() and int(size) > 0 for size in sizes)):
        problems.append(f"--split {args.split}: write two line counts, such as 4463,1000")
    if sizes and is_url(args.output_prefix):
        problems.append(f"--split needs a local --output-prefix, not {hide_credentials(args.output_prefix)}")
    reject(problems)
    assert examples is not None and options is not None, "otherwise there are problems"
    if args.split is None:
        if make_sft_set(args.input, examples, options, print) is not None:
            _print_next(options.output_prefix, examples)
        return 0
    sources = find_record_files(args.input, examples, print).sources
    tables = {examples.is_table(source) for source in sources}
    if len(tables) > 1:
        raise UserError("--split: the input mixes tables and JSON records; prepare them separately")
    paths = split_lines(sources, [*map(int, sizes)], Path(args.output_prefix), tables.pop(), args.seed)
    parts = [replace(options, output_prefix=f"{args.output_prefix}_{part}") for part in PARTS]
    made = [
        make_sft_set([str(path)], examples, part, print) is not None for part, path in zip(parts, paths, strict=True)
    ]
    if all(made):
        _print_next(parts[0].output_prefix, examples)
    return 0


def _print_next(output_prefix: str, examples: ExampleOptions) -> None:
    """Print the command that fine-tunes on a dataset. It finds the validation part by its name."""
    model, length, format = examples.tokenizer_model, examples.seq_length, examples.format
    if command := next_training([f"{output_prefix}_sft"], model, length, format):
        print(command)


if __name__ == "__main__":
    run_main(main)
