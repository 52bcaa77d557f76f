"""Which of data.prefixes are no datasets yet but small files of records, and what preparing them needs. Names only."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.config.limits import weights_and_paths
from megatron_llama.config.problems import Problem
from megatron_llama.config.settings import LABEL_TEMPLATES, Config, DataConfig
from megatron_llama.plan.rules.layout import reads

_RECORDS, _TABLES = (".jsonl", ".json", ".ndjson"), (".tsv",)
_COMPRESSED = (".gz", ".zst", ".zstd")


def is_record_file(data: DataConfig, path: str) -> bool:
    """Whether an entry of data.prefixes is a file that data_prep/sft.py reads, rather than a dataset."""
    return data.kind == "sft" and not data.mock and _bare(path).endswith(_RECORDS + _TABLES)


def is_table(path: str) -> bool:
    """Whether a file of records has a header and columns."""
    return _bare(path).endswith(_TABLES)


def record_files(data: DataConfig) -> list[tuple[str, str]]:
    """(setting, path) of each file of records, each once."""
    named = [("data.prefixes", path) for path in weights_and_paths(data.prefixes)[1]]
    named += [("data.validation_prefixes", str(path)) for path in data.validation_prefixes]
    return list(dict.fromkeys((name, path) for name, path in named if is_record_file(data, path)))


def tokenizer_of_records(config: Config) -> str | None:
    """What encodes the files of records: a sentencepiece model or a Hugging Face folder."""
    return config.data.tokenizer or config.init_from


def note_records(config: Config, notes: list[str]) -> None:
    """Say which files a run will prepare first."""
    for _, path in record_files(config.data):
        notes.append(f"{path} is not prepared yet: a run does that first, with data_prep/sft.py's code")


@reads("data.prefixes", "data.validation_prefixes", "data.kind", "data.tokenizer", "data.template", "init_from")
def records_can_be_prepared(config: Config, world_size: int) -> Iterator[Problem]:
    """Records are text: they need a tokenizer, and tables a question too."""
    data, files = config.data, record_files(config.data)
    if files and tokenizer_of_records(config) is None:
        rule = f"{files[0][1]} is text, which needs a tokenizer"
        instead = "write data.tokenizer=FOLDER (Hugging Face) or tokenizer.model, or init_from=FOLDER"
        yield Problem("data.tokenizer", None, rule, instead)
    tables = [path for _, path in files if is_table(path)]
    if tables and data.template is None:
        rule = f"{tables[0]} is a table, and how its lines are asked is not said"
        yield Problem("data.template", None, rule, f"write data.template={' or '.join(LABEL_TEMPLATES)}")
    if data.template is not None and not tables:
        rule = "is for .tsv files, and data.prefixes names none"
        yield Problem("data.template", data.template, rule, "leave data.template out")
    if data.chat_template != DataConfig.chat_template and not files:
        rule = "is for files of records; a dataset has its template in it already"
        yield Problem("data.chat_template", data.chat_template, rule, "leave data.chat_template out")


def _bare(path: str) -> str:
    lower = path.lower()
    for suffix in _COMPRESSED:
        lower = lower.removesuffix(suffix)
    return lower
