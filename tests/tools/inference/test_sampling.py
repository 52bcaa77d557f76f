"""Sampling of ids."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers.generation import logits_process

from megatron_llama.tools.inference.generator import choose, filter_probabilities, penalize, used_ids
from megatron_llama.tools.inference.sampling import Sampling, describe, folder_defaults, ignored_settings
from tests.golden import GoldenFiles

PROCESSORS: dict[str, Any] = {  # in the order of GenerationMixin._get_logits_processor
    "repetition_penalty": logits_process.RepetitionPenaltyLogitsProcessor,
    "temperature": logits_process.TemperatureLogitsWarper,
    "top_k": logits_process.TopKLogitsWarper,
    "top_p": logits_process.TopPLogitsWarper,
    "min_p": logits_process.MinPLogitsWarper,
}
P = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)  # exact sums


def drawn(sampling: Sampling, logits: torch.Tensor, count: int = 4000) -> torch.Tensor:
    """Shares of each id among many draws."""
    generators = sampling.generators(1)
    ids = [int(choose(logits, sampling, generators)) for _ in range(count)]
    return torch.bincount(torch.tensor(ids), minlength=logits.shape[-1]) / count


@pytest.mark.parametrize(
    ("sampling", "shares"),
    [
        (Sampling(temperature=1.0), P),
        (Sampling(temperature=1.0, top_p=0.75), torch.tensor([2 / 3, 1 / 3, 0, 0])),
        (Sampling(temperature=0.5), P**2 / (P**2).sum()),
    ],
    ids=["all", "nucleus", "squares"],
)
def test_shares_are_the_probabilities(sampling: Sampling, shares: torch.Tensor) -> None:
    order = torch.tensor([2, 0, 3, 1])  # not falling
    logits = torch.log(P[order]).float()[None]
    assert drawn(sampling, logits).tolist() == pytest.approx(shares[order].tolist(), abs=0.03)


@pytest.mark.parametrize("top_p", [0.1, 0.25, 0.5, 0.8, 0.99])
def test_the_nucleus_as_a_plain_loop_finds_it(top_p: float) -> None:
    """Many ids are equally likely, so that ties are at the limit."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        weights = torch.bincount(torch.randint(200, (1024,), generator=generator), minlength=200)
        probabilities = weights.double() / 1024  # exact sums
        expected, total = [], 0.0
        for number in sorted(range(200), key=lambda each: (-int(weights[each]), each)):
            if total < top_p:
                expected.append(number)
                total += float(probabilities[number])
        result = filter_probabilities(probabilities, Sampling(top_p=top_p))
        assert result.nonzero()[:, 0].tolist() == sorted(expected)
        assert torch.equal(result[expected], probabilities[expected])


ROUNDING = 3e-7
"""Difference of logits between layouts and between instruction sets."""


@pytest.mark.parametrize("scale", [1e-3, 2.0], ids=["nearly equal logits", "different logits"])
@pytest.mark.parametrize("noise", [ROUNDING, 0.01], ids=["rounding", "more"])
def test_noise_changes_only_draws_that_are_ties_within_it(scale: float, noise: float) -> None:
    rows, size, sampling = 2000, 512, Sampling(temperature=1.0)
    logits = scale * torch.randn(rows, size, generator=torch.Generator().manual_seed(0))
    error = noise * (2 * torch.rand(rows, size, generator=torch.Generator().manual_seed(1)) - 1)
    one, other = (choose(each, sampling, sampling.generators(rows)) for each in (logits, logits + error))
    changed = (one != other).nonzero()[:, 0].tolist()
    assert bool(changed) == (noise > ROUNDING) and len(changed) <= rows * noise
    generators = sampling.generators(rows)
    for row in changed:
        uniform = torch.rand(size, dtype=torch.float64, generator=generators[row])
        scores = logits[row].double() - (-uniform.log()).log()
        assert scores[one[row]] == scores.max() and scores.max() - scores[other[row]] <= 2 * noise


@pytest.mark.parametrize("scale", [1e-3, 2.0], ids=["nearly equal logits", "different logits"])
def test_rounding_changes_no_draw_from_a_nucleus(scale: float) -> None:
    sampling, logits = Sampling(top_p=0.9), scale * torch.randn(2000, 512, generator=torch.Generator().manual_seed(0))
    error = ROUNDING * torch.randn(2000, 512, generator=torch.Generator().manual_seed(1))
    one, other = (choose(each, sampling, sampling.generators(2000)) for each in (logits, logits + error))
    assert torch.equal(one, other)


DRAWS = [[945, 862], [859, 944], [867, 992], [819, 762]]


def test_draws_of_a_seed_on_every_processor() -> None:
    logits = torch.linspace(-2, 2, 1000).expand(2, -1)
    generators = Sampling(seed=5).generators(2)
    assert [choose(logits, Sampling(top_p=0.9), generators).tolist() for _ in range(4)] == DRAWS


def test_greedy_takes_the_likeliest_and_the_lowest_of_equal_ids() -> None:
    equal = torch.zeros(2, 100_000).index_fill(-1, torch.tensor([70, 7000, 99_999]), 1.0)
    for logits in (equal, torch.randn(5, 100, generator=torch.Generator().manual_seed(0))):
        likeliest = [70, 70] if logits is equal else logits.argmax(-1).tolist()
        for sampling in (Sampling(greedy=True), Sampling(top_p=1e-9)):
            assert choose(logits, sampling, sampling.generators(len(logits))).tolist() == likeliest


def test_impossible_ids_are_never_drawn() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, torch.finfo(torch.float32).min, 0.0]])
    shares = drawn(Sampling(temperature=5.0), logits)
    assert shares[0] == shares[2] == 0 and shares[1] == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 7},
        {"top_k": 500},
        {"min_p": 0.2},
        {"repetition_penalty": 1.3},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.7, "top_k": 30, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 0.8},
    ],
    ids=str,
)
def test_filters_as_transformers_applies_them(fields: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    sampling, logits = Sampling(**fields), 3 * torch.randn(50, 200, generator=generator)
    prompts = torch.randint(200, (50, 30), generator=generator)
    theirs = logits.double()
    for name, processor in PROCESSORS.items():
        if name in fields or name == "temperature":
            theirs = processor(getattr(sampling, name))(prompts, theirs)
    penalized = penalize(logits.double(), sampling.repetition_penalty, used_ids(prompts.tolist(), 200))
    ours = filter_probabilities(torch.softmax(penalized / sampling.temperature, -1), sampling)
    # Both compute in fp64; a sum of 200 terms rounds by less than this.
    torch.testing.assert_close(ours / ours.sum(-1, keepdim=True), torch.softmax(theirs, -1), rtol=1e-12, atol=0)


def test_defaults_of_a_folder() -> None:
    """Defaults by a generation_config.json and the options, and settings that are wrong or have no effect."""
    page = ""
    for row in GoldenFiles.commands("tools/inference/folder_defaults.txt"):
        content, given = json.loads(f"[{row}]")
        defaults, problems = folder_defaults(content, given)
        wrong = [problem.rule.split()[0] for problem in problems]
        page += f"$ {row}\n    {describe(defaults)}; wrong: {wrong}; without effect: {ignored_settings(content)}\n"
        assert problems or Sampling(**defaults, **given)
    GoldenFiles.check("tools/inference/folder_defaults.txt", page)
