"""JSONL to Megatron's indexed datasets."""

import os
import sys

if __package__ in (None, ""):  # run as a script: this folder holds inspect.py, which must not hide Python's own
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import json
from pathlib import Path

import numpy as np

from data_prep.lib.errors import UserError, run_main
from data_prep.lib.files import atomic_open, sha256_file
from data_prep.lib.indexed import token_dtype, write_index
from data_prep.lib.sources import find_sources, read_lines


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", nargs="+", required=True)
    parser.add_argument("--json-keys", nargs="+", default=["text"])
    parser.add_argument("--tokenizer-library", default="sentencepiece")
    parser.add_argument("--tokenizer-model", type=Path, required=True)
    parser.add_argument("--append-eod", action="store_true")
    parser.add_argument("--output-prefix", required=True)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    import sentencepiece

    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(args.tokenizer_model))
    dtype = token_dtype(tokenizer.vocab_size())
    out = Path(f"{args.output_prefix}_text_document")
    counts = {"documents_read": 0, "documents_written": 0, "documents_empty": 0, "documents_skipped": 0, "tokens": 0}
    lengths = []
    with atomic_open(out.with_name(out.name + ".bin")) as file:
        for source in find_sources(args.input):
            for line in read_lines(source):
                if not line.strip():
                    continue
                try:
                    ids = tokenizer.encode(json.loads(line)["text"])
                except (ValueError, KeyError, TypeError) as error:
                    raise UserError(f"{source.path}: {error}") from None
                if ids and args.append_eod:
                    ids.append(tokenizer.eos_id())
                counts["documents_read"] += 1
                counts["documents_written" if ids else "documents_empty"] += 1
                counts["tokens"] += len(ids)
                lengths.append(len(ids))
                file.write(np.array(ids, dtype=dtype).tobytes())
    draft = out.with_name(out.name + ".len")
    np.array(lengths, dtype="<i4").tofile(draft)
    with atomic_open(out.with_name(out.name + ".idx")) as file:
        write_index(file, draft, dtype)
    draft.unlink()
    with atomic_open(out.with_name(out.name + ".json")) as file:
        file.write(json.dumps({**counts, "skipped": {}, "tokenizer_sha256": sha256_file(args.tokenizer_model)}).encode())
    print(counts)
    return 0


if __name__ == "__main__":
    run_main(main)
