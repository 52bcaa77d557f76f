"""From a finished work folder to the outputs under their final names; and telling whether they are there already."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.lib.input_files import QUARANTINE_SUFFIX
from data_prep.lib.ledger import Ledger
from data_prep.lib.workspace import QUARANTINE, Workspace
from megatron_llama.corpus.indexed_format import write_index
from megatron_llama.system.errors import UserError
from megatron_llama.system.files import sha256_file, sync_folder, write_atomically

SUFFIXES = (".bin", ".idx", ".json")


def write_outputs(
    workspace: Workspace, dtypes: Sequence[np.dtype], manifests: list[dict[str, Any]], ledger: Ledger
) -> None:
    """Writes indices and manifests into the work folder, notes in the journal that all is complete, and publishes.

    Sizes and hashes are added to ``manifests``.
    """
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
    """Moves complete files to their final names. Killed in the middle, it is called again and finishes the job.

    A manifest comes last and an old one goes first: with a manifest, all files that it lists are in place.
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
    """Where the lines that were skipped end up."""
    return folder / f"{names[0]}{QUARANTINE_SUFFIX}"


def read_finished(folder: Path, names: list[str]) -> dict[str, Any] | None:
    """The manifest of a complete output, or None where there is none at all.

    Raises:
        UserError: files are there that no finished run of this program left.
    """
    manifests = []
    strange = []
    for name in names:
        files = [folder / f"{name}{suffix}" for suffix in SUFFIXES]
        there = [path for path in files if path.exists()]
        if not there:
            continue
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            manifest = json.loads(files[2].read_bytes())
            if all(path.stat().st_size == manifest["bytes"][path.suffix] for path in files[:2]):
                manifests.append(manifest)
                continue
        strange += [str(path) for path in there]
    if strange or (manifests and len(manifests) < len(names)):
        raise UserError(
            f"{', '.join(strange) or folder}: files are there that no finished run of this program left. "
            "Move them away, or replace them with --overwrite"
        )
    return manifests[0] if manifests else None


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What differs between two runs' options, in words."""
    words = []
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            before, now = json.dumps(old.get(key)), json.dumps(new.get(key))
            long = len(before) + len(now) > 200
            words.append(f"{key} differs" if long else f"{key} was {before} and is now {now}")
    return words
