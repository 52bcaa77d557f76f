"""JSONL (plain, .gz, .zst), text folders and OSCAR to Megatron's indexed datasets.

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
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_llama.system.errors import UserError, run_main

if TYPE_CHECKING:
    from data_prep.lib.encoding_run import Options
    from megatron_llama.text.encoders import Encoder

# numpy and the encoders are imported where they are needed: --help answers at once.

SENTENCEPIECE_TYPES = ("sentencepiecetokenizer", "llama2tokenizer", "llama2", "gptsentencepiecetokenizer")
HUGGINGFACE_TYPES = ("huggingfacetokenizer", "huggingface")
TIKTOKEN_TYPES = ("tiktokenizer", "tiktoken", "llama3")


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    result = argparse.ArgumentParser(
        prog="preprocess.py",
        description=(__doc__ or "").partition("\n\n")[0],
        epilog="docs/data.md has the formats, what counts as a bad line, and what happens on every kind of failure.",
    )
    data = result.add_argument_group("input")
    data.add_argument("--input", nargs="+", required=True, metavar="PATH", help="files, folders, patterns; .gz, .zst")
    data.add_argument(
        "--json-keys", nargs="+", metavar="KEY", help="a dataset for each (default: text; content for OSCAR's own)"
    )
    data.add_argument("--text-suffixes", nargs="+", default=[".txt"], metavar="S", help="files that are one document")
    data.add_argument("--on-bad-line", choices=["error", "skip"], default="error", help="default: error")
    data.add_argument("--max-line-mib", type=float, default=64, help="a longer line is a bad line (default 64)")
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
    output.add_argument("--output-prefix", required=True, metavar="PATH", help="writes PATH_KEY_document.bin ...")
    output.add_argument("--workers", type=int, default=cores(), help="processes (default: one a core)")
    output.add_argument("--overwrite", action="store_true", help="replace an output made with other options")
    output.add_argument("--checkpoint-seconds", type=float, default=5.0, help="work that a kill may cost (default 5)")
    output.add_argument("--block-mib", type=float, default=4.0, help="text that a worker takes at a time (default 4)")
    known = result.add_argument_group("known from Megatron and NeMo, without effect here")
    known.add_argument("--dataset-impl", choices=["mmap"], default="mmap", help="the only one there is")
    for flag in ("--log-interval", "--partitions", "--make-vocab-size-divisible-by", "--vocab-size"):
        known.add_argument(flag, type=int, help=argparse.SUPPRESS)
    for flag in ("--need-pad-id", "--keep-sequential-samples"):
        known.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    for flag in ("--split-sentences", "--prepend-bos", "--ftfy"):
        known.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    return result


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tokenizer_of(args: argparse.Namespace) -> tuple[str, str]:
    """(library, path) from the flags, as Megatron's or NeMo's users write them.

    Raises:
        UserError: none is named, or it is one that this program does not know.
    """
    kind, library, model = args.tokenizer_type or "", (args.tokenizer_library or "").lower(), args.tokenizer_model
    library = {"hf": "huggingface", "megatron": ""}.get(library, library)
    if kind and (os.path.exists(kind) or "/" in kind):
        # NeMo: --tokenizer-library huggingface --tokenizer-type FOLDER
        return library or "huggingface", kind
    if not library:
        lower = kind.lower()
        by_type = {
            **dict.fromkeys(SENTENCEPIECE_TYPES, "sentencepiece"),
            **dict.fromkeys(HUGGINGFACE_TYPES, "huggingface"),
            **dict.fromkeys(TIKTOKEN_TYPES, "tiktoken"),
        }
        if kind and lower not in by_type:
            raise UserError(f"--tokenizer-type {kind}: known are a Hugging Face folder, {', '.join(sorted(by_type))}")
        library = by_type.get(lower) or ("huggingface" if model and os.path.isdir(model) else "sentencepiece")
    if library not in ("sentencepiece", "huggingface", "tiktoken"):
        raise UserError(f"--tokenizer-library {library}: known are sentencepiece, huggingface, tiktoken")
    if not model:
        raise UserError("--tokenizer-model is missing: the tokenizer's .model file, or a Hugging Face folder")
    return library, model


def check(args: argparse.Namespace) -> None:
    """Raises UserError for values that can't work."""
    if args.workers < 1:
        raise UserError(f"--workers must be at least 1, not {args.workers}")
    if args.max_line_mib <= 0:
        raise UserError("--max-line-mib must be above 0")
    if not 2**-10 <= args.block_mib <= 256:
        raise UserError("--block-mib must be between 1/1024 and 256")
    if args.checkpoint_seconds < 0:
        raise UserError("--checkpoint-seconds must not be negative")
    if args.split_sentences:
        raise UserError("--split-sentences is for BERT; there are no sentences here, only documents")
    if args.prepend_bos or args.ftfy:
        raise UserError("--prepend-bos and --ftfy are not done here: text goes in as it is, documents end with EOD")
    for key in args.json_keys or []:
        if not re.fullmatch(r"[\w.\- ]+", key):
            raise UserError(f"--json-keys {key!r}: the key becomes part of a file name and must fit there")
    if len(set(args.json_keys or [])) != len(args.json_keys or []):
        raise UserError("--json-keys: a key is named twice")
    if os.path.basename(args.output_prefix) in ("", ".", ".."):
        raise UserError(f"--output-prefix {args.output_prefix}: it must end in a name, not in a folder")


def prepare(args: argparse.Namespace) -> tuple["Options", "Encoder"]:
    """Finds the input, loads and checks the tokenizer.

    Raises:
        UserError: something is missing or does not fit.
    """
    from data_prep.lib.encode_text import Job
    from data_prep.lib.encoding_run import Options
    from data_prep.lib.input_sample import detect_keys, sample_texts
    from data_prep.lib.sources import find_sources
    from megatron_llama.text.encoders import load_encoder

    check(args)
    library, model = tokenizer_of(args)
    left_out: list[str] = []
    sources = find_sources(args.input, args.text_suffixes, left_out)
    keys = args.json_keys or detect_keys(sources)
    encoder = load_encoder(library, model, args.encoder, sample_texts(sources, keys))
    encoder.notes += [f"{path} is left out: no records, it seems; to take it, name it" for path in left_out]
    if args.append_eod and encoder.eod is None:
        raise UserError(f"--append-eod: the tokenizer {model} has no end-of-text token")
    job = Job(sources, tuple(keys), args.append_eod, int(args.max_line_mib * 2**20))
    options = Options(
        job=job,
        output_prefix=args.output_prefix,
        workers=args.workers,
        skip_bad_lines=args.on_bad_line == "skip",
        overwrite=args.overwrite,
        checkpoint_seconds=args.checkpoint_seconds,
        block_bytes=int(args.block_mib * 2**20),
    )
    return options, encoder


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    args = parser().parse_args(arguments)
    from data_prep.lib.make_dataset import make_dataset

    options, encoder = prepare(args)
    for note in encoder.notes:
        print(f"note: {note}", file=sys.stderr)
    make_dataset(options, encoder, print)
    return 0


if __name__ == "__main__":
    run_main(main)
