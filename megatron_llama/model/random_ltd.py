"""Random layer-wise token dropping (Yao et al. 2022, arXiv:2211.11586): a layer sees a random subset of the tokens, in
their order; the others pass it by unchanged.

What each layer sees of each sequence is a function of seed, number of the sample and layer, drawn on the host with the
batch. So it is the same on all tensor-parallel ranks, in every layout, in the recomputed forward pass and after a
resume. A token keeps the position that it has in the sequence, and its document.

Under sequence parallelism a rank has a part of the sequence, and of the subset a part of the same size as the others',
whose tokens may be another rank's. So the ranks exchange them: a reduce-scatter before the layer, in which each rank
contributes what it has, and an all-gather after it, both of the subset alone. Shapes follow from the schedule only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from megatron_llama.arch.pattern import Pattern
from megatron_llama.devices.visibility import AttentionInputs, Documents, masked
from megatron_llama.model.rotary import Rotary


@dataclass(frozen=True)
class Subset:
    """The k tokens of each of b sequences that one layer sees."""

    rows: Tensor
    """Where they are among this rank's tokens [s(/t) * b], or -1 where another rank has them [k * b], int64."""
    places: Tensor
    """The reverse: which of them each of this rank's tokens is, or -1 for those that are dropped [s(/t) * b], int64."""
    positions: Tensor
    """Their positions, which count from the beginning of their document [b, k], int64."""
    split: bool
    """Whether the sequence is split over tensor-parallel ranks."""
    documents: Documents | None = None
    """Their documents."""

    def select(self, x: Tensor) -> Tensor:
        """The subset of x [s(/t), b, h]: [k(/t), b, h]."""
        b, h = x.shape[1:]
        part = x.flatten(0, 1).index_select(0, self.rows.clamp(min=0))
        if not self.split:
            return part.view(-1, b, h)
        part = torch.where((self.rows >= 0).unsqueeze(1), part, 0).view(-1, b, h)
        return reduce_scatter_to_sequence_parallel_region(part, group=parallel_state.get_tensor_model_parallel_group())

    def put_back(self, x: Tensor, y: Tensor) -> Tensor:
        """x [s(/t), b, h] with y [k(/t), b, h] in place of the subset."""
        if self.split:
            group = parallel_state.get_tensor_model_parallel_group()
            y = gather_from_sequence_parallel_region(y, tensor_parallel_output_grad=True, group=group)
        spread = y.flatten(0, 1).index_select(0, self.places.clamp(min=0))
        return torch.where((self.places >= 0).unsqueeze(1), spread, x.flatten(0, 1)).view_as(x)

    def visible(
        self, length: int, pattern: Pattern, build: Callable[..., AttentionInputs | None]
    ) -> AttentionInputs | None:
        """What the tokens of the subset see of it, in sequences of ``length`` tokens.

        ``build`` is the device's builder of mask inputs (model/inputs.py).

        Documents are as contiguous as before, so their kernels do. A window or blocks count positions that are no
        longer neighbours: these are computed behind a mask.
        """
        if pattern.leaves_out(length):
            return masked(self.positions, pattern, self.documents)
        return build(self.positions, self.documents, Pattern())


@dataclass(frozen=True)
class Subsets:
    """What the layers of a rank see of a micro batch: n layers, each a ``Subset``, stacked."""

    layers: tuple[int, ...]
    length: int
    """Tokens of a sequence that each sees."""
    rows: Tensor
    places: Tensor
    positions: Tensor
    split: bool
    documents: tuple[Documents, ...] = ()

    def of(self, layer: int) -> Subset | None:
        """What a layer, by its global number, sees; None for all."""
        if layer not in self.layers:
            return None
        n = self.layers.index(layer)
        documents = self.documents[n] if self.documents else None
        return Subset(self.rows[n], self.places[n], self.positions[n], self.split, documents)

    def on(self, move: Callable[[Tensor], Tensor]) -> Subsets:
        """The same on a device to which ``move`` takes tensors."""
        rows, places, positions = map(move, (self.rows, self.places, self.positions))
        documents = tuple(each.on(move) for each in self.documents)
        return replace(self, rows=rows, places=places, positions=positions, documents=documents)


def draw(seed: int, samples: Sequence[int], layers: Sequence[int], length: int, of: int) -> Tensor:
    """The tokens that layers see of samples, ascending [layers, samples, length], int64: ``length`` of ``of``, every
    subset with the same probability."""
    kept = torch.empty(len(layers), len(samples), length, dtype=torch.int64)
    for n, layer in enumerate(layers):
        for b, sample in enumerate(samples):
            digest = hashlib.blake2b(f"{seed}/random_ltd/{sample}/{layer}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)  # torch's seeds are signed
            kept[n, b] = torch.randperm(of, generator=generator)[:length].sort().values
    return kept


def subsets(
    kept: Tensor, layers: Sequence[int], of: int, documents: Documents | None, part: tuple[int, int] = (0, 1)
) -> Subsets:
    """What ``draw`` has drawn, for a rank that has the ``part`` (number, of how many) of sequences of ``of`` tokens."""
    n, b, length = kept.shape
    number, parts = part
    column, size = torch.arange(b)[:, None], of // parts
    rows = (kept - number * size) * b + column
    rows[(rows < 0) | (rows >= size * b)] = -1
    places = torch.full((n, b, of), -1).scatter_(2, kept, (torch.arange(length) * b + column).expand(n, b, length))
    places = places[:, :, number * size : (number + 1) * size]
    positions, theirs = kept, tuple[Documents, ...]()
    if documents is not None:
        positions = documents.positions().expand(n, b, of).gather(2, kept)
        ids = documents.ids.expand(n, b, of).gather(2, kept)
        theirs = tuple(Documents.of(of_layer) for of_layer in ids)
    rows, places = (x.transpose(1, 2).flatten(1) for x in (rows, places))
    return Subsets(tuple(layers), length, rows, places, positions, parts > 1, theirs)


def attach(block: nn.Module) -> None:
    """Let ``block`` take a layer's ``Subset`` after its other inputs, which are the subset's then (model/inputs.py)."""
    block.forward = partial(_on_subset, block.forward)  # type: ignore[method-assign]


def _on_subset(
    forward: Callable[..., Tensor],
    x: Tensor,
    rotary: Rotary,
    visible: AttentionInputs | None = None,
    subset: Subset | None = None,
) -> Tensor:
    """Run a block on its subset of x [s(/t), b, h]; the other tokens skip it."""
    if subset is None:
        return forward(x, rotary, visible)
    return subset.put_back(x, forward(subset.select(x), rotary, visible))
