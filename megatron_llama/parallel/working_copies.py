"""Weights that a rank without data-parallel peers casts by itself, where its layers compute in another dtype.

``fully_shard`` over one rank would write each cast weight three times in a step, and copy frozen weights too. Here a
layer's parameter is a working copy in the compute dtype; its master, in the dtype of the optimizer, is what ``Shard``
knows. A copy has memory in a pass only: it is cast at the start and freed when its gradient is whole; that of the
embedding, on which its gradient does not depend, once it has been read, if there is one micro batch. The master is
given the gradient in the dtypes that ``fully_shard`` would use, or as it is (``Storage.keeps_bf16_grads``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from megatron_llama import devices
from megatron_llama.model.llama import Llama
from megatron_llama.model.mcore_config import torch_dtype
from megatron_llama.plan import Plan


class WorkingCopies:
    """The working copies of a chunk, whose parameters they become; parameters that need no cast stay."""

    def __init__(self, chunk: Llama, plan: Plan) -> None:
        dtype = torch_dtype(plan.precision.compute_dtype)
        # Below ZeRO 2 micro batches are summed in this dtype, from there on in the master's.
        self._sums_are_narrow = plan.precision.grad_accum_dtype == "bfloat16" and plan.config.trainer.zero < 2
        self._stay_narrow = plan.storage.keeps_bf16_grads
        self._is_last_microbatch = True
        self.master_of: dict[nn.Parameter, nn.Parameter] = {}
        for module in chunk.modules():
            for name, master in list(module.named_parameters(recurse=False)):
                if master.is_floating_point() and master.dtype != dtype:
                    copy = nn.Parameter(torch.empty_like(master, dtype=dtype), master.requires_grad)
                    if copy.requires_grad:
                        copy.register_post_accumulate_grad_hook(self._hand_over)
                    self.master_of[copy] = master
                    if self._stay_narrow:
                        master.grad_dtype = None  # any  # type: ignore[attr-defined]
                    setattr(module, name, copy)
        if plan.storage.frees_embedding_of(is_first=chunk.is_first, is_last=chunk.is_last):
            chunk.get_submodule("embed_tokens").register_forward_hook(self._free_table)
        self._free_all()

    def _free_table(self, embedding: nn.Module, *_: object) -> None:
        table = embedding.get_parameter("weight")
        if torch.is_grad_enabled() and table in self.master_of:  # a validation may have several micro batches
            table.untyped_storage().resize_(0)

    @torch.no_grad()
    def _fill_all(self) -> None:
        for copy, master in self.master_of.items():
            copy.untyped_storage().resize_(copy.numel() * copy.element_size())
            copy.data.copy_(master)

    def _free_all(self) -> None:
        for copy in self.master_of:
            copy.untyped_storage().resize_(0)

    @torch.no_grad()
    def _hand_over(self, copy: torch.Tensor) -> None:
        """Called when a backward pass has added to ``copy.grad``."""
        last = self._is_last_microbatch
        if self._sums_are_narrow and not last:
            return
        assert isinstance(copy, nn.Parameter) and copy.grad is not None
        master, grad = self.master_of[copy], copy.grad
        if master.grad is None:
            master.grad = grad if self._stay_narrow else grad.to(master.dtype)
        else:
            master.grad = master.grad.to(master.dtype)
            devices.of(grad.device).kernels(compiled=False).add_(master.grad, grad)
        copy.grad = None
        if last:
            copy.untyped_storage().resize_(0)  # nothing else of this pass needs the weight

    def before_last_microbatch(self) -> Callable[[], AbstractContextManager[None]]:
        """The ``no_sync_func`` of megatron-core's schedules: a context around all micro batches except the last."""

        @contextmanager
        def context() -> Iterator[None]:
            self._is_last_microbatch = False
            try:
                yield
            finally:
                self._is_last_microbatch = True

        return context


@contextmanager
def filled(chunks: Sequence[WorkingCopies | None]) -> Iterator[None]:
    """Give the chunks' copies their masters' values inside the context, which is one pass."""
    filled = [copies for copies in chunks if copies is not None]
    for copies in filled:
        copies._fill_all()
    try:
        yield
    finally:
        for copies in filled:
            copies._free_all()
