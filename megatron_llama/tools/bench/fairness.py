"""Whether contestants do the same work: the same weights, tokens and dtypes. Those that don't are refused by name."""

from __future__ import annotations

import math

from megatron_llama.tools.bench.contest import Facts, Task, checksum

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
LOSS_TOLERANCE = 0.1
"""The first loss is the logarithm of the vocabulary within this share: initial weights differ, random tokens can't be
guessed, and another normalization or shift would show."""


def unfair(task: Task, facts: Facts, first_loss: float, torch_version: str) -> list[str]:
    """What a contestant does otherwise than its task says, a sentence each; empty for a fair one."""
    tokens = task.text(1)[:, :-1]
    wanted: dict[str, tuple[object, object]] = {
        "parameters": (facts.parameters, task.parameters),
        "dtype of the weights": (facts.weight_dtype, "float32"),
        "dtype of the products": (facts.compute_dtype, DTYPES[task.precision]),
        "tokens of a step": (facts.tokens_per_step, tokens.numel()),
        "checksum of the first tokens": (facts.tokens_checksum, checksum(tokens)),
        "largest gradient norm": (facts.clip, task.optimizer["clip"]),
        "torch": (facts.versions.get("torch"), torch_version),
    }
    found = [f"{what}: {has}, not {should}" for what, (has, should) in wanted.items() if has != should]
    expected = math.log(task.model["vocab_size"])
    if not abs(first_loss - expected) < LOSS_TOLERANCE * expected:
        found.append(f"first loss: {first_loss:.4f}, not within {LOSS_TOLERANCE:.0%} of {expected:.4f}")
    return found
