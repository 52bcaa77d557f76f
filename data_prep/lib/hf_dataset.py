"""A folder that holds a Hugging Face dataset: which of its files are data, and of which split.

Two layouts: what ``datasets.save_to_disk`` writes (state.json beside data-*.arrow, a folder for each split under a
dataset_dict.json), and a repository of the hub as it is downloaded (README.md names configs and their data files, or
the files are named train-00000-of-00002.parquet). As everywhere, what is trained on is the split ``train`` where there
is one; of several configs, the default one.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
from collections.abc import Sequence
from typing import Any

from megatron_llama.system.errors import UserError

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
