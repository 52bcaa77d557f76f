"""Finding the input's files. What is found and not taken is kept with its reason: no file vanishes."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from data_prep.lib.parquet_csv import is_columnar
from data_prep.lib.records import BOM, loads, parse_line
from data_prep.lib.sources import STDIN, Source, compression_of, inspect, not_read, read_pieces, unpack
from megatron_llama.config.data_settings import RAW_DATA_SUFFIXES, TABLE_SUFFIXES, strip_compression
from megatron_llama.config.hf_config import DATASET, download_hint, resolve_hub_name
from megatron_llama.system.errors import UserError
from megatron_llama.text.conversation import RecordError

TEXT_SUFFIXES = (".txt",)
ONE_VALUE_MAX_BYTES = 4 << 20
QUARANTINE_SUFFIX = ".quarantine.jsonl"
"""Of the file in which a run keeps the bad lines that it left out."""
NO_SUFFIX = "no suffix that is read"
MOST_REASONS = 8


@dataclass
class InputFiles:
    """The input's files."""

    sources: list[Source] = field(default_factory=list)
    not_taken: dict[str, str] = field(default_factory=dict)
    """path to reason"""

    def notes(self) -> list[str]:
        """What was not taken: each reason once, with a name and the number of others; all are in the manifest."""
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
        return [
            f"{len(self.not_taken):,} of {total:,} files found are not taken: {'; '.join(words)}. To take one, name it"
        ]


def find_sources(
    patterns: Sequence[str], text_suffixes: Sequence[str] = TEXT_SUFFIXES, *, arrays: bool = False, tables: bool = False
) -> InputFiles:
    """The input files of the command line, in its order; folders and patterns are sorted by path.

    A file that is named is taken. In a folder, at any depth, the names decide: RECORD_SUFFIXES and ``text_suffixes``,
    with ``tables`` .tsv too, compressed or not. Of what a pattern matches, files of other names are taken where they
    begin with a record. What is plainly no list of records is left out: a manifest of several lines, a text file
    beside files of records. With ``arrays`` a JSON array over several lines is a list of records.

    Raises:
        UserError: something is not there, can't be read, or no file is left.
    """
    texts = tuple(text_suffixes)
    wanted = RAW_DATA_SUFFIXES + texts + (TABLE_SUFFIXES if tables else ())
    found = InputFiles()
    seen: set[str] = set()
    for given in patterns:
        pattern = resolve_hub_name(given, DATASET)
        if os.path.isdir(pattern):
            paths, reasons = _in_folder(pattern, wanted)
        elif pattern == STDIN or os.path.exists(pattern):
            paths, reasons = ["/dev/stdin" if pattern == STDIN else pattern], {}
        else:
            paths, reasons = _matching(pattern, wanted)
        if paths != [pattern]:
            reasons |= _no_records(paths, texts, arrays)
        found.not_taken |= dict(sorted(reasons.items()))
        taken = [path for path in paths if path not in reasons]
        if not taken:
            others = InputFiles(not_taken=reasons).notes()
            raise UserError(
                ". ".join([f"{pattern} holds no file to take ({', '.join(wanted)}, compressed or not)", *others])
            )
        for path in taken:
            real = os.path.realpath(path)
            if real in seen:
                raise UserError(f"{path} is named twice in --input: its documents would count twice")
            seen.add(real)
            found.sources.append(inspect(path, texts))
    return found


def _in_folder(folder: str, wanted: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """(what the names in a folder say is to be taken, sorted; the rest with reasons)"""
    paths: list[str] = []
    reasons: dict[str, str] = {}
    for base, folders, names in os.walk(folder, followlinks=True):
        for name in [one for one in folders if one.startswith(".")]:
            folders.remove(name)
            reasons[os.path.join(base, name)] = "a hidden folder"
        for name in [one for one in folders if _is_loop(base, one)]:
            folders.remove(name)
            reasons[os.path.join(base, name)] = "a link to a folder that it is in"
        for name in names:
            path = os.path.join(base, name)
            if reason := _reason(path, wanted):
                reasons[path] = reason
            else:
                paths.append(path)
    reasons |= not_chosen(folder, sorted(paths))
    return sorted(path for path in paths if path not in reasons), reasons


def _is_loop(base: str, name: str) -> bool:
    """Whether a folder in ``base`` is a link to that folder, or to one above it."""
    path = os.path.join(base, name)
    if not os.path.islink(path):
        return False
    inside, real = os.path.realpath(base), os.path.realpath(path)
    return os.path.commonpath([inside, real]) == real


def _no_records(paths: Sequence[str], texts: tuple[str, ...], arrays: bool) -> dict[str, str]:
    """Of the files of a folder or pattern those that are plainly no lists of records, with reasons."""
    reasons = {path: "one JSON value, and no list of records" for path in paths if _is_one_value(path, arrays)}
    is_text = {path for path in paths if strip_compression(path).endswith(texts)}
    if texts and len(is_text) + len(reasons) < len(paths):
        reasons |= dict.fromkeys(sorted(is_text), "a text beside files of records")
    return reasons


def _reason(path: str, wanted: tuple[str, ...]) -> str | None:
    """Why a file in a folder is not taken, as far as its name says."""
    if os.path.basename(path).startswith("."):
        return "hidden"
    if os.path.exists(path) and not os.path.isfile(path):
        return "no file: a pipe, a socket or a device"
    if path.endswith(QUARANTINE_SUFFIX):
        return "bad lines that an earlier run left out"
    if strip_compression(path).endswith(wanted):
        return None
    if strip_compression(path).endswith(TABLE_SUFFIXES):
        return "a table; sft.py takes it with --template"
    return NO_SUFFIX


def _matching(pattern: str, wanted: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """(the files that match a pattern and are to be taken, sorted; the rest with reasons)"""
    matches = sorted(glob.glob(pattern, recursive=True))
    if not matches:
        what = " (nothing matches)" if glob.has_magic(pattern) else ": name one" + download_hint(pattern, DATASET)
        raise UserError(f"there is no file {pattern}{what}")
    paths: list[str] = []
    reasons: dict[str, str] = {}
    for path in matches:
        if os.path.isdir(path):
            if "**" not in pattern:  # which goes through the folders itself
                reasons[path] = "a folder; name it, or write **"
        elif (reason := _reason(path, wanted)) and not (reason == NO_SUFFIX and _begins_with_record(path)):
            reasons[path] = reason
        else:
            paths.append(path)
    return paths, reasons


def _begins_with_record(path: str) -> bool:
    """Whether a file whose name says nothing begins as parquet, Arrow or a JSON object."""
    try:
        with open(path, "rb") as file:
            head = file.read(1 << 10)
            if is_columnar(head) or not_read(head):
                return bool(is_columnar(head))
            if compression := compression_of(head):
                file.seek(0)
                head = next(unpack(path, compression, file), (b"", 0))[0]
    except (OSError, UserError):
        return False
    return head.removeprefix(BOM).lstrip()[:1] == b"{"


def _is_one_value(path: str, arrays: bool) -> bool:
    """Whether a small .json file is one JSON value over several lines: a manifest or a configuration."""
    if not path.lower().endswith(".json") or os.path.getsize(path) > ONE_VALUE_MAX_BYTES:
        return False
    with open(path, "rb") as file:
        data = file.read().strip()
    if b"\n" not in data:
        return False
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return not (arrays and isinstance(value, list))


# A folder that holds a Hugging Face dataset: which of its files are data, and of which split.
#
# Two layouts: what ``datasets.save_to_disk`` writes (state.json beside data-*.arrow, a folder for each split under a
# dataset_dict.json), and a repository of the hub as it is downloaded (README.md names configs and their data files, or
# the files are named train-00000-of-00002.parquet). As everywhere, what is trained on is the split ``train`` where
# there is one; of several configs, the default one.


TRAIN = "train"
DESCRIPTIONS = ("dataset_dict.json", "dataset_info.json", "dataset_infos.json")
SHARD = re.compile(r"(?:^|[^A-Za-z0-9])(train|validation|valid|val|dev|test|eval)[-.]\d{4,6}-of-\d{4,6}")


def not_chosen(folder: str, paths: Sequence[str]) -> dict[str, str]:
    """Those of a folder's files that are not to be taken, with the reason; none where it holds no such dataset.

    Raises:
        UserError: it can't be told which files are meant.
    """
    reasons = {path: "describes the dataset" for path in paths if os.path.basename(path) in DESCRIPTIONS}
    for path in paths:
        state = _object(path) if os.path.basename(path) == "state.json" else {}
        if "_data_files" in state:
            reasons[path] = "describes the dataset"
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
    return f"of the split {split}; the split {TRAIN} is taken"


def _not_saved(path: str, state: dict[str, Any], paths: Sequence[str]) -> dict[str, str]:
    """The .arrow files beside a state.json that it does not name: caches of earlier work on the dataset."""
    if state.get("_indices_data_files"):
        raise UserError(f"{path}: the dataset's rows are chosen by a file of indices: save it again, flattened")
    named = {str(one.get("filename")) for one in state["_data_files"]}
    here = [one for one in paths if os.path.dirname(one) == os.path.dirname(path) and one.endswith(".arrow")]
    missing = named - {os.path.basename(one) for one in here}
    if missing:
        raise UserError(f"{path} names {sorted(missing)[0]}, which is not there: the dataset is not whole")
    return {one: "not among the data files of state.json" for one in here if os.path.basename(one) not in named}


def _object(path: str) -> dict[str, Any]:
    """A small file's JSON object; an empty one where there is none."""
    with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
        content = json.load(file)
        return content if isinstance(content, dict) else {}
    return {}


def _configs(readme: str) -> list[dict[str, Any]]:
    """What the header of a dataset's README.md says of its configs."""
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
    """path to split of a config's data files."""
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
    """The files of other configs and splits than the one that is taken."""
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
            f"{folder} is a dataset of several configs ({', '.join(there)}), none of them the default: "
            "name the files of one, with a pattern"
        )
    files = there[chosen][1]
    reasons = {}
    for normed, path in normal.items():
        split = files.get(normed)
        if split is None:
            other = next((name for name, (_, theirs) in there.items() if normed in theirs), None)
            reasons[path] = f"of the config {other}; {chosen} is taken" if other else "no data file of its README.md"
        elif split != TRAIN and TRAIN in files.values():
            reasons[path] = _other_split(split)
    return reasons


# A first look into the input: what the text's key is, and some text for the encoder's self-check.


LOOK_BYTES = 1 << 17
SAMPLE_FILES = 4
SAMPLE_CHARACTERS = 1 << 16
# A record's text is under the first of these that it has: RedPajama-1T and most others; RedPajama-V2; OSCAR.
TEXT_KEYS = ("text", "raw_content", "content")


def _head(source: Source) -> bytes:
    """About the first LOOK_BYTES bytes, unpacked."""
    head = b""
    for piece, _ in read_pieces(source):
        head += piece[:LOOK_BYTES]
        if len(head) >= LOOK_BYTES:
            break
    return head[:LOOK_BYTES].removeprefix(BOM)


def detect_keys(sources: Sequence[Source]) -> list[str]:
    """The key that the first good record's text is under, where the user did not name it.

    Raises:
        UserError: a damaged compressed file.
    """
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
    """Some 64 K characters from the beginnings of the first, middle and last files."""
    picked = sorted({0, len(sources) // 3, 2 * len(sources) // 3, len(sources) - 1})[:SAMPLE_FILES]
    texts: list[str] = []
    for index in picked:
        size = 0
        try:
            head = _head(sources[index])
        except UserError:
            continue  # it will be reported in the input's order
        for line in [head] if sources[index].is_text else head.split(b"\n"):
            found = [line.decode("utf-8", "ignore")]
            with contextlib.suppress(RecordError):  # a bad line is a sample of bytes, at least
                found = found if sources[index].is_text else parse_line(line, keys)
            for text in found:
                texts.append(text[: SAMPLE_CHARACTERS // SAMPLE_FILES - size])
                size += len(texts[-1])
            if size >= SAMPLE_CHARACTERS // SAMPLE_FILES:
                break
    return texts
