"""FLOPs against published counts, against torch's own counter, and MFU against an example that went wrong elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_llama.arch.flops import flops_per_token, matmul_parameters, mfu
from megatron_llama.cli import CONF_DIR
from megatron_llama.config import ModelConfig, load_config
from megatron_llama.plan import parameters

# preset, sequence, then GFLOP per token: 6 x parameters, full and causal attention
GOLDEN = [
    ("llama7b", 4096, 40.43, 46.08, 42.86),
    ("llama13b", 4096, 78.10, 87.18, 82.14),
    ("llama70b", 4096, 413.86, 444.49, 428.39),
    ("llama3_8b", 8192, 48.18, 57.91, 51.47),
    ("llama3_70b", 8192, 423.32, 481.43, 449.22),
    ("llama3_405b", 8192, 2435.12, 2625.42, 2523.96),
]


@pytest.mark.parametrize(("preset", "sequence", "six_p", "full", "causal"), GOLDEN)
def test_published_models(preset: str, sequence: int, six_p: float, full: float, causal: float) -> None:
    model = load_config([f"model={preset}", "data=mock"], CONF_DIR).model
    flops = flops_per_token(model, sequence)
    assert 6 * parameters(model) / 1e9 == pytest.approx(six_p, abs=0.006)
    # The table was counted with the norms' weights, which no product uses: 6 FLOPs each, at most its last digit.
    assert flops.full / 1e9 == pytest.approx(full, rel=2e-5, abs=0.006)
    assert flops.causal / 1e9 == pytest.approx(causal, rel=2e-5, abs=0.006)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kv_heads", [4, 2], ids=["mha", "gqa"])
def test_equals_torchs_counter(tied: bool, kv_heads: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": kv_heads}
    model = ModelConfig(**shape, tie_word_embeddings=tied)
    # Eager attention multiplies plain matrices, which the counter counts as the full square.
    config = LlamaConfig(**shape, tie_word_embeddings=tied, use_cache=False, attn_implementation="eager")
    batch, sequence = 2, 16
    tokens = torch.zeros(batch, sequence, dtype=torch.long)
    rotary = 2 * batch * sequence * (model.hidden_size // model.num_attention_heads // 2)  # positions x frequencies
    with FlopCounterMode(display=False) as forward:
        logits = LlamaForCausalLM(config)(tokens).logits
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    ours = flops_per_token(model, sequence).full * batch * sequence
    counted = forward.get_total_flops()
    assert counted - ours // 3 in (0, rotary, rotary // batch), "the only other matmul is RoPE's table"
    assert backward.get_total_flops() == ours // 3 * 2


def test_heads_count_tied_or_not() -> None:
    tied, untied = (ModelConfig(tie_word_embeddings=tied) for tied in (True, False))
    assert matmul_parameters(tied) == matmul_parameters(untied)


def test_mfu_divides_by_all_devices() -> None:
    # 500 steps of 16 x 2048 tokens of a 70 B model took 13.5 h on 16 devices of 312 TFLOP/s. Divided by the peak of one
    # device, as it was once published, it looks like 45.5 %.
    speed = 500 * 16 * 2048 / (13.5 * 3600)
    assert mfu(6 * 70e9, speed, 312e12, 16) == pytest.approx(0.0284, abs=1e-4)
    assert mfu(6 * 70e9, speed, 312e12, 1) == pytest.approx(0.454, abs=1e-3)


def test_mfu_of_a_published_recipe() -> None:
    # NVIDIA's recipe for Llama 3.1 8B on 8 H100: 10,682 tokens/s on each, 62.47 % by full attention.
    model = load_config(["model=llama3_8b", "data=mock"], CONF_DIR).model
    assert mfu(flops_per_token(model, 8192).full, 8 * 10_682, 989e12, 8) == pytest.approx(0.6247, abs=2e-3)
