"""Prepare datasets: open or resume the work folder, encode the input in order, publish the files."""

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
# A run that stops at a bad line keeps its work folder only if repeating the work takes longer.
WORTH_KEEPING_SECONDS = 60.0


def identity(job: PrepareJob, encoder: Encoder) -> dict[str, Any]:
    """Return the options that determine the output, including the order of the inputs."""
    files = [[os.path.abspath(source.path), source.size, source.mtime_ns, source.is_text] for source in job.sources]
    return {
        "format": MANIFEST_FORMAT,
        "input": [os.path.abspath(source.path) for source in job.sources][:100],
        "input_state": hashlib.sha256(json.dumps(files).encode()).hexdigest(),
        "json_keys": list(job.keys),
        "tokenizer_library": encoder.tokenizer.library,
        "tokenizer_sha256": encoder.tokenizer.sha256,
        "append_eod": job.append_eod,
        **({"prepend_bos": True} if job.prepend_bos else {}),  # older versions did not write it
        "max_line_bytes": job.max_line,
        **({} if job.chat is None else job.chat.options),
    }


def make_dataset(
    job: PrepareJob, options: RunOptions, encoder: Encoder, report: Callable[[str], None]
) -> dict[str, Any] | None:
    """Prepare the datasets, or resume an interrupted run.

    Returns:
        The manifest of the first dataset; None if other parts of the run are unfinished.

    Raises:
        UserError, MachineError, Stopped: No file has its final name then.
    """
    expected, names = identity(job, encoder), job.names(options.output_prefix)
    if options.part is not None:
        return _encode_part(job, options, encoder, PreparePart.parse(options.part), report)
    finished = _find_output(names, options, expected, report)
    if finished is not None:
        return finished
    workspace = Workspace(_work_folder(options, names), names)
    run = EncodingRun(job, options, encoder, workspace, _open_ledger(workspace, expected, options, report))
    _encode(run, report)
    manifest = _write_datasets(job, options, encoder, encoder.name, workspace, run.ledger)
    report("\n".join([*summarize_run(job, options, run.ledger), run.speed()]))
    return manifest


def _encode(run: EncodingRun, report: Callable[[str], None]) -> None:
    """Encode a run's input range; on failure, keep or remove the work folder."""
    workspace = run.workspace
    try:
        run.encode()
    except EncoderMismatch:
        workspace.remove()
        raise
    except UserError:
        # Long work is saved for a run with --on-bad-line skip.
        if run.seconds_worth < WORTH_KEEPING_SECONDS:
            workspace.remove()
        else:
            workspace.checkpoint(run.ledger, seconds=run.seconds_worth)
            report(f"the {run.ledger.documents_read:,} documents before it are saved in {workspace.folder}")
        raise


def _encode_part(
    job: PrepareJob, options: RunOptions, encoder: Encoder, part: PreparePart, report: Callable[[str], None]
) -> dict[str, Any] | None:
    """Encode one part of the input; join all parts if it is the last."""
    expected, names = identity(job, encoder), job.names(options.output_prefix)
    if any(source.stored_at for source in job.sources):
        raise UserError("--part: every part reads the input, and a pipe can be read only once. Write a file to --input")
    finished_before = finished_part(part, options.folder, names)
    try:
        finished = _find_output(names, options, expected, report)
    except Locked:
        if finished_before is None:
            raise
        report(f"part {part} is done; another process is joining the parts")
        return None
    if finished is not None:
        remove_parts(options.folder, names)
        return finished
    cuts = split_input(job.sources, part.count)
    if finished_before is None or finished_before.identity != expected:
        try:
            workspace = Workspace(part.folder(options.folder, names), names)
        except Locked as error:  # A lost node's lock expires: not an error of the user.
            raise MachineError(f"part {part}: {error}") from None
        cut = cuts[part.number - 1]
        ledger = _open_ledger(workspace, {**expected, "part": str(part)}, options, report, cut.begin)
        run = EncodingRun(job, options, encoder, workspace, ledger, cut)
        _encode(run, report)
        workspace.checkpoint(run.ledger, part_done=True, encoder=encoder.name)
        workspace.close()
        workspace.unlock()
        report(f"part {part}: {run.ledger.documents_read:,} documents, {run.ledger.tokens:,} tokens\n{run.speed()}")
    else:
        report(f"part {part}: already complete")
    done = [
        finished_part(PreparePart(number, part.count), options.folder, names) for number in range(1, part.count + 1)
    ]
    missing = [number for number, one in enumerate(done, start=1) if one is None]
    if missing:
        finished = _find_output(names, options, expected, report)  # another process may have joined them
        if finished is None:
            report(f"unfinished parts of {part.count}: {format_numbers(missing)}")
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
    """Join all parts into one dataset."""
    expected, names = identity(job, encoder), job.names(options.output_prefix)
    for one in parts:
        if different := describe_differences(one.identity, expected):
            raise UserError(
                f"part {one.part} has other options: {'; '.join(different)}. Rerun it with --part {one.part}"
            )
        if one.ledger.skipped and options.on_bad_line == "error":
            raise UserError(f"part {one.part} skipped bad lines: write --on-bad-line skip")
    try:
        workspace = Workspace(_work_folder(options, names), names)
    except Locked:
        report("all parts are done; another process is joining them")
        return None
    if not parts[0].folder.exists():  # another process has joined them
        workspace.remove()
        return _read_output(names, options, expected)
    workspace.begin(expected)
    ledger = join_parts(parts, workspace, job.sources, cuts)
    encoders = ", ".join(sorted({str(one.checkpoint["encoder"]) for one in parts}))
    manifest = _write_datasets(job, options, encoder, encoders, workspace, ledger)
    remove_parts(options.folder, names)
    report("\n".join([f"joined {len(parts)} parts", *summarize_run(job, options, ledger)]))
    return manifest


def _write_datasets(
    job: PrepareJob, options: RunOptions, encoder: Encoder, encoder_name: str, workspace: Workspace, ledger: Ledger
) -> dict[str, Any]:
    """Publish the work folder's datasets. Raises UserError if they are empty."""
    if not (ledger.documents_read or options.allow_empty or job.chat is not None):
        workspace.remove()
        files = "the input file is" if len(job.sources) == 1 else f"all {len(job.sources):,} input files are"
        raise UserError(f"no documents: {files} empty. Write --allow-empty to accept an empty dataset")
    if job.chat is not None and not ledger.keys[0].written:
        workspace.remove()
        counts = ", ".join(f"{count:,} {reason}" for reason, count in sorted(ledger.skipped.items()))
        hint = "rerun without --on-bad-line skip to see the first one"
        why = f"all records are bad ({counts}); {hint}" if counts else "the input has no records"
        raise UserError(f"{options.output_prefix}: no examples: {why}")
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
    names: list[str], options: RunOptions, expected: dict[str, Any], report: Callable[[str], None]
) -> dict[str, Any] | None:
    """Return the manifest if an earlier run finished this output, or finish its publication."""
    begun_by = _finish_publishing(_work_folder(options, names), names, options, report)
    finished = None if options.overwrite and begun_by != expected else _read_output(names, options, expected)
    if finished is not None:
        report(f"{options.output_prefix}: already complete, nothing to do")
    return finished


def _read_output(names: list[str], options: RunOptions, expected: dict[str, Any]) -> dict[str, Any] | None:
    """Return the manifest of a complete output with the same options, or None. Raises UserError for other options."""
    manifest = read_finished(options.folder, names)
    if manifest is None:
        return None
    different = describe_differences(manifest.get("options", {}), expected)
    if manifest["documents_skipped"] and options.on_bad_line == "error":
        different.append(f"it skipped {manifest['documents_skipped']} bad lines, and --on-bad-line is error")
    if different:
        raise UserError(
            f"{options.output_prefix} was written with other options: {'; '.join(different)}. "
            "Write another --output-prefix, or --overwrite"
        )
    return manifest


def _finish_publishing(
    folder: Path, names: list[str], options: RunOptions, report: Callable[[str], None]
) -> dict[str, Any] | None:
    """Finish a run that was killed while its files got their final names; return its options."""
    if not folder.is_dir():
        return None
    workspace = Workspace(folder, names)
    begun, checkpoints = workspace.read_journal()
    if checkpoints and checkpoints[-1].get("publish"):
        publish(workspace.folder, options.folder, names)
        workspace.remove()
        report(f"{options.output_prefix}: finished renaming the files of an earlier run")
        return begun
    if begun is None:
        workspace.remove()  # a run was killed while it created or removed the folder
    else:
        workspace.unlock()
    return None


def _open_ledger(
    workspace: Workspace,
    expected: dict[str, Any],
    options: RunOptions,
    report: Callable[[str], None],
    begin: BlockPosition = START,
) -> Ledger:
    """Resume an unfinished run, or start a new one at ``begin``."""
    begun, checkpoints = workspace.read_journal()
    different = describe_differences(begun, expected) if begun is not None else []
    if different and not options.overwrite:
        same_but_for_content = begun is not None and {**begun, "input_state": ""} == {**expected, "input_state": ""}
        if not same_but_for_content:
            raise UserError(
                f"{workspace.folder} has an unfinished run with other options: {'; '.join(different)}. "
                "Rerun with its options, remove the folder, or write --overwrite to start over"
            )
        report("input files changed since the unfinished run: starting over")
    elif begun is not None and checkpoints and not different:
        if checkpoints[-1]["ledger"]["skipped"] and options.on_bad_line == "error":
            raise UserError(
                f"the unfinished run in {workspace.folder} skipped bad lines: write --on-bad-line skip to resume"
            )
        ledger = workspace.resume(expected, checkpoints[-1])
        if ledger is not None:
            report(f"resuming after {ledger.documents_read:,} documents of an unfinished run")
            return ledger
        report("files of the unfinished run are damaged: starting over")
    workspace.begin(expected)
    return Ledger([KeyCounts() for _ in workspace.names], begin)


def _manifest(
    job: PrepareJob, encoder_and_name: tuple[Encoder, str], names: list[str], ledger: Ledger, key: int, dtype: str
) -> dict[str, Any]:
    """Return an output's manifest, which does not depend on time, machine or number of workers."""
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
        **({"bos": encoder.tokenizer.bos} if job.prepend_bos else {}),
        "encoder": encoder_name,
        "options": identity(job, encoder),
        "files_found": len(job.sources) + len(job.not_taken),
        "files_taken": len(job.sources),
        "files_not_taken": {os.path.abspath(path): reason for path, reason in job.not_taken.items()},
        "sources": [{"path": os.path.abspath(s.path), "bytes": s.size} for s in job.sources],
        "quarantine": quarantine_file(Path(), names).name if ledger.skipped else None,
    }
    if job.chat is not None:
        manifest |= {"tokens_with_loss": ledger.learned, "seq_length": job.chat.max_tokens - 1}
    if job.chat is not None or ledger.notes:
        manifest["changed"] = dict(sorted(ledger.notes.items()))
    return manifest


# Verification of an indexed dataset: every length, pointer, index, token id and hash.

_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("documents_read", "documents_written", "documents_skipped", "vocab_size"), (int,)),
    **dict.fromkeys(("tokenizer", "tokenizer_sha256"), (str,)),
    **dict.fromkeys(("options", "skipped"), (dict,)),
    "eod": (int, type(None)),
}
"""Required keys of a manifest and their types."""


def read_manifest(prefix: str) -> dict[str, Any] | None:
    """Read PREFIX.json of preprocess.py or sft.py; return None if there is no manifest.

    Raises:
        UserError: The manifest is damaged or unreadable.
    """
    try:
        manifest = read_json(Path(prefix + ".json"))
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
    size = dataset.bin_path.stat().st_size
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
    counts = {
        "documents_written": written,
        "documents_empty": len(dataset) - written,
        "tokens": len(dataset.tokens),
    }
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
    for suffix, path in ((".bin", dataset.bin_path), (".idx", dataset.idx_path)):
        expected = manifest.get("sha256", {}).get(suffix)
        if check_hashes and expected and sha256_file(path) != expected:
            yield f"{path.name} was changed: its sha256 differs from the manifest's"
