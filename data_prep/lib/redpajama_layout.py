"""What RedPajama looks like on disk: its subsets, their shares in Llama's training, and V2's quality signals."""

from __future__ import annotations

import json
import operator
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from data_prep.lib.input_files import find_sources
from data_prep.lib.json_lines import loads
from data_prep.lib.sources import Source, read_lines
from megatron_llama.config.data_prefixes import RECORD_SUFFIXES, bare_name
from megatron_llama.system.errors import UserError
from megatron_llama.system.files import atomic_open, write_atomically

URL_LIST = "https://data.together.xyz/redpajama-data-1T/v1.0.0/urls.txt"
# Sampling shares in per cent, Llama paper (arXiv 2302.13971), table 1.
LLAMA_SHARES = {
    "common_crawl": 67.0,
    "c4": 15.0,
    "github": 4.5,
    "wikipedia": 4.5,
    "book": 4.5,
    "arxiv": 2.5,
    "stackexchange": 2.0,
}
# The book subset was withdrawn; a folder of that name may carry the plural.
ALIASES = {"books": "book", "cc": "common_crawl", "commoncrawl": "common_crawl", "wiki": "wikipedia"}
V2 = "v2"


def subset_of(name: str) -> str:
    """The subset's own name for a folder's or user's name of it."""
    lower = name.lower()
    return ALIASES.get(lower, lower)


def find_subsets(folder: str) -> dict[str, str]:
    """Subset to folder, for those that hold files; V2's documents count as one subset.

    Raises:
        UserError: it is no folder, or holds no subset.
    """
    if not os.path.isdir(folder):
        raise UserError(f"there is no folder {folder}")
    found = {}
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if subset_of(name) in LLAMA_SHARES and os.path.isdir(path) and _has_records(path):
            found[subset_of(name)] = path
    documents = next(Path(folder).rglob("documents"), None)
    if documents is not None and _has_records(str(documents)):
        found[V2] = str(documents)
    if not found:
        raise UserError(
            f"{folder} holds no RedPajama subset: neither one of {', '.join(LLAMA_SHARES)} with files in it, "
            "nor V2's documents/"
        )
    return {name: found[name] for name in [*LLAMA_SHARES, V2] if name in found}


def _has_records(folder: str) -> bool:
    return any(bare_name(name).endswith(RECORD_SUFFIXES) for _, _, names in os.walk(folder) for name in names)


def shares(subsets: Sequence[str]) -> dict[str, float]:
    """Llama's shares over the subsets that are there, adding up to 1; V2 alone is all of it.

    Raises:
        UserError: V2 together with others, for which no shares were published.
    """
    if list(subsets) == [V2]:
        return {V2: 1.0}
    if V2 in subsets:
        raise UserError("there are no published shares for a mix of V2 and V1: prepare them apart, or pass --subsets")
    total = sum(LLAMA_SHARES[name] for name in subsets)
    return {name: LLAMA_SHARES[name] / total for name in subsets}


RULE = re.compile(r"\s*(\w+)\s*(<=|>=|==|!=|<|>)\s*(-?[\d.]+(?:[eE][-+]?\d+)?)\s*$")
COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}


@dataclass(frozen=True)
class Rule:
    """A condition on one of V2's quality signals, such as rps_doc_word_count>=50."""

    signal: str
    sign: str
    limit: float

    @staticmethod
    def parse(text: str) -> Rule:
        """From the command line.

        Raises:
            UserError: it is no condition.
        """
        match = RULE.match(text)
        if not match:
            raise UserError(f"--quality {text!r}: write SIGNAL>=NUMBER, for example rps_doc_word_count>=50")
        return Rule(match[1], match[2], float(match[3]))

    def holds(self, signals: dict[str, Any]) -> bool:
        """Whether a document fulfils it; one whose signal is null does not.

        Raises:
            KeyError: there is no such signal.
        """
        spans = signals[self.signal]
        value = spans[0][2] if spans else None
        return value is not None and COMPARE[self.sign](float(value), self.limit)

    def __str__(self) -> str:
        return f"{self.signal}{self.sign}{self.limit:g}"


def signals_path(documents: str) -> str:
    """The file of quality signals that belongs to a file of V2's documents."""
    head, marker, tail = documents.rpartition(f"{os.sep}documents{os.sep}")
    name = tail
    for suffix in (".gz", ".zst", *RECORD_SUFFIXES):
        name = name.removesuffix(suffix)
    base = os.path.join(head, "quality_signals", name + ".signals.json")
    for suffix in (".gz", ".zst", ""):
        if marker and os.path.exists(base + suffix):
            return base + suffix
    raise UserError(f"{documents}: its quality signals are not there; looked for {base}.gz")


def filter_file(source: Source, target: Path, rules: Sequence[Rule]) -> dict[str, int]:
    """Copies the documents that fulfil all rules to a .zst file, line by line as they are; returns the counts.

    The two files belong together line by line; where a signal's id names its line, that is checked too.

    Raises:
        UserError: they don't belong together, a signal is unknown, or a line of signals is damaged.
    """
    counts = {"kept": 0, **{str(rule): 0 for rule in rules}}
    signals_file = signals_path(source.path)
    import zstandard

    files = (source, *find_sources([signals_file]).sources)
    pairs = zip_longest(*((line for line in read_lines(one) if line.strip()) for one in files))
    with atomic_open(target) as packed, zstandard.ZstdCompressor().stream_writer(packed, closefd=False) as file:
        for number, (line, signals) in enumerate(pairs):
            if line is None or signals is None:
                shorter = source.path if line is None else signals_file
                raise UserError(f"{source.path} and its quality signals differ in lines: {shorter} ends after {number}")
            values = _signals(signals, signals_file, number)
            try:
                failed = next((rule for rule in rules if not rule.holds(values)), None)
            except KeyError as error:
                known = ", ".join(sorted(values)[:12])
                raise UserError(f"{signals_file}, line {number + 1}: no signal {error}; there are {known}") from None
            except (TypeError, IndexError, ValueError):
                raise UserError(f"{signals_file}, line {number + 1}: a signal has no value where one belongs") from None
            counts["kept" if failed is None else str(failed)] += 1
            if failed is None:
                file.write(line + b"\n")
    return counts


def _signals(line: bytes, path: str, number: int) -> dict[str, Any]:
    try:
        record = loads(line)
        values = record["quality_signals"]
        values = loads(values.encode()) if isinstance(values, str) else values
        identity = str(record.get("id", ""))
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{path}, line {number + 1}: not a record of quality signals") from None
    last = identity.rpartition("/")[2]
    if last.isdigit() and int(last) != number:
        raise UserError(f"{path}, line {number + 1}: it is of document {identity}, so lines are missing before it")
    return dict(values)


def write_conf(path: Path, prefixes: dict[str, str], tokenizer: str, split: str, command: str) -> None:
    """Writes the data group's file that `train.py data=NAME` reads, NAME being the file's.

    Args:
        prefixes: subset to dataset prefix.
    """
    weights = shares(list(prefixes))
    lines = [
        "# Written by data_prep/redpajama.py prepare. The weights are the Llama paper's shares of the training samples",
        "# (arXiv 2302.13971, table 1), renormalised over the subsets that are here.",
        f"name: {json.dumps(path.stem)}",
        "prefixes:",
    ]
    for name, prefix in prefixes.items():
        lines += [f"  - {weights[name]:.6f}", f"  - {json.dumps(prefix)}"]
    lines += [
        f"split: {json.dumps(split)}",
        f"tokenizer: {json.dumps(tokenizer)}",
        "seq_length: 4096",
        f"prepare: {json.dumps(command)}",
    ]
    write_atomically(path, "\n".join(lines) + "\n")
