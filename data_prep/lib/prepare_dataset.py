"""Prepare datasets: encode the input in order, write manifests, publish the files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.lib.blocks import InputRange
from data_prep.lib.encoding_run import EncodingRun, summarize_run
from data_prep.lib.join_parts import FinishedPart, PreparePart, finished_part, join_parts, split_input
from data_prep.lib.output_files import SUFFIXES, publish, quarantine_file, read_finished, write_outputs
from data_prep.lib.run_options import PrepareJob, RunOptions
from data_prep.lib.tokenizer_backends import Encoder, EncoderMismatch
from data_prep.lib.workspace import Ledger, Locked, Workspace, describe_differences, read_journal
from megatron_llama.corpus.indexed_format import MASK_DTYPE, token_dtype
from megatron_llama.system.errors import MachineError, UserError
from megatron_llama.system.files import read_whole, user_cache
from megatron_llama.system.object_store import RemotePath, hide_credentials, is_url, missing_package
from megatron_llama.system.tables import format_ranges

MANIFEST_FORMAT = 1
# A run that stops at a bad line keeps its work folder only if repeating the work takes longer.
WORTH_KEEPING_SECONDS = 60.0


def make_dataset(
    job: PrepareJob, options: RunOptions, encoder: Encoder, report: Callable[[str], None]
) -> dict[str, Any] | None:
    """Prepare the datasets, or resume an interrupted run.

    Returns:
        The manifest of the first dataset; None if other parts of the run are unfinished.

    Raises:
        UserError, MachineError, Stopped: No file has its final name then.
    """
    if is_url(options.output_prefix):
        return _make_stored(job, options, encoder, report)
    preparation = _Preparation(job, options, encoder, report)
    if options.part is None:
        return preparation.encode_all()
    number, _, count = options.part.partition("/")
    return preparation.encode_part(PreparePart(int(number), int(count), preparation.parts_folder))


def _make_stored(
    job: PrepareJob, options: RunOptions, encoder: Encoder, report: Callable[[str], None]
) -> dict[str, Any] | None:
    """Prepare the datasets in the user's cache and upload them, the manifests last. A rerun resumes there.

    Raises UserError, also if the store cannot be written.
    """
    url = options.output_prefix
    try:
        target = RemotePath(url).parent
        if reason := missing_package(url):
            raise UserError(f"--output-prefix {url} {reason[0]}: {reason[1]}")
        target.files()
    except ValueError as error:
        raise UserError(f"--output-prefix {hide_credentials(url)} {error}") from None
    except OSError as error:
        raise UserError(f"--output-prefix {url} cannot be read: {error.strerror}") from None
    if options.part is not None:
        raise UserError(
            "--part: parts on several machines are joined in a shared folder: write a local --output-prefix"
        )
    folder = Path(user_cache("prepared")) / hashlib.sha256(str(target).encode()).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    local = replace(options, output_prefix=str(folder / url.rpartition("/")[2]))
    manifest = make_dataset(job, local, encoder, report)
    try:
        for name in job.names(url):
            content = read_whole(folder / f"{name}.json")
            stored = target / f"{name}.json"
            if stored.is_file() and stored.read_bytes() == content:
                continue
            stored.delete()
            for suffix in SUFFIXES:
                (target / f"{name}{suffix}").upload(folder / f"{name}{suffix}")
            report(f"{target / name}: uploaded; the local copy is in {folder}")
    except OSError as error:
        raise UserError(f"{url} cannot be written: {error.strerror}; the same command resumes the upload") from None
    return manifest


def _full_path(path: str) -> str:
    return path if is_url(path) else os.path.abspath(path)


class _Preparation:
    """Preparation of the datasets of one command."""

    def __init__(self, job: PrepareJob, options: RunOptions, encoder: Encoder, report: Callable[[str], None]) -> None:
        self.job, self.options, self.encoder, self.report = job, options, encoder, report
        self.names = job.names(options.output_prefix)
        self.identity = self._identity()
        """Options that determine the output, including the order of the inputs."""
        self.work_folder, self.parts_folder = (
            options.folder / f".{'+'.join(self.names)}.{kind}" for kind in ("partial", "parts")
        )

    def _identity(self) -> dict[str, Any]:
        job, tokenizer = self.job, self.encoder.tokenizer
        files = [[_full_path(source.path), source.size, source.mtime_ns, source.is_text] for source in job.sources]
        return {
            "format": MANIFEST_FORMAT,
            "input": [_full_path(source.path) for source in job.sources][:100],
            "input_state": hashlib.sha256(json.dumps(files).encode()).hexdigest(),
            "json_keys": list(job.keys),
            "tokenizer_library": tokenizer.library,
            "tokenizer_sha256": tokenizer.sha256,
            **tokenizer.new_tokens.settings,
            "append_eod": job.append_eod,
            **({"prepend_bos": True} if job.prepend_bos else {}),  # older versions did not write it
            "max_line_bytes": job.max_line,
            **({} if job.chat is None else job.chat.options),
        }

    def encode_all(self) -> dict[str, Any]:
        """Encode the whole input; return the manifest of the first dataset."""
        finished = self._find_output()
        if finished is not None:
            return finished
        workspace = Workspace(self.work_folder, self.names)
        run = self._encode(workspace, workspace.resume_or_begin(self.identity, self.options, self.report))
        manifest = self._write_datasets(self.encoder.name, workspace, run.ledger)
        self.report("\n".join([*summarize_run(self.job, self.options, run.ledger), run.speed()]))
        return manifest

    def encode_part(self, part: PreparePart) -> dict[str, Any] | None:
        """Encode one part of the input; join all parts if it is the last."""
        if any(source.stored_at for source in self.job.sources):
            raise UserError(
                "--part: every part reads the input, and a pipe can be read only once. Write a file to --input"
            )
        finished_before = finished_part(part)
        try:
            finished = self._find_output()
        except Locked:
            if finished_before is None:
                raise
            self.report(f"part {part} is done; another process is joining the parts")
            return None
        if finished is not None:
            shutil.rmtree(self.parts_folder, ignore_errors=True)
            return finished
        cuts = split_input(self.job.sources, part.count)
        if finished_before is None or finished_before.identity != self.identity:
            try:
                workspace = Workspace(part.folder, self.names)
            except Locked as error:  # A lost node's lock expires: not an error of the user.
                raise MachineError(f"part {part}: {error}") from None
            cut = cuts[part.number - 1]
            identity = {**self.identity, "part": str(part)}
            ledger = workspace.resume_or_begin(identity, self.options, self.report, cut[0])
            run = self._encode(workspace, ledger, cut)
            workspace.checkpoint(ledger, part_done=True, encoder=self.encoder.name)
            workspace.close()
            workspace.unlock()
            self.report(f"part {part}: {ledger.documents_read:,} documents, {ledger.tokens:,} tokens\n{run.speed()}")
        else:
            self.report(f"part {part}: already complete")
        done = [finished_part(replace(part, number=number)) for number in range(1, part.count + 1)]
        missing = [number for number, one in enumerate(done, start=1) if one is None]
        if missing:
            finished = self._find_output()  # another process may have joined them
            if finished is None:
                self.report(f"unfinished parts of {part.count}: {format_ranges(missing)}")
            return finished
        return self._join_parts([one for one in done if one is not None], cuts)

    def _encode(self, workspace: Workspace, ledger: Ledger, cut: InputRange | None = None) -> EncodingRun:
        """Encode an input range; on failure, keep or remove the work folder."""
        run = EncodingRun(self.job, self.options, self.encoder, workspace, ledger, cut)
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
                workspace.checkpoint(ledger, seconds=run.seconds_worth)
                self.report(f"the {ledger.documents_read:,} documents before it are saved in {workspace.folder}")
            raise
        return run

    def _join_parts(self, parts: Sequence[FinishedPart], cuts: Sequence[InputRange]) -> dict[str, Any] | None:
        """Join all parts into one dataset."""
        for one in parts:
            if different := describe_differences(one.identity, self.identity):
                raise UserError(
                    f"part {one.part} has other options: {'; '.join(different)}. Rerun it with --part {one.part}"
                )
            if one.ledger.skipped and self.options.on_bad_line == "error":
                raise UserError(f"part {one.part} skipped bad lines: write --on-bad-line skip")
        try:
            workspace = Workspace(self.work_folder, self.names)
        except Locked:
            self.report("all parts are done; another process is joining them")
            return None
        if not parts[0].part.folder.exists():  # another process has joined them
            workspace.remove()
            return self._read_output()
        workspace.begin(self.identity)
        ledger = join_parts(parts, workspace, self.job.sources, cuts)
        encoders = ", ".join(sorted({str(one.checkpoint["encoder"]) for one in parts}))
        manifest = self._write_datasets(encoders, workspace, ledger)
        shutil.rmtree(self.parts_folder, ignore_errors=True)
        self.report("\n".join([f"joined {len(parts)} parts", *summarize_run(self.job, self.options, ledger)]))
        return manifest

    def _write_datasets(self, encoder_name: str, workspace: Workspace, ledger: Ledger) -> dict[str, Any]:
        """Publish the work folder's datasets. Raises UserError if they are empty."""
        job, options, chat = self.job, self.options, self.job.chat is not None
        if not any(key.written for key in ledger.keys) and (chat or not options.allow_empty):
            workspace.remove()
            counts = ", ".join(f"{count:,} {reason}" for reason, count in sorted(ledger.skipped.items()))
            hint = "rerun without --on-bad-line skip to see the first one"
            why = f"all records are bad ({counts}); {hint}" if counts else "the input has no records"
            if chat:
                raise UserError(f"{options.output_prefix}: no examples: {why}")
            files = "the input file has" if len(job.sources) == 1 else f"all {len(job.sources):,} input files have"
            why = why if counts else f"{files} no text"
            raise UserError(f"no documents: {why}. Write --allow-empty to accept an empty dataset")
        dtypes = [token_dtype(self.encoder.tokenizer.size)] * len(self.names)
        if job.chat is not None:
            dtypes[1] = np.dtype(MASK_DTYPE)
        manifests = [self._manifest(encoder_name, ledger, key, str(dtype)) for key, dtype in enumerate(dtypes)]
        write_outputs(workspace, dtypes, manifests, ledger)
        workspace.remove()
        return manifests[0]

    def _find_output(self) -> dict[str, Any] | None:
        """Return the manifest if an earlier run finished this output, or finish its publication."""
        begun_by = self._finish_publishing()
        finished = None if self.options.overwrite and begun_by != self.identity else self._read_output()
        if finished is not None:
            self.report(f"{self.options.output_prefix}: already complete, nothing to do")
        return finished

    def _read_output(self) -> dict[str, Any] | None:
        """Return the manifest of a complete output with the same options, or None.

        Raises UserError for other options.
        """
        options = self.options
        manifest = read_finished(options.folder, self.names)
        if manifest is None:
            return None
        different = describe_differences(manifest.get("options", {}), self.identity)
        if manifest["documents_skipped"] and options.on_bad_line == "error":
            different.append(f"it skipped {manifest['documents_skipped']} bad lines, and --on-bad-line is error")
        if different:
            raise UserError(
                f"{options.output_prefix} was written with other options: {'; '.join(different)}. "
                "Write another --output-prefix, or --overwrite"
            )
        return manifest

    def _finish_publishing(self) -> dict[str, Any] | None:
        """Finish a run that was killed while its files got their final names; return its options."""
        if not self.work_folder.is_dir():
            return None
        workspace = Workspace(self.work_folder, self.names)
        begun, checkpoints = read_journal(workspace.folder)
        if checkpoints and checkpoints[-1].get("publish"):
            publish(workspace.folder, self.options.folder, self.names)
            workspace.remove()
            self.report(f"{self.options.output_prefix}: finished renaming the files of an earlier run")
            return begun
        if begun is None:
            workspace.remove()  # a run was killed while it created or removed the folder
        else:
            workspace.unlock()
        return None

    def _manifest(self, encoder_name: str, ledger: Ledger, key: int, dtype: str) -> dict[str, Any]:
        """Return an output's manifest, which does not depend on time, machine or number of workers."""
        job, tokenizer, counts = self.job, self.encoder.tokenizer, ledger.keys[key]
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
            "tokenizer": os.path.abspath(tokenizer.path),
            "tokenizer_sha256": tokenizer.sha256,
            "vocab_size": tokenizer.size,
            "eod": tokenizer.end if job.append_eod else None,
            **({"bos": tokenizer.bos} if job.prepend_bos else {}),
            "encoder": encoder_name,
            "options": self.identity,
            "files_found": len(job.sources) + len(job.not_taken),
            "files_taken": len(job.sources),
            "files_not_taken": {_full_path(path): reason for path, reason in job.not_taken.items()},
            "sources": [{"path": _full_path(s.path), "bytes": s.size} for s in job.sources],
            "quarantine": quarantine_file(Path(), self.names).name if ledger.skipped else None,
        }
        if job.chat is not None:
            manifest |= {"tokens_with_loss": ledger.learned, "seq_length": job.chat.max_tokens - 1}
        if job.chat is not None or ledger.notes:
            manifest["changed"] = dict(sorted(ledger.notes.items()))
        return manifest
