"""Fine-tuning sets: examples with loss masks, packed or padded to sequences.

An example of n tokens takes n - 1 positions: its last token is a label only, its first token an input only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_llama.config import ConfigError
from megatron_llama.config.data_settings import MASK_SUFFIX, REJECTED, validation_sets
from megatron_llama.config.settings import DataConfig
from megatron_llama.corpus.indexed_format import IndexedDataset
from megatron_llama.corpus.packing import Order, Packed, Unpacked
from megatron_llama.corpus.splits import DatasetSplit, open_splits
from megatron_llama.data.checks import check_data, check_ids, check_mask
from megatron_llama.data.graded_order import Level, build_graded, group_seed, levels_of
from megatron_llama.parallel.groups import raise_on_all_ranks, sync_errors
from megatron_llama.plan import Plan
from megatron_llama.plan.data_schedules import indexed_metrics

PADDING = -1
"""Document number of padding tokens in a packed sequence."""


class Examples:
    """Examples of several datasets, numbered consecutively."""

    def __init__(self, parts: Sequence[DatasetSplit], vocab_size: int, *, pairs: bool = False) -> None:
        self._vocab_size, self.pairs = vocab_size, pairs
        self._sets = [(IndexedDataset(part.prefix), IndexedDataset(part.prefix + MASK_SUFFIX)) for part in parts]
        self._ranges = [(part.first, part.last) for part in parts]
        self._ends = np.cumsum([part.last - part.first for part in parts])
        self.lengths = np.concatenate([part.index.lengths[part.first : part.last] for part in parts])
        """Tokens of each example."""

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, loss mask: 1 for tokens with loss) of an example, each [length].

        With pairs, the ids are of the chosen and the rejected answer, whose masks have REJECTED added.

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
        check_mask(mask, masks.prefix, position, 1 + REJECTED * self.pairs)
        return ids, mask


class SFTDataset:
    """Samples of ``seq_length`` tokens, each of whole examples, in the order of ``order``."""

    reference: np.ndarray | None = None
    """Log probabilities of each pair's answers with the initial weights, int64 [pairs, 2] (train/reference.py)."""

    def __init__(self, examples: Examples, order: Order, seq_length: int, packed: bool, once: bool = False) -> None:
        """``packed``: several examples per sequence. ``once``: a single epoch."""
        self.examples, self.order, self.seq_length, self.packed, self.once = examples, order, seq_length, packed, once

    def __len__(self) -> int:
        """Samples in an epoch. Later samples belong to the next epochs, or with ``once`` are padding without loss that
        fills the last batch."""
        return len(self.order)

    def __getitem__(self, index: int) -> Mapping[str, torch.Tensor]:
        """Return sample ``index`` of any epoch, with ``documents`` if packed, else with ``num_tokens``.

        With pairs, each answer is a document, and the sample has tensors of ``Pairs`` (model/preference.py).
        """
        tokens, labels, loss_mask = (np.zeros(self.seq_length, dtype=kind) for kind in ("int64", "int64", "float32"))
        documents, answers = (np.full(self.seq_length, fill, dtype="int64") for fill in (PADDING, 0))
        position, pairs = 0, self.examples.pairs
        is_over = self.once and index >= len(self)
        numbers = [] if is_over else self.order.examples(index)
        for number, example in enumerate(numbers):
            ids, mask = self.examples[example]
            here = slice(position, position + len(ids) - 1)
            tokens[here], labels[here], loss_mask[here], documents[here] = ids[:-1], ids[1:], mask[1:], number
            if pairs:
                rejected = mask // REJECTED
                documents[here] = 2 * number + rejected[:-1]
                answers[here] = 2 * number + rejected[1:]
                # The chosen answer does not predict the first token of the rejected one.
                loss_mask[here] = mask[1:] % REJECTED * (rejected[:-1] == rejected[1:])
            position = here.stop
        sample = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask}
        if self.packed or pairs:
            sample["documents"] = documents
        else:
            sample["num_tokens"] = np.array(position)
        if pairs:
            numbers = numbers or [-1]  # of no pair
            lengths = np.bincount(answers, loss_mask, 2 * len(numbers)).astype("float32")
            sample |= {"answers": answers, "numbers": np.array(numbers, dtype="int64"), "lengths": lengths}
        if pairs and self.reference is not None:
            sample["reference"] = self.reference[numbers].reshape(-1)
        return {name: torch.from_numpy(array) for name, array in sample.items()}


def build_sft(plan: Plan) -> tuple[SFTDataset, dict[str, SFTDataset]]:
    """Build the training set and, if the run validates, each validation set by name. All ranks must call it.

    Raises:
        ConfigError: on all ranks, if a set cannot be read, does not fit the model, or has an empty split.
    """
    raise_on_all_ranks(check_data(plan.config) if dist.get_rank() == 0 else [])
    names = (validation_sets(plan.config.data) or [""]) if plan.config.trainer.val_every_steps else ()
    validation = {name: _split(plan, 1, name) for name in names}
    return graded_examples(plan, _split(plan, 0), levels_of(plan)), validation


def graded_examples(plan: Plan, training: SFTDataset, levels: Sequence[Level]) -> SFTDataset:
    """Return the examples in the curriculum's order, if a metric has an index. All ranks must call it.

    Each group of examples (data/graded_order.py) is packed separately. Raises ConfigError on all ranks.
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
    pairs = bool(plan.config.finetune.metrics)
    examples = Examples(open_splits(data, number, name), plan.model.vocab_size, pairs=pairs)
    whole = number > 0 and plan.config.trainer.val_steps is None
    return SFTDataset(examples, _order(data, examples.lengths, seed), data.length, data.pack, once=whole)


def _order(data: DataConfig, lengths: np.ndarray, seed: int) -> Order:
    """Return the order of examples with ``lengths`` tokens."""
    return Packed(lengths - 1, data.length, seed) if data.pack else Unpacked(len(lengths), seed)
