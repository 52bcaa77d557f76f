"""A whole run: open or resume the work folder, encode everything in order, publish."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.lib.encoding_run import EncodingRun
from data_prep.lib.job import Job, RunOptions
from data_prep.lib.ledger import KeyCounts, Ledger
from data_prep.lib.publish import differences, publish, quarantine_file, read_finished, write_outputs
from data_prep.lib.workspace import Workspace
from megatron_llama.data.indexed_format import MASK_DTYPE, token_dtype
from megatron_llama.system.errors import UserError
from megatron_llama.text.encoders import Encoder, EncoderMismatch

MANIFEST_FORMAT = 1
# A run that a bad line ends leaves its work for the next one only where doing it again would take longer than this.
WORTH_KEEPING_SECONDS = 60.0


def identity(job: Job, encoder: Encoder) -> dict[str, Any]:
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


def make_dataset(job: Job, options: RunOptions, encoder: Encoder, say: Callable[[str], None]) -> dict[str, Any]:
    """Does the run, or what is left of it; returns the manifest of the first output.

    Raises:
        UserError, MachineError, Stopped: as their names say; the final names stay untouched.
    """
    wanted, names = identity(job, encoder), job.names(options.output_prefix)
    folder = options.folder / f".{'+'.join(names)}.partial"
    begun_by = _publish_rest(folder, names, options, say)
    finished = None if options.overwrite and begun_by != wanted else _finished(names, options, wanted)
    if finished is not None:
        say(f"{options.output_prefix}: complete already, nothing to do")
        return finished
    workspace = Workspace(folder, names)
    ledger = _open(workspace, wanted, options, say)
    run = EncodingRun(job, options, encoder, workspace, ledger)
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
            say(f"the {run.ledger.documents_read:,} documents before it are kept in {workspace.folder}")
        raise
    if not (run.ledger.documents_read or options.allow_empty or job.chat is not None):
        workspace.remove()
        files = "the one file" if len(job.sources) == 1 else f"all {len(job.sources):,} files"
        raise UserError(f"the input holds no document: {files} of it are empty; --allow-empty makes a dataset of that")
    if job.chat is not None and not run.ledger.keys[0].written:
        workspace.remove()
        counts = ", ".join(f"{count:,} {reason}" for reason, count in sorted(run.ledger.skipped.items()))
        advice = "without --on-bad-line skip the first is named with its reason"
        why = f"all its records are bad ({counts}); {advice}" if counts else "it holds no record"
        raise UserError(f"{options.output_prefix}: no example was made of the input: {why}")
    dtypes = [token_dtype(encoder.tokenizer.size)] * len(names)
    if job.chat is not None:
        dtypes[1] = np.dtype(MASK_DTYPE)
    manifests = [_manifest(run, wanted, key, str(dtype)) for key, dtype in enumerate(dtypes)]
    write_outputs(workspace, dtypes, manifests, run.ledger)
    say(run.summary())
    workspace.remove()
    return manifests[0]


def _finished(names: list[str], options: RunOptions, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest where this very output is complete; None where there is none."""
    manifest = read_finished(options.folder, names)
    if manifest is None:
        return None
    different = differences(manifest.get("options", {}), wanted)
    if manifest["documents_skipped"] and options.on_bad_line == "error":
        different.append(f"it left out {manifest['documents_skipped']} bad lines and now none may be bad")
    if different:
        raise UserError(
            f"{options.output_prefix} was made with other options: {'; '.join(different)}. "
            "Choose another --output-prefix, or replace it with --overwrite"
        )
    return manifest


def _publish_rest(
    folder: Path, names: list[str], options: RunOptions, say: Callable[[str], None]
) -> dict[str, Any] | None:
    """Finishes a run that was killed between its last checkpoint and its end; returns that run's options."""
    if not folder.is_dir():
        return None
    workspace = Workspace(folder, names)
    begun, checkpoints = workspace.read_journal()
    if checkpoints and checkpoints[-1].get("publish"):
        publish(workspace.folder, options.folder, names)
        workspace.remove()
        say(f"{options.output_prefix}: an earlier run had all but the final names")
        return begun
    if begun is None:
        workspace.remove()  # a run was killed while it made, or removed, the folder
    else:
        workspace.unlock()
    return None


def _open(workspace: Workspace, wanted: dict[str, Any], options: RunOptions, say: Callable[[str], None]) -> Ledger:
    """Resumes what was begun, or starts from nothing."""
    begun, checkpoints = workspace.read_journal()
    different = differences(begun, wanted) if begun is not None else []
    if different and not options.overwrite:
        same_but_for_content = begun is not None and {**begun, "input_state": ""} == {**wanted, "input_state": ""}
        if not same_but_for_content:
            raise UserError(
                f"an unfinished run with other options is in {workspace.folder}: {'; '.join(different)}. "
                "Finish it with its own options, remove that folder, or start over with --overwrite"
            )
        say("the input files were changed since an unfinished run: starting over")
    elif begun is not None and checkpoints and not different:
        if checkpoints[-1]["ledger"]["skipped"] and options.on_bad_line == "error":
            raise UserError(
                f"the unfinished run in {workspace.folder} skipped bad lines: go on with --on-bad-line skip"
            )
        ledger = workspace.resume(wanted, checkpoints[-1])
        if ledger is not None:
            say(f"going on after {ledger.documents_read:,} documents of an unfinished run")
            return ledger
        say("the unfinished run's files are damaged: starting over")
    workspace.begin(wanted)
    return Ledger([KeyCounts() for _ in workspace.names])


def _manifest(run: EncodingRun, wanted: dict[str, Any], key: int, dtype: str) -> dict[str, Any]:
    """What the output is and where it comes from. Nothing in it depends on time, machine or number of workers."""
    job, encoder, ledger = run.job, run.encoder, run.ledger
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
        "encoder": encoder.name,
        "options": wanted,
        "files_found": len(job.sources) + len(job.not_taken),
        "files_taken": len(job.sources),
        "files_not_taken": {os.path.abspath(path): reason for path, reason in job.not_taken.items()},
        "sources": [{"path": os.path.abspath(s.path), "bytes": s.size} for s in job.sources],
        "quarantine": quarantine_file(Path(), run.workspace.names).name if ledger.skipped else None,
    }
    if job.chat is not None:
        manifest |= {
            "tokens_with_loss": ledger.learned,
            "changed": dict(sorted(ledger.notes.items())),
            "seq_length": job.chat.max_tokens - 1,
        }
    return manifest
