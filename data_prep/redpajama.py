"""RedPajama, from the official list of files to indexed datasets and a config that trains on their blend.

    python data_prep/redpajama.py download --output data/redpajama --subsets arxiv wikipedia --sample 2
    python data_prep/redpajama.py prepare --input data/redpajama --tokenizer-model tokenizer.model
    python train.py data=redpajama ...

Both can be stopped, killed and started again: they go on where they were.
"""

import os
import sys

if __package__ in (None, ""):  # run as a script: this folder holds inspect.py, which must not hide Python's own
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import json
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from data_prep.lib.download import (
    URL_LIST,
    V2,
    DownloadItem,
    QualityRule,
    fetch_all,
    filter_file,
    find_subsets,
    parse_sums,
    read_text,
    shares,
    subset_of,
    write_conf,
)
from data_prep.lib.input_files import find_sources
from data_prep.lib.job import RunOptions, cores
from data_prep.lib.sets import TextOptions, make_text_set
from megatron_llama.config.data_settings import strip_compression
from megatron_llama.config.hf_config import resolve_hub_name
from megatron_llama.system.errors import UserError, run_main
from megatron_llama.system.files import write_atomically

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_CONF = ROOT / "conf" / "data" / "redpajama.yaml"


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    result = argparse.ArgumentParser(prog="redpajama.py", description=(__doc__ or "").partition("\n\n")[0])
    commands = result.add_subparsers(dest="command", required=True)
    download = commands.add_parser("download", help="fetch files of the official list")
    download.add_argument("--output", type=Path, required=True, help="folder; the list's own layout is kept below it")
    download.add_argument("--url-list", help="URL or file with one URL a line (default: the official list of 1T)")
    download.add_argument("--base-url", help="what to take off the URLs to get the paths (default: their common part)")
    download.add_argument("--subsets", nargs="+", help="only these (default: all that are listed)")
    download.add_argument("--sample", type=int, metavar="N", help="only N files of each subset, evenly spread")
    download.add_argument(
        "--sha256sums", nargs="+", default=[], help="sha256sum lists, URLs or files, to check against"
    )
    download.add_argument("--jobs", type=int, default=4, help="files at a time (default 4)")
    download.add_argument("--dry-run", action="store_true", help="only list what would be fetched")
    prepare = commands.add_parser("prepare", help="tokenize every subset and write the config")
    prepare.add_argument("--input", required=True, help="the folder that download filled, or any of its layout")
    prepare.add_argument("--output", type=Path, default=Path("datasets/redpajama"), help="default datasets/redpajama")
    prepare.add_argument("--tokenizer-model", required=True, help=".model file, or a Hugging Face folder")
    prepare.add_argument("--tokenizer-library", help="sentencepiece (default), huggingface, tiktoken")
    prepare.add_argument("--subsets", nargs="+", help="only these (default: all that are there)")
    prepare.add_argument("--quality", nargs="+", default=[], metavar="RULE", help="V2: keep what fulfils all, e.g. "
                         "'rps_doc_word_count>=50' 'ccnet_perplexity<300'")  # fmt: skip
    prepare.add_argument("--on-bad-line", choices=["error", "skip"], default="error", help="default: error")
    prepare.add_argument("--workers", type=int, default=cores(), help="processes (default: one a core)")
    prepare.add_argument("--overwrite", action="store_true", help="replace datasets made with other options")
    prepare.add_argument("--split", default="980,10,10", help="training, validation, test (default 980,10,10)")
    prepare.add_argument("--conf", type=Path, default=DEFAULT_CONF, help="default conf/data/redpajama.yaml")
    return result


def select(urls: Sequence[str], base: str, subsets: Sequence[str] | None, sample: int | None) -> dict[str, str]:
    """URL to path below the output folder, for the chosen subsets and sample.

    Raises:
        UserError: a subset is not in the list, or a URL would leave the folder.
    """
    paths: dict[str, str] = {}
    by_subset: dict[str, list[str]] = {}
    for url in dict.fromkeys(urls):
        path = url.removeprefix(base).lstrip("/") if url.startswith(base) else urlsplit(url).path.lstrip("/")
        if not path or ".." in url.split("/"):
            raise UserError(f"the list holds {url}, which names no file below the output folder")
        paths[url] = path
        by_subset.setdefault(subset_of(path.split("/")[0]), []).append(url)
    wanted = [subset_of(name) for name in subsets] if subsets else list(by_subset)
    unknown = [name for name in wanted if name not in by_subset]
    if unknown:
        raise UserError(f"--subsets {' '.join(unknown)}: the list has {', '.join(by_subset)}")
    chosen = {}
    for name in wanted:
        files = by_subset[name]
        count = min(len(files), sample) if sample else len(files)
        for number in range(count):
            url = files[number * len(files) // count]
            chosen[url] = paths[url]
    return chosen


def download(args: argparse.Namespace) -> int:
    """Fetches the chosen files."""
    if args.sample is not None and args.sample < 1:
        raise UserError("--sample must be at least 1")
    if args.jobs < 1:
        raise UserError("--jobs must be at least 1")
    where = args.url_list or URL_LIST
    urls = [line.strip() for line in read_text(where).splitlines() if line.strip()]
    bad = [url for url in urls if not url.startswith(("http://", "https://"))]
    if not urls or bad:
        raise UserError(f"{where} is no list of URLs" + (f": it holds {bad[0][:80]!r}" if bad else ""))
    base = args.base_url or (where.rsplit("/", 1)[0] + "/" if "://" in where else _common(urls))
    chosen = select(urls, base, args.subsets, args.sample)
    sums: dict[str, str] = {}
    for name in args.sha256sums:
        sums |= parse_sums(read_text(name))
    items = []
    for url, path in chosen.items():
        names = (path, path.partition("/")[2], os.path.basename(path))  # a list may name files without their folders
        items.append(DownloadItem(url, args.output / path, next((sums[name] for name in names if name in sums), None)))
    checked = sum(item.sha256 is not None for item in items)
    print(f"{len(items)} of {len(urls)} files, {checked} with a sha256 to check")
    if args.dry_run:
        for item in items:
            print(f"{item.url} -> {item.path}")
        return 0
    fetch_all(items, args.jobs, print)
    return 0


def _common(urls: Sequence[str]) -> str:
    """The folder that all URLs share, one level above where they part."""
    folders = {url.rsplit("/", 1)[0] + "/" for url in urls}
    common = os.path.commonprefix(sorted(folders)).rsplit("/", 1)[0]
    return (common.rsplit("/", 1)[0] if len(folders) == 1 else common) + "/"  # one folder alone is the subset


def prepare(args: argparse.Namespace) -> int:
    """Tokenizes the subsets and writes the config."""
    rules = [QualityRule.parse(text) for text in args.quality]
    found = find_subsets(args.input)
    if args.subsets:
        wanted = [subset_of(name) for name in args.subsets]
        missing = [name for name in wanted if name not in found]
        if missing:
            raise UserError(f"--subsets {' '.join(missing)}: {args.input} holds {', '.join(found)}")
        found = {name: path for name, path in found.items() if name in wanted}
    if rules and V2 not in found:
        raise UserError("--quality is for V2, which has signals; this is 1T")
    weights = shares(list(found))
    prefixes = {}
    for name, folder in found.items():
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
    write_conf(args.conf, prefixes, os.path.abspath(resolve_hub_name(args.tokenizer_model)), args.split, command)
    print(f"{args.conf}: now python train.py data={args.conf.stem} ...")
    return 0


def _filter_v2(folder: str, target: Path, rules: list[QualityRule]) -> Path:
    """Writes the documents that fulfil the rules below `target`, file by file; what is there already is kept."""
    summarize_run = target / "account.txt"
    totals: Counter[str] = Counter()
    words = " ".join(map(str, rules))
    if summarize_run.exists() and summarize_run.read_text().splitlines()[0] != words:
        raise UserError(f"{target} holds documents filtered by other rules: remove it, or choose another --output")
    write_atomically(summarize_run, words + "\n")
    for source in find_sources([folder]).sources:
        relative = os.path.relpath(source.path, folder)
        out = target / os.path.dirname(relative) / (strip_compression(os.path.basename(relative)) + "l.zst")
        counted = out.with_name(out.name + ".counts")
        if not (out.exists() and counted.exists()):
            write_atomically(counted, json.dumps(filter_file(source, out, rules)))
        totals.update(json.loads(counted.read_bytes()))
    dropped = ", ".join(f"{count:,} by {name}" for name, count in totals.items() if name != "kept")
    print(f"quality: {sum(totals.values()):,} documents = {totals['kept']:,} kept + dropped ({dropped})")
    return target


def main() -> int:
    """The command line."""
    args = parser().parse_args()
    return download(args) if args.command == "download" else prepare(args)


if __name__ == "__main__":
    run_main(main)
