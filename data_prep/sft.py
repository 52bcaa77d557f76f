"""Conversations, pairs and labelled tables to a fine-tuning set: tokens, and masks of what is to be learned.

    python data_prep/sft.py --input chat.jsonl.gz folder/ --tokenizer-model HF_FOLDER --seq-length 2048 \\
        --output-prefix datasets/chat/chat

Writes datasets/chat/chat_sft.bin, .idx (tokens, one sequence an example), chat_sft_mask.bin, .idx (1 where a token is
to be learned) and, as the sign that all is complete, .json beside both. Killed at any moment, the same command goes on
where it was. docs/sft_data.md has the formats, the templates and what counts as a bad record.
"""

import os
import sys

if __package__ in (None, ""):  # run as a script: this folder holds inspect.py, which must not hide Python's own
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.preprocess import cores
from megatron_llama.system.errors import UserError, run_main

if TYPE_CHECKING:
    from data_prep.lib.encode_examples import Chat
    from data_prep.lib.sources import Source
    from megatron_llama.text.chat_tokenizer import ChatTokenizer

FORMATS = ("auto", "messages", "sharegpt", "prompt_completion", "preference", "alpaca", "gsm8k", "tsv")
CHAT_TEMPLATES = ("own", "chatml", "prompter", "dialogue", "plain")
LABEL_TEMPLATES = ("qnli", "sst2")
KEYS = ("sft", "sft_mask")
SUFFIXES = (".tsv",)
CHATML_END = "<|im_end|>"


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    result = argparse.ArgumentParser(
        prog="sft.py",
        description=(__doc__ or "").partition("\n\n")[0],
        epilog="docs/sft_data.md has the formats, the templates, and what counts as a bad record.",
    )
    data = result.add_argument_group("input")
    data.add_argument("--input", nargs="+", required=True, metavar="PATH", help="files, folders, patterns; .gz, .zst")
    data.add_argument("--format", choices=FORMATS, default="auto", help="default: by each record's keys, and .tsv")
    data.add_argument("--template", choices=LABEL_TEMPLATES, help="how a labelled table's lines are asked")
    data.add_argument("--split", metavar="N,M", help="N lines for training and M for validation, drawn by --seed")
    data.add_argument("--seed", type=int, default=1234, help="of --split (default 1234)")
    data.add_argument("--on-bad-line", choices=["error", "skip"], default="error", help="default: error")
    data.add_argument("--max-line-mib", type=float, default=64, help="a longer line is a bad line (default 64)")
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
    output.add_argument("--output-prefix", required=True, metavar="PATH", help="writes PATH_sft.bin ...")
    output.add_argument("--workers", type=int, default=cores(), help="processes (default: one a core)")
    output.add_argument("--overwrite", action="store_true", help="replace an output made with other options")
    output.add_argument("--checkpoint-seconds", type=float, default=5.0, help="work that a kill may cost (default 5)")
    return result


def check(args: argparse.Namespace) -> list[int]:
    """The sizes of --split, none where there is none; raises UserError for values that can't work."""
    if args.workers < 1:
        raise UserError(f"--workers must be at least 1, not {args.workers}")
    if args.max_line_mib <= 0:
        raise UserError("--max-line-mib must be above 0")
    if args.seq_length < 1:
        raise UserError("--seq-length must be at least 1")
    if args.checkpoint_seconds < 0:
        raise UserError("--checkpoint-seconds must not be negative")
    if os.path.basename(args.output_prefix) in ("", ".", ".."):
        raise UserError(f"--output-prefix {args.output_prefix}: it must end in a name, not in a folder")
    if args.split is None:
        return []
    sizes = args.split.split(",")
    if len(sizes) != 2 or not all(size.strip().isdecimal() and int(size) > 0 for size in sizes):
        raise UserError(f"--split {args.split}: write two numbers of lines, such as 4463,1000")
    return [int(size) for size in sizes]


def is_table(source: "Source", args: argparse.Namespace) -> bool:
    """Whether a file is a table with a header, rather than one record a line."""
    from data_prep.lib.sources import bare_name

    return args.format == "tsv" or (args.format == "auto" and bare_name(source.path).endswith(SUFFIXES))


def sources_of(inputs: Sequence[str], args: argparse.Namespace, say: Callable[[str], None]) -> list["Source"]:
    """The input's files. Raises UserError."""
    from data_prep.lib.sources import find_sources, with_array

    left_out: list[str] = []
    sources = find_sources(inputs, text_suffixes=(), left_out=left_out, arrays=True)
    for path in left_out:
        say(f"{path} is left out: it is one JSON value, and no list of records")
    return [source if is_table(source, args) else with_array(source) for source in sources]


def columns_of(sources: Sequence["Source"], args: argparse.Namespace) -> dict[int, list[str]]:
    """The header of each source that is a table.

    Raises:
        UserError: no template is named for it, or it lacks one of its columns.
    """
    import re

    from data_prep.lib.split_lines import header_of
    from megatron_llama.text.conversation import LABELLED

    found = {}
    for number, source in enumerate(sources):
        if not is_table(source, args):
            continue
        if args.template is None:
            raise UserError(f"{source.path} is a table: say with --template how it is asked ({', '.join(LABELLED)})")
        found[number] = header_of(source).decode("utf-8", "replace").split("\t")
        template = LABELLED[args.template]
        missing = [
            name for name in [*re.findall(r"{(\w+)}", template.prompt), template.label] if name not in found[number]
        ]
        if missing:
            raise UserError(f"{source.path} has no column {missing[0]}; it has {', '.join(found[number])[:200]}")
    return found


def chat_of(args: argparse.Namespace, sources: Sequence["Source"]) -> "Chat":
    """How the command line says that records become examples.

    Raises:
        UserError: tokenizer and template don't fit, or a table's template is missing.
    """
    from data_prep.lib.encode_examples import Chat
    from megatron_llama.text.chat_template import NAMED, own_template
    from megatron_llama.text.chat_tokenizer import load_chat_tokenizer
    from megatron_llama.text.conversation import LABELLED

    own = args.chat_template == "own"
    tokenizer = load_chat_tokenizer(args.tokenizer_model, own)
    if own:
        folder = Path(args.tokenizer_model)
        jinja = own_template(folder if folder.is_dir() else folder.parent, tokenizer.added_tokens)
        pieces, source = jinja.pieces, jinja.source
    else:
        named = NAMED[args.chat_template]
        pieces, source = named.pieces, repr(named)
        _check_end(tokenizer, args)
    if args.add_bos and own:
        raise UserError("--add-bos is for named templates; the tokenizer's own writes its begin-of-text token itself")
    if args.add_bos and tokenizer.bos is None:
        raise UserError(f"--add-bos: {args.tokenizer_model} has no begin-of-text token")
    add_bos = bool(tokenizer.adds_bos and not own if args.add_bos is None else args.add_bos)
    names = ("format", "template", "chat_template", "seq_length", "too_long", "train_on_inputs")
    options = {**{name: getattr(args, name) for name in names}, "add_bos": add_bos}
    return Chat(
        tokenizer=tokenizer,
        pieces=pieces,
        format=args.format if args.format != "tsv" else "auto",
        labelled=LABELLED[args.template] if args.template else None,
        columns=columns_of(sources, args),
        max_tokens=args.seq_length + 1,  # the last token is only a label
        truncate=args.too_long == "truncate",
        train_on_inputs=args.train_on_inputs,
        add_bos=add_bos,
        own_template=own,
        options={**options, "chat_template_sha256": hashlib.sha256(source.encode()).hexdigest()},
    )


def _check_end(tokenizer: "ChatTokenizer", args: argparse.Namespace) -> None:
    """A model that never learns to end an answer never ends one."""
    if args.chat_template == "chatml" and tokenizer.control(CHATML_END) is None:
        raise UserError(
            f"{args.tokenizer_model} has no token {CHATML_END}, with which --chat-template chatml ends an answer: "
            "the model would not stop. Write prompter, dialogue or plain"
        )
    if tokenizer.encoder.eod is None and args.chat_template != "chatml":
        raise UserError(f"{args.tokenizer_model} has no end-of-text token, with which --chat-template ends an answer")


def prepare(
    args: argparse.Namespace, inputs: Sequence[str], prefix: str, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Makes one set; returns the manifest of its tokens.

    Raises:
        UserError, MachineError, Stopped: as their names say.
    """
    from data_prep.lib.encode_text import Job
    from data_prep.lib.encoding_run import Options
    from data_prep.lib.make_dataset import make_dataset

    sources = sources_of(inputs, args, say)
    chat = chat_of(args, sources)
    options = Options(
        job=Job(sources, KEYS, append_eod=False, max_line=int(args.max_line_mib * 2**20)),
        output_prefix=prefix,
        workers=args.workers,
        skip_bad_lines=args.on_bad_line == "skip",
        overwrite=args.overwrite,
        checkpoint_seconds=args.checkpoint_seconds,
        chat=chat,
    )
    return make_dataset(options, chat.tokenizer.encoder, say)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    args = parser().parse_args(arguments)
    sizes = check(args)
    if not sizes:
        prepare(args, args.input, args.output_prefix)
        return 0
    from data_prep.lib.split_lines import PARTS, split_lines

    sources = sources_of(args.input, args, print)
    tables = {is_table(source, args) for source in sources}
    if len(tables) > 1:
        raise UserError("--split: the input mixes tables and records")
    paths = split_lines(sources, sizes, Path(args.output_prefix), tables.pop(), args.seed)
    for part, path in zip(PARTS, paths, strict=True):
        prepare(args, [str(path)], f"{args.output_prefix}_{part}")
    return 0


if __name__ == "__main__":
    run_main(main)
