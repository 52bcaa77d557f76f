"""Fine-tuning sets: examples with loss masks, packed or padded to sequences.

An example of n tokens takes n - 1 positions: its last token is a label only, its first token an input only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_llama.config import ConfigError
from megatron_llama.config.data_settings import (
    LABELLED,
    MASK_SUFFIX,
    PAIRS,
    PREFERENCE_FORMATS,
    REJECTED,
    UNPAIRED,
    validation_sets,
)
from megatron_llama.config.settings import DataConfig
from megatron_llama.corpus.indexed_format import IndexedDataset
from megatron_llama.corpus.packing import Order, Packed, Unpacked
from megatron_llama.corpus.splits import DatasetSplit, open_splits
from megatron_llama.data.checks import check_data, check_ids, check_mask
from megatron_llama.data.curriculum_order import Level, build_graded, group_seed, levels_of
from megatron_llama.parallel.groups import raise_on_all_ranks, sync_errors
from megatron_llama.plan import Plan
from megatron_llama.plan.data_schedules import indexed_metrics

PADDING = -1
"""Document number of padding tokens in a packed sequence."""

_MARKS = {PAIRS: REJECTED, UNPAIRED: LABELLED + REJECTED}
"""Largest value that is added to the loss masks of a format, which are 0 and 1."""


class Examples:
    """Examples of several datasets, numbered consecutively. ``format``: that of their preferences, if they have any."""

    def __init__(self, parts: Sequence[DatasetSplit], vocab_size: int, format: str | None = None) -> None:
        self._vocab_size, self.format = vocab_size, format
        self._sets = [(IndexedDataset(part.prefix), IndexedDataset(part.prefix + MASK_SUFFIX)) for part in parts]
        self._ranges = [(part.first, part.last) for part in parts]
        self._ends = np.cumsum([part.last - part.first for part in parts])
        self.lengths = np.concatenate([part.index.lengths[part.first : part.last] for part in parts])
        """Tokens of each example."""

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, loss mask: 1 for tokens with loss) of an example, each [length].

        With pairs, the ids are of the chosen and the rejected answer, whose masks have REJECTED added. Masks of answers
        with a label have LABELLED added, and REJECTED if the answer is undesirable.

        Raises:
            ConfigError: an id is outside the vocabulary, or a mask is neither 0 nor 1.
        """
        part = int(np.searchsorted(self._ends, number, side="right"))
        first, last = self._ranges[part]
        position = first + number - (int(self._ends[part]) - (last - first))
        tokens, masks = self._sets[part]
        ids = tokens.sequence(position)
        check_ids(ids, self._vocab_size, lambda token: (tokens.prefix, position, token))
        mask = masks.sequence(position)
        check_mask(mask, masks.prefix, position, 1 + _MARKS.get(self.format or "", 0))
        return ids, mask

    def mismatched(self, number: int, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, mask) of an example's prompt with the answer of the example before, at most ``most`` tokens."""
        (ids, mask), (other_ids, other_mask) = self[number], self[(number - 1) % len(self)]
        start, other = (_answer_start(marks) for marks in (mask, other_mask))
        pairs = ((ids, other_ids), (mask, other_mask))
        ids, mask = (np.concatenate((prompt[:start], answer[other:]))[:most] for prompt, answer in pairs)
        return ids, mask

    def mismatched_lengths(self, most: int) -> np.ndarray:
        """Return the number of tokens of ``mismatched`` of each example. Reads all masks."""
        starts = np.array([_answer_start(self[number][1]) for number in range(len(self))])
        return np.minimum(starts + np.roll(self.lengths - starts, 1), most)


def _answer_start(mask: np.ndarray) -> int:
    """Return the position of the first token with loss that is a label; at most the last token."""
    return 1 + int((mask[1:] % REJECTED).argmax())


class SFTDataset:
    """Samples of ``seq_length`` tokens, each of whole examples, in the order of ``order``."""

    reference: np.ndarray | None = None
    """Log probabilities with the initial weights, int64 [examples, 2]: of a pair's answers, or of the answer and the
    mismatched answer (train/reference_logps.py)."""

    def __init__(self, examples: Examples, order: Order, seq_length: int, packed: bool, once: bool = False) -> None:
        """``packed``: several examples per sequence. ``once``: a single epoch."""
        self.examples, self.order, self.seq_length, self.packed, self.once = examples, order, seq_length, packed, once

    def __len__(self) -> int:
        """Samples in an epoch. Later samples belong to the next epochs, or with ``once`` are padding without loss that
        fills the last batch."""
        return len(self.order)

    def __getitem__(self, index: int) -> Mapping[str, torch.Tensor]:
        """Return sample ``index`` of any epoch, with ``documents`` if packed, else with ``num_tokens``.

        With preferences, each answer is a document, and the sample has tensors of ``Pairs`` (model/preference.py).
        """
        numbers = self._numbers(index)
        return self._sample(numbers, [self.examples[number] for number in numbers])

    def mismatched(self, index: int) -> Mapping[str, torch.Tensor]:
        """Return sample ``index`` with mismatched answers (``Examples.mismatched``)."""
        numbers = self._numbers(index)
        return self._sample(numbers, [self.examples.mismatched(n, self.seq_length + 1) for n in numbers], column=1)

    def _numbers(self, index: int) -> Sequence[int]:
        return [] if self.once and index >= len(self) else self.order.examples(index)

    def _sample(
        self, numbers: Sequence[int], examples: Sequence[tuple[np.ndarray, np.ndarray]], column: int = 0
    ) -> Mapping[str, torch.Tensor]:
        """Return the sample of examples (ids, mask). ``column``: of the reference, for answers with a label."""
        tokens, labels, loss_mask = (np.zeros(self.seq_length, dtype=kind) for kind in ("int64", "int64", "float32"))
        documents, answers = (np.full(self.seq_length, fill, dtype="int64") for fill in (PADDING, 0))
        position, format = 0, self.examples.format
        for number, (ids, mask) in enumerate(examples):
            here = slice(position, position + len(ids) - 1)
            tokens[here], labels[here], documents[here] = ids[:-1], ids[1:], number
            loss_mask[here], answers[here] = mask[1:] % REJECTED, number
            if format == PAIRS:
                rejected = mask // REJECTED
                documents[here] = 2 * number + rejected[:-1]
                answers[here] = 2 * number + rejected[1:]
                # The chosen answer does not predict the first token of the rejected one.
                loss_mask[here] *= rejected[:-1] == rejected[1:]
            position = here.stop
        sample = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask}
        if self.packed or format:
            sample["documents"] = documents
        else:
            sample["num_tokens"] = np.array(position)
        if format:
            numbers = numbers or [-1]  # no example
            lengths = np.bincount(answers, loss_mask, len(numbers) * (1 + (format == PAIRS))).astype("float32")
            sample |= {"answers": answers, "numbers": np.array(numbers, dtype="int64"), "lengths": lengths}
        if format == UNPAIRED:
            sample["desirable"] = np.array([mask[0] < LABELLED + REJECTED for _, mask in examples] or [False])
        if format and self.reference is not None:
            sample["reference"] = self.reference[numbers, slice(None) if format == PAIRS else column].reshape(-1)
        return {name: torch.from_numpy(array) for name, array in sample.items()}


def build_sft(plan: Plan) -> tuple[SFTDataset, dict[str, SFTDataset]]:
    """Build the training set and, if the run validates, each validation set by name. All ranks must call it.

    Raises:
        ConfigError: on all ranks, if a set cannot be read, does not fit the model, or has an empty split.
    """
    raise_on_all_ranks(check_data(plan.config) if dist.get_rank() == 0 else [])
    names = (validation_sets(plan.config.data) or [""]) if plan.config.trainer.val_every_steps else ()
    return graded_examples(plan, _split(plan, 0), levels_of(plan)), {name: _split(plan, 1, name) for name in names}


def graded_examples(plan: Plan, training: SFTDataset, levels: Sequence[Level]) -> SFTDataset:
    """Return the examples in the curriculum's order, if a metric has an index. All ranks must call it.

    Each group of examples (data/curriculum_order.py) is packed separately. Raises ConfigError on all ranks.
    """
    data, seed = plan.config.data, plan.config.trainer.seed
    if not indexed_metrics(data):
        return training
    lengths = training.examples.lengths

    def order_of(examples: np.ndarray, group: int) -> Order:
        return _order(data, lengths[examples], group_seed(seed, group))

    with sync_errors(ConfigError):
        order = build_graded(plan, open_splits(data, 0), levels, [level.samples for level in levels], order_of)
    return SFTDataset(training.examples, order, data.length, packed=data.pack)


def _split(plan: Plan, number: int, name: str = "") -> SFTDataset:
    data, seed = plan.config.data, plan.config.trainer.seed + number
    format = PREFERENCE_FORMATS.get(plan.config.finetune.objective)
    examples = Examples(open_splits(data, number, name), plan.model.vocab_size, format)
    whole, lengths = number > 0 and plan.config.trainer.val_steps is None, examples.lengths
    if format == UNPAIRED and data.pack:  # a packed sequence also has room for the mismatched answers
        lengths = np.maximum(lengths, examples.mismatched_lengths(data.length + 1))
    return SFTDataset(examples, _order(data, lengths, seed), data.length, data.pack, once=whole)


def _order(data: DataConfig, lengths: np.ndarray, seed: int) -> Order:
    """Return the order of examples with ``lengths`` tokens."""
    return Packed(lengths - 1, data.length, seed) if data.pack else Unpacked(len(lengths), seed)
