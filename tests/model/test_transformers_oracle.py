"""Logits, loss and each gradient equal transformers' LlamaForCausalLM with the same weights."""

from __future__ import annotations

import pytest
import torch

from megatron_llama.plan import Plan
from tests.compiled import skip_without_compiler
from tests.layouts.table import ONE_MICRO_BATCH
from tests.model.llamas import Answer, ours, theirs
from tests.oracle import Tensors, distance, make_plan
from tests.ranks import run_ranks
from tests.rows import each_layout, read_layouts

# Imported before any rank is forked: it takes seconds.
transformers = pytest.importorskip("transformers", reason="transformers, the oracle, is a development dependency")

TOLERANCE = 1e-5  # fp32; sums in another order

MODELS = {name: model for name, (_, model) in read_layouts(__file__, "models")[0].items()}


@each_layout(__file__, "transformers")
@pytest.mark.usefixtures("compiled_here")
def test_equals_transformers(ranks: int, layout: list[str]) -> None:
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


@each_layout(__file__, "transformers in bf16", "ranks, settings")
@pytest.mark.usefixtures("compiled_here")
def test_bf16_is_as_close_to_fp32_as_transformers(ranks: int, settings: list[str]) -> None:
    skip_without_compiler(settings)
    our_errors, their_errors = _errors_of_bf16(ranks, settings)
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


def _errors_of_bf16(ranks: int, settings: list[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the differences of bf16 from fp32: our layout from our one process, and transformers from itself."""
    alone = [one for one in settings if not one.startswith("trainer.") or one == ONE_MICRO_BATCH]
    plan, half = make_plan(1, *alone), make_plan(ranks, *settings, "trainer.precision=bf16")
    assert half.storage.keeps_bf16_grads == (ONE_MICRO_BATCH in settings)
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
