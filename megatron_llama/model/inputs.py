"""Inputs of a micro batch: token ids and labels for the model, rotary angles and mask inputs for its blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_llama.arch.attention_pattern import Pattern, pattern_of
from megatron_llama.config import ModelConfig
from megatron_llama.devices.attention_inputs import AttentionInputs, Documents
from megatron_llama.model.preference import Pairs
from megatron_llama.model.random_ltd import Subset, Subsets
from megatron_llama.model.rotary import Rotary, at_positions, rotary_table

BuildVisible = Callable[[Tensor, Documents | None, Pattern], AttentionInputs | None]
"""Type of ``Kernels.visible``: from tokens or positions [b, s] (only the shape is read) to the mask inputs."""


@dataclass(frozen=True)
class MicroBatch:
    """Sequences that a data-parallel rank processes together."""

    tokens: Tensor
    """Token ids [b, s], int64; the rank's part of each sequence, if context-parallel ranks divide it."""
    labels: Tensor
    """Ids of the next tokens [b, s], int64."""
    loss_mask: Tensor
    """1 for tokens with loss, else 0 [b, s], fp32."""
    token_counts: Tensor
    """[2], int64: tokens without padding, and the sum over documents of length * ``Pattern.span(length)``, which the
    FLOPs of attention are proportional to."""
    documents: Documents | None = None
    """Documents of packed sequences, whole on each context-parallel rank. All pipeline stages have them."""
    subsets: Subsets | None = None
    """With random-LTD, the tokens that each layer of this rank processes in training. None: all tokens."""
    noise_keys: Tensor | None = None
    """Keys of the tokens' noise for NEFTune, int32 [b, s]."""
    pairs: Pairs | None = None
    """Pairs of answers, or answers with a label, for preference training."""
    mismatched: MicroBatch | None = None
    """Prompts with answers of other prompts, from which KTO estimates a divergence."""

    @property
    def loss_count(self) -> Tensor:
        """Number of tokens with loss, or examples in ``pairs``: the loss is their mean. Scalar."""
        return self.loss_mask.sum() if self.pairs is None else self.pairs.count

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy on ``device``. From pinned memory the copy is asynchronous."""
        return self.on(lambda tensor: tensor.to(device, non_blocking=True))

    def on(self, move: Callable[[Tensor], Tensor]) -> MicroBatch:
        """Return a copy on the device to which ``move`` takes tensors."""
        tokens, labels, loss_mask, counts = map(move, (self.tokens, self.labels, self.loss_mask, self.token_counts))
        documents, subsets = self.documents and self.documents.on(move), self.subsets and self.subsets.on(move)
        keys = None if self.noise_keys is None else move(self.noise_keys)
        pairs, mismatched = self.pairs and self.pairs.on(move), self.mismatched and self.mismatched.on(move)
        return MicroBatch(tokens, labels, loss_mask, counts, documents, subsets, keys, pairs, mismatched)


@dataclass(frozen=True)
class BlockInputs:
    """Inputs of a chunk's blocks in addition to the activations."""

    rotary: Rotary
    visible: AttentionInputs | None
    """Mask inputs of attention; None if a token attends to all tokens up to itself."""
    documents: Documents | None = None
    subsets: Subsets | None = None
    of_subset: Callable[[Subset], tuple[Rotary, AttentionInputs | None]] | None = None
    """Rotary angles and mask inputs of a layer's subset."""

    def of(self, layer: int) -> tuple[Rotary, AttentionInputs | None] | tuple[Rotary, AttentionInputs | None, Subset]:
        """Return (rotary, visible) of a layer, by its global number. With random-LTD its subset is third."""
        subset = None if self.subsets is None else self.subsets.of(layer)
        if subset is None:
            return self.rotary, self.visible
        assert self.of_subset is not None
        return *self.of_subset(subset), subset


class InputBuilder:
    """Builder of the ``BlockInputs`` of micro batches. ``build_visible`` is the device's ``Kernels.visible``."""

    def __init__(self, model: ModelConfig, build_visible: BuildVisible) -> None:
        self.model, self.build_visible = model, build_visible
        self._table: Rotary | None = None

    def whole(self, tokens: Tensor, documents: Documents | None = None, subsets: Subsets | None = None) -> BlockInputs:
        """Build the inputs for whole sequences [b, s], the ``documents`` in them, and the layers' ``subsets``."""
        table = self._table_for(tokens.shape[1], tokens.device)
        visible = self.build_visible(tokens, documents, self.pattern)
        rotary = table if documents is None else _at(table, documents.positions())
        return BlockInputs(rotary, visible, documents, subsets, partial(self._of_subset, table, tokens.shape[1]))

    __call__ = whole  # of micro batches; with context parallelism DividedInputBuilder overrides it

    @property
    def pattern(self) -> Pattern:
        """Pattern of the model's attention."""
        return pattern_of(self.model)

    def rotary(self, positions: Tensor, length: int) -> Rotary:
        """Return the angles of ``positions`` [b, s], int64, below ``length``."""
        return _at(self._table_for(length, positions.device), positions)

    def _of_subset(self, table: Rotary, length: int, subset: Subset) -> tuple[Rotary, AttentionInputs | None]:
        return _at(table, subset.positions), subset.visible(length, self.pattern, self.build_visible)

    def _table_for(self, length: int, device: torch.device) -> Rotary:
        """Return the angles of all positions below ``length``, cached until length or device change."""
        if self._table is None or self._table[0].shape[0] != length or self._table[0].device != device:
            self._table = rotary_table(self.model, length, device)
        return self._table


def _at(table: Rotary, positions: Tensor) -> Rotary:
    cos, sin = table
    return at_positions(cos, positions), at_positions(sin, positions)
