"""Files of a prepared dataset: move them from the work folder to their names; read the manifest; verify everything."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.lib.find_inputs import QUARANTINE_SUFFIX
from data_prep.lib.workspace import QUARANTINE, Ledger, Workspace
from megatron_llama.corpus.indexed_format import CHUNK, IndexedDataset, write_index
from megatron_llama.system.errors import UserError
from megatron_llama.system.files import read_json, sha256_file, sync_folder, write_atomically
from megatron_llama.system.object_store import is_url, location

SUFFIXES = (".bin", ".idx", ".json")


def write_outputs(
    workspace: Workspace, dtypes: Sequence[np.dtype], manifests: list[dict[str, Any]], ledger: Ledger
) -> None:
    """Add sizes and hashes to ``manifests``, write them and the indices, mark the journal complete, and publish."""
    for name, dtype, manifest in zip(workspace.names, dtypes, manifests, strict=True):
        index = workspace.folder / f"{name}.idx"
        with open(index, "wb") as file:
            sequences, tokens = write_index(file, workspace.folder / f"{name}.lengths", dtype)
            file.flush()
            os.fsync(file.fileno())
        size = (workspace.folder / f"{name}.bin").stat().st_size
        assert (sequences, tokens) == (manifest["documents_written"], manifest["tokens"])
        assert size == tokens * dtype.itemsize, f"{size} bytes of tokens, {tokens * dtype.itemsize} expected"
        manifest |= {
            "bytes": {".bin": size, ".idx": index.stat().st_size},
            "sha256": {".bin": workspace.sha256(f"{name}.bin"), ".idx": sha256_file(index)},
        }
        write_atomically(workspace.folder / f"{name}.json", json.dumps(manifest, indent=1) + "\n")
    workspace.checkpoint(ledger, publish=True)
    workspace.close()
    publish(workspace.folder, workspace.folder.parent, workspace.names)


def publish(work: Path, folder: Path, names: list[str]) -> None:
    """Move complete files to their final names. The call can be repeated after a crash.

    The manifest is removed first and written last, so a manifest implies that its files are complete.
    """
    for name in names:
        files = [f"{name}{suffix}" for suffix in SUFFIXES]
        if (work / files[-1]).exists():
            if (work / files[0]).exists():
                for file in reversed(files):
                    (folder / file).unlink(missing_ok=True)
            for file in files:
                if (work / file).exists():
                    os.replace(work / file, folder / file)
            sync_folder(folder)
    quarantine = work / QUARANTINE
    if quarantine.exists():
        final = quarantine_file(folder, names)
        if quarantine.stat().st_size:
            os.replace(quarantine, final)
        else:
            final.unlink(missing_ok=True)


def quarantine_file(folder: Path, names: list[str]) -> Path:
    """Return the path of the file with the skipped lines."""
    return folder / f"{names[0]}{QUARANTINE_SUFFIX}"


def read_finished(folder: Path, names: list[str]) -> dict[str, Any] | None:
    """Return the manifest of a complete output, or None if no file exists.

    Raises UserError if files exist that do not form a complete output.
    """
    manifests = []
    unexpected = []
    for name in names:
        files = [folder / f"{name}{suffix}" for suffix in SUFFIXES]
        existing = [path for path in files if path.exists()]
        if not existing:
            continue
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            manifest = json.loads(files[2].read_bytes())
            if all(path.stat().st_size == manifest["bytes"][path.suffix] for path in files[:2]):
                manifests.append(manifest)
                continue
        unexpected += [str(path) for path in existing]
    if unexpected or (manifests and len(manifests) < len(names)):
        raise UserError(
            f"{', '.join(unexpected) or folder}: not a complete output of this program. "
            "Move the files, or write --overwrite"
        )
    return manifests[0] if manifests else None


_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("documents_read", "documents_written", "documents_skipped", "vocab_size"), (int,)),
    **dict.fromkeys(("tokenizer", "tokenizer_sha256"), (str,)),
    **dict.fromkeys(("options", "skipped"), (dict,)),
    "eod": (int, type(None)),
}
"""Required keys of a manifest and their types."""


def read_manifest(prefix: str) -> dict[str, Any] | None:
    """Read PREFIX.json of preprocess.py or sft.py; return None if there is no manifest.

    Raises UserError if the manifest is damaged or unreadable.
    """
    try:
        manifest = read_json(location(prefix + ".json"))
        if not isinstance(manifest, dict):
            raise ValueError("not a JSON object")
        for name, kinds in _KINDS.items():
            if name not in manifest or type(manifest[name]) not in kinds:
                raise ValueError(f"{name} is {str(manifest.get(name, 'missing'))[:60]}")
        if not all(type(count) is int for count in manifest["skipped"].values()):
            raise ValueError("skipped has values that are not counts")
        if not isinstance(manifest.get("sha256", {}), dict):
            raise ValueError("sha256 is not an object")
        return manifest
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{prefix}.json is damaged: {error}") from None


def open_local(prefix: str) -> IndexedDataset:
    """Open a dataset for a tool that reads all of it. Raises UserError for an object store."""
    if is_url(prefix):
        raise UserError(f"{prefix} is in an object store: copy the dataset first")
    return IndexedDataset(prefix)


def find_problems(dataset: IndexedDataset, manifest: dict[str, Any] | None, check_hashes: bool) -> Iterator[str]:
    """Yield one message per error in a dataset. Reads the files once, in chunks."""
    index = dataset.index
    itemsize = index.dtype.itemsize
    end = 0
    for start in range(0, len(index.lengths), CHUNK):
        lengths = index.lengths[start : start + CHUNK].astype(np.int64)
        if (lengths <= 0).any():
            yield f"sequence {start + int(np.argmax(lengths <= 0))} has no tokens"
        sizes = lengths * itemsize
        wrong = index.pointers[start : start + CHUNK] != end + np.cumsum(sizes) - sizes
        if wrong.any():
            yield f"sequence {start + int(np.argmax(wrong))} does not start at the end of the previous one"
        end += int(sizes.sum())
    size = dataset.bin_size
    if end != size:
        yield f"{dataset.bin_path.name} has {size:,} bytes; the index requires {end:,}"
    indices = index.document_indices
    if not len(indices) or indices[0] != 0 or indices[-1] != len(index):
        yield "the document indices do not run from 0 to the number of sequences"
    for start in range(0, len(indices) - 1, CHUNK):
        if (np.diff(indices[start : start + CHUNK + 1]) < 0).any():
            yield "the document indices decrease"
            break
    if manifest is not None:
        vocab_size = manifest["vocab_size"]
        for start in range(0, len(dataset.tokens), CHUNK):
            part = dataset.tokens[start : start + CHUNK]
            if int(part.max()) >= vocab_size or int(part.min()) < 0:
                where = start + int(np.argmax((part >= vocab_size) | (part < 0)))
                yield f"token {where} is {int(dataset.tokens[where])}; the vocabulary has {vocab_size}"
                break
        yield from _against_manifest(dataset, manifest, check_hashes)


def _against_manifest(dataset: IndexedDataset, manifest: dict[str, Any], check_hashes: bool) -> Iterator[str]:
    index = dataset.index
    written = int(np.count_nonzero(np.diff(index.document_indices)))
    counts = {"documents_written": written, "documents_empty": len(dataset) - written, "tokens": len(dataset.tokens)}
    for key, value in counts.items():
        if manifest.get(key) != value:
            yield f"{key} is {value:,}, {manifest.get(key)} in the manifest"
    if manifest.get("eod") is not None and len(index):
        ends = index.pointers // index.dtype.itemsize + index.lengths - 1
        last = dataset.tokens[np.minimum(ends, len(dataset.tokens) - 1)]
        if (last != manifest["eod"]).any():
            yield f"non-empty document {int(np.argmax(last != manifest['eod']))} does not end with EOD"
    if manifest.get("bos") is not None and len(index):
        starts = index.pointers[index.lengths > 0] // index.dtype.itemsize
        if (dataset.tokens[starts] != manifest["bos"]).any():
            yield f"document {int(np.argmax(dataset.tokens[starts] != manifest['bos']))} does not begin with BOS"
    for suffix, path in ((".bin", Path(str(dataset.bin_path))), (".idx", dataset.idx_path)):
        expected = manifest.get("sha256", {}).get(suffix)
        if check_hashes and expected and sha256_file(path) != expected:
            yield f"{path.name} was changed: its sha256 differs from the manifest's"
