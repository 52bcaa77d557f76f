"""Logits, loss and each gradient equal transformers' LlamaForCausalLM with the same weights."""

from __future__ import annotations

import pytest
import torch

from megatron_llama.plan import Plan
from tests.compiled import skip_without_compiler
from tests.layouts.table import ASYNC_TP, BIASES, COMPILED, OLMO2, ONE_MICRO_BATCH, QWEN2, QWEN3, TIED, WIDE, WINDOW
from tests.model.llamas import Answer, ours, theirs
from tests.oracle import Tensors, distance, make_plan
from tests.ranks import run_ranks
from tests.rows import rows

# Imported before any rank is forked: it takes seconds.
transformers = pytest.importorskip("transformers", reason="transformers, the oracle, is a development dependency")

TOLERANCE = 1e-5  # fp32; sums in another order

# Wavelengths of head_dim 8 are 6, 63, 628 and 6283: one is kept, one lies between, two are stretched.
LLAMA3_ROPE = (
    "model.rope_scaling.rope_type=llama3",
    "model.rope_scaling.factor=8",
    "model.rope_scaling.low_freq_factor=1",
    "model.rope_scaling.high_freq_factor=4",
    "model.rope_scaling.original_max_position_embeddings=128",
)
YARN_ROPE = ("model.rope_scaling={rope_type: yarn, factor: 4, original_max_position_embeddings: 64}",)
LONGROPE = (
    "model.rope_scaling={rope_type: longrope, factor: 4, original_max_position_embeddings: 8, "
    "short_factor: [1, 1, 1, 1], long_factor: [1, 2, 3, 4]}",
)
DYNAMIC_ROPE = ("model.max_position_embeddings=8", "model.rope_scaling={rope_type: dynamic, factor: 8}")
MODELS = {
    "grouped queries": (),
    "one kv head": ("model.num_key_value_heads=1",),
    "multi-head": ("model.num_key_value_heads=4",),
    "tied": ("model.tie_word_embeddings=true",),
    "llama3 rope": LLAMA3_ROPE,
    "yarn rope": YARN_ROPE,
    "longrope": LONGROPE,
    "dynamic rope": DYNAMIC_ROPE,
    "wide heads": ("model.head_dim=32",),
    "other eps and theta": ("model.rms_norm_eps=0.1", "model.rope_theta=100"),
    "sliding window": ("model.sliding_window=5",),
    "sliding window, wide heads": ("model.sliding_window=5", "model.head_dim=32"),
    "qwen2": (QWEN2,),
    "qwen2, one kv head, tied, window": (QWEN2, "model.num_key_value_heads=1", TIED, WINDOW),
    "qwen3": (QWEN3,),
    "qwen3, wide heads, window": (QWEN3, "model.head_dim=32", WINDOW),
    "qwen3, biases": (QWEN3, BIASES[0]),
    "olmo2": (OLMO2,),
    "olmo2, one kv head, tied, wide heads": (OLMO2, "model.num_key_value_heads=1", TIED, "model.head_dim=32"),
    # Larger weights: next to the biases of ``roughen_norms``, gradients would be rounding errors.
    "olmo2, biases": (OLMO2, BIASES[0], "model.initializer_range=0.5"),
    "biases": (*BIASES, "model.initializer_range=0.2"),
    "odd vocabulary, tied, llama3 rope": ("model.vocab_size=61", "model.tie_word_embeddings=true", *LLAMA3_ROPE),
}
LAYOUTS = {
    "one process": (1, ()),
    "tp2·pp2": (4, ("trainer.tp=2", "trainer.pp=2")),
    "one process, compiled": (1, tuple(COMPILED)),
    "tp2+sp, async_tp": (2, tuple(ASYNC_TP)),
    "tp4, kv heads < tp": (4, ("trainer.tp=4", "trainer.sp=false")),
}


@pytest.mark.parametrize(("ranks", "layout"), rows(LAYOUTS.items(), {"one process"}))
@pytest.mark.usefixtures("compiled_here")
def test_equals_transformers(ranks: int, layout: tuple[str, ...]) -> None:
    skip_without_compiler(layout)
    plans = [make_plan(ranks, *layout, *model) for model in MODELS.values()]
    answers = ours(ranks, plans)
    expected = run_ranks(_theirs, 1, plans, [answer.weights for answer in answers])[0]
    for name, answer, oracle in zip(MODELS, answers, expected, strict=True):
        differences = _differences(answer, oracle)
        assert all(difference <= TOLERANCE for difference in differences.values()), (name, differences)
        assert answer.accuracy == pytest.approx(oracle.accuracy, abs=1e-6), name
        assert (answer.fused > 0) == ("trainer.async_tp=true" in layout)
    assert any(answer.accuracy > 0 for answer in answers)


def test_models_differ_where_they_should() -> None:
    # The comparison would be worth little if, at this size, the settings made no difference.
    ropes = ("llama3 rope", "yarn rope", "longrope", "dynamic rope")
    names = ("grouped queries", *ropes, "other eps and theta", "sliding window")
    plain, *others = ours(1, [make_plan(1, *MODELS[name]) for name in names])
    for other in others:
        assert distance(other.logits, plain.logits) > 1e-2


# Paths that bf16 alone takes: one micro batch's gradients stay in 16 bits until the update, and compiled blocks have a
# kernel for attention that sums in 32. name, ranks, layout, model.
BF16 = [
    ("one process", (1, (), ())),
    ("one micro batch", (1, (ONE_MICRO_BATCH,), ("model.num_key_value_heads=1",))),
    ("tp2·pp2, tied, one micro batch", (4, ("trainer.tp=2", "trainer.pp=2", ONE_MICRO_BATCH), (TIED,))),
    ("compiled, one micro batch", (1, (*COMPILED, ONE_MICRO_BATCH), tuple(WIDE))),
    ("tp2+sp, compiled, window", (2, ("trainer.tp=2", *COMPILED), (*WIDE, WINDOW))),
]


@pytest.mark.parametrize(("ranks", "layout", "model"), rows(BF16, {name for name, _ in BF16[:3]}))
@pytest.mark.usefixtures("compiled_here")
def test_bf16_is_as_close_to_fp32_as_transformers(ranks: int, layout: tuple[str, ...], model: tuple[str, ...]) -> None:
    skip_without_compiler(layout)
    our_errors, their_errors = _errors_of_bf16(ranks, layout, model)
    assert not _beyond(our_errors, their_errors)
    assert our_errors["logits"] > 1e-3  # bf16 really is at work


def _beyond(ours: dict[str, float], theirs: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Our errors that are above their limits, with these.

    Both round to 8 bits after each operation; neither may be much further from fp32 than the other. The factor leaves
    room for where each rounds (we turn queries and keep the loss in fp32, they don't). A norm's weight has 32 values,
    too few for its own error to be a scale: theirs is the largest of all norms.
    """
    of_norms = max(error for kind, error in theirs.items() if kind.endswith("norm.weight"))
    scales = {kind: of_norms if kind.endswith("norm.weight") else error for kind, error in theirs.items()}
    limits = {kind: 2 * scale + 1e-3 for kind, scale in scales.items()}
    return {kind: (error, limits[kind]) for kind, error in ours.items() if error > limits[kind]}


def _errors_of_bf16(
    ranks: int, layout: tuple[str, ...], model: tuple[str, ...]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the differences of bf16 from fp32: our layout from our one process, and transformers from itself."""
    plan = make_plan(1, *model, *(setting for setting in layout if setting == ONE_MICRO_BATCH))
    half = make_plan(ranks, *layout, *model, "trainer.precision=bf16")
    assert half.storage.keeps_bf16_grads == (ONE_MICRO_BATCH in layout)
    exact, rounded = ours(1, [plan])[0], ours(ranks, [half])[0]
    their_exact, their_rounded = run_ranks(_exact_and_rounded, 1, plan, exact.weights)[0]
    return _differences(rounded, exact), _differences(their_rounded, their_exact)


def _differences(answer: Answer, oracle: Answer) -> dict[str, float]:
    assert answer.logits.shape == oracle.logits.shape
    actual = {"logits": distance(answer.logits, oracle.logits.float()), "loss": abs(answer.loss / oracle.loss - 1)}
    assert answer.grads.keys() == oracle.grads.keys()
    return actual | {name: distance(grad, oracle.grads[name].float()) for name, grad in answer.grads.items()}


def _theirs(rank: int, plans: list[Plan], weights: list[Tensors]) -> list[Answer]:
    return [theirs(plan, tensors) for plan, tensors in zip(plans, weights, strict=True)]


def _exact_and_rounded(rank: int, plan: Plan, weights: Tensors) -> tuple[Answer, Answer]:
    return theirs(plan, weights), theirs(plan, weights, torch.bfloat16)
