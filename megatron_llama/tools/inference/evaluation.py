"""Accuracy: of the likeliest label, and of the number at the end of a written answer."""
from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from data_prep.lib.input_files import find_sources
from data_prep.lib.sources import read_lines, with_array
from megatron_llama.config import Config, ConfigError, DataConfig, ModelConfig, Problem
from megatron_llama.config.data_settings import MASK_SUFFIX, strip_compression
from megatron_llama.corpus.indexed_format import IndexedDataset
from megatron_llama.data.checks import check_data, mask_problem
from megatron_llama.system.errors import UserError
from megatron_llama.system.files import read_json
from megatron_llama.text.conversation import LABELLED, Template
from megatron_llama.tools.inference.arguments import not_utf8
from megatron_llama.tools.inference.chat import NONE, PromptBuilder
from megatron_llama.tools.inference.generator import Generator, Sampling

T = TypeVar("T")
_Z = 1.959963984540054  # two-sided 95 % quantile of the normal distribution
_NUMBER = re.compile(r"^#### *(-?\$?\d[\d,]*(?:\.\d+)?)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class EncodedRecord:
    """A record as ids."""

    prompt: list[int]
    labels: list[list[int]]
    """The ids that follow the prompt for each label; empty where an answer is to be written."""
    record: Record


def share(right: int, of: int) -> dict[str, float]:
    """``right`` answers out of ``of``, at least one: their share, and Wilson's interval of 95 % (Wilson 1927)."""
    p, square = right / of, _Z * _Z
    middle, width = (p + square / (2 * of)), _Z * math.sqrt(p * (1 - p) / of + square / (4 * of * of))
    low, high = ((middle + sign * width) / (1 + square / of) for sign in (-1, 1))
    return {"right": right, "of": of, "share": p, "low": max(0.0, low), "high": min(1.0, high)}


def encode_records(records: Records, template: Template, prompts: PromptBuilder, room: int) -> list[EncodedRecord]:
    """The records as ids, shortest first. Those with more than ``room`` ids are left out and counted in ``records``.

    A prompt is a user's message in the chat template. A label's ids are those that differ when it is written after the
    prompt: a tokenizer may join its first letters with the prompt's last. Raises ConfigError as ``prompts`` does.
    """
    encoded = []
    for record in records.good:
        messages = [{"role": "user", "content": template.prompt.format(**record)}]
        ids = prompts.ids(messages)
        labels = [label if prompts.template == NONE else label.strip() for label in template.labels.values()]
        whole = [prompts.ids(messages, label) for label in labels]
        shared = len(os.path.commonprefix([ids, *whole]))
        one = EncodedRecord(ids[:shared], [other[shared:] for other in whole], record)
        if shared + max(map(len, one.labels), default=0) > room or not shared:
            records.skipped["too long"] += 1
        else:
            encoded.append(one)
    return sorted(encoded, key=lambda one: len(one.prompt))  # stable: ties stay in the file's order


def label_accuracy(
    generator: Generator, records: Sequence[EncodedRecord], template: Template, rows: int, progress: Progress
) -> dict[str, object]:
    """The share of records whose own label is the likeliest of all labels after the prompt, ``rows`` at a time."""
    names = list(template.labels)
    right, truths, guesses = 0, Counter[str](), Counter[str]()
    for batch in _batches(records, rows, progress):
        for one, guess in zip(batch, label_scores(generator, batch).argmax(-1).tolist(), strict=True):
            truth = str(one.record[template.answer])
            truths[truth] += 1
            guesses[names[guess]] += 1
            right += truth == names[guess]
    majority, count = truths.most_common(1)[0]
    return {
        "accuracy": share(right, len(records)),
        "majority": {"label": majority, "share": count / len(records)},
        "labels": {name: {"there": truths[name], "chosen": guesses[name]} for name in names},
    }


def label_scores(generator: Generator, batch: Sequence[EncodedRecord]) -> torch.Tensor:
    """The log likelihood of each label's ids after each prompt, [b, labels], fp64. The prompt is computed once."""
    lengths = torch.tensor([len(one.prompt) for one in batch])
    longest = max(len(label) for one in batch for label in one.labels)
    cache = generator.cache(len(batch), int(lengths.max()) + longest, at_once=longest)
    prompts = _padded([one.prompt for one in batch])
    logits = generator.logits(prompts, cache.at(torch.zeros_like(lengths), prompts.shape[1], lengths - 1))
    after_prompt = torch.log_softmax(logits.double(), -1)
    scores = torch.zeros(len(batch), len(batch[0].labels), dtype=torch.float64)
    for number in range(scores.shape[1]):
        labels = [one.labels[number] for one in batch]
        steps = [after_prompt]
        most = max(map(len, labels))
        if most > 1:
            # The next label overwrites this one in the cache: a slot is a position.
            logits = generator.logits(_padded([label[:-1] for label in labels]), cache.at(lengths, most - 1))
            steps.append(torch.log_softmax(logits.double(), -1))
        likelihoods = torch.cat(steps)
        for row, label in enumerate(labels):
            scores[row, number] = sum(likelihoods[step, row, token] for step, token in enumerate(label))
    return scores


def answer_accuracy(
    generator: Generator,
    records: Sequence[EncodedRecord],
    template: Template,
    decode: Callable[[Sequence[int]], str],
    rows: int,
    max_new_tokens: int,
    progress: Progress,
) -> dict[str, object]:
    """The shares of greedy answers that have a line ``#### number``, and that have the right number there."""
    formed = right = 0
    examples: list[dict[str, object]] = []
    for batch in _batches(records, rows, progress):
        answers = generator.generate([one.prompt for one in batch], Sampling(greedy=True), max_new_tokens)
        for one, answer in zip(batch, answers, strict=True):
            text = decode(answer.ids)
            number, truth = final_number(text), final_number(str(one.record[template.answer]))
            formed += number is not None
            right += number is not None and number == truth
            if len(examples) < 3:
                examples.append({**one.record, "written": text})
    return {
        "well_formed": share(formed, len(records)),
        "exact_match": share(right, len(records)),
        "examples": examples,
    }


def _batches(records: Sequence[T], rows: int, progress: Progress) -> Iterator[Sequence[T]]:
    for first in range(0, len(records), rows):
        yield records[first : first + rows]
        progress(min(first + rows, len(records)), len(records))


def final_number(answer: str) -> Decimal | None:
    """The number of the first line ``#### number``; None where there is no such line."""
    found = _NUMBER.search(answer)
    try:
        return Decimal(found[1].replace(",", "").replace("$", "")) if found else None
    except InvalidOperation:
        return None


def _padded(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Ids [rows, longest], zeros after the end of each row."""
    return pad_sequence([torch.tensor(ids, dtype=torch.int64) for ids in rows], batch_first=True)


# Perplexity on an indexed dataset.


_LOGIT_BYTES = 256 << 20  # fp32 logits of a rank in one batch
Progress = Callable[[int, int], None]
"""Called with the number of windows or records that are done, and of all."""
Example = tuple[np.ndarray, np.ndarray]
"""(ids, loss mask) of a window or a fine-tuning example. Nothing predicts its first id."""


@dataclass(frozen=True)
class Perplexity:
    """Over all learned tokens that have a token before them."""

    tokens: int
    """Predicted tokens; of a dataset of text all but the first."""
    windows: int
    """Windows or examples."""
    seq_length: int
    """Inputs of the longest one."""
    loss: float
    """Mean negative log likelihood of a token, in nats."""
    perplexity: float


def open_ids(prefix: str, model: ModelConfig) -> np.ndarray:
    """All ids of a dataset, document after document, memory-mapped. Raises ConfigError where they do not fit."""
    problems = check_data(Config(model=model, data=DataConfig(prefixes=[prefix], tokenizer=None)))
    if problems:
        raise ConfigError(problems)
    return IndexedDataset(prefix).tokens


def is_fine_tuning_set(prefix: str) -> bool:
    """Whether a dataset has loss masks."""
    return Path(prefix + MASK_SUFFIX + ".idx").is_file()


def open_examples(prefix: str, model: ModelConfig) -> list[Example] | None:
    """The examples of a fine-tuning set, memory-mapped; None for a dataset of text.

    Raises ConfigError for a set that does not fit the model, or whose masks are not its own.
    """
    if not is_fine_tuning_set(prefix):
        return None
    open_ids(prefix, model)
    tokens = IndexedDataset(prefix)
    if rule := mask_problem(prefix, tokens.index):
        raise ConfigError([Problem("--dataset", prefix, rule, "make the dataset again")])
    masks = IndexedDataset(prefix + MASK_SUFFIX)
    longest, context = int(tokens.index.lengths.max()), model.max_position_embeddings
    if longest - 1 > context:
        rule = f"holds an example of {longest} tokens, and the model has {context} positions"
        raise ConfigError([Problem("--dataset", prefix, rule, "make it again with a smaller --seq-length")])
    return [(tokens.sequence(number), masks.sequence(number)) for number in range(len(tokens.index))]


def windows(count: int, length: int) -> Iterator[tuple[int, int]]:
    """(first input, first after the last input) of windows that predict every id but the first once; the last is
    shorter."""
    return ((start, min(start + length, count - 1)) for start in range(0, count - 1, length))


def open_windows(prefix: str, model: ModelConfig, length: int, max_tokens: int | None) -> list[Example]:
    """A dataset, or its first ``max_tokens`` ids, in windows of ``length`` inputs, cut as training cuts them.

    A window's first tokens have little context, as in training, and documents follow each other as they are stored.
    """
    ids, learned = open_ids(prefix, model)[:max_tokens], np.ones(length + 1, np.uint8)
    return [(ids[a : b + 1], learned[: b + 1 - a]) for a, b in windows(len(ids), length)]


@torch.no_grad()
def perplexity(generator: Generator, examples: list[Example], progress: Progress) -> Perplexity:
    """The loss on examples or windows, as val_loss is: each alone, over its learned tokens, all of equal weight.

    All ranks must call it.
    """
    examples = sorted(examples, key=lambda example: len(example[0]))  # similar lengths in a batch: less padding
    room = _LOGIT_BYTES * generator.plan.config.trainer.tp // (generator.plan.padded_vocab_size * 4)
    total, count, done = 0.0, 0, 0
    while done < len(examples):
        rows = 1
        while done + rows < len(examples) and (rows + 1) * (len(examples[done + rows][0]) - 1) <= room:
            rows += 1
        ids, learned = (
            pad_sequence([torch.from_numpy(row.astype(np.int64)) for row in column], batch_first=True)
            for column in zip(*examples[done : done + rows], strict=True)
        )
        tokens, labels, mask = ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), learned[:, 1:]
        batch = (column.to(generator.device) for column in (tokens, labels))
        total += generator.llama(*batch, loss_weights=mask.float().to(generator.device))[0].item()
        count += int(mask.sum())
        done += rows
        progress(done, len(examples))
    mean = total / max(1, count)
    longest = len(examples[-1][0]) - 1
    return Perplexity(count, len(examples), longest, mean, math.exp(mean) if mean < 700 else math.inf)


# Evaluation data: the records of a file, and the templates that make prompts of them.


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
        if strip_compression(source.path).endswith(".tsv"):
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
