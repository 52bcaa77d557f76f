"""Sampling of ids."""

from __future__ import annotations

import pytest
import torch

from megatron_llama.tools.inference.generator import Sampling, choose, nucleus

P = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)  # exact sums


@pytest.mark.parametrize(
    ("top_p", "count"),
    [(1e-9, 1), (0.5, 1), (0.5 + 1e-9, 2), (0.75, 2), (0.75 + 1e-9, 3), (0.875, 3), (0.876, 4), (1.0, 4)],
)
def test_the_nucleus_is_the_smallest_that_reaches_p(top_p: float, count: int) -> None:
    assert (nucleus(P.clone(), top_p) > 0).tolist() == [place < count for place in range(4)]


def drawn(sampling: Sampling, logits: torch.Tensor, count: int = 4000) -> torch.Tensor:
    """Shares of each id among many draws."""
    generators = sampling.generators(1)
    ids = [int(choose(logits, sampling, generators)) for _ in range(count)]
    return torch.bincount(torch.tensor(ids), minlength=logits.shape[-1]) / count


def test_shares_are_the_probabilities() -> None:
    logits = torch.log(P[torch.tensor([2, 0, 3, 1])]).float()[None]  # not in falling order
    assert drawn(Sampling(temperature=1.0), logits).tolist() == pytest.approx([0.125, 0.5, 0.125, 0.25], abs=0.03)
    assert drawn(Sampling(temperature=1.0, top_p=0.75), logits).tolist() == pytest.approx(
        [0, 2 / 3, 0, 1 / 3], abs=0.03
    )
    squares = P**2 / (P**2).sum()
    expected = squares[torch.tensor([2, 0, 3, 1])].tolist()
    assert drawn(Sampling(temperature=0.5), logits).tolist() == pytest.approx(expected, abs=0.03)


def test_impossible_ids_are_never_drawn() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, torch.finfo(torch.float32).min, 0.0]])
    shares = drawn(Sampling(temperature=5.0), logits)
    assert shares[0] == shares[2] == 0 and shares[1] == pytest.approx(0.5, abs=0.03)


def test_greedy_takes_the_likeliest() -> None:
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(choose(logits, Sampling(greedy=True), []), logits.argmax(-1))
    one = Sampling(top_p=1e-6)
    assert torch.equal(choose(logits, one, one.generators(5)), logits.argmax(-1))


def test_a_seed_is_a_sequence_of_draws() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    first, repeated, other = (Sampling(seed=seed).generators(3) for seed in (1, 1, 9))
    draws = [
        [choose(logits, Sampling(), generators).tolist() for _ in range(8)] for generators in (first, repeated, other)
    ]
    assert draws[0] == draws[1] != draws[2]
