"""Show and verify an indexed dataset.

    python data_prep/inspect.py corpora/book_text_document --document 0

Prints counts, a histogram of sequence lengths and one decoded document. Checks all lengths, pointers, indices, token
ids and hashes; the exit status is 2 if a check fails.
"""

import os
import sys

if __package__ in (None, ""):  # run as a script: keep inspect.py in this folder from hiding the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

    import megatron_llama  # noqa: F401  (ends the program at Ctrl-C while it imports the rest)

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron_llama.system.errors import UserError, run_main
from megatron_llama.system.rerun_command import ArgumentParser

if TYPE_CHECKING:
    from megatron_llama.corpus.indexed_format import IndexedDataset

BAR = 40
SHOWN_CHARACTERS = 1000


def counts(dataset: "IndexedDataset", manifest: dict[str, Any] | None) -> Iterator[str]:
    """Yield lines with the counts of documents and tokens."""
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
            yield f"skipped: {reasons}; saved in {manifest['quarantine']}"
        sha256 = manifest["tokenizer_sha256"][:12]
        yield f"tokenizer {manifest['tokenizer']} (vocabulary of {manifest['vocab_size']:,}, sha256 {sha256}...)"
    if len(lengths):
        middle = f"median {int(np.median(lengths)):,}, mean {lengths.mean():,.1f}"
        yield f"tokens per sequence: {lengths.min():,} to {lengths.max():,}, {middle}"


def histogram(dataset: "IndexedDataset") -> Iterator[str]:
    """Yield the lines of a histogram of sequence lengths, in powers of two."""
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
    """Yield a document's ids, and its text if the tokenizer is available.

    Raises UserError if the document does not exist, or the tokenizer differs from the manifest's.
    """
    ids = dataset.document(number).tolist()
    yield f"document {number}: {len(ids):,} tokens, ids {' '.join(map(str, ids[:12]))}{' ...' if len(ids) > 12 else ''}"
    path = model or (manifest or {}).get("tokenizer")
    if not path or (not model and not os.path.exists(path)):
        yield "(no tokenizer to decode it: write --tokenizer-model PATH)"
        return
    from data_prep.lib.tokenizer_backends import load_encoder
    from megatron_llama.config.data_settings import NewTokens
    from megatron_llama.config.hub import resolve_hub_name

    options = (manifest or {}).get("options", {})
    library, new_tokens = options.get("tokenizer_library", "sentencepiece"), NewTokens.of(options)
    path = resolve_hub_name(path)
    choice = "sentencepiece" if library == "sentencepiece" else "auto"
    tokenizer = load_encoder(library, path, choice, new_tokens=new_tokens).tokenizer
    if manifest and manifest["tokenizer_sha256"] != tokenizer.sha256:
        raise UserError(
            f"{path} (sha256 {tokenizer.sha256[:12]}) is not the tokenizer of this dataset; see its manifest"
        )
    if ids and max(ids) >= tokenizer.size:
        raise UserError(
            f"{path} is not the tokenizer of this dataset: id {max(ids)} exceeds its vocabulary of {tokenizer.size}"
        )
    text = tokenizer.decode(ids[:-1] if ids and ids[-1] == tokenizer.end else ids, skip_special=False)
    yield text[:characters] + ("..." if len(text) > characters else "")


def main() -> int:
    """Run the command line; return the exit status."""
    parser = ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("prefix", help="dataset path, with or without .bin or .idx")
    add("--document", type=int, default=0, metavar="N", help="document to decode, counted from 0 (default 0)")
    add("--tokenizer-model", metavar="PATH", help="default: the tokenizer in the manifest")
    text = "characters of the document to print (default 1000)"
    add("--characters", type=int, default=SHOWN_CHARACTERS, metavar="N", help=text)
    add("--no-hashes", action="store_true", help="skip the sha256 checks, which are the slowest")
    args = parser.parse_args()
    from data_prep.lib.output_files import find_problems, open_local, read_manifest

    dataset = open_local(args.prefix)
    manifest = read_manifest(dataset.prefix)
    for line in [*counts(dataset, manifest), *histogram(dataset)]:
        print(line)
    errors = list(find_problems(dataset, manifest, check_hashes=not args.no_hashes))
    if errors:
        raise UserError(f"{dataset.prefix} is damaged: " + "; ".join(errors))
    print("verified: header, sizes, lengths, pointers, document indices" + (", ids, manifest" if manifest else ""))
    if len(dataset):
        for line in decoded(dataset, manifest, args.document, args.tokenizer_model, args.characters):
            print(line)
    return 0


if __name__ == "__main__":
    run_main(main)
