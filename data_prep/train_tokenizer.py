"""Train a sentencepiece tokenizer with Llama 2's settings.

    python data_prep/train_tokenizer.py --input data/*.jsonl --vocab-size 4096 --model-prefix data/tokenizer

BPE with byte fallback, identity normalization, split digits and whitespace-only pieces; <unk> 0, <s> 1, </s> 2.
Writes PREFIX.model and PREFIX.vocab. Training is deterministic.
"""

import os
import sys

if __package__ in (None, ""):  # run as a script: keep inspect.py in this folder from hiding the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

    import megatron_llama  # noqa: F401  (ends the program at Ctrl-C while it imports the rest)

import argparse
import io
import json
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from data_prep.lib.find_inputs import detect_keys, find_sources
from data_prep.lib.input_readers import Source, read_lines
from data_prep.lib.next_command import next_command
from megatron_llama.system.errors import UserError, run_main
from megatron_llama.system.files import write_atomically
from megatron_llama.system.interrupts import leave
from megatron_llama.system.rerun_command import ArgumentParser
from megatron_llama.system.signals import run_in_thread

# sentencepiece drops longer sentences, so sample_sentences cuts them.
MAX_SENTENCE_BYTES = 4192
BYTE_AND_CONTROL_PIECES = 256 + 3


def texts(sources: Sequence[Source], keys: Sequence[str], skipped: Counter[str]) -> Iterator[str]:
    """Yield the texts of each record; count records without text in ``skipped``, by the path of the file."""
    for source in sources:
        for line in read_lines(source):
            if source.is_text:
                yield line.decode("utf-8", "ignore")
                continue
            try:
                record = json.loads(line) if line.strip() else {}
            except (ValueError, RecursionError):
                record = None
            values = [record.get(key) for key in keys] if isinstance(record, dict) else []
            strings = [text for text in values if isinstance(text, str)]
            skipped[source.path] += bool(line.strip()) and not strings
            for text in strings:
                yield text.encode("utf-8", "ignore").decode("utf-8")


def sample_sentences(documents: Iterator[str], available: int, sample_bytes: int) -> Iterator[str]:
    """Yield lines of evenly spaced documents, about ``sample_bytes`` of ``available`` bytes. Deterministic.

    Raises UserError if all documents are empty.
    """
    share = min(1.0, sample_bytes / max(1, available))
    taken = offered = 0.0
    for text in documents:
        offered += len(text)
        if taken > offered * share:
            continue
        taken += len(text)
        for line in text.split("\n"):
            # A UTF-8 character has at most 4 bytes.
            for start in range(0, len(line), MAX_SENTENCE_BYTES // 4):
                sentence = line[start : start + MAX_SENTENCE_BYTES // 4].replace("\0", "")
                if sentence:
                    yield sentence
    if not taken:
        raise UserError("the input has no text. Write .txt files, or JSON records with the key of --json-keys")


def train(sentences: Iterator[str], vocab_size: int) -> bytes:
    """Train a tokenizer; return the serialized model.

    Raises UserError if the text is too short or too uniform for ``vocab_size``.
    """
    import sentencepiece

    model = io.BytesIO()
    input_errors: list[Exception] = []  # an exception in the iterator loses its type in sentencepiece's C++ code

    def guarded() -> Iterator[str]:
        try:
            yield from sentences
        except Exception as error:
            input_errors.append(error)
            raise

    work = partial(
        sentencepiece.SentencePieceTrainer.train,
        sentence_iterator=guarded(),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=True,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        byte_fallback=True,
        character_coverage=0.99995,
        max_sentence_length=MAX_SENTENCE_BYTES,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        unk_surface=" \u2047 ",
        num_threads=1,  # the model stores this number, which would change its sha256
        minloglevel=2,
    )
    try:
        run_in_thread("sentencepiece", work).result()
    except KeyboardInterrupt:  # not for exit handlers to wait for the thread
        leave(signal.SIGINT, None)
    except (RuntimeError, OSError) as error:
        if input_errors:
            raise input_errors[0] from None
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else "no reason given"
        if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", reason):
            raise UserError(
                f"--vocab-size {vocab_size} is too small for the characters of this text: write --vocab-size "
                f"{least[1]} or more. Each character is a token; rare ones are written as bytes"
            ) from None
        if most := re.search(r"set it to a value <= (\d+)", reason):
            raise UserError(
                f"--vocab-size {vocab_size} is too large for this text: write --vocab-size {most[1]} or less, "
                "or add text"
            ) from None
        raise UserError(f"sentencepiece cannot train --vocab-size {vocab_size} on this text: {reason}") from None
    return model.getvalue()


def write_model(model: bytes, prefix: Path) -> int:
    """Write PREFIX.vocab, then PREFIX.model; return the vocabulary size."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    size = int(processor.vocab_size())
    lines = [f"{processor.id_to_piece(index)}\t{processor.get_score(index):g}\n" for index in range(size)]
    write_atomically(prefix.with_name(prefix.name + ".vocab"), "".join(lines))
    write_atomically(prefix.with_name(prefix.name + ".model"), model)
    return size


def _preprocess_words(args: argparse.Namespace) -> list[str]:
    """Return the flags with which preprocess.py tokenizes the same input."""
    prefix: Path = args.model_prefix
    name = prefix.name if "tokenizer" not in prefix.name else prefix.absolute().parent.name or "data"
    keys = [] if args.json_keys is None else ["--json-keys", *args.json_keys]
    words = ["--input", *args.input, *keys, "--tokenizer-model", f"{prefix}.model", "--append-eod"]
    return [*words, "--output-prefix", str(prefix.with_name(name))]


def main() -> int:
    """Run the command line; return the exit status."""
    parser = ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add(
        "--input", nargs="+", required=True, metavar="PATH", help="files, folders or glob patterns, as in preprocess.py"
    )
    add("--json-keys", nargs="+", metavar="KEY", help="JSON keys of the text (default: text, raw_content or content)")
    add("--vocab-size", type=int, default=32000, help="vocabulary size (default 32000)")
    add("--model-prefix", type=Path, required=True, help="writes PREFIX.model and PREFIX.vocab")
    add("--sample-mib", type=float, default=64.0, help="MiB of text to sample (default 64)")
    args = parser.parse_args()
    if args.vocab_size <= BYTE_AND_CONTROL_PIECES:
        raise UserError(
            f"--vocab-size must be above {BYTE_AND_CONTROL_PIECES}: 256 bytes and <unk>, <s>, </s> are included"
        )
    if args.sample_mib <= 0:
        raise UserError("--sample-mib must be above 0")
    start = time.monotonic()
    inputs = find_sources(args.input)
    for note in inputs.notes():
        sys.stderr.write(f"note: {note}\n")
    sources = inputs.sources
    # Compressed files and Parquet unpack to about three times their size on disk.
    available = sum(source.size * (3 if source.compression or source.kind == "parquet" else 1) for source in sources)
    keys, skipped = args.json_keys or detect_keys(sources), Counter[str]()
    sentences = sample_sentences(texts(sources, keys, skipped), available, int(args.sample_mib * 2**20))
    size = write_model(train(sentences, args.vocab_size), args.model_prefix)
    for path, count in skipped.items():
        if count:
            sys.stderr.write(f"note: {path}: {count:,} records without text under {', '.join(keys)} are ignored\n")
    print(f"{args.model_prefix}.model: vocabulary of {size:,}, {time.monotonic() - start:.1f} s")
    if "-" not in args.input:  # a pipe can be read only once
        print(next_command("data_prep/preprocess.py", _preprocess_words(args)))
    return 0


if __name__ == "__main__":
    run_main(main)
