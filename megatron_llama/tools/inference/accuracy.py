"""Accuracy: of the likeliest label, and of the number at the end of a written answer."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import TypeVar

import torch
from torch.nn.utils.rnn import pad_sequence

from megatron_llama.text.conversation import Template
from megatron_llama.tools.inference.eval_data import Record, Records
from megatron_llama.tools.inference.generator import Generator
from megatron_llama.tools.inference.perplexity import Progress
from megatron_llama.tools.inference.prompts import NONE, PromptBuilder
from megatron_llama.tools.inference.sampling import Sampling

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
