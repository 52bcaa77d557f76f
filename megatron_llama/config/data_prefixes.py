"""The entries of ``data.prefixes`` and ``data.validation_prefixes``: weights, datasets, and files of records that are
still to be prepared. Decides by names alone and opens no file; ``folder_of_records`` looks whether one is there."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence, Set
from typing import Any

from megatron_llama.config.hub import DATASET, local_folder
from megatron_llama.config.limits import is_number
from megatron_llama.config.settings import Config, DataConfig

CSV_SUFFIXES, COLUMNAR_SUFFIXES, TABLE_SUFFIXES = (".csv",), (".parquet", ".arrow"), (".tsv",)
RECORD_SUFFIXES = (".jsonl", ".json", ".ndjson", *CSV_SUFFIXES, *COLUMNAR_SUFFIXES)
MASK_SUFFIX = "_mask"
"""Added to a fine-tuning set's prefix, it is the prefix of its loss masks."""
COMPRESSION_SUFFIXES = (".zst", ".zstd", ".gz", ".xz", ".bz2")


def weights_and_paths(prefixes: Sequence[Any]) -> tuple[list[float], list[str]]:
    """The two halves of ``weight, path, weight, path, ...``; no weights where only paths are given."""
    if not any(is_number(item) for item in prefixes):
        return [], [str(item) for item in prefixes]
    return [float(str(item)) for item in prefixes[::2]], [str(item) for item in prefixes[1::2]]


def name_of_prefixes(prefixes: Sequence[Any]) -> str:
    """What to call datasets that were given as paths, fit for a folder's name; empty for none."""
    paths = [item for item in prefixes if not is_number(item)]
    if not paths:
        return ""
    first = os.path.basename(os.path.normpath(str(paths[0]))).removesuffix("_text_document")
    return re.sub(r"[^\w.-]+", "_", first) + (f"+{len(paths) - 1}" if len(paths) > 1 else "")


def named_paths(data: DataConfig) -> list[tuple[str, str]]:
    """(setting, path) of every entry, training before validation."""
    paths = [("data.prefixes", path) for path in weights_and_paths(data.prefixes)[1]]
    known = {path for _, path in paths}
    for entry in data.schedule:
        new = [path for path in weights_and_paths(entry["prefixes"])[1] if path not in known]
        paths += [("data.schedule", path) for path in new]
        known.update(new)
    return paths + [("data.validation_prefixes", str(path)) for path in data.validation_prefixes]


def record_files(data: DataConfig) -> list[tuple[str, str]]:
    """(setting, path) of each entry that is a file or folder of records (conversations, tables) for data_prep/sft.py
    rather than an indexed dataset, each once."""
    if data.kind != "sft" or data.mock:
        return []
    suffixes = (*RECORD_SUFFIXES, *TABLE_SUFFIXES, "/")
    return list(dict.fromkeys((name, path) for name, path in named_paths(data) if bare_name(path).endswith(suffixes)))


def settle_data(data: Any, given: Set[str]) -> None:
    """Settle, in place, the ``data`` section of a config that is not typed yet.

    Prefixes on the command line have a name and no command that prepares them. Names of the hub become folders of the
    local cache, where that holds them; a folder of records then ends in a slash, as ``record_files`` expects.

    Args:
        given: Settings and groups that the command line sets.
    """
    if "data.prefixes" in given and "data.prepare" not in given:
        # The group's command makes the group's files, not those named on the command line.
        data.prepare = None
        if not {"data.name", "data", "experiment"} & given:
            data.name = name_of_prefixes(list(data.prefixes)) or data.name
    if data.tokenizer is not None:
        data.tokenizer = local_folder(data.tokenizer)
    if data.kind == "sft":
        for name in ("prefixes", "validation_prefixes"):
            data[name] = [item if is_number(item) else folder_of_records(str(item)) for item in data[name]]


def folder_of_records(path: str) -> str:
    """A path, ended by a slash where it is a folder of records, such as a downloaded dataset, or the hub's name of one
    in the local cache; an indexed dataset of that name goes before both."""
    if os.path.exists(path + ".idx"):
        return path
    found = local_folder(path, DATASET)
    return os.path.join(found, "") if os.path.isdir(found) else path


def is_table(path: str) -> bool:
    """Whether a file of records has nothing but columns, so that it needs a prompt for its lines."""
    return bare_name(path).endswith(TABLE_SUFFIXES)


def has_columns(path: str) -> bool:
    """Whether a file of records, or those of a folder, can have columns that a prompt names."""
    return bare_name(path).endswith((*TABLE_SUFFIXES, *CSV_SUFFIXES, *COLUMNAR_SUFFIXES, "/"))


def tokenizer_of_records(config: Config) -> str | None:
    """What encodes the files of records: a sentencepiece model or a Hugging Face folder."""
    return config.data.tokenizer or config.init_from


def bare_name(path: str) -> str:
    """A path or name in lower case without the suffix of its compression."""
    lower = path.lower()
    for suffix in COMPRESSION_SUFFIXES:
        lower = lower.removesuffix(suffix)
    return lower
