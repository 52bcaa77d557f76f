"""1-bit Adam (Tang et al. 2021, arXiv:2102.02888): after a warm-up, ranks exchange the signs of their momentum.

Arithmetic and names follow DeepSpeed's OneBitAdam: Adam without bias correction and with decoupled weight decay for
``freeze_step`` steps. From then on the second moment is frozen, and the momentum is averaged over the data-parallel
ranks, with one bit per value and one scale per rectangle of a Hugging Face tensor. A scale per parameter would depend
on rows that other tensor-parallel ranks do not have: the copies of a shared key/value head would diverge. Compression
errors are added to the next step's momentum (error feedback), on the sending rank (worker) and on the averaging rank
(server).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from megatron_llama.arch.hf_tp_mapping import Rectangle
from megatron_llama.optim.base import Group, OptimizerInputs, ShardOptimizer

_ERRORS = "onebit_rectangle_errors"
"""Name of the compression errors in checkpoints. ``onebit_errors`` of older checkpoints has another order."""


class OneBitAverage:
    """Compressed average of tensors over a group of p ranks. Each rank averages one p-th of all values.

    All tensors form one matrix [p, C]. Rank r averages row r. A tensor of n values has ceil(n / 8p) * 8 columns, so
    that its signs fill whole bytes. Padding stays zero.
    """

    def __init__(self, sizes: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> None:
        """``sizes`` are the numbers of values of the tensors."""
        self.group, self.sizes = group, list(sizes)
        self.ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self.columns = [-(-size // (8 * self.ranks)) * 8 for size in sizes]
        pairs = zip(self.sizes, self.columns, strict=True)
        local_sizes = [min(max(size - rank * columns, 0), columns) for size, columns in pairs]
        self._all_sizes = torch.tensor(self.sizes, device=device)
        self._local_sizes = torch.tensor(local_sizes, device=device)
        self._columns = torch.tensor(self.columns, device=device)
        self.worker_error = torch.zeros(self.ranks, sum(self.columns), device=device)
        self.server_error = torch.zeros(sum(self.columns), device=device)
        self._is_value = self._to_matrix([torch.ones(size, device=device) for size in sizes]).bool()
        self._is_local_value = self._is_value[rank].clone()

    @torch.no_grad()
    def average(self, tensors: Sequence[Tensor], skip: Tensor | None = None) -> list[Tensor]:
        """Return the averages of fp32 ``tensors``, the same on all ranks.

        ``skip`` (bool scalar on the device): where it is true, the compression errors keep their values.
        """
        local = self._to_matrix(tensors) + self.worker_error
        mean_squares = self._norms(local).square().sum(dim=0).div_(self._all_sizes.clamp(min=1))
        scales = mean_squares.sqrt_()  # [tensors]: norm / sqrt(n)
        error = (local - self._signs(local) * self._spread(scales)) * self._is_value
        self.worker_error = error if skip is None else torch.where(skip, self.worker_error, error)
        received = torch.empty_like(packed := _pack(local))
        dist.all_to_all_single(received, packed, group=self.group)  # from each rank the signs that this one averages
        all_scales = self._gather(scales)
        mean = torch.zeros_like(self.server_error)
        for row, row_scales in zip(_unpack(received), all_scales, strict=True):
            mean += row * self._spread(row_scales)
        mean = mean / self.ranks + self.server_error
        mean *= self._is_local_value
        local_scales = self._norms(mean[None])[0].square().div_(self._local_sizes.clamp(min=1)).sqrt_()
        error = (mean - self._signs(mean) * self._spread(local_scales)) * self._is_local_value
        self.server_error = error if skip is None else torch.where(skip, self.server_error, error)
        signs, gathered = _unpack(self._gather(_pack(mean[None])[0])), self._gather(local_scales)
        whole = signs * torch.stack([self._spread(row) for row in gathered])
        parts = whole.split(self.columns, dim=1)
        return [
            part.reshape(-1)[:size].view_as(tensor)
            for part, size, tensor in zip(parts, self.sizes, tensors, strict=True)
        ]

    def _to_matrix(self, tensors: Sequence[Tensor]) -> Tensor:
        """Copy tensors into a zero-padded matrix [p, C]."""
        out = torch.zeros(self.ranks, sum(self.columns), device=tensors[0].device)
        for part, tensor in zip(out.split(self.columns, dim=1), tensors, strict=True):
            padded = torch.zeros(part.numel(), device=tensor.device)
            padded[: tensor.numel()] = tensor.reshape(-1)
            part.copy_(padded.view_as(part))
        return out

    def _norms(self, values: Tensor) -> Tensor:
        """Return the norms of the tensors' rows: [rows, C] to [rows, tensors]."""
        return torch.stack([part.norm(dim=1) for part in values.split(self.columns, dim=1)], dim=1)

    def _spread(self, scales: Tensor) -> Tensor:
        """Repeat a tensor's scale for its columns: [tensors] to [C]."""
        return scales.repeat_interleave(self._columns, output_size=sum(self.columns))  # output_size avoids a sync

    @staticmethod
    def _signs(values: Tensor) -> Tensor:
        """Return 1 for values of 0 or more, else -1, so that a sign is one bit."""
        return (values >= 0).float() * 2 - 1

    def _gather(self, local: Tensor) -> Tensor:
        """All-gather [...] to [p, ...]."""
        out = torch.empty(self.ranks, *local.shape, dtype=local.dtype, device=local.device)
        dist.all_gather_into_tensor(out.view(-1), local.contiguous(), group=self.group)
        return out


class OneBitAdam(ShardOptimizer):
    """Adam with unreduced gradients: sums them over ``group`` in the warm-up, later averages momenta by signs.

    A rank's gradient is a term of the sum over ranks, not of the mean. ``step`` of a weight's state counts as in
    torch's Adam. ``exp_avg`` and ``exp_avg_sq`` are the same on all ranks of the group after each step.
    """

    extra_states_label = "the errors of 1-bit Adam's compression"

    def __init__(
        self,
        groups: Sequence[Group],
        group: dist.ProcessGroup,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        freeze_step: int,
        asynchronous: bool = False,
        rectangles: Mapping[Tensor, Sequence[Rectangle]] | None = None,
    ) -> None:
        """``rectangles``: parts of each weight with a separate scale; None: each weight is one part. Values in no
        part (vocabulary padding) are not averaged.
        """
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self.group, self.freeze_step = group, freeze_step
        self._weights = [weight for entry in self.param_groups for weight in entry["params"]]
        self.skips_on_device = asynchronous
        for weight in self._weights:
            zeros = (torch.zeros_like(weight, requires_grad=False) for _ in range(2))
            self.state[weight] = dict(zip(("exp_avg", "exp_avg_sq"), zeros, strict=True), step=torch.tensor(0.0))
        self._rectangles = rectangles
        sizes = [part.numel() for part in self._split(self._weights)]
        self.exchange = OneBitAverage(sizes, group, self._weights[0].device)

    def _split(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return views of ``tensors``, one tensor per weight and of its shape: one view per scale."""
        if self._rectangles is None:
            return [*tensors]
        pairs = zip(self._weights, tensors, strict=True)
        return [tensor[part.local_slices] for weight, tensor in pairs for part in self._rectangles[weight]]

    @property
    def is_frozen(self) -> bool:
        """Whether the next step exchanges signs."""
        return bool(self.state[self._weights[0]]["step"] >= self.freeze_step)

    @property
    def gradients_summed(self) -> bool:
        return not self.is_frozen

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Sum the gradients over the group in place, in the warm-up only."""
        if not self.is_frozen:
            gradients = [weight.grad for weight in self._weights]
            flat = _flatten_dense_tensors(gradients)
            dist.all_reduce(flat, group=self.group)
            for gradient, whole in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
                gradient.copy_(whole)

    @torch.no_grad()
    def step(self, *, factor: Tensor | None = None, skip: Tensor | None = None) -> None:  # type: ignore[override]
        """Update all weights, after ``reduce_gradients``. ``skip`` must be the same on all ranks."""
        assert factor is None, "the caller has scaled the gradients"
        momenta, frozen = [], self.is_frozen
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                state, gradient = self.state[weight], weight.grad
                state["step"] += 1
                if frozen:  # the mean over ranks of p * gradient is the sum of the gradients
                    momenta.append(state["exp_avg"] * beta1 + gradient * (1 - beta1) * self.exchange.ranks)
                else:
                    with _unless(skip, state["exp_avg"], state["exp_avg_sq"]):
                        state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
                        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if frozen:
            self._set_momenta(momenta, skip)
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"])
                with _unless(skip, weight):
                    weight.sub_(update.add_(weight, alpha=group["weight_decay"]), alpha=group["lr"])

    def _set_momenta(self, momenta: list[Tensor], skip: Tensor | None) -> None:
        """Store the averages of ``momenta``, one tensor per weight, as ``exp_avg``."""
        states = [self.state[weight]["exp_avg"] for weight in self._weights]
        targets = states
        if self.exchange.ranks > 1:
            momenta = self.exchange.average(self._split(momenta), skip)
            targets = self._split(states)
        with _unless(skip, *states):
            for target, momentum in zip(targets, momenta, strict=True):
                target.copy_(momentum)

    def extra_states(self) -> dict[str, Tensor]:
        """Return this rank's compression errors, fp32 [values], worker errors then server errors."""
        return {_ERRORS: torch.cat([self.exchange.worker_error.flatten(), self.exchange.server_error])}

    def load_extra_states(self, states: Mapping[str, Tensor]) -> None:
        sizes = [self.exchange.worker_error.numel(), self.exchange.server_error.numel()]
        worker, server = states[_ERRORS].split(sizes)
        self.exchange.worker_error = worker.view_as(self.exchange.worker_error).clone()
        self.exchange.server_error = server.clone()


def build_onebit_adam(inputs: OptimizerInputs) -> ShardOptimizer:
    """Build ``onebit_adam``."""
    freeze_step = inputs.plan.config.optim.freeze_step
    assert freeze_step is not None, "resolve derives it"
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    numbers = {**inputs.hyperparameters, "freeze_step": freeze_step}
    return OneBitAdam(inputs.groups, group, **numbers, asynchronous=inputs.asynchronous, rectangles=inputs.rectangles)


@contextmanager
def _unless(skip: Tensor | None, *tensors: Tensor) -> Iterator[None]:
    """Restore ``tensors`` after the context where ``skip`` is true."""
    if skip is None:
        yield
        return
    before = [tensor.clone() for tensor in tensors]
    yield
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(torch.where(skip, old, tensor))


def _pack(values: Tensor) -> Tensor:
    """Pack signs of [rows, C] into uint8 [rows, C / 8]: a bit is 1 if the value is 0 or more."""
    places = 2 ** torch.arange(8, device=values.device, dtype=torch.uint8)
    bits = (values >= 0).view(values.shape[0], -1, 8)
    return (bits * places).sum(dim=-1, dtype=torch.uint8)


def _unpack(packed: Tensor) -> Tensor:
    """Unpack uint8 [rows, C / 8] to fp32 [rows, C], 1 or -1."""
    bits = packed[..., None] >> torch.arange(8, device=packed.device, dtype=torch.uint8) & 1
    return bits.view(packed.shape[0], -1).float() * 2 - 1
