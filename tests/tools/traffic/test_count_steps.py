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
from tests.rows import overrides, read_table, rows

TIED, ODD, FEW = "model.tie_word_embeddings=true", "model.vocab_size=61", "global_batch_size=4"
LORA = "finetune.method=lora finetune.lora_rank=2 finetune.lora_target_modules=all-linear"
LAYOUTS, QUICK = read_table(__file__)


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
        assert signs == totals(operations_of_rank(plan, rank))
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
    return run_forked(partial(_exit_with_main, arguments), output, output, 200), output.read_text()


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
