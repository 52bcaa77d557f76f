"""Evaluation data: the records of a file, and the templates that make prompts of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.lib.input_files import find_sources
from data_prep.lib.sources import read_lines, with_array
from megatron_llama.config import ConfigError, Problem
from megatron_llama.config.data_prefixes import bare_name
from megatron_llama.system.errors import UserError
from megatron_llama.system.files import read_json
from megatron_llama.text.conversation import LABELLED, Template
from megatron_llama.tools.inference.arguments import not_utf8

Record = Mapping[str, Any]


# The prompts are the user's messages that data_prep/sft.py makes, so that a tuned model gets prompts as in training.
TEMPLATES: Mapping[str, Template] = {**LABELLED, "gsm8k": Template("{question}", "answer")}


@dataclass
class Records:
    """Records that can be used, and the number of others by reason."""

    good: list[Record] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)


def find_template(name: str) -> Template:
    """A template of this file by its name, or a JSON file with prompt, answer and, for labelled sets, labels."""
    if name in TEMPLATES:
        return TEMPLATES[name]
    instead = f"write --template {', '.join(TEMPLATES)}, or a JSON file with prompt, answer and labels"
    if not Path(name).is_file():
        raise ConfigError([Problem("--template", name, "is neither a template's name nor a file", instead)])
    try:
        content = read_json(Path(name))
        template = Template(content["prompt"], content["answer"], content.get("labels", {}))
        template.fields  # noqa: B018  raises ValueError where the braces can't be parsed
        if not all(isinstance(text, str) and text for text in (*template.labels, *template.labels.values())):
            raise ValueError("labels are texts")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError([Problem("--template", name, f"can't be used: {error!r}", instead)]) from None
    return template


def read_records(path: Path, template: Template, limit: int | None = None) -> Records:
    """The records of a .tsv (with a header), .jsonl or .json (one array) file, at most the first ``limit`` good ones.

    Others are left out and counted. Raises ConfigError for a file that can't be read or has no good record.
    """
    records, wanted = Records(), template.fields
    try:
        for record in _rows(path):
            if len(records.good) == limit:
                break
            if record is None:
                records.skipped["unreadable"] += 1
            elif any(not str(record.get(name) or "").strip() for name in wanted):
                records.skipped["lacks a field"] += 1
            elif any(not_utf8(str(record[name])) for name in wanted):
                records.skipped["lone surrogate"] += 1
            elif template.labels and str(record[template.answer]) not in template.labels:
                records.skipped["unknown label"] += 1
            else:
                records.good.append(record)
    except (OSError, UnicodeDecodeError, UserError) as error:
        rule = f"can't be read: {error}"
        raise ConfigError([Problem("FILE", str(path), rule, "name a .tsv or .jsonl file")]) from None
    if not records.good:
        rule = f"has no record with {', '.join(sorted(wanted))} ({dict(records.skipped) or 'it is empty'})"
        raise ConfigError([Problem("FILE", str(path), rule, "name another file, or another --template")])
    return records


def _rows(path: Path) -> Iterator[Record | None]:
    """Each record, None for one that can't be read; data_prep's readers take compressed files and JSON arrays too."""
    for source in find_sources([str(path)], text_suffixes=(), arrays=True).sources:
        if bare_name(source.path).endswith(".tsv"):
            lines = (line.decode().rstrip("\r") for line in read_lines(source))
            names = next(lines, "").split("\t")
            for cells in (line.split("\t") for line in lines if line):  # in GLUE's files quotes are ordinary characters
                yield dict(zip(names, cells, strict=True)) if len(cells) == len(names) else None
            continue
        for line in read_lines(with_array(source)):
            if not line.strip():
                continue
            try:
                content = json.loads(line)
            except ValueError:
                content = None
            yield content if isinstance(content, dict) else None
