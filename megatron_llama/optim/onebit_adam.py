"""1-bit Adam (Tang et al. 2021, arXiv:2102.02888): after a warm-up, ranks exchange the signs of their momentum.

Arithmetic and names are those of DeepSpeed's OneBitAdam: Adam without bias correction and with decoupled weight decay
for ``freeze_step`` steps; then the second moment stays as it is, and the momentum is averaged over the data-parallel
ranks with one bit for a value and one scale for a tensor. What compression loses is kept and added to the next step's
momentum (error feedback), on the rank that sends and again on the rank that averages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from megatron_llama.optim.base import Group, OptimizerInputs, ShardOptimizer

_ERRORS = "onebit_errors"
"""Name of the compression's errors in checkpoints."""


class OneBitAverage:
    """Averages tensors over a group of p ranks, each value as its sign. Each rank averages one p-th of all values.

    In memory all tensors lie side by side, [p, C]: row r is what rank r averages, and a tensor of n values has
    ceil(n / 8p) * 8 columns, so that signs fill whole bytes. What is behind a tensor's end stays zero.
    """

    def __init__(self, sizes: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> None:
        """``sizes``: the number of values of each tensor."""
        self.group, self.sizes = group, list(sizes)
        self.ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self.columns = [-(-size // (8 * self.ranks)) * 8 for size in sizes]
        pairs = zip(self.sizes, self.columns, strict=True)
        own = [min(max(size - rank * columns, 0), columns) for size, columns in pairs]
        self._all_sizes = torch.tensor(self.sizes, device=device)
        self._own_sizes = torch.tensor(own, device=device)
        self._columns = torch.tensor(self.columns, device=device)
        self.worker_error = torch.zeros(self.ranks, sum(self.columns), device=device)
        self.server_error = torch.zeros(sum(self.columns), device=device)
        self._is_value = self._side_by_side([torch.ones(size, device=device) for size in sizes]).bool()
        self._own_values = self._is_value[rank].clone()

    @torch.no_grad()
    def average(self, tensors: Sequence[Tensor], skip: Tensor | None = None) -> list[Tensor]:
        """The averages of fp32 tensors, the same on all ranks; ``tensors`` are left as they are, and where ``skip``
        (bool scalar) is true what is kept of the losses too."""
        mine = self._side_by_side(tensors) + self.worker_error
        mean_squares = self._norms(mine).square().sum(dim=0).div_(self._all_sizes.clamp(min=1))
        scales = mean_squares.sqrt_()  # [tensors]: norm / sqrt(n)
        lost = (mine - self._signs(mine) * self._spread(scales)) * self._is_value
        self.worker_error = lost if skip is None else torch.where(skip, self.worker_error, lost)
        received = torch.empty_like(packed := _pack(mine))
        dist.all_to_all_single(received, packed, group=self.group)  # from each rank the signs that this one averages
        all_scales = self._gather(scales)
        mean = torch.zeros_like(self.server_error)
        for row, their_scales in zip(_unpack(received), all_scales, strict=True):
            mean += row * self._spread(their_scales)
        mean = mean / self.ranks + self.server_error
        mean *= self._own_values
        own_scales = self._norms(mean[None])[0].square().div_(self._own_sizes.clamp(min=1)).sqrt_()
        lost = (mean - self._signs(mean) * self._spread(own_scales)) * self._own_values
        self.server_error = lost if skip is None else torch.where(skip, self.server_error, lost)
        signs, gathered = _unpack(self._gather(_pack(mean[None])[0])), self._gather(own_scales)
        whole = signs * torch.stack([self._spread(row) for row in gathered])
        parts = whole.split(self.columns, dim=1)
        return [
            part.reshape(-1)[:size].view_as(tensor)
            for part, size, tensor in zip(parts, self.sizes, tensors, strict=True)
        ]

    def _side_by_side(self, tensors: Sequence[Tensor]) -> Tensor:
        out = torch.zeros(self.ranks, sum(self.columns), device=tensors[0].device)
        for part, tensor in zip(out.split(self.columns, dim=1), tensors, strict=True):
            padded = torch.zeros(part.numel(), device=tensor.device)
            padded[: tensor.numel()] = tensor.reshape(-1)
            part.copy_(padded.view_as(part))
        return out

    def _norms(self, values: Tensor) -> Tensor:
        """[rows, C] to [rows, tensors]."""
        return torch.stack([part.norm(dim=1) for part in values.split(self.columns, dim=1)], dim=1)

    def _spread(self, scales: Tensor) -> Tensor:
        """[tensors] to [C]."""
        return scales.repeat_interleave(self._columns, output_size=sum(self.columns))  # else the host would wait for it

    @staticmethod
    def _signs(values: Tensor) -> Tensor:
        """1 where a value is 0 or more, else -1: the sign of zero costs no bit of its own."""
        return (values >= 0).float() * 2 - 1

    def _gather(self, own: Tensor) -> Tensor:
        """[...] of each rank as [p, ...]."""
        out = torch.empty(self.ranks, *own.shape, dtype=own.dtype, device=own.device)
        dist.all_gather_into_tensor(out.view(-1), own.contiguous(), group=self.group)
        return out


class OneBitAdam(ShardOptimizer):
    """Adam whose gradients are this rank's own: it sums them over ``group`` itself, or averages momenta by signs.

    A rank's gradient is its share of the sum over ranks, as everywhere in this project. ``step`` of a weight's state
    counts as in torch's Adam; ``exp_avg`` and ``exp_avg_sq`` are the same on all ranks of the group after each step.
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
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self.group, self.freeze_step = group, freeze_step
        self._weights = [weight for entry in self.param_groups for weight in entry["params"]]
        self.skips_on_device = asynchronous
        for weight in self._weights:
            zeros = (torch.zeros_like(weight, requires_grad=False) for _ in range(2))
            self.state[weight] = dict(zip(("exp_avg", "exp_avg_sq"), zeros, strict=True), step=torch.tensor(0.0))
        self.exchange = OneBitAverage([w.numel() for w in self._weights], group, self._weights[0].device)

    @property
    def is_frozen(self) -> bool:
        """Whether the next step exchanges signs."""
        return bool(self.state[self._weights[0]]["step"] >= self.freeze_step)

    @property
    def gradients_summed(self) -> bool:
        return not self.is_frozen

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """In the warm-up: sums the gradients over the group, in place. Later ones stay this rank's own."""
        if not self.is_frozen:
            gradients = [weight.grad for weight in self._weights]
            flat = _flatten_dense_tensors(gradients)
            dist.all_reduce(flat, group=self.group)
            for gradient, whole in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
                gradient.copy_(whole)

    @torch.no_grad()
    def step(self, *, factor: Tensor | None = None, skip: Tensor | None = None) -> None:  # type: ignore[override]
        """Update all weights, after ``reduce_gradients``. ``skip`` is the same on all ranks, and errors skip too."""
        assert factor is None, "the caller has scaled the gradients"
        momenta, frozen = [], self.is_frozen
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                state, gradient = self.state[weight], weight.grad
                state["step"] += 1
                if frozen:  # the mean over ranks of p times their share is the sum
                    share = gradient * (1 - beta1) * self.exchange.ranks
                    momenta.append(state["exp_avg"] * beta1 + share)
                else:
                    with _unless(skip, state["exp_avg"], state["exp_avg_sq"]):
                        state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
                        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if frozen:
            averages = self.exchange.average(momenta, skip) if self.exchange.ranks > 1 else momenta
            for weight, average in zip(self._weights, averages, strict=True):
                with _unless(skip, self.state[weight]["exp_avg"]):
                    self.state[weight]["exp_avg"].copy_(average)
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"])
                with _unless(skip, weight):
                    weight.sub_(update.add_(weight, alpha=group["weight_decay"]), alpha=group["lr"])

    def extra_states(self) -> dict[str, Tensor]:
        """The errors of this rank's compression, [values] fp32, of worker and server."""
        return {_ERRORS: torch.cat([self.exchange.worker_error.flatten(), self.exchange.server_error])}

    def load_extra_states(self, states: Mapping[str, Tensor]) -> None:
        sizes = [self.exchange.worker_error.numel(), self.exchange.server_error.numel()]
        worker, server = states[_ERRORS].split(sizes)
        self.exchange.worker_error = worker.view_as(self.exchange.worker_error).clone()
        self.exchange.server_error = server.clone()


def build_onebit_adam(inputs: OptimizerInputs) -> ShardOptimizer:
    """Build ``onebit_adam``."""
    freeze_step = inputs.plan.config.optim.freeze_step
    assert freeze_step is not None, "a plan has one"
    group = parallel_state.get_data_parallel_group()
    numbers = {**inputs.numbers, "freeze_step": freeze_step}
    return OneBitAdam(inputs.groups, group, **numbers, asynchronous=inputs.asynchronous)


@contextmanager
def _unless(skip: Tensor | None, *tensors: Tensor) -> Iterator[None]:
    """Where ``skip`` is true, what the block does to ``tensors`` is undone."""
    if skip is None:
        yield
        return
    before = [tensor.clone() for tensor in tensors]
    yield
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(torch.where(skip, old, tensor))


def _pack(values: Tensor) -> Tensor:
    """[rows, C] to [rows, C / 8] uint8: a bit is 1 where a value is 0 or more."""
    places = 2 ** torch.arange(8, device=values.device, dtype=torch.uint8)
    bits = (values >= 0).view(values.shape[0], -1, 8)
    return (bits * places).sum(dim=-1, dtype=torch.uint8)


def _unpack(packed: Tensor) -> Tensor:
    """[rows, C / 8] uint8 to [rows, C] fp32, 1 or -1."""
    bits = packed[..., None] >> torch.arange(8, device=packed.device, dtype=torch.uint8) & 1
    return bits.view(packed.shape[0], -1).float() * 2 - 1
