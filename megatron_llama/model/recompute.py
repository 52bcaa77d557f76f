"""Activation recomputation (``trainer.recompute``): the backward pass recomputes tensors that the forward pass drops.

* elementwise: the operations between matmuls and attention, which are cheap: norms, rotations, SwiGLU;
* selective: these, and attention, which is cheap compared with its scores' size (arXiv:2205.05198);
* full: the whole block, of which only the input is saved (Chen et al. 2016, arXiv:1604.06174).

Recomputed values are bit-identical, as the same functions run on the same inputs.

Compiled blocks take torch's selective activation checkpointing, with a policy about operators. Uncompiled, it would run
the whole block a second time and return the saved results. Then megatron-core's layers would repeat their collectives,
which write into saved results. They would also gather the sequence for matmuls that are skipped. So uncompiled blocks
use saved-tensor hooks. A ``@recomputable`` function notes how to compute its output, and autograd stores the note in
place of the tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MethodType
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
    def noted(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        output = function(*args, **kwargs)
        if not torch.compiler.is_compiling() and _notes is not None:
            first, *others = args
            # A module is called as such, so that its hooks attribute the work to it.
            run, inputs = (first, others) if isinstance(first, nn.Module) else (function, args)
            _notes.add(output, partial(run, *inputs, **kwargs))
        return output

    return noted


def attach(block: nn.Module, kind: str, *, draws_random_numbers: bool) -> None:
    """Make the backward pass of a ``Block`` recompute ``kind``, a value of trainer.recompute.

    Call this before the block's forward is compiled: the compiled graph includes recomputation. With
    ``draws_random_numbers`` (LoRA's dropout) a second forward pass restores the generator's state.
    """
    if kind == "none":
        return
    _wrap(block, "forward", _block_forward(kind, draws_random_numbers))
    if kind == "selective":
        _wrap(block.self_attn, "core_attention", _core_attention)


def _wrap(module: Any, name: str, wrapper: Callable[..., Tensor]) -> None:
    """Replace a method by ``wrapper(module, ...)``, which calls the original as ``module.<name>_once``."""
    setattr(module, f"{name}_once", getattr(module, name))
    setattr(module, name, MethodType(wrapper, module))


@functools.cache  # Dynamo takes the graph of one block for the next if their forward is the same function
def _block_forward(kind: str, draws_random_numbers: bool) -> Callable[..., Tensor]:
    """Return the forward of blocks that recompute ``kind``."""

    def forward(block: Any, *inputs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return block.forward_once(*inputs)  # type: ignore[no-any-return]
        preserve = draws_random_numbers  # else there is no state to restore, and no device to wait for
        if kind == "full":
            return checkpoint(block.forward_once, *inputs, use_reentrant=False, preserve_rng_state=preserve)
        if torch.compiler.is_compiling():
            context_fn = RECOMPUTE_POLICIES[kind]
            return checkpoint(
                block.forward_once, *inputs, use_reentrant=False, preserve_rng_state=preserve, context_fn=context_fn
            )
        with _taking_notes(_Notes()) as notes, saved_tensors_hooks(notes.pack, notes.unpack):
            return block.forward_once(*inputs)  # type: ignore[no-any-return]

    return forward


def _core_attention(attention: Any, *inputs: Any) -> Tensor:
    """Run attention and save its inputs only."""
    if not torch.is_grad_enabled():
        return attention.core_attention_once(*inputs)  # type: ignore[no-any-return]
    # No notes inside: the output is saved, not the output of the kernel.
    with nullcontext() if torch.compiler.is_compiling() else _taking_notes(None):
        return checkpoint(attention.core_attention_once, *inputs, use_reentrant=False, preserve_rng_state=False)


class _Recipe(NamedTuple):
    """A saved tensor that is recomputed: a view of the output of a function."""

    recompute: Callable[[], Tensor]
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class _Notes:
    """Notes of the functions that an uncompiled block has called: how to recompute each output."""

    def __init__(self) -> None:
        self._by_storage: dict[int, tuple[StorageWeakRef, Callable[[], Tensor]]] = {}

    def add(self, output: Tensor, recompute: partial[Tensor]) -> None:
        """Note how to recompute ``output``."""
        # If the output is freed, the weak reference still keeps its storage's number from another storage.
        reference = StorageWeakRef(output.untyped_storage())
        if any(isinstance(x, Tensor) and x.untyped_storage()._cdata == reference.cdata for x in recompute.args):
            return  # a view of an input, which saves nothing
        self._by_storage[reference.cdata] = reference, recompute

    def pack(self, tensor: Tensor) -> Tensor | _Recipe:
        """Return what autograd stores in place of a saved tensor."""
        note = self._by_storage.get(tensor.untyped_storage()._cdata)
        if note is None:
            return tensor
        return _Recipe(note[1], tensor.shape, tensor.stride(), tensor.storage_offset())

    @staticmethod
    def unpack(saved: Any) -> Tensor:
        """Return the saved tensor, in the backward pass, once for each operator that reads it."""
        if not isinstance(saved, _Recipe):
            return saved  # type: ignore[no-any-return]
        with torch.no_grad():
            return saved.recompute().as_strided(saved.shape, saved.stride, saved.offset)

    def clear(self) -> None:
        """Free the inputs of functions whose outputs were not saved; autograd holds the hooks until the backward."""
        self._by_storage.clear()


_notes: _Notes | None = None
"""Notes of the running block, if it recomputes operations."""


@contextmanager
def _taking_notes(notes: _Notes | None) -> Iterator[Any]:
    global _notes
    before, _notes = _notes, notes
    try:
        yield notes
    finally:
        _notes = before
        if notes is not None:
            notes.clear()


_ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
)
"""Operators of scaled_dot_product_attention. Other kernels have operators in devices/."""


def _policy(attention: bool, _: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Whether a compiled block saves an operator's results; attention's only with ``attention``."""
    packet = getattr(operator, "overloadpacket", None)
    if packet in (aten.mm, aten.bmm) or operator.namespace == "_c10d_functional":
        return CheckpointPolicy.PREFER_SAVE
    random = torch.Tag.nondeterministic_seeded in operator.tags  # LoRA's dropout
    if random or (attention and (packet in _ATTENTION or operator.namespace == "megatron_llama")):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.MUST_RECOMPUTE


RECOMPUTE_POLICIES: Mapping[str, Callable[[], Any]] = {
    "elementwise": partial(create_selective_checkpoint_contexts, partial(_policy, True)),
    "selective": partial(create_selective_checkpoint_contexts, partial(_policy, False)),
}
"""torch's policies for compiled blocks."""
