"""Weights that a rank without data-parallel peers casts to the compute dtype itself.

``fully_shard`` over one rank would write each cast weight three times per step, and copy frozen weights too. A layer's
parameter is the copy in the compute dtype, and ``Shard`` holds the master. The gradient gets the master's dtype unless
``Storage.keeps_bf16_grads``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from megatron_llama import devices
from megatron_llama.model.init import torch_dtype
from megatron_llama.model.llama import Llama
from megatron_llama.plan import Plan


class ComputeCopies:
    """Compute-dtype copies of a chunk's weights. They replace the chunk's parameters that need a cast.

    A copy has memory from the cast at the start of a pass until its gradient is complete. With one micro batch the
    embedding's copy is freed after the lookup, because its gradient does not depend on it.
    """

    def __init__(self, chunk: Llama, plan: Plan) -> None:
        dtype = torch_dtype(plan.precision.compute_dtype)
        # Below ZeRO 2 micro batches are summed in this dtype, from ZeRO 2 on in the master's dtype.
        self._sums_in_bf16 = plan.precision.grad_accum_dtype == "bfloat16" and plan.config.trainer.zero < 2
        self._keeps_bf16_grads = plan.storage.keeps_bf16_grads
        self._is_last_microbatch = True
        self.master_of: dict[nn.Parameter, nn.Parameter] = {}
        for module in chunk.modules():
            for name, master in list(module.named_parameters(recurse=False)):
                if master.is_floating_point() and master.dtype != dtype:
                    copy = nn.Parameter(torch.empty_like(master, dtype=dtype), master.requires_grad)
                    if copy.requires_grad:
                        copy.register_post_accumulate_grad_hook(self._on_grad_ready)
                    self.master_of[copy] = master
                    if self._keeps_bf16_grads:
                        master.grad_dtype = None  # any  # type: ignore[attr-defined]
                    setattr(module, name, copy)
        if plan.storage.frees_embedding_of(is_first=chunk.is_first, is_last=chunk.is_last):
            chunk.get_submodule("embed_tokens").register_forward_hook(self._free_embedding)
        self._free_all()

    def _free_embedding(self, embedding: nn.Module, *_: object) -> None:
        weight = embedding.get_parameter("weight")
        if torch.is_grad_enabled() and weight in self.master_of:  # validation may have several micro batches
            weight.untyped_storage().resize_(0)

    @torch.no_grad()
    def _fill_all(self) -> None:
        for copy, master in self.master_of.items():
            copy.untyped_storage().resize_(copy.numel() * copy.element_size())
            copy.data.copy_(master)

    def _free_all(self) -> None:
        for copy in self.master_of:
            copy.untyped_storage().resize_(0)

    @torch.no_grad()
    def _on_grad_ready(self, copy: torch.Tensor) -> None:
        """Move ``copy.grad`` to the master's gradient. Called after a backward pass has added to ``copy.grad``."""
        if copy.grad is None:  # trainer.exact sums gradients itself
            return
        last = self._is_last_microbatch
        if self._sums_in_bf16 and not last:
            return
        assert isinstance(copy, nn.Parameter)
        master, grad = self.master_of[copy], copy.grad
        if master.grad is None:
            master.grad = grad if self._keeps_bf16_grads else grad.to(master.dtype)
        else:
            master.grad = master.grad.to(master.dtype)
            devices.of(grad.device).kernels(compiled=False).add_(master.grad, grad)
        copy.grad = None
        if last:
            copy.untyped_storage().resize_(0)  # no later operation of this pass reads the weight

    def no_sync_func(self) -> Callable[[], AbstractContextManager[None]]:
        """Return the ``no_sync_func`` of megatron-core's schedules: a context around all micro batches but the last."""

        @contextmanager
        def context() -> Iterator[None]:
            self._is_last_microbatch = False
            try:
                yield
            finally:
                self._is_last_microbatch = True

        return context


@contextmanager
def filled_copies(chunks: Sequence[ComputeCopies | None]) -> Iterator[None]:
    """Allocate the chunks' copies and cast the masters into them, for the duration of one pass."""
    present = [copies for copies in chunks if copies is not None]
    for copies in present:
        copies._fill_all()
    try:
        yield
    finally:
        for copies in present:
            copies._free_all()
