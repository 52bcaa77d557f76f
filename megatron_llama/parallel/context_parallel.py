"""Context parallelism: each rank has a part of every sequence, and attention communicates the other parts.

context_division.py gives each rank chunks of every sequence. Norms, matmuls and the loss of a token need no other
token. Gradients of weights are sums over tokens, so ``fully_shard`` sums them over cp as over dp. Attention has two
backends (``trainer.cp_comm``):

    all_gather  gathers keys and values (Llama 3, arXiv:2407.21783, section 3.3.2); their gradients are reduce-scattered
    ulysses     exchanges heads for tokens (Jacobs et al. 2023, arXiv:2309.14509): a rank attends over whole sequences
                with its share of the heads

With all_gather, the backward pass gathers keys and values once more: a rank saves only its own. Attention runs by tiles
(devices/torch_attention.py), which support documents and patterns. Ulysses runs the device's own kernel. It needs a
head per rank, and copies kv heads if there are fewer than ranks.

``divided_parts`` replaces the input builder of a chunk and the attention of its blocks. Inputs of whole sequences
(``InputBuilder.whole``) are computed by each rank alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single

from megatron_llama.arch.attention_pattern import CAUSAL, Lengths, Pattern
from megatron_llama.config import ModelConfig
from megatron_llama.devices import torch_attention
from megatron_llama.devices.attention_inputs import AttentionInputs, Documents
from megatron_llama.devices.kernels import AttentionKernels
from megatron_llama.model.inputs import BlockInputs, InputBuilder
from megatron_llama.model.llama import BlockParts
from megatron_llama.model.random_ltd import Subsets
from megatron_llama.parallel.context_division import Chunks, divide, local_chunks, position_index, zigzags
from megatron_llama.parallel.groups import Groups
from megatron_llama.plan import Plan
from megatron_llama.topology import Topology


class DividedInputs(NamedTuple):
    """Marks a micro batch whose sequences are divided over the context-parallel ranks."""

    of_whole: AttentionInputs | None
    """Visible keys in whole sequences, for the backend."""


class Backend(Protocol):
    """Attention over divided sequences."""

    by_documents: bool
    """Whether documents decide the division of sequences. Without it, the order is zig-zag."""

    def visible(self, tokens: Tensor, documents: Documents | None, pattern: Pattern) -> AttentionInputs | None:
        """Return the visible keys of whole sequences: tokens [b, s], of which only the shape is read."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: AttentionInputs | None) -> Tensor:
        """Return the attention of this rank's tokens, q [b, heads, s/cp, d], to the whole sequence.

        k and v: [b, kv heads, s/cp, d], of this rank's tokens.
        """


def divided_parts(
    parts: BlockParts, topology: Topology, kernels: AttentionKernels, groups: Groups, comm: str
) -> BlockParts:
    """Return ``parts`` that compute this rank's part of each sequence; ``parts`` with one context-parallel rank."""
    if topology.sizes["cp"] == 1:
        return parts
    backend, attend_whole = BACKENDS[comm](kernels, groups["cp"]), parts.attend

    def attend(q: Tensor, k: Tensor, v: Tensor, visible: Any) -> Tensor:
        if isinstance(visible, DividedInputs):
            return backend.attend(q, k, v, visible.of_whole)
        return attend_whole(q, k, v, visible)

    def inputs(model: ModelConfig) -> InputBuilder:
        return DividedInputBuilder(parts.inputs(model), backend, topology)

    return replace(parts, attend=attend, inputs=inputs)


class DividedInputBuilder(InputBuilder):
    """Builder of the inputs of this rank's tokens. ``whole`` builds the inputs of whole sequences."""

    def __init__(self, builder: InputBuilder, backend: Backend, topology: Topology) -> None:
        super().__init__(builder.model, builder.build_visible)
        self._backend, self._topology = backend, topology

    def __call__(
        self, tokens: Tensor, documents: Documents | None = None, subsets: Subsets | None = None
    ) -> BlockInputs:
        """Build the inputs for this rank's token ids [b, s/cp]. ``documents`` are of the whole sequences."""
        assert subsets is None, "a rule rejects random-LTD"
        return self.padded(tokens, tokens.shape[1] * self._topology.sizes["cp"], documents)

    def padded(self, tokens: Tensor, unpadded: int, documents: Documents | None = None) -> BlockInputs:
        """Build the inputs for this rank's token ids [b, s/cp], of sequences with ``unpadded`` tokens before padding.

        Some RoPE scalings depend on the length of a sequence, to which padding does not count.
        """
        lengths = documents.lengths if documents is not None and self._backend.by_documents else None
        chunks = local_chunks(self._topology, tokens.shape[1] * self._topology.sizes["cp"], lengths, self.pattern)
        local = position_index(chunks, tokens.device)
        positions = local[None] if documents is None else documents.positions().index_select(1, local)
        rotary = self.rotary(positions.clamp(max=unpadded - 1), unpadded)
        return BlockInputs(rotary, self.visible(tokens, documents), documents)

    def visible(self, tokens: Tensor, documents: Documents | None = None) -> Any:
        """Return the mask inputs for this rank's token ids [b, s/cp]: ``DividedInputs``."""
        whole = tokens.new_empty(tokens.shape[0], tokens.shape[1] * self._topology.sizes["cp"])
        return DividedInputs(self._backend.visible(whole, documents, self.pattern))


def to_natural_order(x: Tensor, division: Sequence[Chunks]) -> Tensor:
    """Return parts of all ranks [cp, s/cp, ...] as sequences [s, ...]. ``division``: see ``divide``."""
    slices: dict[int, Tensor] = {}
    for part, chunks in zip(x, division, strict=True):
        starts = (chunk.start for chunk in chunks)
        slices.update(zip(starts, part.split([len(chunk) for chunk in chunks]), strict=True))
    return torch.cat([slices[start] for start in sorted(slices)])


def to_rank_order(x: Tensor, division: Sequence[Chunks]) -> Tensor:
    """Return sequences [s, ...] as the parts of all ranks [cp, s/cp, ...]."""
    ordered = torch.cat([chunk for rank in _rank_order(x, division) for chunk in rank])
    return ordered.unflatten(0, (len(division), -1))


def _rank_order(x: Tensor, division: Sequence[Chunks]) -> list[list[Tensor]]:
    return [[x.narrow(0, chunk.start, len(chunk)) for chunk in chunks] for chunks in division]


def _sequence_first(x: Tensor) -> Tensor:
    """Permute [b, heads, s, d] to [s, b, heads, d], which is the memory order."""
    return x.permute(2, 0, 1, 3)


def _heads_first(x: Tensor) -> Tensor:
    """Permute [s, b, heads, d] to [b, heads, s, d]."""
    return x.permute(1, 2, 0, 3)


# all_gather: this rank's queries, and the keys and values of the whole sequence.


class AllGather:
    """Attention to gathered keys and values."""

    by_documents = True

    def __init__(self, kernels: AttentionKernels, group: dist.ProcessGroup) -> None:
        self.compiled, self.group = kernels.compiled, group

    def visible(self, tokens: Tensor, documents: Documents | None, pattern: Pattern) -> AttentionInputs:
        """See ``Backend``."""
        if documents is None:
            documents = Documents.whole(tokens.shape[0], tokens.shape[1], tokens.device)
        if self.compiled:
            return AttentionInputs(pattern, "tiles", None, documents.host_cu_seqlens)
        return AttentionInputs(pattern, "tiles", documents.lengths)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: AttentionInputs | None) -> Tensor:
        """See ``Backend``."""
        assert visible is not None
        if visible.lengths is None:
            out, _ = _operator(q, k, v, visible.host_cu_seqlens, self.group.group_name, [*astuple(visible.pattern)])
            return out
        return torch_attention.AttentionOp.apply(
            q, k, v, _forward, _backward, visible.lengths, visible.pattern, self.group
        )


def _gather(k: Tensor, v: Tensor, division: Sequence[Chunks], group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Gather this rank's keys and values [b, kv heads, s/cp, d] to [b, kv heads, s, d], by one collective."""
    local = torch.stack([_sequence_first(k), _sequence_first(v)], dim=1)
    parts = local.new_empty(dist.get_world_size(group), *local.shape)
    dist.all_gather_into_tensor(parts.flatten(0, 1), local, group=group)
    del local
    keys, values = to_natural_order(parts, division).unbind(1)
    return _heads_first(keys), _heads_first(values)


def gather_keys(k: Tensor, division: Sequence[Chunks], group: dist.ProcessGroup) -> Tensor:
    """Gather this rank's keys [b, kv heads, s/cp, d] to [b, kv heads, s, d], by one collective."""
    local = _sequence_first(k).contiguous()
    parts = local.new_empty(len(division), *local.shape)
    dist.all_gather_into_tensor(parts.flatten(0, 1), local, group=group)
    return _heads_first(to_natural_order(parts, division))


def _to_parts(dkv: Sequence[Tensor], division: Sequence[Chunks]) -> Tensor:
    """Return gradients of keys and values [b, kv heads, s, d] as the parts of all ranks [cp, s/cp, 2, b, heads, d]."""
    b, heads, s, d = dkv[0].shape
    parts = dkv[0].new_empty(len(division), s // len(division), 2, b, heads, d)
    for number, grad in enumerate(dkv):
        for part, chunks in zip(parts, _rank_order(_sequence_first(grad), division), strict=True):
            torch.cat(chunks, out=part.select(1, number))
    return parts


def _reduce_scatter(parts: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Sum ``_to_parts`` over the ranks; return this rank's gradients [b, kv heads, s/cp, d] of keys and values."""
    local = torch.empty_like(parts.select(0, 0))
    dist.reduce_scatter_tensor(local, parts.flatten(0, 1), group=group)
    dk, dv = local.unbind(1)
    return _heads_first(dk), _heads_first(dv)


def _division(
    q: Tensor, lengths: Lengths, pattern: Pattern, group: dist.ProcessGroup
) -> tuple[Sequence[Chunks], Chunks]:
    """Return the positions of all ranks' tokens and of this rank's queries [b, heads, s/cp, d]."""
    size = dist.get_world_size(group)
    division = divide(size, size * q.shape[2], lengths, pattern)
    return division, division[dist.get_rank(group)]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, pattern: Pattern, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return (attention [b, heads, s/cp, d], log-sum-exp of scores [b, heads, s/cp], fp32)."""
    division, chunks = _division(q, lengths, pattern, group)
    return torch_attention.tiles_forward(q, *_gather(k, v, division, group), lengths, pattern, chunks)


def _backward(
    grad: Tensor, saved: Sequence[Tensor], lengths: Lengths, pattern: Pattern, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. ``saved``: q, k, v, output, log-sum-exp."""
    q, k, v, out, lse = saved
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()  # kernels require a contiguous last dim
    division, chunks = _division(q, lengths, pattern, group)
    # Whole sequences set the peak of long context: each copy is freed before the next one.
    gathered = _gather(k, v, division, group)
    dq, *dkv = torch_attention.tiles_backward(grad, q, *gathered, out, lse, lengths, pattern, chunks)
    del gathered
    parts = _to_parts(dkv, division)
    del dkv
    return dq, *_reduce_scatter(parts, group)


@torch.library.custom_op("megatron_llama::context_attention", mutates_args=())
def _operator(
    q: Tensor, k: Tensor, v: Tensor, host_cu_seqlens: Tensor, group: str, pattern: list[int]
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries, for compiled blocks. ``pattern`` has the fields of ``Pattern``."""
    return _forward(q, k, v, *_how(q, host_cu_seqlens, group, pattern))


@torch.library.custom_op("megatron_llama::context_attention_backward", mutates_args=())
def _operator_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    host_cu_seqlens: Tensor,
    group: str,
    pattern: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    dq, *dkv = _backward(grad, (q, k, v, out, lse), *_how(q, host_cu_seqlens, group, pattern))
    dk, dv = (torch_attention.empty_like(x).copy_(x) for x in dkv)  # outputs of an operator must not share memory
    return dq, dk, dv


def _how(
    q: Tensor, host_cu_seqlens: Tensor, name: str, pattern: list[int]
) -> tuple[Lengths, Pattern, dist.ProcessGroup]:
    group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    length = q.shape[2] * dist.get_world_size(group)
    return torch_attention.document_lengths(host_cu_seqlens, q.shape[0], length), Pattern(*pattern), group


torch_attention.register_attention(_operator, _operator_backward, tensors=1)


# ulysses: whole sequences, and this rank's share of the heads.


class Ulysses:
    """Attention of a rank's heads over whole sequences, by the device's kernel. Documents are the same on all ranks."""

    by_documents = False

    def __init__(self, kernels: AttentionKernels, group: dist.ProcessGroup) -> None:
        self.kernels, self.group, self.cp = kernels, group, dist.get_world_size(group)

    def visible(self, tokens: Tensor, documents: Documents | None, pattern: Pattern) -> AttentionInputs | None:
        """See ``Backend``."""
        return self.kernels.visible(tokens, documents, pattern)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: AttentionInputs | None) -> Tensor:
        """See ``Backend``."""
        copies = max(1, self.cp // k.shape[1])
        if copies > 1:  # neighboring ranks have the query heads of one kv head
            k, v = k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1)
        q, k, v = (self._sequences(x) for x in (q, k, v))
        return self._tokens(self.kernels.attend(q, k, v, visible))

    def _sequences(self, x: Tensor) -> Tensor:
        """Exchange [b, heads, s/cp, d] to [b, heads/cp, s, d]."""
        by_rank = _sequence_first(x).unflatten(2, (self.cp, -1)).movedim(2, 0)
        parts = self._exchange(by_rank)
        return _heads_first(to_natural_order(parts, zigzags(self.cp, self.cp * parts.shape[1])))

    def _tokens(self, x: Tensor) -> Tensor:
        """Exchange [b, heads/cp, s, d] to [b, heads, s/cp, d]."""
        by_rank = to_rank_order(_sequence_first(x), zigzags(self.cp, x.shape[2]))
        return _heads_first(self._exchange(by_rank).movedim(0, 2).flatten(2, 3))

    def _exchange(self, parts: Tensor) -> Tensor:
        """Send part i [cp, ...] to rank i; return the parts of all ranks [cp, ...]."""
        received: Tensor = _AllToAll.apply(parts.contiguous(), self.group)
        return received


class _AllToAll(torch.autograd.Function):
    """Exchange of equal parts, which is its own gradient."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _all_to_all(grad.contiguous(), ctx.group), None


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    if torch.compiler.is_compiling():
        received: Tensor = all_to_all_single(parts, None, None, group)
        waited: Tensor = torch.ops._c10d_functional.wait_tensor(received)
        return waited
    received = torch.empty_like(parts)  # not the functional form, whose waits train/waits.py does not trace
    dist.all_to_all_single(received, parts, group=group)
    return received


BACKENDS: dict[str, type[AllGather | Ulysses]] = {"all_gather": AllGather, "ulysses": Ulysses}
"""Backends by ``trainer.cp_comm``."""


# Largest attention logit of each head in a step's forward passes (``optim.qk_clip``, optim/qk_clip.py). Kernels of
# attention do not return it, so the scores are computed once more, by blocks (``largest_logits``). A rank has the
# maximum of its heads, layers, samples and queries; ``optim/qk_clip.py`` takes the maximum over ranks. With context
# parallelism, a rank gathers the keys of whole sequences. Recomputation and validation record nothing.


def logits_measure(plan: Plan, groups: Groups) -> Callable[[Tensor, Tensor, Any, Tensor | None], Tensor | None]:
    """Return the function with which attention records its largest logits as ``max_logits``."""
    by_documents = BACKENDS[plan.config.trainer.cp_comm].by_documents

    def measure(q: Tensor, k: Tensor, visible: Any, last: Tensor | None) -> Tensor | None:
        is_recomputed = torch._C._current_graph_task_id() >= 0  # torch's checkpoint runs it in the backward pass
        if not torch.is_grad_enabled() or is_recomputed:
            return last
        with torch.no_grad():
            largest = _largest(q, k, visible, groups=groups, by_documents=by_documents)
            return largest if last is None else torch.maximum(last, largest)

    return measure


def _largest(q: Tensor, k: Tensor, visible: Any, *, groups: Groups, by_documents: bool) -> Tensor:
    """Return the largest logits of this rank's queries [b, heads, s/cp, d], fp32 [heads]."""
    if not isinstance(visible, DividedInputs):
        return torch_attention.largest_logits(q, k, visible)
    group, whole = groups["cp"], visible.of_whole
    documents = whole.lengths if by_documents and whole is not None else None
    pattern = CAUSAL if whole is None else whole.pattern
    division = divide(group.size(), k.shape[2] * group.size(), documents, pattern)
    return torch_attention.largest_logits(q, gather_keys(k, division, group), whole, division[group.rank()])
