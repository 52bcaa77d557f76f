"""Muon: Newton-Schulz orthogonalization of the momentum of each matrix of a block; AdamW for the other weights.

Keller Jordan et al. 2024 (kellerjordan.github.io/posts/muon); scale and weight decay of Moonlight (Liu et al. 2025,
arXiv:2502.16982). The matrices are Hugging Face's: rows of q, k, v, gate and up are separate in the fused parameters.

The ranks of a pipeline stage divide the matrices (plan/muon_division.py). Each rank gathers the parts of its matrices
from the shards, orthogonalizes them, and sends the parts of the result to all ranks that hold them. So the update does
not depend on the layout, and no rank repeats the work of another one. Matrices are sent and multiplied in the compute
dtype of the precision. With bf16 this is the published algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_llama.arch.hf_tp_mapping import Rectangle
from megatron_llama.model.init import torch_dtype
from megatron_llama.optim.adam import adamw_update
from megatron_llama.optim.base import Group, OptimizerInputs, ShardOptimizer
from megatron_llama.optim.low_precision import WEIGHT, ElementwiseOptimizer
from megatron_llama.parallel.groups import current_groups
from megatron_llama.plan.muon_division import NEWTON_SCHULZ_STEPS, MatrixWork, heads_of

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration, by Keller Jordan."""
EPS = 1e-7
"""Smallest norm that a matrix is divided by."""
MOMENTUM = "momentum_buffer"
SCALES: dict[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
}
"""Factors of the update of a matrix [rows, columns], by ``optim.adjust_lr``."""


class Held(NamedTuple):
    """A rectangle of a matrix in a weight of this rank."""

    weight: Tensor
    group: Group
    rectangle: Rectangle


class Muon(ElementwiseOptimizer):
    """Muon for ``matrices``, AdamW for the other weights.

    Args:
        work: owners of the matrices, and the parts that ranks hold.
        process_group: the ranks of the pipeline stage, in the order of ``work``'s members.
    """

    def __init__(
        self, inputs: OptimizerInputs, work: MatrixWork, process_group: dist.ProcessGroup, **hyperparameters: Any
    ) -> None:
        super().__init__(inputs, adamw_update, **hyperparameters)
        self._work, self._process_group = work, process_group
        self._dtype = torch_dtype(inputs.plan.precision.compute_dtype)
        """Dtype of sent and multiplied matrices."""
        self._model, self._optim = inputs.plan.model, inputs.plan.config.optim
        self._member = dist.get_rank(process_group)
        self._rounds = list(work.rounds)
        self._matrices = inputs.matrices
        self._held: dict[str, list[Held]] = {}
        for group in self.param_groups:
            for weight in group["params"]:
                for part in inputs.rectangles[weight] if weight in inputs.matrices else ():
                    self._held.setdefault(part.name, []).append(Held(weight, group, part))

    @torch.no_grad()
    def step(self, *, factor: Tensor | None = None, skip: Tensor | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                if weight in self._matrices:
                    self._update_momentum(weight, group, factor, skip)
                else:
                    self.update(weight, group, factor, skip)
        for owners in self._rounds:
            matrix = self._gather(owners, factor)
            if matrix is not None:
                matrix = orthogonalized(matrix, self._heads(owners[self._member]))
            for held, update in self._scatter(owners, matrix):
                self._update_part(held, update, skip)
        for weight in self.state:
            if weight.grad is not None:
                self.state[weight]["step"] += 1

    def _update_momentum(self, weight: Tensor, group: Group, factor: Tensor | None, skip: Tensor | None) -> None:
        state, gradient = self.state[weight], weight.grad
        assert gradient is not None
        rectangles, tensors = self.rectangles[weight], {MOMENTUM: state[MOMENTUM]}
        self.apply(_lerp_momentum, tensors, rectangles, gradient, state["step"], group, factor=factor, skip=skip)

    def _gather(self, owners: dict[int, str], factor: Tensor | None) -> Tensor | None:
        """Gather the Nesterov momenta of a round's matrices at their owners; return this rank's matrix, if any."""
        work, member = self._work, self._member
        peers, local = work.same_replica(member), owners.get(member)
        sent = {owner: self._momenta(owners[owner], factor) for owner in peers if owner in owners}
        parts = {peer: work.sent_parts(local, peer) for peer in peers} if local is not None else {}
        sizes = {peer: _sizes(rectangles) for peer, rectangles in parts.items()}
        received = self._exchange(sent, sizes, alone=len(peers) == 1)
        if local is None:
            return None
        matrix = torch.empty(work.shape(local), dtype=self._dtype, device=received.device)
        _fill(matrix, [part for peer in peers for part in parts[peer]], received)
        return matrix

    def _momenta(self, name: str, factor: Tensor | None) -> list[Tensor]:
        """Return the Nesterov momenta of this rank's parts of a matrix that it sends, [values] each."""
        momenta = []
        for weight, group, part in self._held.get(name, ()):
            if part.replica == 0:
                assert weight.grad is not None
                gradient = weight.grad[part.local_slices].float()
                gradient = gradient if factor is None else gradient * factor
                momentum = self.state[weight][MOMENTUM][part.local_slices].float()
                momenta.append(gradient.lerp(momentum, group["momentum"]).to(self._dtype).flatten())
        return momenta

    def _scatter(self, owners: dict[int, str], matrix: Tensor | None) -> Iterator[tuple[Held, Tensor]]:
        """Send the parts of this rank's matrix; yield this rank's parts of all matrices of the round."""
        work, local = self._work, owners.get(self._member)
        sent: dict[int, list[Tensor]] = {}
        if matrix is not None and local is not None:
            sent = {
                other: [matrix[_slices(part)].flatten() for part in work.parts(local, other)]
                for other in range(work.members)
            }
        held = {owner: self._held.get(name, []) for owner, name in owners.items()}
        sizes = {owner: _sizes(each.rectangle for each in parts) for owner, parts in held.items()}
        received = self._exchange(sent, sizes)
        ordered = [each for owner in sorted(held) for each in held[owner]]
        values = received.split([math.prod(each.rectangle.size) for each in ordered])
        for each, part in zip(ordered, values, strict=True):
            yield each, part.view(each.rectangle.size)

    def _exchange(self, sent: dict[int, list[Tensor]], expected: dict[int, int], *, alone: bool = False) -> Tensor:
        """Send lists of tensors [values] to members; return the values from members in their order, [values].

        Args:
            sent: tensors by member.
            expected: numbers of values from each member. Missing members send nothing.
            alone: all members send to themselves only.
        """
        device = next(iter(self.rectangles)).device
        tensors = [tensor for member in sorted(sent) for tensor in sent[member]]
        whole = torch.cat(tensors) if tensors else torch.empty(0, dtype=self._dtype, device=device)
        members = range(self._work.members)
        if alone or len(members) == 1:
            return whole
        received = torch.empty(sum(expected.values()), dtype=self._dtype, device=device)
        into = [expected.get(member, 0) for member in members]
        out = [sum(tensor.numel() for tensor in sent.get(member, ())) for member in members]
        dist.all_to_all_single(received, whole, into, out, group=self._process_group)
        return received

    def _update_part(self, held: Held, update: Tensor, skip: Tensor | None) -> None:
        """Apply weight decay and the orthogonalized ``update`` to a rectangle of a weight."""
        weight, group, part = held
        rows, columns = part.global_shape
        scale = SCALES[self._optim.adjust_lr](rows // self._heads(part.name), columns)
        at_start = replace(part, local_offset=(0, 0))
        numbers = {**group, "matrix_lr": group["lr"] * group["matrix_lr_ratio"], "scale": scale}
        tensors, step = {WEIGHT: weight.data[part.local_slices]}, self.state[weight]["step"]
        self.apply(_subtract_update, tensors, [at_start], update, step, numbers, skip=skip)

    def _heads(self, name: str) -> int:
        return heads_of(self._model, name.split(".")[-2], split=self._optim.split_heads)


def orthogonalized(matrix: Tensor, heads: int = 1) -> Tensor:
    """Return U S V^T of ``matrix`` [rows, columns] by Newton-Schulz, with singular values S of about 0.7 to 1.2.

    The dtype of ``matrix`` is the dtype of the iteration. ``heads``: equal blocks of rows, each orthogonalized alone.
    """
    a, b, c = COEFFICIENTS
    blocks = matrix.unflatten(0, (heads, -1))
    tall = blocks.shape[1] > blocks.shape[2]
    x = blocks.mT if tall else blocks
    x = x / x.flatten(1).norm(dim=1).clamp(min=EPS)[:, None, None]
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).flatten(0, 1)


def build_muon(inputs: OptimizerInputs) -> ShardOptimizer:
    """Build ``muon``. A collective if the process groups are created with it."""
    plan, optim = inputs.plan, inputs.plan.config.optim
    assert optim.matrix_lr is not None, "resolve derives it"
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    current_groups().label("dp" if plan.data_ranks > 1 else "tp", group)
    place = plan.topology(dist.get_rank()).place
    numbers: dict[str, Any] = {
        **inputs.hyperparameters,
        "momentum": optim.momentum,
        "matrix_lr_ratio": optim.matrix_lr / inputs.hyperparameters["lr"],
    }
    return Muon(inputs, MatrixWork(plan, place["pp"]), group, **numbers)


def _lerp_momentum(tensors: Sequence[Tensor], gradient: Tensor, step: Tensor, group: Group) -> None:
    (momentum,) = tensors
    momentum.lerp_(gradient, 1 - group["momentum"])


def _subtract_update(tensors: Sequence[Tensor], update: Tensor, step: Tensor, group: Group) -> None:
    (weight,) = tensors
    weight.mul_(1 - group["matrix_lr"] * group["weight_decay"]).add_(update, alpha=-group["matrix_lr"] * group["scale"])


def _slices(part: Rectangle) -> tuple[slice, ...]:
    """Return the slices of a rectangle in the whole matrix."""
    return tuple(slice(start, start + size) for start, size in zip(part.offset, part.size, strict=True))


def _sizes(parts: Any) -> int:
    return sum(math.prod(part.size) for part in parts)


def _fill(matrix: Tensor, parts: Sequence[Rectangle], values: Tensor) -> None:
    for part, flat in zip(parts, values.split([math.prod(part.size) for part in parts]), strict=True):
        matrix[_slices(part)] = flat.view(part.size)
