"""Datasets before the ranks start: files of records in data.prefixes are prepared, and what can't be used is refused.

A prepared dataset is in a folder whose name is a digest of everything that decides its content: the file's bytes, the
tokenizer's files and the settings. It appears there whole, by a rename, so the next run finds it, wherever the same
records are.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_llama.config import Config, ConfigError, DataConfig, Problem
from megatron_llama.config.data_settings import has_columns, raw_data_tokenizer
from megatron_llama.config.hf_config import short_name
from megatron_llama.system.errors import LaunchFailed, MachineError, Stopped, UserError
from megatron_llama.system.files import sha256_file, try_lock, user_cache, wait_for_lock

MAX_BYTES = 256 << 20
"""Of a file on disk. Beyond it preparation takes many minutes, which belong in a job of their own."""
_NAME = "records"
_VERSION = 2  # of what data_prep/sft.py makes of the same records; raise it when that changes
# The files that tokenizers and chat templates are read from.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True)
class RecordFile:
    """A file or folder of records, and where its dataset is or will be."""

    setting: str
    path: str
    tokenizer: str
    folder: Path
    stamp: list[tuple[str, int, int]]
    """Path, size and time of each file when it was read for the folder's name."""

    @property
    def prefix(self) -> str:
        """Replaces the file in data.prefixes."""
        return str(self.folder / f"{_NAME}_sft")


def prepare_datasets(
    config: Config, files: Iterable[tuple[str, str]], seq_length: int, *, make: bool, quiet: bool = False
) -> Config:
    """Return a copy of the config with a dataset in place of each of its files of records.

    Args:
        files: (setting, path), as in ``Plan.raw_data_files``.
        seq_length: Tokens per sequence, as in the plan: the config may leave it open.
        make: Prepare each dataset that does not exist. Otherwise its file stays in the config.
        quiet: Do not report datasets that existed before.

    Raises:
        ConfigError: A file is too large. If ``make``, also for files that can't be used and for bad records.
        LaunchFailed: The machine failed.
        Stopped: A signal stopped the preparation; the same command starts it again.
    """
    data = replace(config.data, seq_length=seq_length)
    too_large: list[Problem] = []
    unreadable: list[Problem] = []
    found = _find_records(config, data, files, too_large, unreadable)
    if problems := [*too_large, *(unreadable if make else ())]:  # a plan notes unreadable files
        raise ConfigError(problems)
    for records in found if make else ():
        _prepare_once(records, data, quiet)
    finished = [records for records in found if records.folder.is_dir()]
    return _with_prefixes(config, finished, all_prepared=len(finished) == len(found) and not unreadable)


def _find_records(
    config: Config,
    data: DataConfig,
    files: Iterable[tuple[str, str]],
    too_large: list[Problem],
    unreadable: list[Problem],
) -> list[RecordFile]:
    """Return the files of records that can be used; add the problems of the others to the two lists."""
    found: list[RecordFile] = []
    tokenizer = raw_data_tokenizer(config)
    if tokenizer is None:  # a rule asks for it
        return found
    for setting, path in files:
        try:
            stamp = _stamp(path)
            if (size := sum(size for _, size, _ in stamp)) > MAX_BYTES:
                most = MAX_BYTES >> 20
                rule = f"has {size / 2**20:,.0f} MiB; up to {most} MiB are prepared at the start"
                instead = f"make a dataset of it: {_command(path, tokenizer, data)}"
                too_large.append(Problem(setting, path, rule, instead))
                continue
            cache = Path(os.path.abspath(os.path.expanduser(data.cache_dir or user_cache("data"))))
            folder = cache / _key(path, [file for file, _, _ in stamp], tokenizer, data)
        except OSError as error:
            rule = f"{error.filename or path} can't be read: {error.strerror}"
            unreadable.append(Problem(setting, path, rule, "make it readable, or name another file"))
            continue
        except UserError as error:
            unreadable.append(Problem(setting, path, str(error), "name a file of records, or a folder that holds some"))
            continue
        found.append(RecordFile(setting, path, tokenizer, folder, stamp))
    return found


def _stamp(path: str) -> list[tuple[str, int, int]]:
    """``Records.stamp`` of a file, or of what is taken of a folder. Raises OSError, and UserError for what is not."""
    files = [path]
    if os.path.isdir(path):
        from data_prep.lib.input_files import find_sources

        files = [source.path for source in find_sources([path], text_suffixes=(), arrays=True).sources]
    status = [os.stat(file) for file in files]
    return [(file, one.st_size, one.st_mtime_ns) for file, one in zip(files, status, strict=True)]


def _with_prefixes(config: Config, prepared: list[RecordFile], *, all_prepared: bool) -> Config:
    """A copy of the config that names prepared datasets instead of their files."""
    prefixes = {(records.setting, records.path): records.prefix for records in prepared}
    config = copy.deepcopy(config)
    data = config.data
    data.prefixes = [prefixes.get(("data.prefixes", str(item)), item) for item in data.prefixes]
    data.validation_prefixes = [prefixes.get(("data.validation_prefixes", p), p) for p in data.validation_prefixes]
    if prepared and all_prepared:  # what is left are datasets, whose examples are rendered already
        data.template, data.chat_template = DataConfig.template, DataConfig.chat_template
    return config


def _key(path: str, records: list[str], tokenizer: str, data: DataConfig) -> str:
    """A digest of everything that decides the dataset's content; ``records`` are the files at ``path``. Raises
    OSError."""
    own = Path(tokenizer)
    folder = own if own.is_dir() else own.parent
    files = [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    files += [] if own.is_dir() else [own]
    content = {
        "version": _VERSION,
        "records": sha256_file(Path(path)) if records == [path] else [sha256_file(Path(file)) for file in records],
        "table": data.template if has_columns(path) else None,
        "tokenizer": [(file.name, sha256_file(file)) for file in files],
        "reads": None if own.is_dir() else own.name,
        "chat_template": data.chat_template,
        "seq_length": data.length,
    }
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]


def _prepare_once(records: RecordFile, data: DataConfig, quiet: bool) -> None:
    """Prepares the dataset unless it exists: one process at a time, the others find it."""
    if records.folder.is_dir():
        if not quiet:
            _report(f"{records.path}: prepared before, in {records.folder}")
        return
    cache = records.folder.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f".{records.folder.name}.lock").open("a") as lock:
            locked = try_lock(lock)
            if locked is False:
                if not quiet:
                    _report(f"{records.path}: another start prepares it; waiting")
                wait_for_lock(lock)
            if records.folder.is_dir():
                if not quiet:
                    _report(f"{records.path}: prepared by another start, in {records.folder}")
                return
            if locked is not None:  # alone, so these are left over from starts that were killed
                for rest in cache.glob(f".{records.folder.name}.partial.*"):
                    shutil.rmtree(rest, ignore_errors=True)
            aside = cache / f".{records.folder.name}.partial.{os.uname().nodename}.{os.getpid()}"
            try:
                _report(_summary(records, _prepare(records, data, aside)))
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise LaunchFailed(f"{records.path} can't be prepared in {cache}: {error.strerror or error}") from error


def _prepare(records: RecordFile, data: DataConfig, aside: Path) -> dict[str, Any]:
    """Prepares the dataset in the folder ``aside`` and renames that; returns the dataset's manifest."""
    from data_prep.lib.job import RunOptions
    from data_prep.lib.sets import ExampleOptions, make_sft_set

    template = data.template if has_columns(records.path) else None
    examples = ExampleOptions(
        records.tokenizer, data.length, template=template or None, chat_template=data.chat_template
    )
    aside.mkdir()
    try:
        options = RunOptions(str(aside / _NAME))
        manifest = make_sft_set([os.path.abspath(records.path)], examples, options, lambda _: None)
    except UserError as error:
        rule, _, advice = str(error).partition(" Nothing was written.")
        instead = "mend the file"
        if advice:
            instead = f"mend it, or leave bad lines out: {_command(records.path, records.tokenizer, data)}"
        raise ConfigError([Problem(records.setting, records.path, rule.rstrip("."), instead)]) from None
    except MachineError as error:
        raise LaunchFailed(f"{records.path} could not be prepared: {error}") from error
    except Stopped as error:
        raise Stopped(f"{records.path} is not prepared yet: {str(error).partition('.')[0]}") from None
    if _stamp(records.path) != records.stamp:
        instead = "start again when nothing writes to it"
        raise ConfigError([Problem(records.setting, records.path, "was changed while it was read", instead)])
    try:
        os.rename(aside, records.folder)
    except OSError:  # without locks, another start was faster: the same content
        if not records.folder.is_dir():
            raise
    assert manifest is not None, "all of the file was prepared"
    return manifest


def _command(path: str, tokenizer: str, data: DataConfig) -> str:
    """The command that makes a dataset of the file by hand, leaving bad lines out."""
    name = short_name(path).partition(".")[0]
    words = ["--input", os.path.abspath(path), "--tokenizer-model", tokenizer, "--seq-length", str(data.length)]
    words += ["--chat-template", data.chat_template] if data.chat_template != DataConfig.chat_template else []
    words += ["--template", str(data.template)] if has_columns(path) and data.template else []
    words += ["--on-bad-line", "skip", "--output-prefix", f"datasets/{name}/{name}"]
    return f"python data_prep/sft.py {shlex.join(words)}, and write datasets/{name}/{name}_sft"


def _summary(records: RecordFile, manifest: dict[str, Any]) -> str:
    changed = "".join(f"; {count:,} {what}" for what, count in manifest["changed"].items())
    return (
        f"{records.path}: {manifest['documents_written']:,} documents, {manifest['tokens']:,} tokens "
        f"({manifest['tokens_with_loss']:,} learned), {manifest['documents_skipped']:,} skipped{changed}; "
        f"prepared in {records.folder}"
    )


def _report(text: str) -> None:
    sys.stdout.write(f"data: {text}\n")
    sys.stdout.flush()
