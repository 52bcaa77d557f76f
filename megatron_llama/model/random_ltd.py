"""Random layer-wise token dropping (random-LTD: Yao et al. 2022, arXiv:2211.11586).

A layer processes a random subset of the tokens, in their order. The other tokens skip the layer. A token keeps its
position in the sequence and its document.

The subset is a function of seed, sample number and layer, drawn on the host with the batch. So it is the same on all
tensor-parallel ranks, in every layout, in the recomputed forward pass and after a resume.

Under sequence parallelism a rank holds s/t tokens of the sequence and processes k/t tokens of the subset, which may be
other tokens. The ranks exchange them by a reduce-scatter before the layer and an all-gather after it, both of the
subset alone. Shapes depend on the schedule only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from megatron_llama.arch.attention_pattern import Pattern
from megatron_llama.devices.attention_inputs import AttentionInputs, Documents, masked
from megatron_llama.model.rotary import Rotary


@dataclass(frozen=True)
class Subset:
    """The k tokens of each of b sequences that one layer processes."""

    rows: Tensor
    """Index of each subset token among this rank's s(/t) * b tokens, -1 if another rank has it: [k * b], int64."""
    inverse: Tensor
    """Index of each of this rank's tokens in the subset, -1 if it is dropped: [s(/t) * b], int64."""
    positions: Tensor
    """Positions inside the documents [b, k], int64."""
    split: bool
    """Whether the sequence is split over tensor-parallel ranks."""
    documents: Documents | None = None
    """Documents of the subset's tokens."""

    def select(self, x: Tensor) -> Tensor:
        """Return the subset of x [s(/t), b, h] as [k(/t), b, h]."""
        b, h = x.shape[1:]
        part = x.flatten(0, 1).index_select(0, self.rows.clamp(min=0))
        if not self.split:
            return part.view(-1, b, h)
        part = torch.where((self.rows >= 0).unsqueeze(1), part, 0).view(-1, b, h)
        return reduce_scatter_to_sequence_parallel_region(part, group=parallel_state.get_tensor_model_parallel_group())

    def merge(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x [s(/t), b, h] with its subset replaced by y [k(/t), b, h]."""
        if self.split:
            group = parallel_state.get_tensor_model_parallel_group()
            y = gather_from_sequence_parallel_region(y, tensor_parallel_output_grad=True, group=group)
        spread = y.flatten(0, 1).index_select(0, self.inverse.clamp(min=0))
        return torch.where((self.inverse >= 0).unsqueeze(1), spread, x.flatten(0, 1)).view_as(x)

    def visible(
        self, length: int, pattern: Pattern, build: Callable[..., AttentionInputs | None]
    ) -> AttentionInputs | None:
        """Return the mask inputs of attention inside the subset, for sequences of ``length`` tokens.

        ``build`` is the device's ``BuildVisible`` (model/inputs.py). Tokens of a document stay contiguous, so document
        kernels apply. A window or blocks count positions, which have gaps here: these use a dense mask.
        """
        if pattern.is_sparse(length):
            return masked(self.positions, pattern, self.documents)
        return build(self.positions, self.documents, Pattern())


@dataclass(frozen=True)
class Subsets:
    """The ``Subset`` of each of n layers for a micro batch. Tensors are stacked: [n, ...]."""

    layers: tuple[int, ...]
    """Global numbers of the layers."""
    length: int
    """Tokens of a sequence that each layer processes (k)."""
    rows: Tensor
    inverse: Tensor
    positions: Tensor
    split: bool
    documents: tuple[Documents, ...] = ()

    def of(self, layer: int) -> Subset | None:
        """Return the subset of a layer, by its global number. None if it processes all tokens."""
        if layer not in self.layers:
            return None
        n = self.layers.index(layer)
        documents = self.documents[n] if self.documents else None
        return Subset(self.rows[n], self.inverse[n], self.positions[n], self.split, documents)

    def on(self, move: Callable[[Tensor], Tensor]) -> Subsets:
        """Return a copy on the device to which ``move`` takes tensors."""
        rows, inverse, positions = map(move, (self.rows, self.inverse, self.positions))
        documents = tuple(each.on(move) for each in self.documents)
        return replace(self, rows=rows, inverse=inverse, positions=positions, documents=documents)


def draw_subsets(seed: int, samples: Sequence[int], layers: Sequence[int], length: int, of: int) -> Tensor:
    """Draw ``length`` of ``of`` tokens for each layer and sample: ascending indices [layers, samples, length], int64.

    All subsets are equally likely.
    """
    indices = torch.empty(len(layers), len(samples), length, dtype=torch.int64)
    for n, layer in enumerate(layers):
        for b, sample in enumerate(samples):
            digest = hashlib.blake2b(f"{seed}/random_ltd/{sample}/{layer}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)  # torch's seeds are signed
            indices[n, b] = torch.randperm(of, generator=generator)[:length].sort().values
    return indices


def build_subsets(
    indices: Tensor, layers: Sequence[int], of: int, documents: Documents | None, part: tuple[int, int] = (0, 1)
) -> Subsets:
    """Build the subsets of a rank from the result of ``draw_subsets``.

    Args:
        indices: [layers, samples, length].
        layers: global numbers of the layers.
        of: tokens of a sequence.
        documents: documents of the sequences.
        part: (number, count) of the rank's part of each sequence.
    """
    n, b, length = indices.shape
    number, parts = part
    column, size = torch.arange(b)[:, None], of // parts
    rows = (indices - number * size) * b + column
    rows[(rows < 0) | (rows >= size * b)] = -1
    order = (torch.arange(length) * b + column).expand(n, b, length)
    inverse = torch.full((n, b, of), -1).scatter_(2, indices, order)[:, :, number * size : (number + 1) * size]
    positions, subset_documents = indices, tuple[Documents, ...]()
    if documents is not None:
        positions = documents.positions().expand(n, b, of).gather(2, indices)
        ids = documents.ids.expand(n, b, of).gather(2, indices)
        subset_documents = tuple(Documents.of(of_layer) for of_layer in ids)
    rows, inverse = (x.transpose(1, 2).flatten(1) for x in (rows, inverse))
    return Subsets(tuple(layers), length, rows, inverse, positions, parts > 1, subset_documents)


def run_on_subset(
    forward: Callable[..., Tensor],
    x: Tensor,
    rotary: Rotary,
    visible: AttentionInputs | None = None,
    subset: Subset | None = None,
) -> Tensor:
    """Run a block's ``forward`` on its subset of x [s(/t), b, h]; the other tokens skip it.

    With a subset, ``rotary`` and ``visible`` are the subset's (model/inputs.py).
    """
    if subset is None:
        return forward(x, rotary, visible)
    return subset.merge(x, forward(subset.select(x), rotary, visible))
