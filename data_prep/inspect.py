"""Shows what is in an indexed dataset, and checks that it is whole.

    python data_prep/inspect.py datasets/book_text_document --document 0

Prints counts, a histogram of document lengths and one document decoded. Every length, pointer, index, token id and hash
is checked; exit status 2 where something is wrong.
"""

import os
import sys

if __package__ in (None, ""):  # run as a script: this folder holds inspect.py, which must not hide Python's own
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron_llama.system.errors import UserError, run_main

if TYPE_CHECKING:
    from megatron_llama.corpus.indexed_format import IndexedDataset

BAR = 40
SHOWN_CHARACTERS = 1000


def counts(dataset: "IndexedDataset", manifest: dict[str, Any] | None) -> Iterator[str]:
    """What there is, in a few lines."""
    import numpy as np

    lengths = dataset.index.lengths
    empty = len(dataset) - int(np.count_nonzero(np.diff(dataset.index.document_indices)))
    tokens = f"{len(dataset.tokens):,} {dataset.index.dtype} tokens"
    yield f"{dataset.prefix}: {len(dataset):,} documents ({empty:,} empty), {tokens}"
    if manifest:
        read, skipped = manifest["documents_read"], manifest["documents_skipped"]
        yield f"read {read:,} = {manifest['documents_written']:,} written + {empty:,} empty + {skipped:,} skipped"
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in manifest["skipped"].items())
        if reasons:
            yield f"skipped: {reasons}; kept in {manifest['quarantine']}"
        sha256 = manifest["tokenizer_sha256"][:12]
        yield f"tokenizer {manifest['tokenizer']} ({manifest['vocab_size']:,} pieces, sha256 {sha256}...)"
    if len(lengths):
        middle = f"median {int(np.median(lengths)):,}, mean {lengths.mean():,.1f}"
        yield f"tokens a sequence: {lengths.min():,} to {lengths.max():,}, {middle}"


def histogram(dataset: "IndexedDataset") -> Iterator[str]:
    """How many sequences have how many tokens, in powers of two."""
    import numpy as np

    if not len(dataset.index.lengths):
        return
    powers = np.floor(np.log2(np.maximum(dataset.index.lengths, 1))).astype(int)
    numbers = np.bincount(powers)
    for power in range(int(powers.min()), len(numbers)):
        bar = "#" * int(np.ceil(BAR * numbers[power] / numbers.max()))
        yield f"{2**power:>10,} to {2 ** (power + 1) - 1:>10,}  {numbers[power]:>12,}  {bar}"


def decoded(
    dataset: "IndexedDataset", manifest: dict[str, Any] | None, number: int, model: str | None, characters: int
) -> Iterator[str]:
    """One document as text, where its tokenizer is at hand, else as ids.

    Raises:
        UserError: there is no such document, or the tokenizer is not the one that the manifest names.
    """
    ids = dataset.document(number).tolist()
    yield f"document {number}: {len(ids):,} tokens, ids {' '.join(map(str, ids[:12]))}{' ...' if len(ids) > 12 else ''}"
    path = model or (manifest or {}).get("tokenizer")
    if not path or (not model and not os.path.exists(path)):
        yield "(no tokenizer at hand to decode it: name one with --tokenizer-model)"
        return
    from data_prep.lib.encoders import load_encoder
    from megatron_llama.config.hf_config import resolve_hub_name

    library = (manifest or {}).get("options", {}).get("tokenizer_library", "sentencepiece")
    path = resolve_hub_name(path)
    tokenizer = load_encoder(library, path, "sentencepiece" if library == "sentencepiece" else "auto").tokenizer
    if manifest and manifest["tokenizer_sha256"] != tokenizer.sha256:
        raise UserError(f"{path} is not the tokenizer that made the dataset: its sha256 is {tokenizer.sha256[:12]}")
    if ids and max(ids) >= tokenizer.size:
        raise UserError(f"{path} has {tokenizer.size} pieces and the document holds id {max(ids)}: not its tokenizer")
    text = tokenizer.decode(ids[:-1] if ids and ids[-1] == tokenizer.end else ids, skip_special=False)
    yield text[:characters] + ("..." if len(text) > characters else "")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("prefix", help="the dataset's path, with or without .bin or .idx")
    parser.add_argument("--document", type=int, default=0, metavar="N", help="decode the N-th document (default 0)")
    parser.add_argument("--tokenizer-model", help="default: the one that the manifest names")
    parser.add_argument("--characters", type=int, default=SHOWN_CHARACTERS, help="of the document (default 1000)")
    parser.add_argument("--no-hashes", action="store_true", help="leave out the sha256, the slowest of the checks")
    args = parser.parse_args()
    from data_prep.lib.dataset import problems, read_manifest
    from megatron_llama.corpus.indexed_format import IndexedDataset

    dataset = IndexedDataset(args.prefix)
    manifest = read_manifest(dataset.prefix)
    for line in [*counts(dataset, manifest), *histogram(dataset)]:
        print(line)
    wrong = list(problems(dataset, manifest, check_hashes=not args.no_hashes))
    if wrong:
        raise UserError(f"{dataset.prefix} is damaged: " + "; ".join(wrong))
    print("whole: header, sizes, lengths, pointers, document indices" + (", ids, manifest" if manifest else ""))
    if len(dataset):
        for line in decoded(dataset, manifest, args.document, args.tokenizer_model, args.characters):
            print(line)
    return 0


if __name__ == "__main__":
    run_main(main)
