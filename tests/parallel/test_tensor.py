"""The loss of a split vocabulary, the parallel linear layers and the sums of replicated gradients, each alone.

The oracle is plain torch on whole tensors, in fp64. tests/layouts compares whole models in all layouts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from megatron_llama.arch.attention_pattern import Lengths, Pattern
from megatron_llama.arch.hf_tp_mapping import Rectangle
from megatron_llama.arch.parameters import padded_vocab_size
from megatron_llama.devices.attention_inputs import Documents, dense_mask
from megatron_llama.devices.torch_attention import tiles_backward, tiles_forward
from megatron_llama.model import loss
from megatron_llama.model.llama import _apply, parallel_linear
from megatron_llama.model.loss import IN_PLACE, Head, LossSpec, fused_softmax
from megatron_llama.parallel.compiling import traceable_matmul
from megatron_llama.parallel.context_division import chunk_work, divide
from megatron_llama.parallel.groups import Groups
from megatron_llama.parallel.parallelize import mcore_config
from megatron_llama.parallel.replicated_gradients import ReplicatedGradients
from megatron_llama.parallel.shards import Shard
from megatron_llama.plan import Plan, resolve
from megatron_llama.topology import Topology
from tests.config.helpers import make
from tests.oracle import rank_groups
from tests.ranks import run_ranks

FACTOR = 4
"""Largest error of a result, as a multiple of the error of the same formula in fp32 torch (at least one rounding)."""


def _plan(world_size: int, **settings: Any) -> Plan:
    return resolve(make(**{"trainer.tp": world_size, "trainer.sp": False} | settings), world_size)


def _in_groups(rank: int, check: Callable[..., None], plan: Plan, cases: Iterable[tuple]) -> None:
    with rank_groups(plan, rank) as groups:
        for case in cases:
            torch.manual_seed(0)  # all ranks draw the same whole tensors
            check(plan, plan.topology(rank), groups, *case)


def _assert_as_exact_as_fp32(actual: Tensor, fp32: Tensor, exact: Tensor) -> None:
    rounding = torch.finfo(torch.float32).eps * exact.abs().max()
    error, allowed = (actual - exact).abs().max(), FACTOR * max((fp32 - exact).abs().max(), rounding)
    assert error <= allowed, f"error {error:.2g}, allowed {allowed:.2g}"


def _softmax_of_parts(rank: int) -> None:
    for kernels in (IN_PLACE, fused_softmax(lambda function, name: function)):
        for z_loss in (0.0, 0.01):
            _check_softmax(rank, LossSpec(10, dist.group.WORLD, False, kernels, z_loss=z_loss))


def _check_softmax(rank: int, spec: LossSpec) -> None:
    """Logits of 10 columns per rank. Some labels have a probability near 1, some rows a maximum on one rank only."""
    torch.manual_seed(0)
    columns = slice(10 * rank, 10 * rank + 10)
    labels, weights = torch.randint(10 * dist.get_world_size(), (24,)), torch.rand(24)
    logits = torch.randn(24, 10 * dist.get_world_size())
    logits[torch.arange(8), labels[:8]] += 12
    logits[8:12, :10] += 100
    results = []
    for dtype in (torch.float32, torch.float64):
        whole = logits.to(dtype, copy=True).requires_grad_()
        losses = cross_entropy(whole, labels, reduction="none") + spec.z_loss * whole.logsumexp(1).square()
        (losses * weights).sum().backward()
        assert whole.grad is not None
        results.append((losses.detach(), whole.grad[:, columns]))
    local = logits[:, columns].contiguous()
    losses = loss._losses_and_gradients(local, labels - columns.start, weights, spec)
    for actual, fp32, exact in zip((losses, local), *results, strict=True):
        _assert_as_exact_as_fp32(actual, fp32, exact)


@pytest.mark.parametrize("tp", [2, 4])
def test_softmax_of_a_split_vocabulary(tp: int) -> None:
    """In place and fused, with a z-loss and without."""
    run_ranks(_softmax_of_parts, tp)


def _head(plan: Plan, topology: Topology, groups: Groups, vocabulary: int) -> None:
    """24 tokens in chunks of 10. A label of -100 and two weights of 0 are ignored."""
    rank, tp = topology.place["tp"], topology.sizes["tp"]
    loss.loss_chunk = lambda hidden_size: 10  # in this forked rank only
    padded = padded_vocab_size(vocabulary, tp)
    hidden, weight = torch.randn(12, 2, 16), torch.randn(padded, 16)
    labels, loss_weights = torch.randint(vocabulary, (2, 12)), torch.rand(2, 12)
    labels[0, 0], labels[1, 11] = vocabulary - 1, -100
    loss_weights[0, 5] = loss_weights[1, 11] = 0
    results = []
    for dtype in (torch.float32, torch.float64):
        x, w = (whole.to(dtype, copy=True).requires_grad_() for whole in (hidden, weight))
        logits = linear(x, w[:vocabulary]).transpose(0, 1)
        losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")  # 0 for the label -100
        total = (losses * loss_weights.flatten()).sum()
        total.backward()
        right = ((logits.argmax(-1) == labels) * loss_weights).sum()
        assert x.grad is not None and w.grad is not None
        results.append((total.detach(), right, x.grad, w.grad))
    rows, part = slice(rank * padded // tp, (rank + 1) * padded // tp), slice(None)
    if plan.sp:
        part = slice(rank * 12 // tp, (rank + 1) * 12 // tp)
    x, w = hidden[part].clone().requires_grad_(), weight[rows].clone().requires_grad_()
    head = Head(16, padded, vocabulary, mcore_config(plan), tied=True)
    with torch.no_grad():
        total, right = head(x, w, labels, loss_weights)
    trained = head(x, w, labels, loss_weights)
    trained.backward()
    assert x.grad is not None and w.grad is not None
    fp32, exact = results
    for index, cut, actual in (0, ..., total), (0, ..., trained), (1, ..., right), (2, part, x.grad), (3, rows, w.grad):
        _assert_as_exact_as_fp32(actual, fp32[index][cut], exact[index][cut])


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_head_of_a_split_vocabulary(tp: int, sp: bool) -> None:
    """Loss, weight of the correct tokens, and gradients of hidden states and of this rank's rows; even and padded."""
    run_ranks(_in_groups, tp, _head, _plan(tp, **{"trainer.sp": sp}), [(40,), (37,)])


def _layer(plan: Plan, topology: Topology, groups: Groups, is_column: bool, frozen: bool) -> None:
    rank, tp = topology.place["tp"], topology.sizes["tp"]
    name = "gate_up_proj" if is_column else "down_proj"
    layer = parallel_linear(name, plan.model, mcore_config(plan), matmul=traceable_matmul).double()
    whole = nn.Linear(layer.input_size, layer.output_size, dtype=torch.float64)
    x = torch.randn(8, 2, layer.input_size, dtype=torch.float64, requires_grad=True)
    output = whole(x)
    grad = torch.randn_like(output)
    output.backward(grad)

    def part(tensor: Tensor, dim: int, is_split: bool = True) -> Tensor:
        return tensor.detach().chunk(tp, dim)[rank].clone() if is_split else tensor.detach().clone()

    def of_input(tensor: Tensor) -> Tensor:
        return part(tensor, 0, plan.sp) if is_column else part(tensor, 2)

    def of_output(tensor: Tensor) -> Tensor:
        return part(tensor, 2) if is_column else part(tensor, 0, plan.sp)

    assert layer.bias is not None and whole.weight.grad is not None and x.grad is not None
    layer.weight.data = part(whole.weight, 0 if is_column else 1)
    layer.bias.data = part(whole.bias, 0, is_column)
    layer.weight.requires_grad_(not frozen)
    local = of_input(x).requires_grad_()
    actual = _apply(layer, local)
    actual.backward(of_output(grad))
    torch.testing.assert_close(actual, of_output(output))
    torch.testing.assert_close(local.grad, of_input(x.grad))
    if frozen:
        assert layer.weight.grad is None
    else:
        torch.testing.assert_close(layer.weight.grad, part(whole.weight.grad, 0 if is_column else 1))
    # The bias of a row-parallel layer has the gradient of this rank's tokens: ReplicatedGradients sums it.
    torch.testing.assert_close(layer.bias.grad, of_output(grad).sum((0, 1)))


@pytest.mark.parametrize("sp", [False, True])
def test_linear_layers(sp: bool) -> None:
    """Column and row parallel, trained and frozen."""
    cases = [*itertools.product((True, False), (False, True))]
    run_ranks(_in_groups, 2, _layer, _plan(2, **{"trainer.sp": sp, "model.mlp_bias": True}), cases)


ROWS = {"q_proj": 0, "k_proj": 2, "v_proj": 4}
"""First row of each Hugging Face module in the gradient of qkv_proj, which has 6 rows; the other gradients too."""
NEVER = ("layers.0.mlp.down_proj.weight", "layers.0.mlp.gate_up_proj.weight", "layers.0.mlp.gate_up_proj.bias")
UNDER_SP = (
    *("norm.weight", "layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight"),
    *("layers.0.self_attn.o_proj.bias", "layers.0.mlp.down_proj.bias"),
)
QK_NORMS = "layers.0.self_attn.q_norm.weight", "layers.0.self_attn.k_norm.weight"
QKV, TABLES = "layers.0.self_attn.qkv_proj.weight", ("embed_tokens.weight", "lm_head.weight")
REPLICATED: dict[str, tuple[int, dict[str, Any], dict[str, list[list[int]]]]] = {
    "no sp": (2, {}, {}),
    "sp": (2, {"trainer.sp": True}, dict.fromkeys(UNDER_SP, [[0, 1]])),
    "norms of heads": (2, {"model.model_type": "qwen3"}, dict.fromkeys(QK_NORMS, [[0, 1]])),
    "shared kv heads": (4, {"model.num_key_value_heads": 2}, {QKV: [[0, 1], [2, 3]]}),
    "tied": (
        4,
        {"trainer.tp": 2, "trainer.pp": 2, "model.tie_word_embeddings": True},
        dict.fromkeys(TABLES, [[0, 2], [1, 3]]),
    ),
}
"""Ranks, settings, and the groups of ranks that sum each parameter's gradient. Others keep their gradients."""


def _replicated(plan: Plan, topology: Topology, groups: Groups, summed: dict[str, list[list[int]]]) -> None:
    rank = dist.get_rank()
    names = [*NEVER, *UNDER_SP, *QK_NORMS, QKV, TABLES[topology.place["pp"]]]  # one table on each stage
    grads = torch.randn(len(names), dist.get_world_size(), 6, 2)
    shards = []
    for name, ranks in zip(names, grads, strict=True):
        modules = ROWS if name == QKV else {}
        parts = [Rectangle(f"{m}.weight", (6, 2), (0, 0), (row, 0), (2, 2)) for m, row in modules.items()]
        shards.append(Shard(name, nn.Parameter(torch.zeros(6, 2)), parts, is_primary_replica=True))
        shards[-1].parameter.grad = ranks[rank].clone()
    without = Shard("norm.weight", nn.Parameter(torch.zeros(6, 2)), [], is_primary_replica=True)
    ReplicatedGradients(plan, topology, groups).reduce([without, *shards])
    assert without.grad is None
    for shard, ranks in zip(shards, grads, strict=True):
        expected = ranks[rank].clone()
        first = ROWS["k_proj"] if shard.name == QKV else 0  # each rank has its own query heads
        for group in summed.get(shard.name, []):
            if rank in group:
                expected[first:] = ranks[group, first:].sum(0)
        assert shard.grad is not None and torch.equal(shard.grad, expected), shard.name


@pytest.mark.parametrize("world_size, settings, summed", REPLICATED.values(), ids=REPLICATED)
def test_replicated_gradients(world_size: int, settings: dict[str, Any], summed: dict[str, list[list[int]]]) -> None:
    run_ranks(_in_groups, world_size, _replicated, _plan(world_size, **settings), [(summed,)])


LENGTH = 48
PATTERNS = {"causal": Pattern(), "window": Pattern(window=5), "blocks": Pattern(0, 2, 3, 1)}
DOCUMENTS = {"whole": ((LENGTH,), (LENGTH,)), "documents": ((12, 7, 1, 28), (5, 43))}


def documents_of(lengths: Lengths) -> Documents:
    return Documents.of(torch.stack([torch.repeat_interleave(torch.tensor(row)) for row in lengths]))


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_the_work_of_a_division_is_what_the_kernels_compute(pattern: Pattern) -> None:
    """Without masked keys, which some tiles compute."""
    lengths = DOCUMENTS["documents"]
    documents = documents_of(lengths)
    visible = dense_mask(documents.positions(), pattern, documents.ids)[:, 0]
    size = LENGTH // 8
    expected = [int(visible[:, start : start + size].sum()) for start in range(0, LENGTH, size)]
    assert chunk_work(LENGTH, 8, lengths, pattern) == expected


@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("cp", [2, 4])
def test_attention_of_all_ranks_adds_up(cp: int, pattern: Pattern, lengths: Lengths) -> None:
    torch.manual_seed(0)
    q, grad = torch.randn(2, 2, 4, LENGTH, 8).unbind(0)
    k, v = torch.randn(2, 2, 2, LENGTH, 8).unbind(0)
    out, lse = tiles_forward(q, k, v, lengths, pattern)
    whole = tiles_backward(grad, q, k, v, out, lse, lengths, pattern)
    sums = [torch.zeros_like(k), torch.zeros_like(v)]
    for rank in range(cp):
        chunks = divide(cp, LENGTH, lengths, pattern)[rank]
        local = torch.tensor([position for chunk in chunks for position in chunk])
        q_part, grad_part = q[:, :, local], grad[:, :, local]
        part, part_lse = tiles_forward(q_part, k, v, lengths, pattern, chunks)
        torch.testing.assert_close(part, out[:, :, local])
        torch.testing.assert_close(part_lse, lse[:, :, local])
        dq, *dkv = tiles_backward(grad_part, q_part, k, v, part, part_lse, lengths, pattern, chunks)
        torch.testing.assert_close(dq, whole[0][:, :, local], rtol=1e-4, atol=1e-5)
        for total, more in zip(sums, dkv, strict=True):
            total += more
    for total, expected in zip(sums, whole[1:], strict=True):
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)
