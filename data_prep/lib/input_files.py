"""Finding the input's files. What is found and not taken is kept with its reason: no file vanishes."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from data_prep.lib.columnar import is_columnar
from data_prep.lib.hf_dataset import not_chosen
from data_prep.lib.json_lines import BOM
from data_prep.lib.pipes import STDIN
from data_prep.lib.sources import Source, inspect, not_read
from data_prep.lib.unpack import compression_of, unpack
from megatron_llama.config.data_prefixes import RECORD_SUFFIXES, TABLE_SUFFIXES, bare_name
from megatron_llama.config.hub import DATASET, local_folder, or_fetch_it
from megatron_llama.system.errors import UserError

TEXT_SUFFIXES = (".txt",)
ONE_VALUE_MAX_BYTES = 4 << 20
QUARANTINE_SUFFIX = ".quarantine.jsonl"
"""Of the file in which a run keeps the bad lines that it left out."""
NO_SUFFIX = "no suffix that is read"
MOST_REASONS = 8


@dataclass
class Found:
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
) -> Found:
    """The input files of the command line, in its order; folders and patterns are sorted by path.

    A file that is named is taken. In a folder, at any depth, the names decide: RECORD_SUFFIXES and ``text_suffixes``,
    with ``tables`` .tsv too, compressed or not. Of what a pattern matches, files of other names are taken where they
    begin with a record. What is plainly no list of records is left out: a manifest of several lines, a text file
    beside files of records. With ``arrays`` a JSON array over several lines is a list of records.

    Raises:
        UserError: something is not there, can't be read, or no file is left.
    """
    texts = tuple(text_suffixes)
    wanted = RECORD_SUFFIXES + texts + (TABLE_SUFFIXES if tables else ())
    found = Found()
    seen: set[str] = set()
    for given in patterns:
        pattern = local_folder(given, DATASET)
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
            others = Found(not_taken=reasons).notes()
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
    is_text = {path for path in paths if bare_name(path).endswith(texts)}
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
    if bare_name(path).endswith(wanted):
        return None
    if bare_name(path).endswith(TABLE_SUFFIXES):
        return "a table; sft.py takes it with --template"
    return NO_SUFFIX


def _matching(pattern: str, wanted: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """(the files that match a pattern and are to be taken, sorted; the rest with reasons)"""
    matches = sorted(glob.glob(pattern, recursive=True))
    if not matches:
        what = " (nothing matches)" if glob.has_magic(pattern) else ": name one" + or_fetch_it(pattern, DATASET)
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
