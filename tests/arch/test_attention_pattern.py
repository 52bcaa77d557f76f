"""Sparse attention patterns: tiles cover exactly the visible pairs, and FLOPs count only those pairs."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_llama.arch.attention_pattern import KeyRange, Keys, Pattern, pattern_of
from megatron_llama.arch.flops import flops_per_token, matmul_parameters, mfu
from megatron_llama.arch.parameters import parameters
from megatron_llama.cli import CONF_DIR
from megatron_llama.config import ModelConfig, load_config
from megatron_llama.config.hf_config import compare_shapes, shape_from_hf, unsupported_architecture
from megatron_llama.config.settings import SparseAttention
from megatron_llama.data.batches import Batches
from megatron_llama.plan import resolve
from megatron_llama.plan.forecast_job import job_of_plan
from tests.oracle import RaggedSamples, make_plan
from tests.paths import CONF

PATTERNS = [
    Pattern(),
    Pattern(window=1),
    Pattern(window=7),
    Pattern(window=40),
    Pattern(block=3, local_blocks=4, global_blocks=1),
    Pattern(block=2, local_blocks=2, global_blocks=2),
    Pattern(block=50, local_blocks=1, global_blocks=1),
]


def visible(pattern: Pattern, length: int) -> set[tuple[int, int]]:
    """Enumerate the visible (query, key) pairs by the definitions in settings.py."""
    pairs = set()
    for query, key in product(range(length), repeat=2):
        if pattern.window:
            is_visible = query - key < pattern.window
        elif pattern.group:
            block = key // pattern.block % pattern.local_blocks
            same = query // pattern.group == key // pattern.group
            is_visible = same or block >= pattern.local_blocks - pattern.global_blocks
        else:
            is_visible = True
        if key <= query and is_visible:
            pairs.add((query, key))
    return pairs


def covered(pattern: Pattern, length: int) -> list[tuple[int, int]]:
    """The pairs that the tiles' calls compute and let through."""
    groups, first, size = pattern.global_keys(length)
    global_keys = [group * size + place for group in range(groups) for place in range(first, size)]
    pairs = []
    for start, stop, parts in pattern.tiles(length):
        for place, query in enumerate(range(start, stop)):
            for part in parts:
                pairs += [(query, key) for key in _keys(part, place, global_keys, pattern.window)]
    return pairs


def _keys(part: KeyRange, place: int, global_keys: list[int], window: int) -> list[int]:
    keys = list(range(part.start, part.stop))
    if part.keys is Keys.CAUSAL:
        return keys[: place + 1]
    if part.keys is Keys.WINDOW:
        return keys[place : place + window]
    return [global_keys[key] for key in keys] if part.keys is Keys.GLOBAL else keys


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("length", [1, 2, 11, 12, 13, 41, 90])
def test_tiles_cover_what_is_seen_once(pattern: Pattern, length: int) -> None:
    pairs, expected = covered(pattern, length), visible(pattern, length)
    assert len(pairs) == len(set(pairs)) and set(pairs) == expected
    assert (len(expected) < length * (length + 1) / 2) == pattern.is_sparse(length)
    # A span counts the pairs on the edge by half: at most one for each token.
    assert 0 <= len(expected) - pattern.span(length) * length / 2 <= length / 2


def test_flops_of_a_window_and_of_blocks() -> None:
    """By hand: 4096 tokens that see at most 1024; groups of 512, and the last 128 of each earlier one."""
    window = pattern_of(ModelConfig(sliding_window=1024)).span(4096)
    assert window == 2 * 1024 - 1024**2 / 4096 == 1792
    blocks = pattern_of(ModelConfig(sparse_attention=SparseAttention(128, 4, 1))).span(4096)
    assert blocks == (8 * 512**2 + 2 * sum(512 * 128 * group for group in range(8))) / 4096 == 1408
    model = ModelConfig(head_dim=48)
    whole, none = flops_per_token(model, 4096).causal, flops_per_token(model, 0).causal
    assert flops_per_token(model, window).causal - none == (whole - none) * 1792 / 4096


@pytest.mark.parametrize(
    "setting", ["model.sliding_window=5", "model.sparse_attention={block: 2, num_local_blocks: 2}"]
)
def test_a_run_and_its_forecast_count_alike(setting: str) -> None:
    plan = make_plan(1, setting)
    span = pattern_of(plan.model).span(16)
    assert span < 16 and job_of_plan(plan).document == round(span)
    sizes = Batches(RaggedSamples(16, 64), plan, plan.topology(0), None).on_host(0)[0].token_counts.tolist()
    assert sizes == [2 * 16, 2 * round(16 * span)]


def test_the_plan_says_what_is_seen() -> None:
    def notes(*overrides: str) -> str:
        common = ["data=mock", "data.seq_length=512", "device=cpu"]
        return "\n".join(resolve(load_config([*common, *overrides], CONF), 1).notes)

    assert "attention in a window of 128 tokens: tiles" in notes("model.sliding_window=128")
    assert "attention inside documents: tiles" in notes("data.document_mask=true", "model.sliding_window=512")
    assert "attention" not in notes("model.sliding_window=512")
    blocks = notes("model.sparse_attention.block=16")
    assert "attention in groups of 64 tokens, and to the last 16 of each earlier group: tiles" in blocks


def test_mistrals_config() -> None:
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 8, "model_type": "mistral"}
    # Defaults of transformers' MistralConfig for missing keys; a null is a value.
    assert shape_from_hf(shape)["sliding_window"] == 4096
    assert shape_from_hf(shape)["num_key_value_heads"] == 8
    assert shape_from_hf({**shape, "sliding_window": None})["sliding_window"] is None
    # transformers does not read a Llama's.
    assert shape_from_hf({**shape, "model_type": "llama", "sliding_window": 7})["sliding_window"] is None
    assert not unsupported_architecture(shape)
    assert unsupported_architecture({**shape, "model_type": "mixtral"})
    ours = {**shape_from_hf(shape), "sliding_window": 5}
    assert compare_shapes(ours, {**shape, "sliding_window": 4}) == {"sliding_window": (5, 4)}


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
    # NVIDIA's recipe for Llama 3.1 8B on 8 H100: 10,682 tokens/s on each, 62.47 % by full attention.
    model = load_config(["model=llama3_8b", "data=mock"], CONF_DIR).model
    assert mfu(flops_per_token(model, 8192).full, 8 * 10_682, 989e12, 8) == pytest.approx(0.6247, abs=2e-3)
