"""Download RedPajama, tokenize its subsets and write a config that trains on their blend.

    python data_prep/redpajama.py download --output data/redpajama --subsets arxiv wikipedia --sample 2
    python data_prep/redpajama.py prepare --input data/redpajama --tokenizer-model tokenizer.model
    python train.py data=redpajama ...

Rerun either command to resume it.
"""

from __future__ import annotations

import os
import sys

if __package__ in (None, ""):  # run as a script: keep inspect.py in this folder from hiding the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

    import megatron_llama  # noqa: F401  (ends the program at Ctrl-C while it imports the rest)

import argparse
import json
import operator
import re
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from data_prep.lib import download
from data_prep.lib.download import V2, DownloadItem, subset_of
from data_prep.lib.find_inputs import find_sources
from data_prep.lib.input_readers import Source, read_lines
from data_prep.lib.next_command import blend_words, new_model_words, next_command
from data_prep.lib.output_files import read_manifest
from data_prep.lib.record_formats import loads
from data_prep.lib.run_options import RunOptions, add_bad_line_flag, cores
from data_prep.lib.sft_and_text_sets import TextOptions, make_text_set
from megatron_llama.config.data_settings import RAW_DATA_SUFFIXES, strip_compression
from megatron_llama.config.hub import resolve_hub_name
from megatron_llama.system.errors import UserError, run_main
from megatron_llama.system.files import atomic_open, write_atomically
from megatron_llama.system.programs import CONF_DIR, OWN_CONF, conf_folders
from megatron_llama.system.rerun_command import ArgumentParser

DEFAULT_CONF = OWN_CONF / "data" / "prepared" / "redpajama.yaml"
"""conf/data/redpajama.yaml, which git tracks, includes this file."""


def parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    result = ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    commands = result.add_subparsers(dest="command", required=True)
    add = commands.add_parser("download", help="download the files of a URL list").add_argument
    add("--output", type=Path, required=True, metavar="FOLDER", help="output folder; keeps the paths of the list")
    add("--url-list", help="URL or file with one URL per line (default: RedPajama-1T's list)")
    add("--base-url", help="URL prefix to strip for local paths (default: common prefix)")
    add("--subsets", nargs="+", metavar="NAME", help="subsets (default: all in the list)")
    add("--sample", type=int, metavar="N", help="download N evenly spaced files per subset")
    add("--sha256sums", nargs="+", default=[], metavar="LIST", help="sha256sum lists (URLs or files) to verify")
    add("--jobs", type=int, default=4, help="parallel downloads (default 4)")
    add("--dry-run", action="store_true", help="list the files without downloading")
    prepare = commands.add_parser("prepare", help="tokenize the subsets and write the config")
    add = prepare.add_argument
    add("--input", required=True, metavar="FOLDER", help="folder written by download, or with its layout")
    add("--output", type=Path, default=Path("corpora/redpajama"), metavar="FOLDER", help="default corpora/redpajama")
    add("--tokenizer-model", required=True, metavar="PATH", help=".model file or Hugging Face folder")
    add("--tokenizer-library", help="sentencepiece, huggingface or tiktoken (default: detected)")
    add("--subsets", nargs="+", metavar="NAME", help="subsets (default: all in --input)")
    text = "V2 only: keep documents that satisfy all rules, such as rps_doc_word_count>=50"
    add("--quality", nargs="+", default=[], metavar="RULE", help=text)
    add_bad_line_flag(prepare)
    add("--workers", type=int, default=cores(), help="processes (default: one per core)")
    add("--overwrite", action="store_true", help="replace datasets written with other options")
    add("--split", default="980,10,10", help="weights of training, validation and test (default 980,10,10)")
    add("--conf", type=Path, default=DEFAULT_CONF, metavar="FILE", help="default conf/data/prepared/redpajama.yaml")
    return result


def select(urls: Sequence[str], base: str, subsets: Sequence[str] | None, sample: int | None) -> dict[str, str]:
    """Map the URLs of the requested subsets and sample to paths below the output folder.

    Raises UserError if a subset is not in the list, or a URL's path leaves the folder.
    """
    paths: dict[str, str] = {}
    by_subset: dict[str, list[str]] = {}
    for url in dict.fromkeys(urls):
        path = url.removeprefix(base).lstrip("/") if url.startswith(base) else urlsplit(url).path.lstrip("/")
        if not path or ".." in url.split("/"):
            raise UserError(f"--url-list: {url} has no file path below the output folder")
        paths[url] = path
        by_subset.setdefault(subset_of(path.split("/")[0]), []).append(url)
    requested = [subset_of(name) for name in subsets] if subsets else list(by_subset)
    unknown = [name for name in requested if name not in by_subset]
    if unknown:
        raise UserError(f"--subsets {' '.join(unknown)}: the list has {', '.join(by_subset)}")
    chosen = {}
    for name in requested:
        files = by_subset[name]
        count = min(len(files), sample) if sample else len(files)
        for number in range(count):
            url = files[number * len(files) // count]
            chosen[url] = paths[url]
    return chosen


def _download(args: argparse.Namespace) -> int:
    """Download the requested files."""
    if args.sample is not None and args.sample < 1:
        raise UserError("--sample must be at least 1")
    if args.jobs < 1:
        raise UserError("--jobs must be at least 1")
    url_list = args.url_list or download.URL_LIST
    urls = [line.strip() for line in download.read_text(url_list).splitlines() if line.strip()]
    bad = [url for url in urls if not url.startswith(("http://", "https://"))]
    if not urls or bad:
        raise UserError(
            f"--url-list {url_list}: expected one URL per line" + (f", found {bad[0][:40]!r}" if bad else "")
        )
    base = args.base_url or (url_list.rsplit("/", 1)[0] + "/" if "://" in url_list else _common(urls))
    chosen = select(urls, base, args.subsets, args.sample)
    sums: dict[str, str] = {}
    for name in args.sha256sums:
        sums |= download.parse_sums(download.read_text(name))
    items = []
    for url, path in chosen.items():
        names = (path, path.partition("/")[2], os.path.basename(path))  # a list may omit folders
        items.append(DownloadItem(url, args.output / path, next((sums[name] for name in names if name in sums), None)))
    print(f"{len(items)} of {len(urls)} files, {sum(item.sha256 is not None for item in items)} with a sha256")
    if args.dry_run:
        for item in items:
            print(f"{item.url} -> {item.path}")
        return 0
    download.fetch_all(items, args.jobs, print)
    tokenizer = args.output.with_name(args.output.name + "_tokenizer")
    keys = ["--json-keys", "raw_content"] * any(subset_of(path.split("/")[0]) == V2 for path in chosen.values())
    words = ["--input", str(args.output), *keys, "--vocab-size", "32000", "--model-prefix", str(tokenizer)]
    print(next_command("data_prep/train_tokenizer.py", words))
    words = ["prepare", "--input", str(args.output), "--tokenizer-model", f"{tokenizer}.model"]
    print(next_command("data_prep/redpajama.py", words).replace("next:", "then:", 1))
    return 0


def _common(urls: Sequence[str]) -> str:
    """Return the URL prefix above the subset folders."""
    folders = {url.rsplit("/", 1)[0] + "/" for url in urls}
    common = os.path.commonprefix(sorted(folders)).rsplit("/", 1)[0]
    return (common.rsplit("/", 1)[0] if len(folders) == 1 else common) + "/"  # a single folder is the subset itself


def _prepare(args: argparse.Namespace) -> int:
    """Tokenize the subsets and write the config."""
    rules = [QualityRule.parse(text) for text in args.quality]
    folders = download.find_subsets(args.input)
    if args.subsets:
        requested = [subset_of(name) for name in args.subsets]
        missing = [name for name in requested if name not in folders]
        if missing:
            raise UserError(f"--subsets {' '.join(missing)}: {args.input} holds {', '.join(folders)}")
        folders = {name: path for name, path in folders.items() if name in requested}
    if rules and V2 not in folders:
        raise UserError(f"--quality needs the quality signals of RedPajama-V2; {args.input} has 1T. Remove --quality")
    weights = download.shares(list(folders))
    prefixes = {}
    for name, folder in folders.items():
        print(f"{name} ({weights[name]:.1%} of the blend)")
        source = str(_filter_v2(folder, args.output / "filtered", rules)) if rules else folder
        prefix = args.output / name
        key = "raw_content" if name == V2 else "text"
        make_text_set(
            TextOptions([source], args.tokenizer_model, args.tokenizer_library, json_keys=[key], append_eod=True),
            RunOptions(str(prefix), on_bad_line=args.on_bad_line, workers=args.workers, overwrite=args.overwrite),
            print,
        )
        prefixes[name] = os.path.abspath(f"{prefix}_{key}_document")
    command = f"python data_prep/redpajama.py {shlex.join(sys.argv[1:])}"
    download.write_conf(
        args.conf, prefixes, os.path.abspath(resolve_hub_name(args.tokenizer_model)), args.split, command
    )
    print(f"{args.conf} written")
    print(next_command("train.py", _train_words(args, prefixes, weights)))
    return 0


def _train_words(args: argparse.Namespace, prefixes: dict[str, str], weights: dict[str, float]) -> list[str]:
    """Return the settings that train on the blend: the config file if train.py finds it, else its content."""
    folders = [folder.resolve() / "data" for folder in conf_folders(CONF_DIR)]
    is_found = args.conf == DEFAULT_CONF or (args.conf.suffix == ".yaml" and args.conf.resolve().parent in folders)
    blend = [item for name, prefix in prefixes.items() for item in (round(weights[name], 6), prefix)]
    manifest = read_manifest(next(iter(prefixes.values()))) or {}
    model = new_model_words(args.tokenizer_model, manifest["vocab_size"])
    if not is_found:
        return [*blend_words(blend, args.split), *model]
    # The file names the tokenizer. Its sequences are too long for the default model; null derives their length.
    return [f"data={args.conf.stem}", "data.seq_length=null", model[-1]]


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
class QualityRule:
    """Condition on a quality signal of V2, such as rps_doc_word_count>=50."""

    signal: str
    sign: str
    limit: float

    @staticmethod
    def parse(text: str) -> QualityRule:
        """Parse a rule. Raises UserError if the text is not a condition."""
        match = RULE.match(text)
        if not match:
            raise UserError(f"--quality {text!r}: write SIGNAL>=NUMBER, for example rps_doc_word_count>=50")
        return QualityRule(match[1], match[2], float(match[3]))

    def holds(self, signals: dict[str, Any]) -> bool:
        """Whether a document satisfies the rule; a null signal does not.

        Raises KeyError if the signal does not exist.
        """
        spans = signals[self.signal]
        value = spans[0][2] if spans else None
        return value is not None and COMPARE[self.sign](float(value), self.limit)

    def __str__(self) -> str:
        return f"{self.signal}{self.sign}{self.limit:g}"


def _signals_path(documents: str) -> str:
    """Return the quality signals file of a V2 documents file. Raises UserError."""
    head, marker, tail = documents.rpartition(f"{os.sep}documents{os.sep}")
    name = tail
    for suffix in (".gz", ".zst", *RAW_DATA_SUFFIXES):
        name = name.removesuffix(suffix)
    base = os.path.join(head, "quality_signals", name + ".signals.json")
    for suffix in (".gz", ".zst", ""):
        if marker and os.path.exists(base + suffix):
            return base + suffix
    raise UserError(f"{documents}: no quality signals file {base}.gz: download it, or remove --quality")


def _filter_file(source: Source, target: Path, rules: Sequence[QualityRule]) -> dict[str, int]:
    """Copy the lines of documents that satisfy all rules to a .zst file; return the counts.

    Lines of the two files correspond. If a signal's id has a line number, it is verified.

    Raises:
        UserError: The files do not match, a signal is unknown, or a line of signals is invalid.
    """
    counts = {"kept": 0, **{str(rule): 0 for rule in rules}}
    signals_file = _signals_path(source.path)
    import zstandard

    files = (source, *find_sources([signals_file]).sources)
    pairs = zip_longest(*((line for line in read_lines(one) if line.strip()) for one in files))
    with atomic_open(target) as packed, zstandard.ZstdCompressor().stream_writer(packed, closefd=False) as file:
        for number, (line, signals) in enumerate(pairs):
            if line is None or signals is None:
                shorter = source.path if line is None else signals_file
                raise UserError(
                    f"{source.path} and its quality signals differ in length: {shorter} ends after {number} lines"
                )
            values = _signals(signals, signals_file, number)
            try:
                failed = next((rule for rule in rules if not rule.holds(values)), None)
            except KeyError as error:
                known = ", ".join(sorted(values)[:12])
                raise UserError(
                    f"{signals_file}, line {number + 1}: no signal {error}; the signals are {known}"
                ) from None
            except (TypeError, IndexError, ValueError):
                raise UserError(f"{signals_file}, line {number + 1}: a signal has no value") from None
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
        raise UserError(f"{path}, line {number + 1}: not a quality signals record") from None
    last = identity.rpartition("/")[2]
    if last.isdigit() and int(last) != number:
        raise UserError(f"{path}, line {number + 1}: it has document {identity}, so lines are missing before it")
    return dict(values)


def _filter_v2(folder: str, target: Path, rules: list[QualityRule]) -> Path:
    """Write the documents that satisfy all rules to ``target``; skip files that exist."""
    summarize_run = target / "account.txt"
    totals: Counter[str] = Counter()
    words = " ".join(map(str, rules))
    if summarize_run.exists() and summarize_run.read_text().splitlines()[0] != words:
        raise UserError(f"{target} was filtered by other rules: remove it, or write another --output")
    write_atomically(summarize_run, words + "\n")
    for source in find_sources([folder]).sources:
        relative = os.path.relpath(source.path, folder)
        out = target / os.path.dirname(relative) / (strip_compression(os.path.basename(relative)) + "l.zst")
        counted = out.with_name(out.name + ".counts")
        if not (out.exists() and counted.exists()):
            write_atomically(counted, json.dumps(_filter_file(source, out, rules)))
        totals.update(json.loads(counted.read_bytes()))
    dropped = ", ".join(f"{count:,} by {name}" for name, count in totals.items() if name != "kept")
    print(f"quality: {sum(totals.values()):,} documents = {totals['kept']:,} kept + dropped ({dropped})")
    return target


def main() -> int:
    """Run the command line; return the exit status."""
    args = parser().parse_args()
    return _download(args) if args.command == "download" else _prepare(args)


if __name__ == "__main__":
    run_main(main)
