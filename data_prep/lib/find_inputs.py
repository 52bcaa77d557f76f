"""Find the input files. Each ignored file is recorded with a reason."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from data_prep.lib import input_readers
from data_prep.lib.input_readers import STDIN, Source
from data_prep.lib.parquet_csv import is_columnar
from data_prep.lib.record_formats import BOM, loads, parse_line
from data_prep.lib.run_options import collect, reject
from megatron_llama.config.data_settings import RAW_DATA_SUFFIXES, TABLE_SUFFIXES, strip_compression
from megatron_llama.config.hub import DATASET, download_hint, resolve_hub_name
from megatron_llama.system.errors import UserError
from megatron_llama.system.files import file_size
from megatron_llama.system.object_store import RemotePath, hide_credentials, is_url, location, missing_package
from megatron_llama.text.conversation import RecordError

TEXT_SUFFIXES = (".txt",)
ONE_VALUE_MAX_BYTES = 4 << 20
QUARANTINE_SUFFIX = ".quarantine.jsonl"
"""Suffix of the file with a run's skipped lines."""
NO_SUFFIX = "unsupported suffix"
MOST_REASONS = 8


@dataclass
class InputFiles:
    """Input files, and ignored files with reasons."""

    sources: list[Source] = field(default_factory=list)
    not_taken: dict[str, str] = field(default_factory=dict)
    """Path to reason."""
    real_paths: set[str] = field(default_factory=set)
    """Where the sources are."""

    def add(self, pattern: str, texts: tuple[str, ...], suffixes: tuple[str, ...], arrays: bool) -> None:
        """Add the files of a path or pattern. Raises UserError."""
        if is_url(pattern):
            paths, reasons = _in_store(pattern, suffixes)
        elif os.path.isdir(pattern):
            paths, reasons = _in_folder(pattern, suffixes)
        elif pattern == STDIN or os.path.exists(pattern):
            paths, reasons = ["/dev/stdin" if pattern == STDIN else pattern], {}
        else:
            paths, reasons = _matching(pattern, suffixes)
        if paths != [pattern]:
            reasons |= _no_records(paths, texts, arrays)
        self.not_taken |= dict(sorted(reasons.items()))
        taken = [path for path in paths if path not in reasons]
        if not taken:
            others = InputFiles(not_taken=reasons).notes()
            rule = f"{pattern} has no supported file ({', '.join(suffixes)}, optionally compressed)"
            raise UserError(". ".join([rule, *others]))
        for path in taken:
            real = path if is_url(path) else os.path.realpath(path)
            if real in self.real_paths:
                raise UserError(f"{path} occurs twice in --input: list each file once")
            self.real_paths.add(real)
            self.sources.append(input_readers.inspect(path, texts))

    def notes(self) -> list[str]:
        """Return notes on ignored files: each reason once, with one path and a count. The manifest lists all."""
        if not self.not_taken:
            return []
        by_reason: dict[str, list[str]] = {}
        for path, reason in self.not_taken.items():
            by_reason.setdefault(reason, []).append(path)
        words = [
            f"{paths[0]}{f' and {len(paths) - 1:,} more' if paths[1:] else ''} ({reason})"
            for reason, paths in list(by_reason.items())[:MOST_REASONS]
        ]
        words += [f"{len(by_reason) - MOST_REASONS} more reasons"] if len(by_reason) > MOST_REASONS else []
        total = len(self.sources) + len(self.not_taken)
        head = f"{len(self.not_taken):,} of {total:,} files found are ignored (list a file in --input to use it):"
        return ["\n  ".join([head, *words])]


def find_sources(
    patterns: Sequence[str], text_suffixes: Sequence[str] = TEXT_SUFFIXES, *, arrays: bool = False, tables: bool = False
) -> InputFiles:
    """Find the input files, in command-line order; files of folders and patterns are sorted by path.

    Paths of files are always used. In folders, at any depth, the suffix decides: RAW_DATA_SUFFIXES, ``text_suffixes``
    and, with ``tables``, .tsv, compressed or not. For patterns, files with other suffixes are also used if they start
    with a record. JSON files with a single value, and text files among record files, are ignored. With ``arrays``, a
    JSON array over several lines is a list of records.

    Raises:
        UserError: A path does not exist or is unreadable, or no file remains. Names all such paths.
    """
    texts = tuple(text_suffixes)
    suffixes = RAW_DATA_SUFFIXES + texts + (TABLE_SUFFIXES if tables else ())
    inputs, problems = InputFiles(), list[str]()
    for path_or_pattern in patterns:
        pattern = path_or_pattern if is_url(path_or_pattern) else resolve_hub_name(path_or_pattern, DATASET)
        collect(problems, partial(inputs.add, pattern, texts, suffixes, arrays))
    reject(problems)
    return inputs


def _in_folder(folder: str, suffixes: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """Return (supported files in a folder, sorted; ignored paths with reasons)."""
    paths: list[str] = []
    reasons: dict[str, str] = {}
    for base, folders, names in os.walk(folder, followlinks=True):
        for name in [one for one in folders if one.startswith(".")]:
            folders.remove(name)
            reasons[os.path.join(base, name)] = "a hidden folder"
        for name in [one for one in folders if _is_loop(base, one)]:
            folders.remove(name)
            reasons[os.path.join(base, name)] = "a link to a parent folder"
        for name in names:
            path = os.path.join(base, name)
            if reason := _reason(path, suffixes):
                reasons[path] = reason
            else:
                paths.append(path)
    reasons |= not_chosen(folder, sorted(paths))
    return sorted(path for path in paths if path not in reasons), reasons


def _in_store(pattern: str, suffixes: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """Return (supported objects of a URL, a folder's URL or a pattern, sorted; ignored ones with reasons)."""
    try:
        remote = RemotePath(pattern)
        if problem := missing_package(pattern):
            raise UserError(f"--input {pattern} {problem[0]}: {problem[1]}")
        is_pattern = glob.has_magic(pattern)
        if not is_pattern and remote.is_file():
            return [pattern], {}
        start = re.split(r"[^/]*[*\[]", pattern)[0].rstrip("/") if is_pattern else remote.url
        paths = sorted(f"{start}/{name}" for name in RemotePath(start).files())
    except ValueError as error:
        raise UserError(f"--input {hide_credentials(pattern)} {error}") from None
    except OSError as error:
        raise UserError(f"cannot read --input {pattern}: {error.strerror}") from None
    if is_pattern:
        paths = [path for path in paths if PurePosixPath(path).match(pattern)]
    if not paths:
        raise UserError(f"--input {pattern} does not exist: there is no such object")
    reasons = {path: reason for path in paths if (reason := _reason(path, suffixes))}
    return [path for path in paths if path not in reasons], reasons


def _is_loop(base: str, name: str) -> bool:
    """Whether a folder in ``base`` is a link to ``base`` or one of its parents."""
    path = os.path.join(base, name)
    if not os.path.islink(path):
        return False
    inside, real = os.path.realpath(base), os.path.realpath(path)
    return os.path.commonpath([inside, real]) == real


def _no_records(paths: Sequence[str], texts: tuple[str, ...], arrays: bool) -> dict[str, str]:
    """Return the files that are not lists of records, with reasons."""
    reasons = {path: "a single JSON value, not a list of records" for path in paths if _is_one_value(path, arrays)}
    is_text = {path for path in paths if strip_compression(path).endswith(texts)}
    if texts and len(is_text) + len(reasons) < len(paths):
        reasons |= dict.fromkeys(sorted(is_text), "a text file in an input of record files")
    return reasons


def _reason(path: str, suffixes: tuple[str, ...]) -> str | None:
    """Return the reason to ignore a file of a folder by its name, else None."""
    if os.path.basename(path).startswith("."):
        return "hidden"
    if os.path.exists(path) and not os.path.isfile(path):
        return "a pipe, socket or device"
    if path.endswith(QUARANTINE_SUFFIX):
        return "skipped lines of an earlier run"
    if strip_compression(path).endswith(suffixes):
        return None
    if strip_compression(path).endswith(TABLE_SUFFIXES):
        return "a table, which sft.py reads with --template"
    return NO_SUFFIX


def _matching(pattern: str, suffixes: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """Return (supported files that match a pattern, sorted; ignored paths with reasons)."""
    matches = sorted(glob.glob(pattern, recursive=True))
    if not matches:
        hint = (
            " (no match for the pattern)"
            if glob.has_magic(pattern)
            else ": write an existing path" + download_hint(pattern, DATASET)
        )
        raise UserError(f"--input {pattern} does not exist{hint}")
    paths: list[str] = []
    reasons: dict[str, str] = {}
    for path in matches:
        if os.path.isdir(path):
            if "**" not in pattern:  # ** descends into folders
                reasons[path] = "a folder: list it in --input, or write **"
        elif (reason := _reason(path, suffixes)) and not (reason == NO_SUFFIX and _begins_with_record(path)):
            reasons[path] = reason
        else:
            paths.append(path)
    return paths, reasons


def _begins_with_record(path: str) -> bool:
    """Whether a file with an unsupported suffix starts as Parquet, Arrow or a JSON object."""
    try:
        with open(path, "rb") as file:
            head = file.read(1 << 10)
            if is_columnar(head) or input_readers.describe_unsupported(head):
                return bool(is_columnar(head))
            if compression := input_readers.compression_of(head):
                file.seek(0)
                head = next(input_readers.unpack(path, compression, file), (b"", 0))[0]
    except (OSError, UserError):
        return False
    return head.removeprefix(BOM).lstrip()[:1] == b"{"


def _is_one_value(path: str, arrays: bool) -> bool:
    """Whether a small .json file is one JSON value over several lines, such as a configuration."""
    if not path.lower().endswith(".json") or file_size(location(path)) > ONE_VALUE_MAX_BYTES:
        return False
    with input_readers.open_input(path) as file:
        data = file.read().strip()
    if b"\n" not in data:
        return False
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return not (arrays and isinstance(value, list))


# Hugging Face datasets: select the data files and the split.
#
# Two layouts: the output of ``datasets.save_to_disk`` (state.json and data-*.arrow, a folder per split below a
# dataset_dict.json), and a downloaded hub repository (README.md lists configs and their data files, or files have names
# like train-00000-of-00002.parquet). The split ``train`` is used if it exists, and the default config.

TRAIN = "train"
DESCRIPTIONS = ("dataset_dict.json", "dataset_info.json", "dataset_infos.json")
SHARD = re.compile(r"(?:^|[^A-Za-z0-9])(train|validation|valid|val|dev|test|eval)[-.]\d{4,6}-of-\d{4,6}")


def not_chosen(folder: str, paths: Sequence[str]) -> dict[str, str]:
    """Return the files of a Hugging Face dataset to ignore, with reasons; empty for other folders.

    Raises UserError if the selection is ambiguous, or files are missing.
    """
    reasons = {path: "dataset description" for path in paths if os.path.basename(path) in DESCRIPTIONS}
    for path in paths:
        state = _object(path) if os.path.basename(path) == "state.json" else {}
        if "_data_files" in state:
            reasons[path] = "dataset description"
            reasons |= _not_saved(path, state, paths)
    rest = [path for path in paths if path not in reasons]
    splits = _object(os.path.join(folder, "dataset_dict.json")).get("splits") or []
    configs = _configs(os.path.join(folder, "README.md"))
    if TRAIN in splits:
        for path in rest:
            split = os.path.relpath(path, folder).split(os.sep)[0]
            if split in splits and split != TRAIN:
                reasons[path] = _other_split(split)
    elif configs:
        reasons |= _not_in_config(folder, rest, configs)
    else:
        shards = {path: match[1] for path in rest if (match := SHARD.search(os.path.basename(path)))}
        with_train = {os.path.dirname(path) for path, split in shards.items() if split == TRAIN}
        for path, split in shards.items():
            if split != TRAIN and os.path.dirname(path) in with_train:
                reasons[path] = _other_split(split)
    return reasons


def _other_split(split: str) -> str:
    return f"split {split}; only the split {TRAIN} is used"


def _not_saved(path: str, state: dict[str, Any], paths: Sequence[str]) -> dict[str, str]:
    """Return the .arrow files that state.json does not list, such as caches."""
    if state.get("_indices_data_files"):
        raise UserError(
            f"{path}: indices mappings are not supported: call flatten_indices() and save the dataset again"
        )
    named = {str(one.get("filename")) for one in state["_data_files"]}
    here = [one for one in paths if os.path.dirname(one) == os.path.dirname(path) and one.endswith(".arrow")]
    missing = named - {os.path.basename(one) for one in here}
    if missing:
        raise UserError(f"{path} lists {sorted(missing)[0]}, which does not exist: download or save the dataset again")
    return {one: "not listed in state.json" for one in here if os.path.basename(one) not in named}


def _object(path: str) -> dict[str, Any]:
    """Read a JSON object; return an empty one if there is no valid file."""
    with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
        content = json.load(file)
        return content if isinstance(content, dict) else {}
    return {}


def _configs(readme: str) -> list[dict[str, Any]]:
    """Return the configs in the YAML header of a dataset's README.md."""
    try:
        with open(readme, encoding="utf-8") as file:
            text = file.read(1 << 20)
    except (OSError, UnicodeDecodeError):
        return []
    if not text.startswith("---\n"):
        return []
    import yaml

    with contextlib.suppress(yaml.YAMLError):
        header = yaml.safe_load(text[4:].partition("\n---")[0])
        configs = header.get("configs") if isinstance(header, dict) else None
        return [one for one in configs or [] if isinstance(one, dict)]
    return []


def _files_of(folder: str, config: dict[str, Any]) -> dict[str, str]:
    """Map the paths of a config's data files to splits."""
    given = config.get("data_files") or "**"
    if isinstance(given, dict):
        given = [{"split": split, "path": path} for split, path in given.items()]
    files = {}
    for entry in given if isinstance(given, list) else [given]:
        entry = entry if isinstance(entry, dict) else {"split": TRAIN, "path": entry}
        patterns = entry.get("path") or []
        for pattern in patterns if isinstance(patterns, list) else [patterns]:
            where = os.path.join(folder, str(config.get("data_dir") or ""), str(pattern))
            for path in glob.glob(where, recursive=True):
                files[os.path.normpath(path)] = str(entry.get("split"))
    return files


def _not_in_config(folder: str, paths: Sequence[str], configs: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the files of other configs and splits, with reasons."""
    normal = {os.path.normpath(path): path for path in paths}
    there = {}
    for config in configs:
        files = {path: split for path, split in _files_of(folder, config).items() if path in normal}
        if files:
            there[str(config.get("config_name"))] = (config, files)
    if not there:
        return {}
    defaults = [name for name, (config, _) in there.items() if config.get("default") or name == "default"]
    chosen = next(iter(there)) if len(there) == 1 else defaults[0] if defaults else None
    if chosen is None:
        raise UserError(
            f"{folder} has several configs ({', '.join(there)}) and no default: "
            "write a pattern for the files of one config"
        )
    files = there[chosen][1]
    reasons = {}
    for normed, path in normal.items():
        split = files.get(normed)
        if split is None:
            other = next((name for name, (_, theirs) in there.items() if normed in theirs), None)
            reasons[path] = f"config {other}; only {chosen} is used" if other else "not a data file in README.md"
        elif split != TRAIN and TRAIN in files.values():
            reasons[path] = _other_split(split)
    return reasons


# Detection of the text key, and sample texts for the encoder's self-check.

LOOK_BYTES = 1 << 17
SAMPLE_FILES = 4
SAMPLE_CHARACTERS = 1 << 16
# Text keys in order of priority: RedPajama-1T and most others, RedPajama-V2, OSCAR.
TEXT_KEYS = ("text", "raw_content", "content")


def _head(source: Source) -> bytes:
    """Return the first LOOK_BYTES unpacked bytes."""
    head = b""
    for chunk, _ in input_readers.read_chunks(source):
        head += chunk[:LOOK_BYTES]
        if len(head) >= LOOK_BYTES:
            break
    return head[:LOOK_BYTES].removeprefix(BOM)


def detect_keys(sources: Sequence[Source]) -> list[str]:
    """Return the text key of the first valid record, or ``text``. Raises UserError if a compressed file is damaged."""
    for source in sources[:SAMPLE_FILES]:
        if source.is_text:
            continue
        head = _head(source)
        for line in head.split(b"\n")[: 64 if head.count(b"\n") else 0]:
            try:
                record = loads(line)
            except (ValueError, RecursionError):
                continue
            for key in TEXT_KEYS:
                if isinstance(record, dict) and isinstance(record.get(key), str):
                    return [key]
    return ["text"]


def sample_texts(sources: Sequence[Source], keys: Sequence[str]) -> list[str]:
    """Return about 64 K characters from the start of the first, middle and last files."""
    picked = sorted({0, len(sources) // 3, 2 * len(sources) // 3, len(sources) - 1})[:SAMPLE_FILES]
    texts: list[str] = []
    for index in picked:
        size = 0
        try:
            head = _head(sources[index])
        except UserError:
            continue  # reported later, in input order
        for line in [head] if sources[index].is_text else head.split(b"\n"):
            texts_of_line = [line.decode("utf-8", "ignore")]
            with contextlib.suppress(RecordError):  # a bad line is still a sample
                texts_of_line = texts_of_line if sources[index].is_text else parse_line(line, keys)
            for text in texts_of_line:
                texts.append(text[: SAMPLE_CHARACTERS // SAMPLE_FILES - size])
                size += len(texts[-1])
            if size >= SAMPLE_CHARACTERS // SAMPLE_FILES:
                break
    return texts
