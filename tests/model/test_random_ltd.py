"""Random layer-wise token dropping: subsets, and layers on subsets. tests/layouts/ compares layouts."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import Any

import torch

from megatron_llama.arch.attention_pattern import pattern_of
from megatron_llama.devices.attention_inputs import AttentionInputs, Documents, dense_mask
from megatron_llama.devices.kernels import Kernels
from megatron_llama.model.random_ltd import Subset, build_subsets, draw_subsets
from megatron_llama.model.rotary import at_positions, rotary_table
from megatron_llama.parallel import ParallelModel
from megatron_llama.plan import Plan
from tests.layouts.table import DROPPING
from tests.oracle import CPU, make_plan, on_ranks_by_plan, rank_batches, rank_data, rank_groups, rank_model
from tests.ranks import run_ranks

S, B = 16, 2


def test_subsets_are_sorted_and_reproducible() -> None:
    drawn = draw_subsets(7, range(5, 9), (1, 2), 6, 16)
    assert drawn.shape == (2, 4, 6)
    assert (drawn.diff() > 0).all() and 0 <= drawn.min() and drawn.max() < 16
    assert torch.equal(drawn, draw_subsets(7, range(5, 9), (1, 2), 6, 16)), "no state is left behind"
    part = draw_subsets(7, range(7, 9), (2,), 6, 16)
    assert torch.equal(drawn[1:, 2:], part), "independent of the other samples and layers"
    apart = [tuple(row.tolist()) for row in drawn.flatten(0, 1)]
    assert len(set(apart)) == len(apart), "layers and samples see different tokens"
    assert not torch.equal(drawn, draw_subsets(8, range(5, 9), (1, 2), 6, 16)), "the seed counts"


def test_every_subset_is_as_likely() -> None:
    """torch's generator is not used."""
    counts = Counter(tuple(row) for row in draw_subsets(1, range(2000), (1,), 2, 5)[0].tolist())
    assert set(counts) == set(combinations(range(5), 2))
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 27.9
    torch.manual_seed(3)
    before = torch.get_rng_state()
    draw_subsets(7, range(4), (1,), 6, 16)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_a_rank_gets_by_hand() -> None:
    """Two sequences of four tokens, of which it is 1 and 2, and 0 and 3; the second of two ranks has 2 and 3."""
    drawn = torch.tensor([[[1, 2], [0, 3]]])
    whole = build_subsets(drawn, (5,), 4, None).of(5)
    assert whole is not None and not whole.split
    assert whole.rows.tolist() == [2 * 1 + 0, 2 * 0 + 1, 2 * 2 + 0, 2 * 3 + 1], "token by token, sequence by sequence"
    assert whole.inverse.tolist() == [-1, 1, 0, -1, 2, -1, -1, 3]
    half = build_subsets(drawn, (5,), 4, None, (1, 2)).of(5)
    assert half is not None and half.split
    assert half.rows.tolist() == [-1, -1, 2 * 0 + 0, 2 * 1 + 1] and half.inverse.tolist() == [2, -1, -1, 3]
    assert build_subsets(drawn, (5,), 4, None, (0, 2)).of(5).inverse.tolist() == [-1, 1, 0, -1]
    assert build_subsets(drawn, (5,), 4, None).of(4) is None


DOCUMENTS = torch.tensor([[0] * 7 + [1] * 9, [0] * 3 + [1] * 4 + [2] * 6 + [-1] * 3])
WAYS = [
    ("plain", [], False),
    ("documents", [], True),
    ("window", ["model.sliding_window=5"], False),
    ("window, documents", ["model.sliding_window=3"], True),
    ("blocks, documents", ["model.sparse_attention={block: 2, num_local_blocks: 2, num_global_blocks: 1}"], True),
]


def test_a_layer_is_one_whose_dropped_keys_nobody_sees() -> None:
    """The reference computes all tokens behind a dense mask without the dropped keys, at the original positions, and
    takes the kept tokens' outputs: other code for rotary angles, documents, windows and blocks."""
    plans = [make_plan(1, DROPPING, *model) for _, model, _ in WAYS]
    actual = run_ranks(_layer_and_reference, 1, plans, [documents for *_, documents in WAYS])[0]
    for (name, *_), by_kernel in zip(WAYS, actual, strict=True):
        for kernel, (output, reference, x, dropped) in by_kernel.items():
            assert (output[0] - reference[0]).abs().max() < 2e-6, (name, kernel)
            assert (output[1] - reference[1]).norm() < 1e-5 * reference[1].norm(), f"gradient, {name}, {kernel}"
            assert torch.equal(output[0][dropped], x[dropped]), "dropped tokens pass by unchanged"
            assert not torch.equal(output[0], x)


def _layer_and_reference(rank: int, plans: list[Plan], with_documents: list[bool]) -> list[dict[str, Any]]:
    actual = []
    with rank_groups(plans[0], rank):
        for plan, has in zip(plans, with_documents, strict=True):
            chunk = rank_model(plan, rank).chunks[0]
            block, pattern = chunk.layers["1"], pattern_of(plan.model)
            documents = Documents.of(DOCUMENTS) if has else None
            drawn = draw_subsets(3, range(B), (1,), 8, S)
            subset = build_subsets(drawn, (1,), S, documents).of(1)
            assert subset is not None
            torch.manual_seed(0)
            x, weight = torch.randn(S, B, 32), torch.randn(S, B, 32)
            table = rotary_table(plan.model, S, CPU)
            is_kept = torch.zeros(B, S, dtype=torch.bool).scatter_(1, drawn[0], True)
            positions = torch.arange(S).expand(B, S) if documents is None else documents.positions()
            # A dropped token attends to itself: an empty row would be NaN.
            mask = dense_mask(positions, pattern, DOCUMENTS if has else None) & is_kept[:, None, None, :]
            mask = mask | torch.eye(S, dtype=torch.bool)
            angles = [at_positions(half, positions) for half in table]

            def ours(x: torch.Tensor, kernel: str, subset: Subset = subset, block: Any = block) -> torch.Tensor:
                rotary = tuple(at_positions(half, subset.positions) for half in table)  # noqa: B023
                build = Kernels(attention=kernel).visible
                return block(x, rotary, subset.visible(S, pattern, build), subset)  # noqa: B023

            def reference(x: torch.Tensor, block: Any = block) -> torch.Tensor:
                y = block(x, tuple(angles), AttentionInputs(pattern, "mask", mask=mask))  # noqa: B023
                return torch.where(is_kept.t().unsqueeze(-1), y, x)  # noqa: B023

            def with_gradient(function: Any, *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
                leaf = x.clone().requires_grad_()  # noqa: B023
                output = function(leaf, *more)
                (output * weight).sum().backward()  # noqa: B023
                assert leaf.grad is not None
                return output.detach(), leaf.grad

            dropped = ~is_kept.t()
            expected = with_gradient(reference)
            actual.append({kernel: (with_gradient(ours, kernel), expected, x, dropped) for kernel in ("tiles", "mask")})
    return actual


def test_validation_and_logits_see_all_tokens() -> None:
    plans = [make_plan(1, *overrides) for overrides in ([DROPPING], [])]
    with_it, without = on_ranks_by_plan(_validated, plans)[0]
    assert with_it[0] == without[0] and torch.equal(with_it[1], without[1])
    assert with_it[2:] == (4, None), "subsets in training, and none in the batches of the validation"


def _validated(plan: Plan, model: ParallelModel) -> tuple[float, torch.Tensor, int | None, int | None]:
    batches = rank_batches(plan).at(0)  # training batches
    loss, logits = model.forward_backward(batches, train=False).item(), model.logits(batches[0].tokens)
    assert logits is not None
    plan.config.trainer.val_every_steps = 1
    data = rank_data(plan)
    subsets = [part.at(0)[0].subsets for part in (data.train, data.validation[""])]
    train, validation = (each.length if each else None for each in subsets)
    return loss, logits, train, validation
