"""Entries of ``data.prefixes``, ``data.validation_prefixes`` and ``data.curriculum``.

Prefixes are weights, indexed datasets and raw data files that are not prepared yet. Functions decide by name and open
no file; some check whether a path exists.
"""

from __future__ import annotations

import glob
import itertools
import json
import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence, Set
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from megatron_llama.config.hub import DATASET, resolve_hub_name
from megatron_llama.config.limits import at_least, is_weight, one_of
from megatron_llama.config.problems import Problem, closest_match, format_value, quote_value
from megatron_llama.config.settings import Config, DataConfig
from megatron_llama.config.settings_table import settings_of
from megatron_llama.system.files import path_exists, read_json
from megatron_llama.system.object_store import RemotePath, is_url

CSV_SUFFIXES, COLUMNAR_SUFFIXES, TABLE_SUFFIXES = (".csv",), (".parquet", ".arrow"), (".tsv",)
RAW_DATA_SUFFIXES = (".jsonl", ".json", ".ndjson", *CSV_SUFFIXES, *COLUMNAR_SUFFIXES)
MASK_SUFFIX = "_mask"
"""Suffix of a fine-tuning dataset's prefix that gives the prefix of its loss masks."""
PAIRS, UNPAIRED = "pairs", "unpaired"
"""Formats of records with two answers, and with an answer and a label (data_prep/sft.py --format), for preference
training."""
PREFERENCE_FORMATS = {"dpo": PAIRS, "orpo": PAIRS, "kto": UNPAIRED}
"""Format of an objective's data; other data has no preferences."""
REJECTED = 2
"""Added to the loss masks of a pair's rejected answer, which follows the chosen answer in the same example, and of an
undesirable answer."""
LABELLED = 4
"""Added to the loss masks of an answer with a label."""


def stored_format(mark: int) -> str | None:
    """Return the format of an example's preferences by the loss mask of its last token; None without preferences."""
    return UNPAIRED if mark >= LABELLED else PAIRS if mark >= REJECTED else None


TEXT_SUFFIX, SFT_SUFFIX = "_text_document", "_sft"
"""Suffixes that data_prep appends to ``--output-prefix``, for pretraining (with the default key) and fine-tuning."""
RAW_TEXT_SUFFIXES = (".txt", ".text", ".md", *RAW_DATA_SUFFIXES, *TABLE_SUFFIXES)
COMPRESSION_SUFFIXES = (".zst", ".zstd", ".gz", ".xz", ".bz2")
DATA_FOLDER, OLD_DATA_FOLDER = "corpora/", "datasets/"
"""Folder of prepared data, and its name in older versions, which shadows Hugging Face's package ``datasets``."""


def split_weights(prefixes: Sequence[Any]) -> tuple[list[float], list[str]]:
    """Split ``weight, path, weight, path, ...`` into (weights, paths); weights are [] if only paths are given."""
    if not any(is_weight(item) for item in prefixes):
        return [], [str(item) for item in prefixes]
    return [float(str(item)) for item in prefixes[::2]], [str(item) for item in prefixes[1::2]]


def name_dataset(prefixes: Sequence[Any]) -> str:
    """Return a name, valid as a folder name, for datasets given as paths; "" for no path."""
    paths = [item for item in prefixes if not is_weight(item)]
    if not paths:
        return ""
    first = os.path.basename(os.path.normpath(str(paths[0]))).removesuffix(TEXT_SUFFIX)
    return re.sub(r"[^\w.-]+", "_", first) + (f"+{len(paths) - 1}" if len(paths) > 1 else "")


def list_paths(data: DataConfig) -> list[tuple[str, str]]:
    """Return (setting, path) of every entry, training before validation."""
    paths = [("data.prefixes", path) for path in split_weights(data.prefixes)[1]]
    known = {path for _, path in paths}
    for entry in data.schedule:
        new = [path for path in split_weights(entry["prefixes"])[1] if path not in known]
        paths += [("data.schedule", path) for path in new]
        known.update(new)
    sets = validation_sets(data).values()
    return paths + [("data.validation_prefixes", path) for path in dict.fromkeys(itertools.chain(*sets))]


def validation_sets(data: DataConfig) -> dict[str, list[str]]:
    """Return the paths of ``data.validation_prefixes`` by the name of their set, "" for paths without a name."""
    sets: dict[str, list[str]] = {}
    for entry in data.validation_prefixes:
        for name, paths in entry.items() if isinstance(entry, Mapping) else [("", entry)]:
            sets.setdefault(str(name), []).extend([paths] if isinstance(paths, str) else map(str, paths))
    return sets


def derives_validation(data: DataConfig) -> bool:
    """Return whether the period of validations has a default: a run with held-out data other than its split."""
    return not data.mock and (data.kind == "sft" or bool(data.validation_prefixes))


def raw_data_files(data: DataConfig) -> list[tuple[str, str]]:
    """Return (setting, path) of each entry that is raw data (conversations, tables) for data_prep/sft.py, each once."""
    if data.kind != "sft" or data.mock:
        return []
    suffixes = (*RAW_DATA_SUFFIXES, *TABLE_SUFFIXES, "/")
    paths = ((name, path) for name, path in list_paths(data) if strip_compression(path).endswith(suffixes))
    return list(dict.fromkeys(paths))


def settle_data_settings(data: Any, given: Set[str]) -> None:
    """Complete, in place, the ``data`` section of a config that is not typed yet.

    Prefixes on the command line set ``data.name`` and clear ``data.prepare``. Data in the old folder are found there.
    Hub names become folders of the local cache if it contains them. Folders of raw data then end in a slash, as
    ``raw_data_files`` expects. The paths of a named validation set become a list.

    Args:
        given: Settings and groups that the command line sets.
    """
    if "data.prefixes" in given and "data.prepare" not in given:
        # The group's command makes the group's files, not the files on the command line.
        data.prepare = None
        if not {"data.name", "data", "experiment"} & given:
            data.name = name_dataset(list(data.prefixes)) or data.name
    if data.tokenizer is not None:
        data.tokenizer = resolve_hub_name(find_in_data_folders(data.tokenizer))
    first: dict[tuple[int, int], str] = {}
    for owner, name in _lists_of_paths(data):
        paths = [item if is_weight(item) else str(item) for item in owner[name]]
        if not data.mock:
            paths = [item if is_weight(item) else find_in_data_folders(item) for item in paths]
        if data.kind == "sft":
            paths = [item if is_weight(item) else resolve_raw_data(item) for item in paths]
        if not data.mock:
            paths = paths if any(map(is_weight, paths)) else expand_patterns(paths)
            paths = [item if is_weight(item) else complete_prefix(item, data.kind) for item in paths]
            paths = same_names(paths, first)
        owner[name] = paths


def _lists_of_paths(data: Any) -> Iterator[tuple[Any, str]]:
    """Yield (owner, key) of each list of prefixes in a ``data`` section that is not typed yet, training first.

    A single path of a validation set becomes a list. Values that are no lists are omitted: limits reject them.
    """
    yield data, "prefixes"
    for entry in data.schedule:
        if isinstance(entry, MutableMapping) and isinstance(entry.get("prefixes"), MutableSequence):
            yield entry, "prefixes"
    if not any(isinstance(entry, MutableMapping) for entry in data.validation_prefixes):
        yield data, "validation_prefixes"
        return
    for entry in data.validation_prefixes:
        for name in entry if isinstance(entry, MutableMapping) else ():
            if isinstance(entry[name], str):
                entry[name] = [entry[name]]
            if isinstance(entry[name], MutableSequence):
                yield entry, name


def find_in_data_folders(path: str) -> str:
    """Return ``path``, or its place in the other data folder if only that one has files with this prefix.

    Data of older versions and configs of their runs keep working, also after the user has moved the data.
    """
    for here, other in itertools.permutations((DATA_FOLDER, OLD_DATA_FOLDER)):
        moved = other + path.removeprefix(here)
        if path.startswith(here) and not glob.glob(glob.escape(path) + "*") and glob.glob(glob.escape(moved) + "*"):
            return moved
    return path


def expand_patterns(paths: Iterable[str]) -> list[str]:
    """Replace each pattern, such as ``corpus/*_text_document``, by the prefixes of the datasets that match it."""
    expanded: list[str] = []
    for path in paths:
        matches = sorted(glob.glob(path + ".idx")) if glob.has_magic(path) and not os.path.exists(path + ".idx") else []
        if is_url(path) and glob.has_magic(path):
            matches = _stored_matches(path + ".idx")
        names = [match.removesuffix(".idx") for match in matches]
        expanded += [name for name in names if not name.endswith(MASK_SUFFIX)] or [path]
    return expanded


def _stored_matches(pattern: str) -> list[str]:
    """Return the objects whose names match a pattern; none if the store cannot be read, which a rule reports."""
    try:
        folder = RemotePath(pattern).parent
        return sorted(str(folder / name) for name in folder.files() if fnmatch(name, pattern.rpartition("/")[2]))
    except (OSError, ValueError):
        return []


def same_names(paths: Sequence[Any], first: dict[tuple[int, int], str]) -> list[Any]:
    """Give all paths of one dataset, such as links to it, the same name: the first one, which is added to ``first``.

    Under several names a run would read each sample several times in a row. Under one name a dataset that is listed
    twice is read for twice the epochs, each in a different order.
    """

    def name(path: str) -> str:
        try:
            status = os.stat(path + ".bin")
        except (OSError, ValueError):  # missing: a rule reports it
            return path
        return first.setdefault((status.st_dev, status.st_ino), path)

    return [item if is_weight(item) else name(str(item)) for item in paths]


def complete_prefix(path: str, kind: str) -> str:
    """Return ``path``, or the dataset that data_prep wrote if ``path`` is the value of its ``--output-prefix``."""
    suffix = SFT_SUFFIX if kind == "sft" else TEXT_SUFFIX
    if is_url(path) and path.endswith(suffix):
        return path  # without a request
    whole = path + suffix
    return whole if path_exists(whole + ".idx") and not path_exists(path + ".idx") else path


def datasets_named(prefix: str) -> list[str]:
    """Return the datasets that data_prep wrote with ``--output-prefix``; several if a JSON key was given."""
    names = sorted(path.removesuffix(".idx") for path in glob.glob(glob.escape(prefix) + "_*.idx"))
    return [name for name in names if not name.endswith(MASK_SUFFIX)]


def suggest_for_data(path: str, name: str = "data.prefixes") -> str | None:
    """Return the text to write for the path of a dataset or of raw text, given where it does not work; else None."""
    if os.path.exists(path + ".idx"):
        return f"write data.prefixes={quote_value([path])}"
    if names := datasets_named(path):
        alternatives = " or ".join(f"[{each}]" for each in names[:3])
        return f"write {alternatives[1:-1]} in its entry" if name == "data.schedule" else f"write {name}={alternatives}"
    if glob.glob(os.path.join(glob.escape(path), "*.idx")):
        pattern = os.path.join(path, "*")
        entry = f"{pattern} in its entry" if name == "data.schedule" else f"{name}={quote_value([pattern])}"
        return f"write {entry} for all datasets in the folder"
    plain = strip_compression(path)
    if not plain.endswith(RAW_TEXT_SUFFIXES) and not os.path.isdir(path):
        return None
    stem = os.path.basename(os.path.normpath(plain)).partition(".")[0]
    prefix = f"{DATA_FOLDER}{name_dataset([stem]) or 'mine'}"
    return (
        f"prepare it: python data_prep/preprocess.py --input {shlex.quote(path)} --tokenizer-model TOKENIZER "
        f"--append-eod --output-prefix {prefix}, then write data.prefixes=[{prefix}{TEXT_SUFFIX}]. "
        "TOKENIZER is a .model file or a Hugging Face folder. For chat data add data.kind=sft instead"
    )


def resolve_raw_data(path: str) -> str:
    """Return ``path``, or with a trailing slash its folder of raw data or the cached folder of a hub name.

    An indexed dataset of that name takes precedence.
    """
    if is_url(path) or os.path.exists(path + ".idx"):
        return path
    folder = resolve_hub_name(path, DATASET)
    return os.path.join(folder, "") if os.path.isdir(folder) else path


def is_template_file(name: str) -> bool:
    """Return whether a chat template is the path of a Jinja file, not a name."""
    return name.endswith(".jinja")


def is_table(path: str) -> bool:
    """Return whether a raw data file is a table, which needs a prompt template."""
    return strip_compression(path).endswith(TABLE_SUFFIXES)


def has_columns(path: str) -> bool:
    """Return whether raw data can have columns that a prompt template refers to."""
    return strip_compression(path).endswith((*TABLE_SUFFIXES, *RAW_DATA_SUFFIXES, "/"))


def raw_data_tokenizer(config: Config) -> str | None:
    """Return the tokenizer of raw data files: a sentencepiece model or a Hugging Face folder."""
    return config.data.tokenizer or config.init_from


def strip_compression(path: str) -> str:
    """Return a path in lower case without the suffix of its compression."""
    lower = path.lower()
    for suffix in COMPRESSION_SUFFIXES:
        lower = lower.removesuffix(suffix)
    return lower


# Entries of ``data.curriculum``: difficulty metric and schedule. Names and arithmetic come from DeepSpeed's data
# efficiency library (arXiv:2212.03597).

SECTION = "data.curriculum"
TRUNCATE, RESHAPE = "seqlen_truncate", "seqlen_reshape"
VALUE, PERCENTILE = "value", "percentile"
LINEAR, ROOT, DISCRETE = "fixed_linear", "fixed_root", "fixed_discrete"
PACED = ("min_difficulty", "max_difficulty", "total_curriculum_step", "difficulty_step")
BY_TYPE = {LINEAR: PACED, ROOT: (*PACED, "root_degree"), DISCRETE: ("difficulty", "max_step")}
"""Required keys of each schedule_type."""


@dataclass(frozen=True, eq=False)
class CurriculumMetric:
    """Entry of data.curriculum: a mapping with metric, the keys of its schedule_type, and optionally the others."""

    metric: str = ""
    """seqlen_truncate, seqlen_reshape, or the name of an index that data_prep/analyze.py wrote. The first truncates
    sequences to the difficulty in tokens, the second splits sequences into chunks of that length. Indices are
    vocab_rarity, length or a custom function."""
    index: str | None = None
    """Folder of the index. Derived: the folder next to each dataset that data_prep/analyze.py writes."""
    difficulty_type: Annotated[str, one_of(VALUE, PERCENTILE)] = VALUE
    """value or percentile, for metrics with an index. With value, steps draw samples up to the difficulty; with
    percentile the easiest share of all samples, where max_difficulty is the whole (100 for percent)."""
    schedule_type: Annotated[str, one_of(LINEAR, ROOT, DISCRETE)] = LINEAR
    """fixed_linear, fixed_root (fast at first) or fixed_discrete (a table)."""
    min_difficulty: Annotated[int | None, at_least(1)] = None
    """First difficulty of the schedule."""
    max_difficulty: Annotated[int | None, at_least(1)] = None
    """Last difficulty; for sequence lengths data.seq_length."""
    total_curriculum_step: Annotated[int | None, at_least(1)] = None
    """Step at which max_difficulty is reached."""
    difficulty_step: Annotated[int, at_least(1)] = 1
    """Difficulties are multiples of this. Each sequence length is a new shape, which some devices compile: choose a
    large value."""
    root_degree: Annotated[int, at_least(1)] = 2
    """For fixed_root: 2 for the square root of the step, 3 for the cube root."""
    difficulty: list[int] = field(default_factory=list)
    """For fixed_discrete: the difficulties, ascending."""
    max_step: list[int] = field(default_factory=list)
    """For fixed_discrete: the last step of each difficulty except the last, ascending."""

    @property
    def is_length(self) -> bool:
        """Whether the difficulty is the sequence length, which needs no index."""
        return self.metric in (TRUNCATE, RESHAPE)

    @property
    def highest(self) -> int:
        """The difficulty at the end of the schedule."""
        if self.schedule_type == DISCRETE:
            return self.difficulty[-1]
        assert self.max_difficulty is not None, "a rule asks for it"
        return self.max_difficulty

    def at(self, step: int) -> int:
        """Return the difficulty of a step, counted from 1. It never decreases."""
        if self.schedule_type == DISCRETE:
            return self.difficulty[sum(last < step for last in self.max_step)]
        least, most, unit = self.min_difficulty, self.max_difficulty, self.difficulty_step
        assert least is not None and most is not None and self.total_curriculum_step is not None, "a rule asks for them"
        root = self.root_degree if self.schedule_type == ROOT else 1
        # DeepSpeed's order of operations, on which the rounding depends.
        reached = math.floor((float(step) / self.total_curriculum_step) ** (1.0 / root) * (most - least) + least)
        # Rounding down must not go below the first multiple of unit from min_difficulty on.
        return min(max(reached - reached % unit, -(-least // unit) * unit), most)

    @lru_cache(maxsize=64)  # noqa: B019  (a process has few metrics)
    def rises(self, last_step: int, begin: int = 1) -> list[tuple[int, int]]:
        """Return (first step, difficulty) of each difficulty from step ``begin`` to ``last_step``."""
        levels = [(begin, self.at(begin))]
        while (now := levels[-1])[1] < self.at(last_step):
            low, high = now[0], last_step  # at(low) is the current difficulty, at(high) a larger one
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self.at(middle) == now[1] else (low, middle)
            levels.append((high, self.at(high)))
        return levels


def curriculum_metrics(entries: Sequence[Any]) -> tuple[CurriculumMetric, ...]:
    """Return the entries of a ``data.curriculum`` in which ``check_curriculum`` finds no problem."""
    return _metrics(json.dumps([dict(entry) for entry in entries]))


def valid_metrics(entries: Sequence[Any]) -> tuple[CurriculumMetric, ...]:
    """Return the entries of a ``data.curriculum``; () if one is invalid."""
    return () if check_curriculum(entries) else curriculum_metrics(entries)


@lru_cache(maxsize=16)
def _metrics(entries: str) -> tuple[CurriculumMetric, ...]:
    """Parse the entries from JSON; cached, as each step needs them several times."""
    return tuple(CurriculumMetric(**entry) for entry in json.loads(entries))


def check_curriculum(entries: Sequence[Any]) -> list[Problem]:
    """Return the problems of the entries that do not depend on other settings."""
    problems: list[Problem] = []
    for number, entry in enumerate(entries, start=1):
        label = f"entry {number}" if len(entries) > 1 else "the entry"
        problems += [Problem(SECTION, format_value(entry), f"{label}: {rule}", fix) for rule, fix in _problems(entry)]
    names = [entry.get("metric") for entry in entries if isinstance(entry, Mapping)]
    if len(set(map(str, names))) < len(names):
        problems.append(Problem(SECTION, None, "lists a metric twice", "write each metric once"))
    if {TRUNCATE, RESHAPE} <= {*map(str, names)}:
        rule = f"{TRUNCATE} and {RESHAPE} cannot be combined"
        problems.append(Problem(SECTION, None, rule, f"keep {TRUNCATE} or {RESHAPE}"))
    return problems


def _problems(entry: Any) -> Iterator[tuple[str, str]]:
    """Yield (rule, text to write instead) for each problem of an entry."""
    if not isinstance(entry, Mapping):
        yield f"must be a mapping, not {format_value(entry)}", "write {metric: NAME, schedule_type: fixed_linear, ...}"
        return
    known = {name.rpartition(".")[2]: setting for name, setting in settings_of(CurriculumMetric, SECTION).items()}
    bad = False
    for key, value in entry.items():
        if key not in known:
            bad, near = True, closest_match(str(key), known)
            yield f"has no key {key}", f"write {near}" if near else f"the keys are {', '.join(known)}"
        elif not (value is None and known[key].optional) and not known[key].has_type(value):
            bad = True
            yield f"{key}={format_value(value)} must be {known[key].type_name}", f"change {key}"
        elif (problem := known[key].problem(value)) is not None:
            bad = True
            instead = problem.instead.replace(f"{SECTION}.", "").replace("=", ": ")
            yield f"{key}={format_value(value)} {problem.rule}", instead
    if not bad:
        yield from _contradictions(entry)


def _contradictions(entry: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the conflicts between the values of an entry."""
    (metric,) = curriculum_metrics([entry])
    if not metric.metric.strip():
        yield "has no metric", f"write metric: {TRUNCATE}, {RESHAPE} or the name of an index"
    required = BY_TYPE[metric.schedule_type]
    if missing := [name for name in required if getattr(metric, name) in (None, [])]:
        missing = [name for name in missing if not (name == "max_step" and len(metric.difficulty) == 1)]
    if missing:
        yield f"schedule_type={metric.schedule_type} needs {', '.join(missing)}", f"write {missing[0]}: NUMBER"
        return
    unused = [key for key in entry if any(key in keys for keys in BY_TYPE.values()) and key not in required]
    if unused:
        yield f"schedule_type={metric.schedule_type} does not read {', '.join(unused)}", f"omit {unused[0]}"
    if metric.is_length and metric.difficulty_type == PERCENTILE:
        yield f"{metric.metric} counts tokens and has no percentiles", f"write difficulty_type: {VALUE}"
    if metric.is_length and metric.index:
        yield f"{metric.metric} needs no index", "omit index"
    if metric.schedule_type != DISCRETE:
        assert metric.min_difficulty is not None and metric.max_difficulty is not None
        if metric.min_difficulty > metric.max_difficulty:
            rule = f"min_difficulty={metric.min_difficulty} is above max_difficulty={metric.max_difficulty}"
            yield rule, f"write min_difficulty: {metric.max_difficulty}"
        return
    whole = all(type(number) is int and number >= 1 for number in (*metric.difficulty, *metric.max_step))
    pairs = [*itertools.pairwise(metric.difficulty), *itertools.pairwise(metric.max_step)]
    if not whole or not all(one < other for one, other in pairs):
        yield "difficulty and max_step must be ascending whole numbers above 0", "write difficulty: [64,128,256]"
    elif len(metric.difficulty) != len(metric.max_step) + 1:
        rule = f"has {len(metric.difficulty)} difficulties and {len(metric.max_step)} max_step"
        yield rule, "write one max_step less than difficulties: the last difficulty has no end"


# New tokens (``data.add_tokens``, ``data.add_special_tokens``). They get the ids after the tokenizer's last one, plain
# tokens first, as in LLaMA-Factory. The model's vocabulary grows only if it has fewer rows: rows that pad the base
# model's vocabulary are used first.

TOKEN_SETTINGS = ("add_tokens", "add_special_tokens")


@dataclass(frozen=True)
class NewTokens:
    """Tokens to add to a tokenizer, in the order of their ids."""

    plain: tuple[str, ...] = ()
    """Tokens of ordinary text: they also match in the text of records, and decoded text contains them."""
    special: tuple[str, ...] = ()
    """Control tokens, which only a chat template or a prompt writes."""

    @staticmethod
    def of(data: Mapping[str, Any] | Any) -> NewTokens:
        """Return the new tokens of a DataConfig, ``data_prep``'s options, or stored settings or options."""
        get = data.get if isinstance(data, Mapping) else lambda name: getattr(data, name, None)
        return NewTokens(*(tuple(get(name) or ()) for name in TOKEN_SETTINGS))

    def __len__(self) -> int:
        return len(self.plain) + len(self.special)

    def unless_in(self, file: Path) -> NewTokens:
        """Return these tokens; none if a tokenizer.json has them, such as an exported one."""
        return NewTokens() if {*self.plain, *self.special} <= read_token_ids(file).keys() else self

    @property
    def settings(self) -> dict[str, list[str]]:
        """The settings that add these tokens, by name without ``data.``; empty ones are omitted."""
        return {name: [*each] for name, each in zip(TOKEN_SETTINGS, (self.plain, self.special), strict=True) if each}

    def grow(self, file: Path) -> bytes:
        """Return the text of ``grow_content``, whose digest identifies the tokenizer in manifests of datasets."""
        return json.dumps(self.grow_content(file), ensure_ascii=False, indent=2).encode()

    def grow_content(self, file: Path) -> dict[str, Any]:
        """Return the content of a tokenizer.json with the new tokens.

        Raises:
            OSError: The file cannot be read.
            ValueError: It is no tokenizer.json, or tokens are empty, repeated or in it; the message lists all of them.
        """
        if file.suffix != ".json" or not file.exists():
            kind = "is another kind" if file.exists() else "does not exist"
            raise ValueError(f"only a tokenizer.json can get new tokens, and {file} {kind}")
        content = read_json(file)
        try:
            known = token_ids(content)
            problems = [*self._problems(known)]
            added: list[Any] = content.get("added_tokens") or []
            next_id = max(len(content["model"]["vocab"]), max((int(token["id"]) for token in added), default=-1) + 1)
        except (LookupError, TypeError, AttributeError):
            raise ValueError(f"{file} is not a tokenizer.json") from None
        if next_id != max(known.values(), default=-1) + 1:  # the package tokenizers would assign used ids
            problems.append(f"{file} has gaps between its ids")
        if problems:
            raise ValueError("; ".join(problems))
        for number, token in enumerate((*self.plain, *self.special)):
            is_special = number >= len(self.plain)
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            flags |= {"normalized": not is_special, "special": is_special}  # as of transformers' add_tokens
            added.append({"id": next_id + number, "content": token, **flags})
        return {**content, "added_tokens": added}

    def _problems(self, known: Mapping[str, int]) -> Iterable[str]:
        """Yield a clause for each rule that tokens violate."""
        tokens = [*self.plain, *self.special]
        if any(not token.strip() for token in tokens):
            yield "a token is empty"
        if repeated := [token for token in dict.fromkeys(tokens) if tokens.count(token) > 1]:
            yield f"{format_value(repeated)} occur twice"
        if existing := [f"{token} (id {known[token]})" for token in dict.fromkeys(tokens) if token in known]:
            yield f"the tokenizer has {', '.join(existing)}"


def token_ids(content: Any) -> dict[str, int]:
    """Return the ids in a tokenizer.json. Raises LookupError, TypeError or AttributeError for other content."""
    vocabulary = content["model"]["vocab"]
    if not isinstance(vocabulary, dict):  # Unigram: pairs of token and score
        vocabulary = {token[0]: number for number, token in enumerate(vocabulary)}
    return {**vocabulary, **{token["content"]: int(token["id"]) for token in content.get("added_tokens") or []}}


def read_token_ids(file: Path) -> dict[str, int]:
    """Return the ids in a tokenizer.json; {} if it cannot be read."""
    try:
        return token_ids(read_json(file))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def fill_new_tokens(config: Any, given: set[str], assign: Callable[[str, Any], None], problems: list[Problem]) -> None:
    """Assign ``data.tokenizer`` (default: init_from), and ``model.vocab_size`` if the new tokens need more rows.

    Args:
        config: Config before it is typed; ``assign`` sets its values.
        given: Settings that the command line sets. A given vocabulary may be larger, such as a multiple of 64.
    """
    new = NewTokens.of(config.data)
    if not new:
        return
    folder = config.data.tokenizer or config.init_from
    name = f"data.{next(iter(new.settings))}"
    if folder is None:
        rule, instead = "needs the tokenizer that gets the tokens", "write data.tokenizer=FOLDER, or init_from=FOLDER"
        problems.append(Problem(name, None, rule, instead))
        return
    assign("data.tokenizer", folder)
    if not os.path.exists(folder):
        return  # a rule reports it
    file = Path(folder, "tokenizer.json") if os.path.isdir(folder) else Path(folder)
    try:
        size = max(token_ids(new.grow_content(file)).values()) + 1
    except (OSError, ValueError) as error:
        rule = f"{file} cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
        instead = "omit tokens that exist, or name the Hugging Face folder of a tokenizer without them"
        problems.append(Problem(name, [*new.plain, *new.special], rule, instead))
        return
    tokens, ids = config.finetune.trainable_token_indices, range(size - len(new), size)
    if config.finetune.method == "lora" and tokens and not {*ids} <= {*tokens}:
        rule = f"must contain the ids of the new tokens, {ids.start} to {ids.stop - 1}: LoRA would freeze their rows"
        instead = f"write finetune.trainable_token_indices={format_value([*dict.fromkeys([*tokens, *ids])])}"
        problems.append(Problem("finetune.trainable_token_indices", [*tokens], rule, instead))
    if "model.vocab_size" not in given and config.model.vocab_size < size:
        assign("model.vocab_size", size)
