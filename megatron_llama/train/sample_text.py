"""A few lines written by the model that was just trained, in whatever layout it is in.

Each token is one forward pass over the whole sequence, at the run's own shapes: slow per token, but it needs no
second model and no other layout, and a few dozen tokens take seconds.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from megatron_llama.parallel import ParallelModel
from megatron_llama.plan import Plan
from megatron_llama.text.tokenizer import read_sentencepiece, tokenizer_file

_TEMPERATURE = 0.7


@torch.no_grad()
def continue_prompts(plan: Plan, model: ParallelModel) -> list[str]:
    """The prompts of ``logging.sample_prompts``, each continued by ``logging.sample_tokens``. All ranks must call
    it."""
    tokenizer = plan.config.data.tokenizer
    if tokenizer is None or not Path(tokenizer).exists() or not plan.config.logging.sample_prompts:
        return []
    pieces = read_sentencepiece(tokenizer_file(tokenizer))
    length = plan.config.data.seq_length
    prompts = [pieces.encode(prompt)[: length // 2] for prompt in plan.config.logging.sample_prompts]
    ids = _extend(prompts, plan, model, min(plan.config.logging.sample_tokens, length // 2))
    return [pieces.decode(_until(row, pieces.eos_id())) for row in ids]


def _extend(prompts: list[list[int]], plan: Plan, model: ParallelModel, count: int) -> list[list[int]]:
    """Sample ``count`` more ids for each prompt, the same on all ranks."""
    tokens = torch.zeros(len(prompts), plan.config.data.seq_length, dtype=torch.int64)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    generator = torch.Generator().manual_seed(plan.config.trainer.seed)
    rows = torch.arange(len(prompts))
    for _ in range(count):
        logits = model.logits(tokens.to(model.device))
        chosen = torch.full((len(prompts),), -1, dtype=torch.int64)
        if logits is not None:  # the last pipeline stage; its tensor-parallel ranks all choose the same
            whole = gather_from_tensor_model_parallel_region(logits).cpu()[lengths - 1, rows]
            whole = whole[:, : plan.model.vocab_size]  # the draw would depend on how many columns pad the vocabulary
            probabilities = torch.softmax(whole.float() / _TEMPERATURE, dim=-1)
            chosen = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
        chosen = chosen.to(model.device)
        dist.all_reduce(chosen, op=dist.ReduceOp.MAX)
        tokens[rows, lengths] = chosen.cpu()
        lengths += 1
    return [row[:n].tolist() for row, n in zip(tokens, lengths.tolist(), strict=True)]


def _until(ids: list[int], end: int) -> list[int]:
    return ids[: ids.index(end)] if end in ids else ids
