"""Evaluation: perplexity, accuracy of the likeliest label, and accuracy of final numbers in generated answers."""

from __future__ import annotations

import json
import math
import os
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from decimal import Decimal, InvalidOperation
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from data_prep.lib.find_inputs import find_sources
from data_prep.lib.input_readers import read_lines, with_array
from megatron_llama.config import Config, ConfigError, ModelConfig, Problem
from megatron_llama.config.data_settings import MASK_SUFFIX, stored_format, strip_compression
from megatron_llama.config.rope import longest_sequence
from megatron_llama.config.settings import DataConfig
from megatron_llama.corpus.indexed_format import IndexedDataset
from megatron_llama.data.checks import check_data, has_labels, mask_problem, tokenizer_mismatches
from megatron_llama.system.errors import UserError
from megatron_llama.system.files import path_exists, read_json
from megatron_llama.text.conversation import LABELLED, Template
from megatron_llama.text.tokenizer import Tokenizer
from megatron_llama.tools.inference.arguments import Measure, OpenedModel, Problems, Progress, not_utf8
from megatron_llama.tools.inference.chat import NONE, PromptBuilder, open_prompt_builder
from megatron_llama.tools.inference.generator import Generator
from megatron_llama.tools.inference.sampling import Sampling
from megatron_llama.tools.inference.saved_model import stop_ids

T = TypeVar("T")
_Z = 1.959963984540054  # two-sided 95 % quantile of the normal distribution
_NUMBER = re.compile(r"^#### *(-?\$?\d[\d,]*(?:\.\d+)?)\s*$", re.MULTILINE)


def records_task(
    arguments: Namespace, opened: OpenedModel, problems: Problems
) -> tuple[frozenset[int], Measure] | None:
    """Return the ids that end an answer, and the measurement of --labelled or --generative.

    On errors returns None and adds to ``problems``.
    """
    kind, file = ("labelled", arguments.labelled) if arguments.labelled else ("generative", arguments.generative)
    if file is None or arguments.template is None:
        return None
    template = problems.collect(find_template, arguments.template)
    if template is None:
        return None
    if bool(template.labels) != (kind == "labelled"):
        rule = "has labels; use --labelled" if template.labels else "has no labels; use --generative"
        problems.add("--template", arguments.template, rule, "write another template")
        return None
    records = problems.collect(read_records, file, template, arguments.limit or None)
    if records is None or opened.tokenizer is None or problems.items:
        return None
    # Without a template of training: built-in templates use plain prompts that end with a line feed, templates from a
    # file are complete prompts.
    default = "own" if arguments.chat else "plain" if arguments.template in TEMPLATES else NONE
    saved, name = opened.saved, arguments.chat_template
    builder = problems.collect(open_prompt_builder, opened.tokenizer, name, saved.trained_template, default)
    if builder is None:
        return None
    context, (_, skipped) = longest_sequence(saved.model), records
    longest = context if template.labels else context - 1  # a generated answer has at least one token
    encoded = problems.collect(encode_records, records, template, builder, longest) or []
    if not encoded and not problems.items:
        problems.add("FILE", str(file), f"no record fits into the model's {context} positions", "name another file")
    report = {
        kind: str(file),
        "template": asdict(template),
        "chat": builder.template not in ("plain", NONE),
        "chat_template": builder.template,
        "skipped": dict(skipped),
    }
    measure = partial(measure_records, arguments, report, template, encoded)
    return stop_ids(saved, opened.tokenizer) | builder.stop, measure


def measure_records(
    arguments: Namespace,
    report: dict[str, Any],
    template: Template,
    records: list[EncodedRecord],
    generator: Generator,
    opened: OpenedModel,
    progress: Progress,
) -> dict[str, Any]:
    """Return ``report`` with the accuracy on the records of a file."""
    rows, most = arguments.batch_size, arguments.max_new_tokens
    if template.labels:
        return report | label_accuracy(generator, records, template, rows, progress)
    assert opened.tokenizer is not None
    accuracy = answer_accuracy(generator, records, template, opened.tokenizer.decode, rows, most, progress)
    return report | {"max_new_tokens": most} | accuracy


@dataclass(frozen=True)
class EncodedRecord:
    """Token ids of a record."""

    prompt: list[int]
    labels: list[list[int]]
    """Ids of each label after the prompt; empty for generated answers."""
    record: Record


def share(right: int, of: int) -> dict[str, float]:
    """Return the share of ``right`` answers out of ``of`` > 0, with the 95 % Wilson interval (Wilson 1927)."""
    p, square = right / of, _Z * _Z
    middle, width = (p + square / (2 * of)), _Z * math.sqrt(p * (1 - p) / of + square / (4 * of * of))
    low, high = ((middle + sign * width) / (1 + square / of) for sign in (-1, 1))
    return {"right": right, "of": of, "share": p, "low": max(0.0, low), "high": min(1.0, high)}


def encode_records(
    records: EvalRecords, template: Template, prompts: PromptBuilder, max_ids: int
) -> list[EncodedRecord]:
    """Encode records, shortest first.

    A prompt is a user message in the chat template. Records of more than ``max_ids`` ids are skipped and counted in
    ``records``. Label ids start where the labels' encodings differ, because a tokenizer may merge a label's first
    letters with the end of the prompt. Raises ConfigError if the chat template rejects a prompt.
    """
    encoded, (good, skipped) = list[EncodedRecord](), records
    for record in good:
        messages = [{"role": "user", "content": template.prompt.format(**record)}]
        ids = prompts.ids(messages)
        labels = [label if prompts.template == NONE else label.strip() for label in template.labels.values()]
        full = [prompts.ids(messages, label) for label in labels]
        shared = len(os.path.commonprefix([ids, *full]))
        one = EncodedRecord(ids[:shared], [other[shared:] for other in full], record)
        if shared + max(map(len, one.labels), default=0) > max_ids or not shared:
            skipped["too long"] += 1
        else:
            encoded.append(one)
    return sorted(encoded, key=lambda one: len(one.prompt))  # stable: ties stay in the file's order


def label_accuracy(
    generator: Generator, records: Sequence[EncodedRecord], template: Template, rows: int, progress: Progress
) -> dict[str, object]:
    """Return the share of records whose label is the likeliest one, in batches of ``rows``."""
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
    """Return the log likelihood of each label after each prompt, [b, labels], fp64. Prompts are computed once."""
    scores = continuation_scores(generator, [one.prompt for one in batch], [one.labels for one in batch])
    return torch.tensor([[likelihood for likelihood, _ in row] for row in scores], dtype=torch.float64)


def continuation_scores(
    generator: Generator, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[Sequence[int]]]
) -> list[list[tuple[float, bool]]]:
    """Return (log likelihood, whether greedy decoding would generate it) of each continuation of each prompt.

    Each prompt is computed once. All ranks must call it.

    Args:
        prompts: ids, at least one per prompt.
        continuations: ids by prompt, at least one per continuation. A prompt and its longest continuation together
            have at most ``context`` + 1 ids.
    """
    longest = [max(map(len, row)) for row in continuations]
    scores: list[list[tuple[float, bool]]] = []
    for part in fitting_parts([*map(len, prompts)], longest, generator.context + 1):
        scores += _continuation_scores(generator, prompts[part], continuations[part])
    return scores


def fitting_parts(prompts: Sequence[int], continuations: Sequence[int], most: int) -> Iterator[slice]:
    """Yield slices of a batch in which the longest prompt and the longest continuation have at most ``most`` ids.

    The cache has a column for each position, so a long prompt and another one's long continuation may exceed it. Each
    pair of lengths fits alone.
    """
    first = 0
    for end in range(1, len(prompts) + 1):
        part = slice(first, end + 1)
        if end == len(prompts) or max(prompts[part]) + max(continuations[part]) > most:
            yield slice(first, end)
            first = end


def _continuation_scores(
    generator: Generator, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[Sequence[int]]]
) -> list[list[tuple[float, bool]]]:
    """Return ``continuation_scores`` of rows that fit the cache together."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    rounds, longest = max(map(len, continuations)), max(len(ids) for row in continuations for ids in row)
    cache = generator.cache(len(prompts), int(lengths.max()) + longest, at_once=longest)
    padded = [[*row, *[[0]] * (rounds - len(row))] for row in continuations]
    tokens, first = _padded(prompts), torch.tensor([[ids[0] for ids in row] for row in padded])
    at_end = cache.at(torch.zeros_like(lengths), tokens.shape[1], lengths - 1)
    (totals,), (greedy,) = generator.log_likelihoods(tokens, first[None], at_end)
    step = max(1, _LOGIT_BYTES // (len(prompts) * generator.plan.padded_vocab_size * 4))
    for number in range(rounds):
        # The next continuation overwrites this one in the cache, because slots are positions.
        column = _padded([row[number] for row in padded])
        counts = torch.tensor([len(row[number]) for row in padded])
        for start in range(0, column.shape[1] - 1, step):
            inputs, targets = column[:, :-1][:, start : start + step], column[:, 1:][:, start : start + step]
            at = cache.at(lengths + start, inputs.shape[1])
            likelihoods, likeliest = generator.log_likelihoods(inputs, targets.t()[..., None], at)
            valid = (torch.arange(start + 1, start + 1 + inputs.shape[1])[:, None] < counts)[..., None]
            totals[:, number] += (likelihoods * valid).sum((0, 2))
            greedy[:, number] &= (likeliest | ~valid).all(0)[:, 0]
    return [
        [(float(totals[row, number]), bool(greedy[row, number])) for number in range(len(scored))]
        for row, scored in enumerate(continuations)
    ]


def answer_accuracy(
    generator: Generator,
    records: Sequence[EncodedRecord],
    template: Template,
    decode: Callable[[Sequence[int]], str],
    rows: int,
    max_new_tokens: int,
    progress: Progress,
) -> dict[str, object]:
    """Return the shares of greedy answers with a line ``#### number``, and with the right number."""
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
    return {"well_formed": share(formed, len(records)), "exact_match": share(right, len(records)), "examples": examples}


def _batches(records: Sequence[T], rows: int, progress: Progress) -> Iterator[Sequence[T]]:
    for first in range(0, len(records), rows):
        yield records[first : first + rows]
        progress(min(first + rows, len(records)), len(records))


def final_number(answer: str) -> Decimal | None:
    """Return the number of the first line ``#### number``; None without such a line."""
    match = _NUMBER.search(answer)
    try:
        return Decimal(match[1].replace(",", "").replace("$", "")) if match else None
    except InvalidOperation:
        return None


def _padded(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Pad rows of ids with zeros: int64 [rows, longest]."""
    return pad_sequence([torch.tensor(ids, dtype=torch.int64) for ids in rows], batch_first=True)


# Perplexity on an indexed dataset.
_LOGIT_BYTES = 256 << 20  # fp32 logits of a rank in one batch
_BATCH_TOKENS = 8192  # keeps batches of a small vocabulary short, so that progress is shown
Example = tuple[np.ndarray, np.ndarray]
"""(ids, loss mask) of a window or fine-tuning example. Its first id is not predicted."""


def dataset_task(arguments: Namespace, opened: OpenedModel, problems: Problems, seq_length: int) -> Measure:
    """Return the measurement of --dataset, in windows of ``seq_length`` tokens; add to ``problems``."""
    is_set = is_fine_tuning_set(arguments.dataset)
    problems.collect(open_examples if is_set else open_ids, arguments.dataset, opened.saved.model)
    for flag, value in (("--seq-length", arguments.seq_length), ("--max-tokens", arguments.max_tokens)):
        if is_set and value is not None:
            problems.add(flag, value, "does not apply to a fine-tuning set", f"remove {flag}")
    if (used := opened.tokenizer) is not None:
        problems.items += tokenizer_mismatches([arguments.dataset], "--tokenizer", str(used.path), used.new_tokens)
    return partial(measure_dataset, arguments.dataset, seq_length, arguments.max_tokens)


def measure_dataset(
    prefix: str, length: int, max_tokens: int | None, generator: Generator, opened: OpenedModel, progress: Progress
) -> dict[str, Any]:
    """Return the perplexity on a dataset, and the bits per byte or the reason why they are unknown."""
    examples = open_examples(prefix, generator.plan.model)
    if examples is None:
        examples = open_windows(prefix, generator.plan.model, length, max_tokens)
    report = {"dataset": prefix, **perplexity(generator, examples, progress)}
    if opened.tokenizer is None:
        return {**report, "bits_per_byte": None, "reason": "the tokenizer is unknown; write --tokenizer PATH"}
    try:
        size = predicted_bytes(opened.tokenizer, prefix, examples)
    except UserError as error:
        return {**report, "bits_per_byte": None, "reason": str(error)}
    return {**report, "bits_per_byte": bits_per_byte(report["loss"], report["tokens"], size), "bytes": size}


def open_ids(prefix: str, model: ModelConfig) -> np.ndarray:
    """Return all ids of a dataset, memory-mapped; raise ConfigError if they do not fit the model."""
    problems = check_data(Config(model=model, data=DataConfig(prefixes=[prefix], tokenizer=None)))
    if problems:
        instead = "prepare it with this model's tokenizer, or name another"
        raise ConfigError(replace(each, field="--dataset", instead=instead) for each in problems)
    return IndexedDataset(prefix).tokens


def is_fine_tuning_set(prefix: str) -> bool:
    """Whether a dataset has loss masks."""
    return path_exists(prefix + MASK_SUFFIX + ".idx")


def open_examples(prefix: str, model: ModelConfig) -> list[Example] | None:
    """Return the examples of a fine-tuning set, memory-mapped; None for text. Raise ConfigError if they do not fit."""
    if not is_fine_tuning_set(prefix):
        return None
    open_ids(prefix, model)
    tokens, fix = IndexedDataset(prefix), "prepare the dataset with a smaller --seq-length"
    if rule := mask_problem(prefix, tokens.index):
        raise ConfigError([Problem("--dataset", prefix, rule, "prepare the dataset from scratch")])
    masks = IndexedDataset(prefix + MASK_SUFFIX)
    if stored := stored_format(masks.sequence(0)[-1]):
        rule, fix = f"has answers of --format {stored}", "prepare it with --format auto --on-bad-line skip"
    elif not has_labels(prefix, 0, len(tokens.index)):
        rule, fix = "has no label: each token is masked", "prepare the dataset again, with answers that have loss"
    elif (longest := int(tokens.index.lengths.max())) - 1 > (context := longest_sequence(model)):
        rule = f"has an example of {longest} tokens, but the model has {context} positions"
    if rule:
        raise ConfigError([Problem("--dataset", prefix, rule, fix)])
    return [(tokens.sequence(number), masks.sequence(number)) for number in range(len(tokens.index))]


def windows(count: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the inputs of windows that predict each id except the first once; the last is shorter."""
    return ((start, min(start + length, count - 1)) for start in range(0, count - 1, length))


def open_windows(prefix: str, model: ModelConfig, length: int, max_tokens: int | None) -> list[Example]:
    """Return a dataset, or its first ``max_tokens`` ids, in windows of ``length`` inputs.

    As in training, a window's first tokens have little context, and documents follow each other in stored order.
    """
    ids, learned = open_ids(prefix, model)[:max_tokens], np.ones(length + 1, np.uint8)
    return [(ids[a : b + 1], learned[: b + 1 - a]) for a, b in windows(len(ids), length)]


@torch.no_grad()
def perplexity(generator: Generator, examples: list[Example], progress: Progress) -> dict[str, Any]:
    """Return the perplexity on examples or windows, with the token-weighted loss of val_loss, by names of the report.

    The names are tokens (predicted ones in the loss mask), windows (or examples), seq_length (inputs of the longest
    window), loss (mean negative log likelihood of a token, in nats) and perplexity. All ranks must call it.
    """
    examples = sorted(examples, key=lambda example: len(example[0]))  # similar lengths in a batch: less padding
    ranks = generator.plan.grid.product("tp", "cp")
    max_tokens = min(_LOGIT_BYTES * ranks // (generator.plan.padded_vocab_size * 4), _BATCH_TOKENS)
    total, count, done = 0.0, 0, 0
    while done < len(examples):
        rows = 1
        while done + rows < len(examples) and (rows + 1) * (len(examples[done + rows][0]) - 1) <= max_tokens:
            rows += 1
        ids, learned = (
            pad_sequence([torch.from_numpy(row.astype(np.int64)) for row in column], batch_first=True)
            for column in zip(*examples[done : done + rows], strict=True)
        )
        tokens, labels, mask = ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), learned[:, 1:]
        total += generator.loss(tokens, labels, mask.float())
        count += int(mask.sum())
        done += rows
        progress(done, len(examples))
    mean = total / max(1, count)
    return {
        "tokens": count,
        "windows": len(examples),
        "seq_length": len(examples[-1][0]) - 1,
        "loss": mean,
        "perplexity": math.exp(mean) if mean < 700 else math.inf,
    }


def predicted_bytes(tokenizer: Tokenizer, prefix: str, examples: Sequence[Example]) -> int:
    """Return the UTF-8 bytes of the text that ``examples`` of a dataset predict.

    The text is decoded: of datasets, by document, because sentencepiece drops the space that it prepends to a text; of
    fine-tuning sets, the tokens with loss. Control tokens have no bytes. A character that is cut counts as U+FFFD.

    Raises UserError if the dataset has ids that the tokenizer lacks.
    """

    def count(ids: np.ndarray) -> int:
        if len(ids) and int(ids.max()) >= tokenizer.size:
            raise UserError(f"the dataset has id {ids.max()}, and {tokenizer.path} has only {tokenizer.size} ids")
        return len(tokenizer.decode(ids.tolist()).encode())

    if is_fine_tuning_set(prefix):
        total = 0
        for ids, mask in examples:
            # Boundaries of the spans with loss. The first id is not predicted.
            edges = np.flatnonzero(np.diff(np.pad(mask[1:] != 0, 1).astype(np.int8))) + 1
            total += sum(count(ids[:end]) - count(ids[:start]) for start, end in edges.reshape(-1, 2).tolist())
        return total
    dataset = IndexedDataset(prefix)
    left, total = 1 + sum(len(ids) - 1 for ids, _ in examples), -count(dataset.tokens[:1])
    for number in range(len(dataset)):
        document = dataset.document(number)[:left]
        total, left = total + count(document), left - len(document)
        if not left:
            break
    return total


def bits_per_byte(loss: float, tokens: int, size: int) -> float | None:
    """Return the negative log likelihood of ``tokens`` with the mean ``loss`` in nats, in bits per byte of their text.

    It does not depend on the tokenizer, unlike perplexity. None if the text has no byte. End-of-text tokens count in
    the likelihood and have no bytes.
    """
    return loss * tokens / (math.log(2) * size) if size > 0 else None


# Evaluation data: records of a file and prompt templates.
Record = Mapping[str, Any]
EvalRecords = tuple[list[Record], Counter[str]]
"""Usable records, and the number of skipped records by reason."""
# The prompts are the user messages of data_prep/sft.py, as in training.
TEMPLATES: Mapping[str, Template] = {**LABELLED, "gsm8k": Template("{question}", "answer")}


def find_template(name: str) -> Template:
    """Return a built-in template, or the template of a JSON file with prompt, answer and optional labels."""
    if name in TEMPLATES:
        return TEMPLATES[name]
    instead = f"write --template {', '.join(TEMPLATES)}, or a JSON file with prompt, answer and labels"
    if not Path(name).is_file():
        raise ConfigError([Problem("--template", name, "is neither a template's name nor a file", instead)])
    try:
        content = read_json(Path(name))
        template = Template(content["prompt"], content["answer"], content.get("labels", {}))
        template.fields  # noqa: B018  raises ValueError for invalid braces
        if not all(isinstance(text, str) and text for text in (*template.labels, *template.labels.values())):
            raise ValueError("labels must be non-empty strings")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError([Problem("--template", name, f"is invalid: {error!r}", instead)]) from None
    return template


def read_records(path: Path, template: Template, limit: int | None = None) -> EvalRecords:
    """Read the first ``limit`` usable records of a .tsv (with a header), .jsonl or .json (one array) file.

    Other records are skipped and counted. Raises ConfigError if the file cannot be read or has no usable record.
    """
    records, skipped, required = list[Record](), Counter[str](), template.fields
    try:
        for record in _rows(path):
            if len(records) == limit:
                break
            if record is None:
                skipped["unreadable"] += 1
            elif any(record.get(name) is None or not str(record[name]).strip() for name in required):
                skipped["lacks a field"] += 1
            elif any(not_utf8(str(record[name])) for name in required):
                skipped["lone surrogate"] += 1
            elif template.labels and str(record[template.answer]) not in template.labels:
                skipped["unknown label"] += 1
            else:
                records.append(record)
    except (OSError, UnicodeDecodeError, UserError) as error:
        rule = f"cannot be read: {error}" if path.exists() else "there is no such file"
        raise ConfigError([Problem("FILE", str(path), rule, "name a .tsv or .jsonl file")]) from None
    if not records:
        rule = f"has no record with {', '.join(sorted(required))} ({dict(skipped) or 'it is empty'})"
        raise ConfigError([Problem("FILE", str(path), rule, "name another file, or another --template")])
    return records, skipped


def _rows(path: Path) -> Iterator[Record | None]:
    """Yield each record, None for an unreadable one; compressed files and JSON arrays are supported."""
    for source in find_sources([str(path)], text_suffixes=(), arrays=True).sources:
        if strip_compression(source.path).endswith(".tsv"):
            lines = (line.decode().rstrip("\r") for line in read_lines(source))
            names = next(lines, "").split("\t")
            for cells in (line.split("\t") for line in lines if line):  # quotes are literal in GLUE's files
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
