"""What the backward pass makes again, operation by operation, instead of keeping it from the forward pass.

``trainer.recompute=elementwise`` keeps what matrix products and attention have made, and makes everything between them
again: norms, rotations, SwiGLU. Nothing dear is done twice, and the values are the same bits.

torch's selective activation checkpointing takes a policy about operators. Uncompiled, it runs the forward pass of a
block again and hands out what was kept. megatron-core's layers would then repeat their collectives, which write into
the kept products, and gather the sequence for products that are not done again. So uncompiled blocks say themselves
what can be made again and how (``made_again``). A compiled block is one graph, from which all that is not needed is
left out: it takes the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

aten = torch.ops.aten
Again = Callable[[], Tensor]


class _Forgotten(NamedTuple):
    """A tensor that was not kept."""

    again: Again
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


def made_again(enabled: bool, *made: tuple[Tensor, Again]) -> AbstractContextManager[None]:
    """A context in which operators keep of the tensors ``made``, and of views of them, how to make them again: each
    comes with a function that returns it, laid out alike. Inside another such context, only the inner one counts.

    The functions run in the backward pass, once for each operator that wants the tensor, without autograd. Does nothing
    unless ``enabled``, and in compiled blocks.
    """
    if not enabled or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return nullcontext()
    ways = {tensor.untyped_storage()._cdata: again for tensor, again in made}

    def pack(tensor: Tensor) -> Tensor | _Forgotten:
        again = ways.get(tensor.untyped_storage()._cdata)
        return tensor if again is None else _Forgotten(again, tensor.shape, tensor.stride(), tensor.storage_offset())

    def unpack(kept: Any) -> Tensor:
        if not isinstance(kept, _Forgotten):
            return kept  # type: ignore[no-any-return]
        with torch.no_grad():
            return kept.again().as_strided(kept.shape, kept.stride, kept.offset)

    return saved_tensors_hooks(pack, unpack)


_ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
)
"""Operators of scaled_dot_product_attention. Other kernels have operators in devices/."""


def _policy(attention: bool, _: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Whether a compiled block keeps an operator's results; attention's only with ``attention``."""
    packet = getattr(operator, "overloadpacket", None)
    if packet in (aten.mm, aten.bmm) or operator.namespace == "_c10d_functional":
        return CheckpointPolicy.PREFER_SAVE
    random = torch.Tag.nondeterministic_seeded in operator.tags  # LoRA's dropout
    if random or (attention and (packet in _ATTENTION or operator.namespace == "megatron_llama")):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.MUST_RECOMPUTE


REMAKING: Mapping[str, Callable[[], Any]] = {
    "elementwise": partial(create_selective_checkpoint_contexts, partial(_policy, True)),
    "selective": partial(create_selective_checkpoint_contexts, partial(_policy, False)),
}
"""The settings of trainer.recompute that make elementwise operations again, with torch's policy for compiled blocks."""
