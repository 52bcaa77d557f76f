"""Pipeline parallelism: megatron-core's schedules (1F1B and interleaved 1F1B, Narayanan et al. 2021, arXiv:2104.04473).

The loss of a micro batch is the sum over its tokens, divided by the number of tokens with loss in the global batch. So
gradients are sums over micro batches and data-parallel ranks, and do not depend on the split of the batch. A mean of
micro-batch means would give tokens of short sequences more weight (huggingface/transformers#34191).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)

from megatron_llama.devices.attention_inputs import Documents
from megatron_llama.model.inputs import MicroBatch
from megatron_llama.model.llama import Llama
from megatron_llama.parallel.data_parallel import no_sync_func
from megatron_llama.parallel.dp1_weight_casts import ComputeCopies
from megatron_llama.plan import Plan


class TokenTotals(NamedTuple):
    """Token counts of a global batch, int64 scalars."""

    with_loss: torch.Tensor
    """Tokens with loss, or pairs of answers."""
    tokens: torch.Tensor
    """Tokens that are not padding."""
    attended: torch.Tensor
    """Sum over documents of length * ``Pattern.span(length)``, which the FLOPs of attention are proportional to."""


def run_schedule(
    chunks: list[Llama],
    plan: Plan,
    microbatches: Sequence[MicroBatch],
    total_tokens: torch.Tensor,
    train: bool,
    compute_copies: Sequence[ComputeCopies | None],
) -> torch.Tensor:
    """Run forward, with ``train`` also backward, over this rank's micro batches.

    Args:
        total_tokens: int64 scalar, tokens with loss (or pairs of answers) in the global batch.
        compute_copies: the chunks' compute-dtype copies.

    Returns:
        Sum of this rank's token losses divided by ``total_tokens``, fp32 scalar. Without ``train`` [2], with the share
        of tokens whose label has the largest logit. With pairs, the loss and ``finetune.metrics``. Zero except on the
        last pipeline stage.
    """
    trainer, metrics = plan.config.trainer, plan.config.finetune.metrics

    def forward_step(batches: Iterator[MicroBatch], chunk: Llama) -> tuple[torch.Tensor, Any]:
        """Return the chunk's output, and a function from the loss to (loss, tokens with loss, value to collect)."""
        batch = next(batches)
        labels = (batch.labels, batch.loss_mask / total_tokens) if chunk.is_last else (None, None)
        inputs = chunk.build_inputs(batch.tokens, batch.documents, batch.subsets if train else None)
        keys = batch.noise_keys if train else None
        pairs = batch.pairs and replace(batch.pairs, weight=1 / total_tokens)
        output = chunk(batch.tokens, *labels, inputs, pairs=pairs, noise_keys=keys)
        return output, lambda loss: (loss[0] if metrics else loss, batch.loss_mask.sum().int(), loss.detach())

    contexts = [no_sync_func(chunk, trainer.zero, copies) for chunk, copies in zip(chunks, compute_copies, strict=True)]
    if train and contexts[0] is not None:  # the interleaved schedule takes one for each chunk
        chunks[0].config.no_sync_func = contexts if trainer.vpp > 1 else contexts[0]
    losses = _run(chunks, plan, forward_step, microbatches, microbatches[0].tokens.shape, train)
    chunks[0].config.no_sync_func = None  # without a backward pass, 1F1B would enter it and not leave it
    shape = (1 + len(metrics),) if metrics else () if train else (2,)
    return torch.stack(losses).sum(dim=0) if losses else torch.zeros(shape, device=total_tokens.device)


def run_answer_logps(chunks: list[Llama], plan: Plan, microbatches: Sequence[MicroBatch]) -> list[torch.Tensor]:
    """Run forward over pairs. Return ``PreferenceLoss.answer_logps`` of each micro batch on the last pipeline stage."""

    def forward_step(batches: Iterator[MicroBatch], chunk: Llama) -> tuple[torch.Tensor, Any]:
        batch = next(batches)
        labels = (batch.labels, batch.loss_mask) if chunk.is_last else (None, None)
        inputs = chunk.build_inputs(batch.tokens, batch.documents)
        assert batch.pairs is not None
        return chunk(batch.tokens, *labels, inputs, pairs=replace(batch.pairs, reference=None)), None

    return _run(chunks, plan, forward_step, microbatches, microbatches[0].tokens.shape, train=False)


def run_logits(
    chunks: list[Llama],
    plan: Plan,
    tokens: torch.Tensor,
    documents: Documents | None = None,
    token_index: torch.Tensor | None = None,
    *,
    is_divided: bool = False,
) -> torch.Tensor | None:
    """Run forward over one micro batch of token ids [b, s], packed if ``documents`` is given.

    Args:
        is_divided: the tokens are this rank's part of each sequence. Default: they are whole sequences, which each
            context-parallel rank computes.
        token_index: [b], int64, the token of each row whose logits are returned. Default: all tokens.

    Returns:
        This rank's logits [s or 1, b, vocabulary/t] on the last pipeline stage, None on the others.
    """
    # A rank of sequence parallelism has a part of the sequence before the head: select after it.
    before_head = None if plan.sp else token_index
    # The interleaved schedule needs a multiple of pp micro batches: repeat the one.
    repeats = plan.config.trainer.pp if plan.config.trainer.vpp > 1 else 1

    def forward_step(batches: Iterator[torch.Tensor], chunk: Llama) -> tuple[torch.Tensor, Any]:
        tokens = next(batches)
        build = chunk.build_inputs if is_divided else chunk.build_inputs.whole
        return chunk(tokens, inputs=build(tokens, documents), token_index=before_head), None

    outputs = _run(chunks, plan, forward_step, [tokens] * repeats, tokens.shape, train=False)
    if not outputs or token_index is None or before_head is not None:
        return outputs[0] if outputs else None
    return outputs[0][token_index, torch.arange(len(token_index), device=token_index.device)][None]


def _run(
    chunks: list[Llama],
    plan: Plan,
    forward_step: Callable[..., tuple[torch.Tensor, Any]],
    microbatches: Sequence[Any],
    shape: torch.Size,
    train: bool,
) -> list[torch.Tensor]:
    """Run the plan's schedule over micro batches of token ids of ``shape`` [b, s]. Return the collected values."""
    if plan.config.trainer.pp == 1:
        schedule = forward_backward_no_pipelining
    elif plan.config.trainer.vpp == 1:
        schedule = forward_backward_pipelining_without_interleaving
    else:
        schedule = forward_backward_pipelining_with_interleaving
    for chunk in chunks:
        chunk.train(train)
    iterators, interleaved = [iter(microbatches) for _ in chunks], plan.config.trainer.vpp > 1
    with torch.set_grad_enabled(train):
        collected: list[torch.Tensor] = schedule(
            forward_step_func=forward_step,
            data_iterator=iterators if interleaved else iterators[0],
            model=chunks if interleaved else chunks[0],
            num_microbatches=len(microbatches),
            seq_length=shape[1] * plan.grid.divisor("tokens"),  # megatron-core divides it by these ranks
            micro_batch_size=shape[0],
            forward_only=not train,
        )
    return collected
