"""Activation recomputation (``trainer.recompute``): the backward pass recomputes tensors that the forward pass drops.

* elementwise: the operations between matmuls and attention, which are cheap: norms, rotations, SwiGLU;
* selective: these, and attention, which is cheap compared with its scores' size (arXiv:2205.05198);
* full: the whole block, of which only the input is saved (Chen et al. 2016, arXiv:1604.06174).

Recomputed values are bit-identical, as the same functions run on the same inputs.

Compiled blocks use torch's selective activation checkpointing, with a policy per operator. Uncompiled, it would run the
whole block a second time and return saved results. megatron-core's layers would then repeat their collectives, which
write into saved results, and gather the sequence for skipped matmuls. So uncompiled blocks use saved-tensor hooks:
a ``@recomputable`` function records how to compute its output, and autograd stores this recipe in place of the tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, ParamSpec

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

aten = torch.ops.aten
P = ParamSpec("P")


def recomputable(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Mark a function, or a module's forward, whose output may be recomputed in the backward pass.

    The function must be cheap, draw no random numbers, and return the same values and strides for the same inputs.
    """

    @functools.wraps(function)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        output = function(*args, **kwargs)
        if not torch.compiler.is_compiling() and _recipes is not None:
            first, *others = args
            # Call a module, not its forward, so that its hooks attribute the work to it.
            run, inputs = (first, others) if isinstance(first, nn.Module) else (function, args)
            _recipes.add(output, partial(run, *inputs, **kwargs))
        return output

    return recorded


def wrap_block(
    kind: str, draws_random_numbers: bool, block: nn.Module, forward: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Return a block's ``forward`` whose backward pass recomputes ``kind``, a value of trainer.recompute but none.

    With ``draws_random_numbers`` (LoRA's dropout) a second forward pass restores the generator's state.
    """
    context_fn = {} if kind == "full" else {"context_fn": RECOMPUTE_POLICIES[kind]}
    # Restoring the generator's state would synchronize with the device.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws_random_numbers, **context_fn}

    def recomputed(*inputs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(*inputs)
        if kind == "full" or torch.compiler.is_compiling():
            return checkpoint(forward, *inputs, **options)  # type: ignore[no-any-return]
        with _recording(_Recipes()) as recipes, saved_tensors_hooks(recipes.pack, recipes.unpack):
            return forward(*inputs)

    return recomputed


def wrap_core_attention(attention: nn.Module, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``Attention.core_attention`` that saves its inputs only (selective)."""

    def recomputed(*inputs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(*inputs)
        # No recipes inside: the output of attention is saved, not the output of the kernel.
        with nullcontext() if torch.compiler.is_compiling() else without_recipes():
            output: Tensor = checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False)
            return output

    return recomputed


class _Recipe(NamedTuple):
    """Recipe of a saved tensor: a view of the output of ``recompute``."""

    recompute: Callable[[], Tensor]
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class _Recipes:
    """Recipes of the outputs of ``@recomputable`` functions in an uncompiled block."""

    def __init__(self) -> None:
        self._by_storage: dict[int, tuple[StorageWeakRef, Callable[[], Tensor]]] = {}

    def add(self, output: Tensor, recompute: partial[Tensor]) -> None:
        """Record how to recompute ``output``."""
        # After the output is freed, the weak reference keeps its storage's number from other storages.
        reference = StorageWeakRef(output.untyped_storage())
        if any(isinstance(x, Tensor) and x.untyped_storage()._cdata == reference.cdata for x in recompute.args):
            return  # a view of an input: no memory to save
        self._by_storage[reference.cdata] = reference, recompute

    def pack(self, tensor: Tensor) -> Tensor | _Recipe:
        """Return what autograd stores in place of a saved tensor."""
        entry = self._by_storage.get(tensor.untyped_storage()._cdata)
        if entry is None:
            return tensor
        return _Recipe(entry[1], tensor.shape, tensor.stride(), tensor.storage_offset())

    @staticmethod
    def unpack(saved: Any) -> Tensor:
        """Return the saved tensor, in the backward pass, once for each operator that reads it."""
        if not isinstance(saved, _Recipe):
            return saved  # type: ignore[no-any-return]
        with torch.no_grad():
            return saved.recompute().as_strided(saved.shape, saved.stride, saved.offset)

    def clear(self) -> None:
        """Free the inputs of functions whose outputs were not saved. Autograd holds the hooks until the backward."""
        self._by_storage.clear()


_recipes: _Recipes | None = None
"""Recipes of the running block, if it recomputes operations."""


@contextmanager
def _recording(recipes: _Recipes | None) -> Iterator[Any]:
    global _recipes
    before, _recipes = _recipes, recipes
    try:
        yield recipes
    finally:
        _recipes = before
        if recipes is not None:
            recipes.clear()


def without_recipes() -> AbstractContextManager[Any]:
    """Return a context in which no recipes are recorded, because the tensors inside are not saved."""
    return _recording(None)


_ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
)
"""Operators of scaled_dot_product_attention. The operators of devices/ have the namespace ``megatron_llama``."""


def _policy(attention: bool, _: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return whether a compiled block saves an operator's results. ``attention``: also attention's."""
    packet = getattr(operator, "overloadpacket", None)
    if packet in (aten.mm, aten.bmm, aten._scaled_mm) or operator.namespace == "_c10d_functional":
        return CheckpointPolicy.PREFER_SAVE
    random = torch.Tag.nondeterministic_seeded in operator.tags and packet not in _ATTENTION  # LoRA's dropout
    if random or (attention and (packet in _ATTENTION or operator.namespace == "megatron_llama")):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.MUST_RECOMPUTE


RECOMPUTE_POLICIES: Mapping[str, Callable[[], Any]] = {
    "elementwise": partial(create_selective_checkpoint_contexts, partial(_policy, True)),
    "selective": partial(create_selective_checkpoint_contexts, partial(_policy, False)),
}
"""By value of trainer.recompute, the ``context_fn`` of torch's checkpoint for compiled blocks."""
