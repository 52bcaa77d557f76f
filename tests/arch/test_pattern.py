"""Sparse attention patterns: tiles cover exactly the visible pairs, and FLOPs count only those pairs."""

from __future__ import annotations

from itertools import product

import pytest

from megatron_llama.arch.flops import flops_per_token
from megatron_llama.arch.pattern import KeyRange, Keys, Pattern, pattern_of
from megatron_llama.config import ModelConfig, SparseAttention, load_config
from megatron_llama.config.hf_config import compare_shapes, shape_from_hf, unsupported_architecture
from megatron_llama.data.batches import Batches
from megatron_llama.plan import resolve
from megatron_llama.plan.job import job_of_plan
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
