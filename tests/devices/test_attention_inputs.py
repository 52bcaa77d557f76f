"""Packed examples don't attend to each other, on every path through attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from megatron_llama.devices import torch_attention
from megatron_llama.devices.attention_inputs import Documents
from megatron_llama.devices.kernels import Kernels
from megatron_llama.parallel import ParallelModel
from megatron_llama.plan import Plan
from tests.compiled import needs_compiler
from tests.oracle import batches_of, make_plan, on_ranks, rank_groups, rank_model
from tests.ranks import run_ranks

LENGTH = 16
# Two sequences of examples, the second with padding at its end.
PACKED = ((5, 1, 7, 3), (9, 4))
# Names, ranks, overrides. Two sequences make one micro batch, so the mask is one of several rows.
PATHS = {
    "plain": (1, []),
    "recompute selective": (1, ["trainer.recompute=selective"]),
    "recompute full": (1, ["trainer.recompute=full"]),
    "tp2+sp": (2, ["trainer.tp=2"]),
    "window, pp2": (2, ["trainer.pp=2", "model.sliding_window=3"]),
    "blocks, tp2+sp": (2, ["trainer.tp=2", "model.sparse_attention={block: 1, num_local_blocks: 2}"]),
    "tp4, copied kv heads": (4, ["trainer.tp=4", "trainer.sp=false"]),
    "pp2": (2, ["trainer.pp=2"]),
    "pp2 vpp2": (2, ["trainer.pp=2", "trainer.vpp=2"]),
    "tp2+sp pp2 recompute full": (4, ["trainer.tp=2", "trainer.pp=2", "trainer.recompute=full"]),
    "zero 3, dp2": (2, ["trainer.zero=3"]),
}


def packed() -> tuple[torch.Tensor, Documents]:
    """(ids [2, 16], their documents)."""
    tokens = torch.randint(0, 64, (len(PACKED), LENGTH), generator=torch.Generator().manual_seed(7))
    ids = torch.full((len(PACKED), LENGTH), -1)
    for row, lengths in zip(ids, PACKED, strict=True):
        row[: sum(lengths)] = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return tokens, Documents.of(ids)


def examples() -> list[tuple[int, slice]]:
    """(sequence, its positions) of each example."""
    ends = [
        (row, sum(lengths[: n + 1]), length) for row, lengths in enumerate(PACKED) for n, length in enumerate(lengths)
    ]
    return [(row, slice(end - length, end)) for row, end, length in ends]


def test_positions_and_borders_by_hand() -> None:
    documents = Documents.of(torch.tensor([[0, 0, 1, 2, 2, -1]]))
    assert documents.positions().tolist() == [[0, 1, 0, 0, 1, 0]]
    assert documents.lengths == ((2, 1, 2, 1),)
    assert documents.cu_seqlens.tolist() == [0, 2, 3, 5, 6, 6, 6]


@pytest.mark.parametrize("kernel", ["tiles", "mask"])
@pytest.mark.parametrize(("ranks", "layout"), PATHS.values(), ids=PATHS)
def test_logits_of_each_example_are_those_of_it_alone(ranks: int, layout: list[str], kernel: str) -> None:
    plan = make_plan(ranks, "trainer.micro_batch_size=2", *layout)
    together, alone = on_ranks(_logits, plan, kernel)[-1]
    for (row, places), expected in zip(examples(), alone, strict=True):
        torch.testing.assert_close(together[row, places], expected, atol=1e-5, rtol=0)


def _logits(plan: Plan, model: ParallelModel, kernel: str) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    for chunk in model.chunks:
        chunk.build_inputs.build_visible = Kernels(attention=kernel).visible
    tokens, documents = packed()
    together = _whole(model.logits(tokens, documents))
    alone = []
    for row, places in examples():
        # By itself, and as every layout wants it: padded to the sequence's length, plain causal attention.
        only = torch.zeros_like(tokens)
        only[:, : places.stop - places.start] = tokens[row, places]
        actual = _whole(model.logits(only))
        alone.append(None if actual is None else actual[0, : places.stop - places.start])
    return together, alone


def _whole(logits: torch.Tensor | None) -> torch.Tensor | None:
    return None if logits is None else gather_from_tensor_model_parallel_region(logits).transpose(0, 1)


class PackedSamples:
    """Samples of the packed micro batch; only one example's labels count."""

    def __init__(self, example: int | None = None, spread: bool = False) -> None:
        """Only ``example`` has loss. With ``spread`` each example is a separate, padded sample."""
        self.tokens, self.documents = packed()
        self.example, self.spread = example, spread

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.tokens.roll(3, dims=1)
        if self.spread:
            row, places = examples()[index % len(examples())]
            size = places.stop - places.start
            tokens, target, counted = torch.zeros(LENGTH).long(), torch.zeros(LENGTH).long(), torch.zeros(LENGTH)
            counts = index < len(examples())
            tokens[:size], target[:size], counted[:size] = self.tokens[row, places], labels[row, places], counts
            return {"tokens": tokens, "labels": target, "loss_mask": counted}
        row = index % 2
        counted = torch.zeros(LENGTH)
        for number, (of, places) in enumerate(examples()):
            if of == row and index < 2 and self.example in (None, number):
                counted[places] = 1
        ids = self.documents.ids[row]
        return {"tokens": self.tokens[row], "labels": labels[row], "loss_mask": counted, "documents": ids}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_no_gradient_crosses_a_document_boundary(recompute: str) -> None:
    """The loss of one example has exact zero gradients for the embeddings of other examples' tokens."""
    plan = make_plan(1, f"trainer.recompute={recompute}", "trainer.micro_batch_size=2", "model.vocab_size=64")
    for number, (row, places) in enumerate(examples()):
        (gradient,) = on_ranks(_input_gradient, plan, number)
        touched = gradient.abs().sum(-1) > 0  # [s, b]
        expected = torch.zeros_like(touched)
        expected[places, row] = True
        assert torch.equal(touched, expected), f"example {number}"


def _input_gradient(plan: Plan, model: ParallelModel, example: int) -> torch.Tensor:
    (chunk,) = model.chunks
    grads: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, arguments: object, output: torch.Tensor) -> None:
        output.register_hook(grads.append)

    chunk.embed_tokens.register_forward_hook(keep)
    batches = batches_of(PackedSamples(example), plan).at(0)
    model.forward_backward([batches[0]] * plan.num_microbatches)
    return grads[0]


PACKED_AND_SPREAD = ["trainer.micro_batch_size=2", "trainer.global_batch_size=8"]


def _gradients(plan: Plan, model: ParallelModel, spread: bool) -> tuple[float, dict[str, torch.Tensor]]:
    loss = model.forward_backward(batches_of(PackedSamples(spread=spread), plan).at(0)).item()
    return loss, {shard.name: shard.grad.clone() for shard in model.shards if shard.grad is not None}


def compiled_too() -> list:
    marks = [pytest.mark.slow, needs_compiler]
    return [[], ["trainer.tp=2"], ["trainer.pp=2"], pytest.param(["trainer.compile=true"], marks=marks)]


@pytest.mark.parametrize("layout", compiled_too(), ids=["plain", "tp2+sp", "pp2", "compiled"])
def test_packed_and_padded_training_agree(layout: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal examples in a global batch give equal loss and gradients, up to the order of sums."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    ranks = 2 if layout and layout[0][-1] == "2" else 1
    if "trainer.compile=true" in layout:
        layout = [*layout, "trainer.compile_strict=true", f"trainer.compile_cache={tmp_path}"]
    together = on_ranks(_gradients, make_plan(ranks, *PACKED_AND_SPREAD, *layout), False)
    eager = [change for change in layout if "compile" not in change]
    apart = on_ranks(_gradients, make_plan(ranks, *PACKED_AND_SPREAD, *eager), True)
    for (loss, gradients), (other_loss, others) in zip(together, apart, strict=True):
        assert loss == pytest.approx(other_loss, rel=1e-6)
        for name, gradient in gradients.items():
            assert (gradient - others[name]).norm() <= 1e-5 * others[name].norm(), name


def test_documents_cost_what_they_cost_alone() -> None:
    """Each document is a separate call on the diagonal. Without documents attention is plain causal."""
    causal, call = "F.scaled_dot_product_attention", "_call"
    assert run_ranks(_asked, 1, make_plan(1), False)[0] == [(causal, LENGTH)] * 4
    a_layer = [(call, length) for row in ((5, 1, 7, 3), (9, 4, 3)) for length in row]
    assert run_ranks(_asked, 1, make_plan(1), True)[0] == a_layer * 4


def _asked(rank: int, plan: Plan, with_documents: bool) -> list[tuple[str, int]]:
    """(function, queries) of each product."""
    requested: list[tuple[str, int]] = []

    def note(owner: object, name: str, shown: str) -> None:
        function = getattr(owner, name)

        def noted(q: torch.Tensor, *more: object, **options: object) -> object:
            requested.append((shown, q.shape[2]))
            return function(q, *more, **options)

        setattr(owner, name, noted)

    note(torch_attention.F, "scaled_dot_product_attention", "F.scaled_dot_product_attention")
    note(torch_attention, "_call", "_call")
    with rank_groups(plan, rank):
        tokens, documents = packed()
        rank_model(plan, rank).logits(tokens, documents if with_documents else None)
    return requested
