"""A whole run: open or resume the work folder, encode everything in order, publish."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.lib.blocks import START, BlockPosition
from data_prep.lib.encoders import Encoder, EncoderMismatch
from data_prep.lib.encoding_run import (
    EncodingRun,
    FinishedPart,
    InputRange,
    PreparePart,
    describe_differences,
    finished_part,
    format_numbers,
    join_parts,
    publish,
    quarantine_file,
    read_finished,
    remove_parts,
    split_input,
    summarize_run,
    write_outputs,
)
from data_prep.lib.job import PrepareJob, RunOptions
from data_prep.lib.workspace import KeyCounts, Ledger, Locked, Workspace
from megatron_llama.corpus.indexed_format import CHUNK, MASK_DTYPE, IndexedDataset, token_dtype
from megatron_llama.system.errors import MachineError, UserError
from megatron_llama.system.files import read_json, sha256_file

MANIFEST_FORMAT = 1
# A run that a bad line ends leaves its work for the next one only where doing it again would take longer than this.
WORTH_KEEPING_SECONDS = 60.0


def identity(job: PrepareJob, encoder: Encoder) -> dict[str, Any]:
    """Everything that decides what the output holds, the order of the inputs included."""
    files = [[os.path.abspath(source.path), source.size, source.mtime_ns, source.is_text] for source in job.sources]
    return {
        "format": MANIFEST_FORMAT,
        "input": [os.path.abspath(source.path) for source in job.sources][:100],
        "input_state": hashlib.sha256(json.dumps(files).encode()).hexdigest(),
        "json_keys": list(job.keys),
        "tokenizer_library": encoder.tokenizer.library,
        "tokenizer_sha256": encoder.tokenizer.sha256,
        "append_eod": job.append_eod,
        "max_line_bytes": job.max_line,
        **({} if job.chat is None else job.chat.options),
    }


def make_dataset(
    job: PrepareJob, options: RunOptions, encoder: Encoder, report: Callable[[str], None]
) -> dict[str, Any] | None:
    """Does the run, or what is left of it; returns the manifest of the first output, None where other parts of the run
    are still to be done.

    Raises:
        UserError, MachineError, Stopped: as their names say; the final names stay untouched.
    """
    wanted, names = identity(job, encoder), job.names(options.output_prefix)
    if options.part is not None:
        return _encode_part(job, options, encoder, PreparePart.parse(options.part), report)
    finished = _find_output(names, options, wanted, report)
    if finished is not None:
        return finished
    workspace = Workspace(_work_folder(options, names), names)
    run = EncodingRun(job, options, encoder, workspace, _open_ledger(workspace, wanted, options, report))
    _encode(run, report)
    manifest = _write_datasets(job, options, encoder, encoder.name, workspace, run.ledger)
    report("\n".join([*summarize_run(job, options, run.ledger), run.speed()]))
    return manifest


def _encode(run: EncodingRun, report: Callable[[str], None]) -> None:
    """Encodes all of a run's range; where that fails, keeps or removes what was done."""
    workspace = run.workspace
    try:
        run.encode()
    except EncoderMismatch:
        workspace.remove()
        raise
    except UserError:
        # Bad input is rarely far from the start. What took long is kept for a run with --on-bad-line skip.
        if run.seconds_worth < WORTH_KEEPING_SECONDS:
            workspace.remove()
        else:
            workspace.checkpoint(run.ledger, seconds=run.seconds_worth)
            report(f"the {run.ledger.documents_read:,} documents before it are kept in {workspace.folder}")
        raise


def _encode_part(
    job: PrepareJob, options: RunOptions, encoder: Encoder, part: PreparePart, report: Callable[[str], None]
) -> dict[str, Any] | None:
    """Does one part of the run, and joins all where it is the last to be done."""
    wanted, names = identity(job, encoder), job.names(options.output_prefix)
    if any(source.stored_at for source in job.sources):
        raise UserError("--part: all parts read the input, and a pipe can be read only once")
    own = finished_part(part, options.folder, names)
    try:
        finished = _find_output(names, options, wanted, report)
    except Locked:
        if own is None:
            raise
        report(f"part {part} is done, and another process joins all parts")
        return None
    if finished is not None:
        remove_parts(options.folder, names)
        return finished
    cuts = split_input(job.sources, part.count)
    if own is None or own.identity != wanted:
        try:
            workspace = Workspace(part.folder(options.folder, names), names)
        except Locked as error:  # perhaps by a process of a lost node, whose lock will go: no mistake of the user's
            raise MachineError(f"part {part}: {error}") from None
        cut = cuts[part.number - 1]
        ledger = _open_ledger(workspace, {**wanted, "part": str(part)}, options, report, cut.begin)
        run = EncodingRun(job, options, encoder, workspace, ledger, cut)
        _encode(run, report)
        workspace.checkpoint(run.ledger, part_done=True, encoder=encoder.name)
        workspace.close()
        workspace.unlock()
        report(f"part {part}: {run.ledger.documents_read:,} documents, {run.ledger.tokens:,} tokens\n{run.speed()}")
    else:
        report(f"part {part}: complete already")
    done = [
        finished_part(PreparePart(number, part.count), options.folder, names) for number in range(1, part.count + 1)
    ]
    missing = [number for number, one in enumerate(done, start=1) if one is None]
    if missing:
        finished = _find_output(names, options, wanted, report)  # another joined them meanwhile
        if finished is None:
            report(f"still to be done, of {part.count} parts: {format_numbers(missing)}")
        return finished
    return _join_parts([one for one in done if one is not None], job, options, encoder, cuts, report)


def _join_parts(
    parts: Sequence[FinishedPart],
    job: PrepareJob,
    options: RunOptions,
    encoder: Encoder,
    cuts: Sequence[InputRange],
    report: Callable[[str], None],
) -> dict[str, Any] | None:
    """Writes the dataset of all parts."""
    wanted, names = identity(job, encoder), job.names(options.output_prefix)
    for one in parts:
        if different := describe_differences(one.identity, wanted):
            raise UserError(f"part {one.part} was made with other options: {'; '.join(different)}. Do it again")
        if one.ledger.skipped and options.on_bad_line == "error":
            raise UserError(f"part {one.part} skipped bad lines: go on with --on-bad-line skip")
    try:
        workspace = Workspace(_work_folder(options, names), names)
    except Locked:
        report("all parts are done, and another process joins them")
        return None
    if not parts[0].folder.exists():  # it was faster, and is done
        workspace.remove()
        return _read_output(names, options, wanted)
    workspace.begin(wanted)
    ledger = join_parts(parts, workspace, job.sources, cuts)
    encoders = ", ".join(sorted({str(one.checkpoint["encoder"]) for one in parts}))
    manifest = _write_datasets(job, options, encoder, encoders, workspace, ledger)
    remove_parts(options.folder, names)
    report("\n".join([f"all {len(parts)} parts are joined", *summarize_run(job, options, ledger)]))
    return manifest


def _write_datasets(
    job: PrepareJob, options: RunOptions, encoder: Encoder, encoder_name: str, workspace: Workspace, ledger: Ledger
) -> dict[str, Any]:
    """Publishes what the workspace holds. Raises UserError where that is nothing."""
    if not (ledger.documents_read or options.allow_empty or job.chat is not None):
        workspace.remove()
        files = "the one file" if len(job.sources) == 1 else f"all {len(job.sources):,} files"
        raise UserError(f"the input holds no document: {files} of it are empty; --allow-empty makes a dataset of that")
    if job.chat is not None and not ledger.keys[0].written:
        workspace.remove()
        counts = ", ".join(f"{count:,} {reason}" for reason, count in sorted(ledger.skipped.items()))
        advice = "without --on-bad-line skip the first is named with its reason"
        why = f"all its records are bad ({counts}); {advice}" if counts else "it holds no record"
        raise UserError(f"{options.output_prefix}: no example was made of the input: {why}")
    dtypes = [token_dtype(encoder.tokenizer.size)] * len(workspace.names)
    if job.chat is not None:
        dtypes[1] = np.dtype(MASK_DTYPE)
    encoder_and_name = (encoder, encoder_name)
    manifests = [
        _manifest(job, encoder_and_name, workspace.names, ledger, key, str(dtype)) for key, dtype in enumerate(dtypes)
    ]
    write_outputs(workspace, dtypes, manifests, ledger)
    workspace.remove()
    return manifests[0]


def _work_folder(options: RunOptions, names: Sequence[str]) -> Path:
    return options.folder / f".{'+'.join(names)}.partial"


def _find_output(
    names: list[str], options: RunOptions, wanted: dict[str, Any], report: Callable[[str], None]
) -> dict[str, Any] | None:
    """The manifest, where an earlier run has made this output, or all of it but the final names."""
    begun_by = _finish_publishing(_work_folder(options, names), names, options, report)
    finished = None if options.overwrite and begun_by != wanted else _read_output(names, options, wanted)
    if finished is not None:
        report(f"{options.output_prefix}: complete already, nothing to do")
    return finished


def _read_output(names: list[str], options: RunOptions, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest where this very output is complete; None where there is none."""
    manifest = read_finished(options.folder, names)
    if manifest is None:
        return None
    different = describe_differences(manifest.get("options", {}), wanted)
    if manifest["documents_skipped"] and options.on_bad_line == "error":
        different.append(f"it left out {manifest['documents_skipped']} bad lines and now none may be bad")
    if different:
        raise UserError(
            f"{options.output_prefix} was made with other options: {'; '.join(different)}. "
            "Choose another --output-prefix, or replace it with --overwrite"
        )
    return manifest


def _finish_publishing(
    folder: Path, names: list[str], options: RunOptions, report: Callable[[str], None]
) -> dict[str, Any] | None:
    """Finishes a run that was killed between its last checkpoint and its end; returns that run's options."""
    if not folder.is_dir():
        return None
    workspace = Workspace(folder, names)
    begun, checkpoints = workspace.read_journal()
    if checkpoints and checkpoints[-1].get("publish"):
        publish(workspace.folder, options.folder, names)
        workspace.remove()
        report(f"{options.output_prefix}: an earlier run had all but the final names")
        return begun
    if begun is None:
        workspace.remove()  # a run was killed while it made, or removed, the folder
    else:
        workspace.unlock()
    return None


def _open_ledger(
    workspace: Workspace,
    wanted: dict[str, Any],
    options: RunOptions,
    report: Callable[[str], None],
    begin: BlockPosition = START,
) -> Ledger:
    """Resumes what was begun, or starts from nothing, at ``begin``."""
    begun, checkpoints = workspace.read_journal()
    different = describe_differences(begun, wanted) if begun is not None else []
    if different and not options.overwrite:
        same_but_for_content = begun is not None and {**begun, "input_state": ""} == {**wanted, "input_state": ""}
        if not same_but_for_content:
            raise UserError(
                f"an unfinished run with other options is in {workspace.folder}: {'; '.join(different)}. "
                "Finish it with its own options, remove that folder, or start over with --overwrite"
            )
        report("the input files were changed since an unfinished run: starting over")
    elif begun is not None and checkpoints and not different:
        if checkpoints[-1]["ledger"]["skipped"] and options.on_bad_line == "error":
            raise UserError(
                f"the unfinished run in {workspace.folder} skipped bad lines: go on with --on-bad-line skip"
            )
        ledger = workspace.resume(wanted, checkpoints[-1])
        if ledger is not None:
            report(f"going on after {ledger.documents_read:,} documents of an unfinished run")
            return ledger
        report("the unfinished run's files are damaged: starting over")
    workspace.begin(wanted)
    return Ledger([KeyCounts() for _ in workspace.names], begin)


def _manifest(
    job: PrepareJob, encoder_and_name: tuple[Encoder, str], names: list[str], ledger: Ledger, key: int, dtype: str
) -> dict[str, Any]:
    """What the output is and where it comes from. Nothing in it depends on time, machine or number of workers."""
    encoder, encoder_name = encoder_and_name
    counts = ledger.keys[key]
    manifest = {
        "documents_read": ledger.documents_read,
        "documents_written": counts.written,
        "documents_empty": counts.empty,
        "documents_skipped": ledger.documents_skipped,
        "skipped": dict(sorted(ledger.skipped.items())),
        "tokens": counts.tokens,
        "text_bytes": ledger.text_bytes,
        "json_key": job.keys[key],
        "dtype": dtype,
        "tokenizer": os.path.abspath(encoder.tokenizer.path),
        "tokenizer_sha256": encoder.tokenizer.sha256,
        "vocab_size": encoder.tokenizer.size,
        "eod": encoder.tokenizer.end if job.append_eod else None,
        "encoder": encoder_name,
        "options": identity(job, encoder),
        "files_found": len(job.sources) + len(job.not_taken),
        "files_taken": len(job.sources),
        "files_not_taken": {os.path.abspath(path): reason for path, reason in job.not_taken.items()},
        "sources": [{"path": os.path.abspath(s.path), "bytes": s.size} for s in job.sources],
        "quarantine": quarantine_file(Path(), names).name if ledger.skipped else None,
    }
    if job.chat is not None:
        manifest |= {
            "tokens_with_loss": ledger.learned,
            "changed": dict(sorted(ledger.notes.items())),
            "seq_length": job.chat.max_tokens - 1,
        }
    return manifest


# The full check of an indexed dataset: every length, pointer, index, token id and hash.


_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("documents_read", "documents_written", "documents_skipped", "vocab_size"), (int,)),
    **dict.fromkeys(("tokenizer", "tokenizer_sha256"), (str,)),
    **dict.fromkeys(("options", "skipped"), (dict,)),
    "eod": (int, type(None)),
}
"""What a manifest must hold to be shown and checked, besides what only some have."""


def read_manifest(prefix: str) -> dict[str, Any] | None:
    """PREFIX.json, which preprocess.py or sft.py wrote; None where another program made the dataset.

    Raises:
        UserError: it is damaged, or can't be read.
    """
    try:
        manifest = read_json(Path(prefix + ".json"))
        if not isinstance(manifest, dict):
            raise ValueError("it is no JSON object")
        for name, kinds in _KINDS.items():
            if name not in manifest or type(manifest[name]) not in kinds:
                raise ValueError(f"{name} is {str(manifest.get(name, 'missing'))[:60]}")
        if not all(type(count) is int for count in manifest["skipped"].values()):
            raise ValueError("skipped holds no counts")
        if not isinstance(manifest.get("sha256", {}), dict):
            raise ValueError("sha256 is no object")
        return manifest
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{prefix}.json is damaged: {error}") from None


def problems(dataset: IndexedDataset, manifest: dict[str, Any] | None, check_hashes: bool) -> Iterator[str]:
    """Everything that is wrong with a dataset, one sentence each. Reads all of it once, in chunks."""
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
            yield f"sequence {start + int(np.argmax(wrong))} does not begin where the one before it ends"
        end += int(sizes.sum())
    size = dataset.bin_path.stat().st_size
    if end != size:
        yield f"{dataset.bin_path.name} has {size:,} bytes; the index gives {end:,}"
    indices = index.document_indices
    if not len(indices) or indices[0] != 0 or indices[-1] != len(index):
        yield "the document indices do not run from 0 to the number of sequences"
    for start in range(0, len(indices) - 1, CHUNK):
        if (np.diff(indices[start : start + CHUNK + 1]) < 0).any():
            yield "the document indices fall"
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
    found = {
        "documents_written": written,
        "documents_empty": len(dataset) - written,
        "tokens": len(dataset.tokens),
    }
    for key, value in found.items():
        if manifest.get(key) != value:
            yield f"{key} is {value:,}; the manifest says {manifest.get(key)}"
    if manifest.get("eod") is not None and len(index):
        ends = index.pointers // index.dtype.itemsize + index.lengths - 1
        last = dataset.tokens[np.minimum(ends, len(dataset.tokens) - 1)]
        if (last != manifest["eod"]).any():
            yield f"document {int(np.argmax(last != manifest['eod']))} of those with tokens does not end with EOD"
    for suffix, path in ((".bin", dataset.bin_path), (".idx", dataset.idx_path)):
        expected = manifest.get("sha256", {}).get(suffix)
        if check_hashes and expected and sha256_file(path) != expected:
            yield f"{path.name} is not the file that was written: its sha256 differs from the manifest's"
