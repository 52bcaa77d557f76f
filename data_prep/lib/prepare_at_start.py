"""Prepare the raw data files of data.prefixes before the ranks start.

A prepared dataset is cached in a folder named by a digest of its content: the raw data file, the tokenizer files and
the settings. An atomic rename creates the folder, so later runs with the same records reuse it.
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
from typing import TYPE_CHECKING, Any

from megatron_llama.config import Config, ConfigError, Problem, data_settings
from megatron_llama.config.data_settings import PREFERENCE_FORMATS, NewTokens, has_columns
from megatron_llama.config.hub import short_name
from megatron_llama.config.settings import DataConfig
from megatron_llama.system.errors import LaunchFailed, MachineError, Stopped, UserError, reason_of
from megatron_llama.system.files import sha256_file, try_lock, user_cache, wait_for_lock
from megatron_llama.system.wrapping import wrap
from megatron_llama.text.conversation import variables_problems
from megatron_llama.text.tokenizer import TOKENIZER_FILES

if TYPE_CHECKING:
    from data_prep.lib.sft_and_text_sets import ExampleOptions

MAX_BYTES = 256 << 20
"""Maximum size of a raw data file. Larger files take minutes to prepare: use data_prep/sft.py."""
_VERSION = 3  # increase it if data_prep/sft.py changes the output of the same records


@dataclass(frozen=True)
class RecordFile:
    """Raw data file or folder, and the path of its dataset."""

    setting: str
    path: str
    tokenizer: str
    folder: Path
    stamp: list[tuple[str, int, int]]
    """Path, size and mtime of each file when ``folder`` was computed."""
    format: str
    """sft.py's --format."""

    @property
    def prefix(self) -> str:
        """Dataset prefix that replaces the file in data.prefixes."""
        return str(self.folder / f"{_dataset_name(self.path)}_sft")


def prepare_datasets(
    config: Config, files: Iterable[tuple[str, str]], seq_length: int, *, make: bool, quiet: bool = False
) -> Config:
    """Return a copy of the config with each raw data file replaced by its prepared dataset.

    Args:
        files: (setting, path), as in ``Plan.raw_data_files``.
        seq_length: Tokens per sequence, as in the plan: the config may leave it open.
        make: Prepare each dataset that does not exist. Otherwise check its tokenizer; its file stays in the config.
        quiet: Do not report datasets that existed before.

    Raises:
        ConfigError: A file is too large, or the tokenizer lacks the template or a token. If ``make``, also for files
            that can't be used and for bad records.
        LaunchFailed: The machine failed.
        Stopped: A signal stopped the preparation; the same command starts it again.
    """
    data = replace(config.data, seq_length=seq_length)
    files_to_prepare, too_large, unreadable = _find_records(config, data, files)
    problems = [*too_large, *(unreadable if make else ())]  # a plan notes unreadable files
    setting, variables = "data.chat_template_kwargs", data.chat_template_kwargs
    for rule in variables_problems(data.chat_template, variables):
        problems.append(Problem(setting, variables, rule, f"omit {setting}, or set other variables"))
    if problems:
        raise ConfigError(problems)
    unprepared = [records for records in files_to_prepare if make or not records.folder.is_dir()]
    if not make and (problems := [problem for records in unprepared for problem in _check(records, data)]):
        raise ConfigError(problems)
    for records in unprepared if make else ():
        _prepare_once(records, data, quiet)
    finished = [records for records in files_to_prepare if records.folder.is_dir()]
    return _with_prefixes(config, finished, all_prepared=len(finished) == len(files_to_prepare) and not unreadable)


def _find_records(
    config: Config, data: DataConfig, files: Iterable[tuple[str, str]]
) -> tuple[list[RecordFile], list[Problem], list[Problem]]:
    """Return the usable raw data files, the problems of too large files, and the problems of unreadable files."""
    files_to_prepare, too_large, unreadable = list[RecordFile](), list[Problem](), list[Problem]()
    tokenizer = data_settings.raw_data_tokenizer(config)
    format = PREFERENCE_FORMATS.get(config.finetune.objective, data.format)
    if tokenizer is None:  # a plan rule reports a missing tokenizer
        return files_to_prepare, too_large, unreadable
    for setting, path in files:
        try:
            stamp = _stamp(path)
            if (size := sum(size for _, size, _ in stamp)) > MAX_BYTES:
                rule = f"has {size / 2**20:,.0f} MiB; the limit for preparation at startup is {MAX_BYTES >> 20} MiB"
                fix = f"prepare it first: {_command(path, tokenizer, data, format)}"
                too_large.append(Problem(setting, path, rule, fix))
                continue
            cache = Path(os.path.abspath(os.path.expanduser(data.cache_dir or user_cache("data"))))
            folder = cache / _key(path, [file for file, _, _ in stamp], tokenizer, data, format)
        except OSError as error:
            rule = f"cannot read {error.filename or path}: {error.strerror}"
            unreadable.append(Problem(setting, path, rule, "fix the permissions, or write another path"))
            continue
        except UserError as error:
            advice = "write a JSONL, CSV or Parquet file, or a folder of such files"
            unreadable.append(Problem(setting, path, str(error), advice))
            continue
        files_to_prepare.append(RecordFile(setting, path, tokenizer, folder, stamp, format))
    return files_to_prepare, too_large, unreadable


def _stamp(path: str) -> list[tuple[str, int, int]]:
    """Return ``RecordFile.stamp`` of a file or of a folder's files. Raises OSError, UserError."""
    files = [path]
    if os.path.isdir(path):
        from data_prep.lib.find_inputs import find_sources

        files = [source.path for source in find_sources([path], text_suffixes=(), arrays=True).sources]
    status = [os.stat(file) for file in files]
    return [(file, one.st_size, one.st_mtime_ns) for file, one in zip(files, status, strict=True)]


def _with_prefixes(config: Config, prepared: list[RecordFile], *, all_prepared: bool) -> Config:
    """Return a copy of the config with the prefixes of the prepared datasets."""
    prefixes = {(records.setting, records.path): records.prefix for records in prepared}
    config = copy.deepcopy(config)
    data = config.data
    data.prefixes = [prefixes.get(("data.prefixes", str(item)), item) for item in data.prefixes]
    sets = {
        name: [prefixes.get(("data.validation_prefixes", path), path) for path in paths]
        for name, paths in data_settings.validation_sets(data).items()
    }
    data.validation_prefixes = sets[""] if "" in sets else [{name: paths} for name, paths in sets.items()]
    if prepared and all_prepared:  # all prefixes are datasets, which need no template
        data.template, data.chat_template, data.chat_template_kwargs = None, DataConfig.chat_template, {}
        data.format, data.response_marker = DataConfig.format, None
    return config


def _key(path: str, records: list[str], tokenizer: str, data: DataConfig, format: str) -> str:
    """Return a digest of tokenizer, options and ``records``, the files at ``path``. Raises OSError."""
    tokenizer_path = Path(tokenizer)
    folder = tokenizer_path if tokenizer_path.is_dir() else tokenizer_path.parent
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    files += [] if tokenizer_path.is_dir() else [tokenizer_path]
    content = {
        "version": _VERSION,
        "name": _dataset_name(path),
        "records": sha256_file(Path(path)) if records == [path] else [sha256_file(Path(file)) for file in records],
        "table": data.template if has_columns(path) else None,
        "tokenizer": [(file.name, sha256_file(file)) for file in files],
        "reads": None if tokenizer_path.is_dir() else tokenizer_path.name,
        "chat_template": _template_key(data.chat_template),
        "seq_length": data.length,
        **({"format": format} if format != "auto" else {}),
        **NewTokens.of(data).settings,
        **({"chat_template_kwargs": data.chat_template_kwargs} if data.chat_template_kwargs else {}),
        **({"response_marker": data.response_marker} if data.response_marker else {}),
    }
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]


def _dataset_name(path: str) -> str:
    """Return the name of a raw data file's dataset, which plans and model cards show."""
    return data_settings.name_dataset([short_name(path).partition(".")[0]])[:50]


def _template_key(name: str) -> str:
    """Return a template's name, or the digest of a Jinja file. Raises OSError."""
    return sha256_file(Path(name)) if data_settings.is_template_file(name) and Path(name).exists() else name


def _prepare_once(records: RecordFile, data: DataConfig, quiet: bool) -> None:
    """Prepare the dataset unless it exists. A lock lets one process do it; others wait."""
    note = (lambda _: None) if quiet else _report
    if records.folder.is_dir():
        note(f"{records.path}: using the prepared dataset in {records.folder}")
        return
    cache = records.folder.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f".{records.folder.name}.lock").open("a") as lock:
            locked = try_lock(lock)
            if locked is False:
                note(f"{records.path}: another run is preparing it; waiting")
                wait_for_lock(lock)
            if records.folder.is_dir():
                note(f"{records.path}: prepared by another run in {records.folder}")
                return
            if locked is not None:  # with the lock, these are leftovers of killed runs
                for rest in cache.glob(f".{records.folder.name}.partial.*"):
                    shutil.rmtree(rest, ignore_errors=True)
            temporary = cache / f".{records.folder.name}.partial.{os.uname().nodename}.{os.getpid()}"
            try:
                _report(_summary(records, _prepare(records, data, temporary)))
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise LaunchFailed(f"cannot prepare {records.path} in {cache} (data.cache_dir): {reason_of(error)}") from error


def _check(records: RecordFile, data: DataConfig) -> list[Problem]:
    """Return the problems that a run would find before it reads the records."""
    from data_prep.lib.sft_and_text_sets import build_chat_format, find_record_files

    path = os.path.abspath(records.path)
    try:
        examples = _examples(records, data)
        build_chat_format(examples, find_record_files([path], examples, lambda _: None).sources)
    except UserError as error:
        return [_problem(error, records, data, records.folder)]
    return []


def _examples(records: RecordFile, data: DataConfig) -> ExampleOptions:
    from data_prep.lib.sft_and_text_sets import ExampleOptions

    template = (data.template or None) if has_columns(records.path) else None
    chat = (data.chat_template, data.chat_template_kwargs, data.response_marker)
    new = NewTokens.of(data).settings
    return ExampleOptions(records.tokenizer, data.length, records.format, template, *chat, **new)  # type: ignore[arg-type]


def _prepare(records: RecordFile, data: DataConfig, temporary: Path) -> dict[str, Any]:
    """Prepare the dataset in ``temporary``, rename that folder, and return the manifest."""
    from data_prep.lib.run_options import RunOptions
    from data_prep.lib.sft_and_text_sets import make_sft_set

    temporary.mkdir()
    try:
        options = RunOptions(str(temporary / _dataset_name(records.path)))
        manifest = make_sft_set([os.path.abspath(records.path)], _examples(records, data), options, lambda _: None)
    except UserError as error:
        raise ConfigError([_problem(error, records, data, temporary / _dataset_name(records.path))]) from None
    except MachineError as error:
        raise LaunchFailed(f"cannot prepare {records.path}: {error}") from error
    except Stopped as error:
        raise Stopped(f"preparation of {records.path} was interrupted: {str(error).partition('.')[0]}") from None
    if _stamp(records.path) != records.stamp:
        fix = "rerun when no process writes to it"
        raise ConfigError([Problem(records.setting, records.path, "changed while it was read", fix)])
    try:
        os.rename(temporary, records.folder)
    except OSError:  # without locks, another run may have created the same content
        if not records.folder.is_dir():
            raise
    assert manifest is not None, "without --part there is always a manifest"
    return manifest


_FORMATS = {"--format unpaired": "finetune.objective=kto", "--format ": "data.format="}
"""Settings in place of formats in messages about records."""


def _problem(error: UserError, records: RecordFile, data: DataConfig, output: Path) -> Problem:
    """Return an error of the preparation as a problem of a setting. Its remedy names settings, not flags."""
    from data_prep.lib.encoding_run import BadRecord
    from megatron_llama.text.chat_template import TemplateError

    if isinstance(error, TemplateError):
        instead = f"write data.chat_template={error.instead}" if error.instead else "correct the template"
        return Problem("data.chat_template", data.chat_template, error.rule, instead)
    rule, fix = str(error), "fix the file"
    if isinstance(error, BadRecord):
        rule = error.rule
        fix = f"fix it, or skip bad lines: {_command(records.path, records.tokenizer, data, records.format)}"
    for flag, setting in {f"{output}: ": "", **_FORMATS}.items():
        rule = rule.replace(flag, setting)
    return Problem(records.setting, records.path, rule.rstrip("."), fix)


def _command(path: str, tokenizer: str, data: DataConfig, format: str) -> str:
    """Return the command that prepares the file and skips bad lines."""
    name = _dataset_name(path)
    words = ["--input", os.path.abspath(path), "--tokenizer-model", tokenizer, "--seq-length", str(data.length)]
    words += ["--chat-template", data.chat_template] if data.chat_template != DataConfig.chat_template else []
    if data.chat_template_kwargs:
        words += ["--chat-template-kwargs", json.dumps(data.chat_template_kwargs)]
    words += [f"--response-marker={data.response_marker}"] if data.response_marker else []
    for setting, tokens in NewTokens.of(data).settings.items():
        words += [f"--{setting.replace('_', '-')}", *tokens]
    words += ["--format", format] if format != "auto" else []
    words += ["--template", str(data.template)] if has_columns(path) and data.template else []
    words += ["--on-bad-line", "skip", "--output-prefix", f"corpora/{name}/{name}"]
    return f"python data_prep/sft.py {shlex.join(words)}, then write corpora/{name}/{name}_sft"


def _summary(records: RecordFile, manifest: dict[str, Any]) -> str:
    changed = "".join(f"; {count:,} {note}" for note, count in manifest["changed"].items())
    return (
        f"{records.path}: {manifest['documents_written']:,} documents, {manifest['tokens']:,} tokens "
        f"({manifest['tokens_with_loss']:,} with loss), {manifest['documents_skipped']:,} skipped{changed}; "
        f"prepared in {records.folder}"
    )


def _report(text: str) -> None:
    sys.stdout.write(wrap(text, "data: ") + "\n")
    sys.stdout.flush()
