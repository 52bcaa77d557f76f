"""Real training steps send the bytes and calls that ``tools/forecast/traffic.py`` predicts, per rank and TrafficKey.

docs/guides/tools/traffic.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, reduce_scatter_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_llama.config import load_config
from megatron_llama.devices import get_device
from megatron_llama.plan import Plan, resolve
from megatron_llama.tools.forecast.traffic import Amount, Traffic, TrafficKey, between_nodes, totals, wire_bytes
from megatron_llama.tools.measured_steps import TrafficCounter, UnknownCollective, count_steps
from megatron_llama.tools.traffic.cli import main, operations_of_rank
from megatron_llama.train.step_checks import StepGuard
from tests.compiled import needs_compiler
from tests.golden import GoldenFiles
from tests.oracle import SHAPE, make_plan
from tests.paths import CONF
from tests.processes import run_forked
from tests.ranks import RankFailed, run_ranks
from tests.rows import overrides, rows

TIED, ODD, FEW = "model.tie_word_embeddings=true", "model.vocab_size=61", "global_batch_size=4"
OLMO2 = "model.model_type=olmo2"
LTD = "random_ltd={min_value:4,max_value:8,seq_per_step:4,require_steps:1}"  # it ends at 8 of 16
LORA = "finetune.method=lora finetune.lora_rank=2 finetune.lora_target_modules=all-linear"
LAYOUTS = {
    "one process": (1, FEW),
    "tp2": (2, f"tp=2 sp=false {FEW}"),
    "tp2+sp, micro batches of 1, selective recompute": (2, f"tp=2 micro_batch_size=1 recompute=selective {FEW}"),
    "tp2+sp, odd vocabulary, tied": (2, f"tp=2 {ODD} {TIED} {FEW}"),
    "tp2, full recompute": (2, f"tp=2 sp=false recompute=full {FEW}"),
    "tp2, every 2nd block": (2, f"tp=2 recompute=full recompute_every=2 {FEW}"),
    "tp4+sp, kv heads < tp": (4, f"tp=4 {FEW}"),
    "tp4+sp, kv heads < tp, qwen2": (4, f"tp=4 {FEW} model.model_type=qwen2"),
    "tp2, qwen3": (2, f"tp=2 sp=false {FEW} model.model_type=qwen3"),
    "tp2·dp2+sp, qwen3, zero 3": (4, f"tp=2 zero=3 {FEW} model.model_type=qwen3"),
    "tp2, olmo2": (2, f"tp=2 sp=false {FEW} {OLMO2}"),
    "tp4+sp, olmo2, kv heads < tp, biases": (4, f"tp=4 {FEW} {OLMO2} model.attention_bias=true"),
    "tp2·dp2+sp, olmo2, zero 3, full recompute": (4, f"tp=2 zero=3 recompute=full {FEW} {OLMO2}"),
    "tp2+sp, olmo2, selective recompute": (2, f"tp=2 recompute=selective {FEW} {OLMO2}"),
    "tp2+sp, olmo2, elementwise recompute": (2, f"tp=2 recompute=elementwise {FEW} {OLMO2}"),
    "tp2+sp, olmo2, random-LTD": (2, f"tp=2 {LTD} {FEW} {OLMO2}"),
    "tp2+sp, olmo2, LoRA on all, full recompute": (2, f"tp=2 recompute=full {OLMO2} {LORA}"),
    "tp2·dp2+sp, biases, zero 2": (4, f"tp=2 zero=2 {FEW} model.attention_bias=true model.mlp_bias=true"),
    "tp2+sp, float8 tensorwise": (2, f"tp=2 float8=tensorwise {FEW}"),
    "tp2, float8 rowwise, full recompute": (2, f"tp=2 sp=false float8=rowwise recompute=full {FEW}"),
    "tp2+sp, float8 tensorwise, full recompute, LoRA": (2, f"tp=2 float8=tensorwise recompute=full {LORA}"),
    "tp2+sp, mlp chunks that differ": (2, f"tp=2 mlp_chunks=3 {FEW}"),
    "tp2+sp, olmo2, mlp chunks, full recompute": (2, f"tp=2 mlp_chunks=2 recompute=full {OLMO2} {FEW}"),
    "tp2, mlp chunks, full recompute": (2, f"tp=2 sp=false mlp_chunks=2 recompute=full {FEW}"),
    "tp2+sp, mlp chunks, full recompute, LoRA on all": (2, f"tp=2 mlp_chunks=2 recompute=full {LORA}"),
    "pp2": (2, f"pp=2 {FEW}"),
    "pp3, uneven": (3, f"pp=3 pipeline_layers=[2,1,1] {FEW}"),
    "pp2·vpp2": (2, f"pp=2 vpp=2 {FEW}"),
    "dp2, zero 0": (2, f"zero=0 micro_batch_size=1 {FEW}"),
    "dp2, zero 1": (2, f"zero=1 micro_batch_size=1 {FEW}"),
    "dp2, zero 2": (2, f"zero=2 micro_batch_size=1 {FEW}"),
    "dp2, zero 3": (2, f"zero=3 micro_batch_size=1 {FEW}"),
    "dp3, zero 3, bf16, rows that don't divide": (3, f"zero=3 precision=bf16 global_batch_size=6 {ODD}"),
    "tp2·dp2+sp, zero 2, bf16_sr": (4, "tp=2 zero=2 precision=bf16_sr"),
    "dp2, zero 1, fp32_ZeroOptMaster": (2, "zero=1 precision=fp32_ZeroOptMaster"),
    "dp4, hybrid, zero 1": (4, "zero=1 shard_group=2"),
    "dp4, hybrid, zero 2": (4, "zero=2 shard_group=2"),
    "pp2·dp3, tied, a shard without rows": (6, f"pp=2 {TIED} model.vocab_size=4 global_batch_size=6"),
    "tp2·pp2·vpp2+sp, full recompute, bf16": (4, f"tp=2 pp=2 vpp=2 recompute=full precision=bf16 {FEW}"),
    "tp2·dp3+sp, one kv head, shards without its rows": (6, "tp=2 global_batch_size=6 model.num_key_value_heads=1"),
    "pp2·dp2, zero 3": (4, "pp=2 zero=3"),
    "dp2, zero 0, gradients in int8": (2, f"zero=0 grad_reduce=int8 {FEW}"),
    "tp2·dp2+sp, gradients in bf16, odd": (4, f"tp=2 grad_reduce=bf16 {ODD}"),
    "dp4, hybrid, zero 2, gradients in int8": (4, "zero=2 shard_group=2 grad_reduce=int8"),
    "dp4, zero 3, second copy, two hops, both in int8": (
        4,
        "zero=3 secondary_group=2 grad_reduce=int8 reduce_group=2 param_gather=int8",
    ),
    "pp2·dp4, zero 3, second copy": (8, "pp=2 zero=3 secondary_group=2 micro_batch_size=1"),
    "tp2·pp2+sp, random-LTD, full recompute": (4, f"tp=2 pp=2 recompute=full {LTD} {FEW}"),
    "tp2·dp2+sp, zero 3, LoRA on all": (4, f"tp=2 zero=3 {LORA}"),
    "tp2, LoRA on all, full recompute": (2, f"tp=2 sp=false recompute=full {LORA}"),
    "tp2·dp2+sp, zero 3, DoRA on all, full recompute": (4, f"tp=2 zero=3 recompute=full finetune.use_dora=true {LORA}"),
    "tp4, kv heads < tp, DoRA on all": (4, f"tp=4 sp=false finetune.use_dora=true {FEW} {LORA}"),
    "tp4+sp, kv heads < tp, LoRA on all": (4, f"tp=4 {FEW} {LORA}"),
    "pp2, LoRA on all": (2, f"pp=2 {LORA}"),
    "cp2·tp2+sp": (4, f"cp=2 tp=2 {FEW}"),
    "cp2·pp2·dp2, zero 3, full recompute of every 2nd block, bf16": (
        8,
        "cp=2 pp=2 zero=3 recompute=full recompute_every=2 precision=bf16",
    ),
    "cp2, selective recompute": (2, f"cp=2 recompute=selective {FEW}"),
    "cp4, ulysses, kv heads < cp": (4, f"cp=4 cp_comm=ulysses {FEW}"),
    "cp2·dp2, ulysses, full recompute": (4, "cp=2 cp_comm=ulysses recompute=full zero=3"),
    "cp2, ulysses, selective recompute": (2, f"cp=2 cp_comm=ulysses recompute=selective {FEW}"),
    "muon, tp2·dp2, zero 0, kv heads < tp": (4, f"optim.name=muon {FEW} tp=2 zero=0 model.num_key_value_heads=1"),
    "muon, pp2·dp2, zero 3, bf16": (4, f"optim.name=muon {FEW} pp=2 zero=3 precision=bf16"),
    "muon, tp2·dp4, hybrid, zero 1": (8, f"optim.name=muon {FEW} tp=2 zero=1 shard_group=2 global_batch_size=8"),
    "muon, tp2·cp2, split heads": (4, f"optim.name=muon {FEW} tp=2 cp=2 optim.split_heads=true"),
    "QK-Clip, tp2·cp2, full recompute": (4, f"optim.qk_clip=1 tp=2 cp=2 recompute=full {FEW}"),
    "QK-Clip, pp2·cp2, ulysses, bf16": (4, "optim.qk_clip=1 pp=2 cp=2 cp_comm=ulysses precision=bf16"),
    "muon, dp2, zero 0": (2, f"optim.name=muon {FEW} zero=0"),
    "tp2·pp2·dp2+sp, tied, odd": (8, f"tp=2 pp=2 {TIED} {ODD} {FEW}"),
}


@cache
def small_plan(ranks: int, text: str) -> Plan:
    return make_plan(ranks, *overrides(text))


def counted(rank: int, plan: Plan) -> list[Traffic]:
    """Return the traffic of a rank in two steps, then its traffic to other nodes of two ranks."""
    return count_steps(plan, rank, get_device("cpu"), torch.device("cpu"), per_node=2)


def differences(world_size: int, text: str) -> list[tuple]:
    """Return (rank, step, key, predicted, counted) of each difference; steps 3 and 4 are the traffic to other nodes."""
    plan, results = small_plan(world_size, text), []
    for rank, steps in enumerate(run_ranks(counted, world_size, plan)):
        operations = operations_of_rank(plan, rank)
        whole, away = totals(operations), between_nodes(operations, rank, world_size, per_node=2)
        for step, (predicted, traffic) in enumerate(zip((whole, whole, away, away), steps, strict=True), start=1):
            for key in {**predicted, **traffic}:
                if predicted.get(key) != traffic.get(key):
                    results.append((rank, step, key, predicted.get(key), traffic.get(key)))
    return results


# Each kind of collective on each axis with every `make test`.
QUICK = {
    "tp2",
    "dp2, zero 0",
    "dp2, zero 2",
    "dp2, zero 3",
    "tp2+sp, odd vocabulary, tied",
    "pp2·vpp2",
    "dp4, hybrid, zero 2",
    "dp4, zero 3, second copy, two hops, both in int8",
    "cp2·tp2+sp",
    "cp4, ulysses, kv heads < cp",
}


@pytest.mark.parametrize(("ranks", "layout"), rows(LAYOUTS.items(), QUICK))
def test_counts_match_the_prediction(ranks: int, layout: str) -> None:
    assert differences(ranks, layout) == []


ONE_BIT = f"optim.name=onebit_adam zero=0 optim.freeze_step=1 {FEW}"
ONE_BIT_LAYOUTS = {
    "dp2": (2, ""),
    "tp2·dp2+sp, odd, tied": (4, f"tp=2 {ODD} {TIED}"),
    "tp2·dp2, LoRA on all": (4, f"tp=2 {LORA}"),
}


@pytest.mark.parametrize(("ranks", "layout"), rows(ONE_BIT_LAYOUTS.items(), {"dp2"}))
def test_one_bit_adam_before_and_after_its_freeze(ranks: int, layout: str) -> None:
    plan = small_plan(ranks, f"{ONE_BIT} {layout}")
    for rank, (warm_up, signs, *_) in enumerate(run_ranks(counted, ranks, plan)):
        predicted = totals(operations_of_rank(plan, rank))
        assert signs == predicted
        (calls, gradients), others = warm_up[TrafficKey("dp", "all_reduce", 2)], {"all_to_all", "all_gather"}
        assert calls == 1 and ("lora" in layout or gradients / 4 == plan.stages[0].held)
        of_dp = {line.kind: amount.payload for line, amount in signs.items() if line.axis == "dp"}
        assert of_dp.keys() == others
        assert of_dp["all_to_all"] >= 0.98 * gradients / 32  # padding of the vocabulary has no signs


def test_one_bit_adam_sends_a_fifth_of_adam() -> None:
    """Count a run at full model size: 15 % warm-up in fp32, the rest as signs."""
    whole = ("model=llama7b", "data=mock", "data.seq_length=4096", "trainer.dp=8", "trainer.zero=0")
    plan = resolve(load_config([*whole, "optim.name=onebit_adam"], CONF), 8)
    signs = sum(wire_bytes(*item) for item in _of_dp(plan))
    gradients = wire_bytes(TrafficKey("dp", "all_reduce", 8), 4 * plan.parameters)
    assert 0 < signs < gradients / 31
    steps, warm_up = plan.config.trainer.steps, plan.config.optim.freeze_step
    assert warm_up == 15 and steps == 100
    assert gradients * steps / (gradients * warm_up + signs * (steps - warm_up)) > 5


def _of_dp(plan: Plan) -> list[tuple[TrafficKey, int]]:
    traffic = totals(operations_of_rank(plan, 0))
    return [(line, amount.payload) for line, amount in traffic.items() if line.axis == "dp"]


@pytest.mark.slow
@needs_compiler
def test_compiled(tmp_path: Path) -> None:
    # Compiled graphs call fewer collectives, and functional ones.
    compiled = f"compile=true compile_cache={tmp_path} recompute=full"
    assert differences(2, f"tp=2 model.num_hidden_layers=2 {FEW} {compiled}") == []


# --- nodes --------------------------------------------------------------------------------------------------------


def _counted_in_fake_world(_: int, plan: Plan, rank: int) -> list[Traffic]:
    """Return ``counted`` in a fake world of this rank only: collectives do nothing, so values are meaningless."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world_size)
    return counted(rank, plan)


@pytest.mark.parametrize(("nodes", "pp"), [(1, 1), (4, 1), (1, 2), (4, 2)])
def test_nodes_of_32_devices(nodes: int, pp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worlds larger than this machine, with the layout of the Trainium recipe."""
    monkeypatch.setattr(StepGuard, "check", lambda *_: None)
    layout = overrides(f"tp=8 pp={pp} model.num_attention_heads=8 global_batch_size={2 * nodes * 4 // pp}")
    plan = make_plan(32 * nodes, *layout)
    rank = plan.world_size - 1
    first, second, *_ = run_ranks(_counted_in_fake_world, 1, plan, rank)[0]
    assert first == second == totals(operations_of_rank(plan, rank))
    assert {line.ranks for line in first if line.axis == "dp"} == {nodes * 4 // pp}


# --- the counter itself -------------------------------------------------------------------------------------------


def _every_operator(rank: int) -> dict[str, Traffic]:
    """Run each collective between 2 ranks with 4 fp32 values per rank."""
    x, pair, group = torch.ones(4), torch.ones(8), dist.group.WORLD
    assert group is not None
    calls_by_name: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(pair, x),
        "all_gather": lambda: dist.all_gather([torch.ones(4), torch.ones(4)], x),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(x, pair),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty(4), x),
        "send, recv": lambda: dist.send(x, 1) if rank == 0 else dist.recv(x, 0),
        "functional all_reduce": lambda: all_reduce(x, "sum", group).wait(),
        "functional all_gather": lambda: all_gather_tensor(x, 0, group).wait(),
        "functional reduce_scatter": lambda: reduce_scatter_tensor(pair, "sum", 0, group).wait(),
        "int64": lambda: dist.all_reduce(torch.ones(4, dtype=torch.int64)),
        "bf16": lambda: dist.all_reduce(torch.ones(4, dtype=torch.bfloat16)),
        "barrier": lambda: dist.barrier(),
    }
    results = {}
    with TrafficCounter() as counter:
        for name, call in calls_by_name.items():
            call()
            results[name] = counter.take()
    return results


def test_each_operator_is_counted() -> None:
    first, second = run_ranks(_every_operator, 2)
    payloads = {
        "all_reduce": ("all_reduce", 16),
        "all_gather_into_tensor": ("all_gather", 32),
        "all_gather": ("all_gather", 32),
        "reduce_scatter_tensor": ("reduce_scatter", 32),
        "all_to_all_single": ("all_to_all", 16),
        "functional all_reduce": ("all_reduce", 16),
        "functional all_gather": ("all_gather", 32),
        "functional reduce_scatter": ("reduce_scatter", 32),
        "int64": ("all_reduce", 32),
        "bf16": ("all_reduce", 8),
    }
    expected = {name: {TrafficKey("world", kind, 2): Amount(1, size)} for name, (kind, size) in payloads.items()}
    expected["barrier"] = {}
    assert first == expected | {"send, recv": {TrafficKey("pp", "send", 2): Amount(1, 16)}}
    assert second == expected | {"send, recv": {TrafficKey("pp", "recv", 2): Amount(1, 16)}}


def _uncounted(rank: int, case: str) -> None:
    group = dist.new_group([0, 1])
    with TrafficCounter():
        if case == "operator":
            dist.broadcast(torch.ones(1), 0)
        else:
            dist.all_reduce(torch.ones(1), group=group)


@pytest.mark.parametrize(
    ("case", "message"), [("operator", "broadcast_ is not counted"), ("group", "a group of no axis")]
)
def test_unknown_collectives_and_groups_raise(case: str, message: str) -> None:
    with pytest.raises(RankFailed, match=f"{UnknownCollective.__name__}.*{message}"):
        run_ranks(_uncounted, 2, case)


# --- scripts/traffic.py -------------------------------------------------------------------------------------------


def measure(folder: Path, *layout: str) -> tuple[int, str]:
    """Return the exit status and the output of ``--measure`` in a fork."""
    arguments, output = ["--measure", *SHAPE, *layout, "trainer.global_batch_size=4"], folder / "output"
    status = run_forked(partial(_exit_with_main, arguments), output, output, 200)
    return status, output.read_text()


def _exit_with_main(arguments: list[str]) -> None:
    raise SystemExit(main(arguments))


def test_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps send the predicted bytes; a wrong prediction gives status 1."""
    status, output = measure(tmp_path, "trainer.tp=2")
    assert status == 0, output
    GoldenFiles.check("tools/traffic/measured.txt", output[output.index("\nrank ") :])
    wrong = {TrafficKey("dp", "all_reduce", 2): Amount(1, 12)}
    monkeypatch.setattr("megatron_llama.tools.forecast.traffic.totals", lambda operations: wrong)
    status, output = measure(tmp_path, "trainer.dp=2")
    assert status == 1
    GoldenFiles.check("tools/traffic/differs.txt", output[output.index("\nrank ") :])
