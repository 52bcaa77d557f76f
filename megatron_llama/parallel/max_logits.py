"""Largest attention logit of each head in a step's forward passes (``optim.qk_clip``, optim/qk_clip.py).

Kernels of attention do not return it, so the scores are computed once more, by blocks (``largest_logits``). A rank has
the maximum of its heads, layers, samples and queries; ``optim/qk_clip.py`` takes the maximum over ranks. With context
parallelism, a rank gathers the keys of whole sequences. Recomputation and validation record nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_llama.arch.pattern import CAUSAL
from megatron_llama.devices.attention import largest_logits
from megatron_llama.model.llama import Llama
from megatron_llama.model.recompute import wrap_method
from megatron_llama.parallel.context import BACKENDS, DividedInputs, gather_keys
from megatron_llama.parallel.groups import Groups
from megatron_llama.plan import Plan
from megatron_llama.topology import divide


def attach(chunk: Llama, plan: Plan, groups: Groups) -> None:
    """Record the largest logits of a chunk's blocks as ``self_attn.max_logits``. Does nothing without QK-Clip."""
    if plan.config.optim.qk_clip is None:
        return
    by_documents = BACKENDS[plan.config.trainer.cp_comm].by_documents
    measure = partial(_largest, groups=groups, by_documents=by_documents)
    for block in chunk.layers.values():
        attention: Any = block.self_attn
        attention.max_logits = None
        attention.measure_logits = measure
        wrap_method(attention, "attend", _attend)


def _attend(attention: Any, q: Tensor, k: Tensor, v: Tensor, visible: Any) -> Tensor:
    is_recomputed = torch._C._current_graph_task_id() >= 0  # torch's checkpoint runs it in the backward pass
    if torch.is_grad_enabled() and not is_recomputed:
        with torch.no_grad():
            largest = attention.measure_logits(q, k, visible)
            last = attention.max_logits
            attention.max_logits = largest if last is None else torch.maximum(last, largest)
    return attention.attend_once(q, k, v, visible)  # type: ignore[no-any-return]


def _largest(q: Tensor, k: Tensor, visible: Any, *, groups: Groups, by_documents: bool) -> Tensor:
    """Return the largest logits of this rank's queries [b, heads, s/cp, d], fp32 [heads]."""
    if not isinstance(visible, DividedInputs):
        return largest_logits(q, k, visible)
    group, whole = groups["cp"], visible.of_whole
    documents = whole.lengths if by_documents and whole is not None else None
    pattern = CAUSAL if whole is None else whole.pattern
    division = divide(group.size(), k.shape[2] * group.size(), documents, pattern)
    return largest_logits(q, gather_keys(k, division, group), whole, division[group.rank()])
