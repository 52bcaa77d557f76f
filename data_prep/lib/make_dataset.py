"""A whole run: open or resume the work folder, encode everything in order, publish."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.lib.encode_examples import MASK_DTYPE, Chat
from data_prep.lib.encoding_run import EncodingRun, Options
from data_prep.lib.ledger import KeyCounts, Ledger
from data_prep.lib.publish import (
    MANIFEST_FORMAT,
    differences,
    publish,
    quarantine_file,
    read_finished,
    write_outputs,
)
from data_prep.lib.workspace import Workspace
from megatron_llama.data.indexed_format import token_dtype
from megatron_llama.system.errors import UserError
from megatron_llama.text.encoders import Encoder, EncoderMismatch

# A run that a bad line ends leaves its work for the next one only where doing it again would take longer than this.
WORTH_KEEPING_SECONDS = 60.0


def identity(options: Options, encoder: Encoder) -> dict[str, Any]:
    """Everything that decides what the output holds; the order of the inputs too."""
    job = options.job
    files = [[os.path.abspath(source.path), source.size, source.mtime_ns, source.is_text] for source in job.sources]
    return {
        "format": MANIFEST_FORMAT,
        "input": [os.path.abspath(source.path) for source in job.sources][:100],
        "input_state": hashlib.sha256(json.dumps(files).encode()).hexdigest(),
        "json_keys": list(job.keys),
        "tokenizer_library": encoder.library,
        "tokenizer_sha256": encoder.sha256,
        "append_eod": job.append_eod,
        "max_line_bytes": job.max_line,
        **({} if options.chat is None else options.chat.options),
    }


def make_dataset(options: Options, encoder: Encoder, say: Callable[[str], None]) -> dict[str, Any]:
    """Does the run, or what is left of it; returns the manifest of the first JSON key.

    Raises:
        UserError, MachineError, Stopped: as their names say; the final names stay untouched.
    """
    wanted = identity(options, encoder)
    folder = options.folder / f".{'+'.join(options.names)}.partial"
    begun_by = _publish_rest(folder, options, say)
    finished = None if options.overwrite and begun_by != wanted else _finished(options, wanted)
    if finished is not None:
        say(f"{options.output_prefix}: complete already, nothing to do")
        return finished
    workspace = Workspace(folder, options.names)
    ledger = _open(workspace, wanted, options, say)
    run = EncodingRun(options, encoder, workspace, ledger)
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
    if options.chat is not None and not run.ledger.keys[0].written:
        workspace.remove()
        raise UserError(f"{options.output_prefix}: no example was made of the input: {_reasons(run.ledger)}")
    manifests = [_manifest(options, encoder, wanted, run.ledger, key) for key in range(len(options.job.keys))]
    write_outputs(workspace, _dtypes(options, encoder), manifests, {"ledger": run.ledger})
    say(run.summary())
    workspace.remove()
    manifest = read_finished(options.folder, options.names)
    assert manifest is not None
    return manifest


def _reasons(ledger: Ledger) -> str:
    """Why records were left out, and how many."""
    counts = ", ".join(f"{count:,} {reason}" for reason, count in sorted(ledger.skipped.items()))
    advice = "without --on-bad-line skip the first is named with its reason"
    return f"all its records are bad ({counts}); {advice}" if counts else "it holds no record"


def _finished(options: Options, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest where this very output is complete; None where there is none."""
    manifest = read_finished(options.folder, options.names)
    if manifest is None:
        return None
    different = differences(manifest.get("options", {}), wanted)
    if manifest["documents_skipped"] and not options.skip_bad_lines:
        different.append(f"it left out {manifest['documents_skipped']} bad lines and now none may be bad")
    if different:
        raise UserError(
            f"{options.output_prefix} was made with other options: {'; '.join(different)}. "
            "Choose another --output-prefix, or replace it with --overwrite"
        )
    return manifest


def _publish_rest(folder: Path, options: Options, say: Callable[[str], None]) -> dict[str, Any] | None:
    """Finishes a run that was killed between its last checkpoint and its end; returns that run's options."""
    if not folder.is_dir():
        return None
    workspace = Workspace(folder, options.names)
    begun, checkpoints = workspace.read_journal()
    if checkpoints and checkpoints[-1].get("publish"):
        publish(workspace.folder, options.folder, options.names)
        workspace.remove()
        say(f"{options.output_prefix}: an earlier run had all but the final names")
        return begun
    if begun is None:
        workspace.remove()  # a run was killed while it made, or removed, the folder
    else:
        workspace.unlock()
    return None


def _open(workspace: Workspace, wanted: dict[str, Any], options: Options, say: Callable[[str], None]) -> Ledger:
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
        if checkpoints[-1]["ledger"]["skipped"] and not options.skip_bad_lines:
            raise UserError(
                f"the unfinished run in {workspace.folder} skipped bad lines: go on with --on-bad-line skip"
            )
        ledger = workspace.resume(wanted, checkpoints[-1])
        if ledger is not None:
            say(f"going on after {ledger.documents_read:,} documents of an unfinished run")
            return ledger
        say("the unfinished run's files are damaged: starting over")
    workspace.begin(wanted)
    return Ledger([KeyCounts() for _ in options.job.keys])


def _manifest(options: Options, encoder: Encoder, wanted: dict[str, Any], ledger: Ledger, key: int) -> dict[str, Any]:
    """What the output is and where it comes from. Nothing in it depends on time, machine or number of workers."""
    counts = ledger.keys[key]
    return {
        "documents_read": ledger.documents_read,
        "documents_written": counts.written,
        "documents_empty": counts.empty,
        "documents_skipped": ledger.documents_skipped,
        "skipped": dict(sorted(ledger.skipped.items())),
        "tokens": counts.tokens,
        "text_bytes": ledger.text_bytes,
        "json_key": options.job.keys[key],
        "dtype": str(_dtypes(options, encoder)[key]),
        "tokenizer": os.path.abspath(encoder.path),
        "tokenizer_sha256": encoder.sha256,
        "vocab_size": encoder.vocab_size,
        "eod": encoder.eod if options.job.append_eod else None,
        "encoder": encoder.name,
        "options": wanted,
        "sources": [{"path": os.path.abspath(s.path), "bytes": s.size} for s in options.job.sources],
        "quarantine": quarantine_file(options.folder, options.names).name if ledger.skipped else None,
        **({} if options.chat is None else _of_examples(options.chat, ledger)),
    }


def _dtypes(options: Options, encoder: Encoder) -> list[np.dtype]:
    """The type of each output's numbers."""
    tokens = token_dtype(encoder.vocab_size)
    return [tokens] * len(options.job.keys) if options.chat is None else [tokens, MASK_DTYPE]


def _of_examples(chat: Chat, ledger: Ledger) -> dict[str, Any]:
    """What a fine-tuning set's manifest says beside."""
    return {
        "tokens_with_loss": ledger.learned,
        "changed": dict(sorted(ledger.notes.items())),
        "seq_length": chat.max_tokens - 1,
    }
