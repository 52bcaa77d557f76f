"""Text samples generated after training, in the training layout.

Each token costs a forward pass over a whole sequence: slow, but it needs no second model or layout.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Continue each of ``logging.sample_prompts`` by ``logging.sample_tokens`` tokens. A collective."""
    tokenizer = plan.config.data.tokenizer
    if tokenizer is None or not Path(tokenizer).exists() or not plan.config.logging.sample_prompts:
        return []
    processor = read_sentencepiece(tokenizer_file(tokenizer))
    length = plan.config.data.length
    prompts = [processor.encode(prompt)[: length // 2] for prompt in plan.config.logging.sample_prompts]
    vocabulary = min(processor.vocab_size(), plan.model.vocab_size)
    ids = _extend(prompts, plan, model, min(plan.config.logging.sample_tokens, length // 2), vocabulary)
    end = processor.eos_id()
    return [processor.decode(row[: row.index(end)] if end in row else row) for row in ids]


def _extend(prompts: list[list[int]], plan: Plan, model: ParallelModel, count: int, vocabulary: int) -> list[list[int]]:
    """Sample ``count`` ids below ``vocabulary`` per prompt, equal on all ranks."""
    tokens = torch.zeros(len(prompts), plan.config.data.length, dtype=torch.int64)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    rows = torch.arange(len(prompts))
    generators = [torch.Generator().manual_seed(plan.config.trainer.seed + row) for row in rows.tolist()]
    for _ in range(count):
        # One position per prompt: the logits of all positions would take gigabytes.
        logits = model.logits(tokens.to(model.device), token_index=(lengths - 1).to(model.device))
        chosen = torch.full((len(prompts),), -1, dtype=torch.int64)
        if logits is not None:  # last pipeline stage; its tensor-parallel ranks sample the same token
            whole = gather_from_tensor_model_parallel_region(logits).cpu()[0]
            whole = whole[:, :vocabulary]  # ids of the tokenizer: models and layouts pad the vocabulary
            chosen = draw(torch.softmax(whole.double() / _TEMPERATURE, dim=-1), generators)
        chosen = chosen.to(model.device)
        dist.all_reduce(chosen, op=dist.ReduceOp.MAX)
        tokens[rows, lengths] = chosen.cpu()
        lengths += 1
    return [row[:n].tolist() for row, n in zip(tokens, lengths.tolist(), strict=True)]


def draw(probabilities: torch.Tensor, generators: Sequence[torch.Generator]) -> torch.Tensor:
    """Draw an id per row by an exponential race: each id arrives at a random time, and the first one wins.

    The noise of an id depends on the row's generator, the number of earlier draws and the id. Rounding of the
    probabilities changes the winner only if the first two times are equal within this rounding. With a cumulative sum,
    rounding of all earlier ids would move the limits of each id.

    Args:
        probabilities: [b, vocabulary], fp64, on the CPU. Their sum need not be 1.
        generators: one per row, on the CPU.

    Returns:
        ids, [b].
    """
    # Not exponential_, whose numbers depend on whether torch is built with MKL.
    uniform = [torch.rand(probabilities.shape[-1], dtype=torch.float64, generator=each) for each in generators]
    times = -torch.stack(uniform).clamp_min_(torch.finfo(torch.float64).tiny).log_()
    return (probabilities / times).argmax(-1)
