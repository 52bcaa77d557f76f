"""The small Llama and the training settings of the other programs that write checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from megatron_llama.config import ModelConfig
from tests.checkpoint.runner import assert_same, make_plan, run
from tests.ranks import run_ranks

LR, BETAS, EPS, DECAY, BATCH, LENGTH, VOCAB = 0.003, (0.9, 0.95), 1e-6, 0.1, 8, 16, 64
SETTINGS = (f"optim.lr={LR}", f"optim.min_lr={LR}", "optim.warmup_steps=0", f"optim.eps={EPS}", "optim.clip=null")
"""The settings of our run that continues the source's."""
UNTIED = "model.tie_word_embeddings=false"
TOKENS = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0))


@dataclass
class Trained:
    """Losses of the steps after the save, and the logits of TOKENS at the save, [b, s, v]."""

    losses: list[float]
    logits: torch.Tensor


@cache
def our_model(*settings: str) -> ModelConfig:
    """Return our model of the sources' shape."""
    return make_plan(1, Path("unused"), UNTIED, *settings).model


def llama_config(**changes: Any) -> Any:
    """Return transformers' config of the sources' shape."""
    import transformers

    return transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        **changes,
    )


LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "pp2": (2, ("trainer.pp=2",)),
    "zero 3": (2, ("trainer.dp=2", "trainer.zero=3")),
    "tp2 pp2": (4, ("trainer.tp=2", "trainer.pp=2")),
}
"""Ranks and settings of the layouts that load them."""


def logits_of_weights(rank: int, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return transformers' logits of TOKENS for the weights among ``tensors``."""
    import transformers

    model = transformers.LlamaForCausalLM(llama_config())
    model.load_state_dict({name: values for name, values in tensors.items() if "/" not in name})
    with torch.no_grad():
        return model(TOKENS).logits


def check_initial_weights(
    source: Path, logits: torch.Tensor, folder: Path, *settings: str, layouts: Sequence[str] = tuple(LAYOUTS)
) -> None:
    """Start runs from the source's folder: transformers has its logits with their weights, which are bit-identical."""
    start = (f"init_from={source}", "trainer.steps=0", *settings)
    first, *others = (run(LAYOUTS[name][0], folder / name, *LAYOUTS[name][1], *start).tensors for name in layouts)
    (ours,) = run_ranks(logits_of_weights, 1, first)
    torch.testing.assert_close(ours, logits, rtol=0, atol=1e-5)
    for tensors in others:
        assert_same(tensors, first)
