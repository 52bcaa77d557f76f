"""Rehearsals match real ranks over gloo: bytes by kind, FLOPs, traffic, order of the schedule."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from megatron_llama.arch.flops import flops_per_token
from megatron_llama.arch.parameters import head_dim
from megatron_llama.devices import get_device
from megatron_llama.plan import Plan
from megatron_llama.plan.memory import rank_memory
from megatron_llama.tools.forecast.rank_work import units
from megatron_llama.tools.forecast.traffic import totals
from megatron_llama.tools.measured_steps import Steps
from megatron_llama.tools.rehearse import cli
from megatron_llama.tools.rehearse import rehearsal as module
from megatron_llama.tools.rehearse.rehearsal import measure_rank, rehearse
from megatron_llama.tools.rehearse.report import MemoryKind, Rehearsal
from megatron_llama.tools.traffic.cli import operations_of_rank
from tests.oracle import SHAPE, make_plan
from tests.ranks import run_ranks
from tests.rows import overrides, read_table, rows

FEW, MICRO_2, TWO_LAYERS = "global_batch_size=4", "micro_batch_size=2", "model.num_hidden_layers=2"
LAYOUTS, QUICK = read_table(__file__)


@pytest.mark.parametrize(("ranks", "layout"), rows(LAYOUTS.items(), QUICK))
def test_rehearsals_match_real_runs(ranks: int, layout: str) -> None:
    compare(make_plan(ranks, *overrides(layout)))


def compare(plan: Plan) -> None:
    ranks = run_ranks(_real_rank, plan.world_size, plan)
    for measured, rehearsed in zip(ranks, run_rehearsals(plan, *range(plan.world_size)), strict=True):
        assert rehearsed.peak == pytest.approx(measured.peak, rel=0.02)
        # Equal except for some scalars, the mesh's table of ranks, which a rehearsal does not track, and, between
        # stages, tensors not yet freed by gloo's threads.
        temporary = MemoryKind.TEMPORARY
        ignored = {temporary, MemoryKind.COMMUNICATION} if plan.config.trainer.pp > 1 else {temporary}
        for rehearsed_kinds, measured_kinds in ((rehearsed.at_peak, measured.at_peak), (rehearsed.most, measured.most)):
            assert without(ignored, rehearsed_kinds) == without(ignored, measured_kinds)
            assert abs(rehearsed_kinds.get(temporary, 0) - measured_kinds.get(temporary, 0)) < 4096
        assert without({temporary}, rehearsed.at_rest) == without({temporary}, measured.at_rest)
        assert rehearsed.reduced == measured.reduced
        assert_memory_matches_the_plan(plan, measured)
        assert rehearsed.flops == measured.flops
        assert rehearsed.traffic == measured.traffic
        assert rehearsed.traffic == totals(operations_of_rank(plan, rehearsed.rank))
        assert rehearsed.order == measured.order
        changes = [item for item in rehearsed.dynamic if item.what.startswith("other shapes")]
        assert bool(changes) == plan.config.data.document_mask, "attention runs per document on CPU"
        assert rehearsed.rehearsed_microbatches == rehearsed.microbatches, "a small step runs fully"


def assert_memory_matches_the_plan(plan: Plan, measured: Rehearsal) -> None:
    zero, planned = plan.config.trainer.zero, rank_memory(plan, plan.stages[measured.place["pp"]])
    shards, gathered = measured.at_rest[MemoryKind.WEIGHTS], measured.most.get(MemoryKind.GATHERED, 0)
    if zero == 3:
        assert planned.weights == shards
    elif plan.num_microbatches > 1:
        assert planned.weights == shards + gathered
    else:  # during the last backward pass gradients replace gathered weights
        assert planned.weights + planned.gradients == shards + max(gathered, measured.reduced)
    if zero < 2 and plan.num_microbatches > 1:  # gradients are not sharded until the last micro batch
        # The forward pass adds the head's gradient to its sum; elsewhere gradients may precede the first sums.
        has_head = measured.place["pp"] == plan.config.trainer.pp - 1 and not plan.config.trainer.vpp > 1
        passes = ("F",) if has_head else ("F", "B")
        # A single rank that accumulates in bf16 ends with fp32 gradients, which are larger than the sums.
        assert planned.gradients == max(max_at_pass_starts(measured, MemoryKind.GRADIENTS, passes), measured.reduced)
    else:
        assert planned.gradients == measured.reduced
    tensors = sum(
        unit.number * sum(parameter.trained for parameter in unit.parameters)
        for stage in range(measured.place["pp"], len(plan.stage_layers), plan.config.trainer.pp)
        for unit in units(plan, len(plan.stage_layers[stage]), stage == 0, stage == len(plan.stage_layers) - 1)
    )
    assert planned.optimizer + 4 * tensors == measured.at_rest[MemoryKind.OPTIMIZER]  # a step count per tensor


def max_at_pass_starts(measured: Rehearsal, kind: str, passes: tuple[str, ...]) -> int:
    """Return the largest number of bytes of a kind at the starts of ``passes``: saved, not temporary, tensors."""
    begins: dict[str, int] = {}
    for change, name in measured.timeline.passes:
        begins.setdefault(name, change)
    column = measured.timeline.kinds.index(kind)
    changes = [change for name, change in begins.items() if name.startswith(passes)]
    return max(int(measured.timeline.bytes[change, column]) for change in changes)


def without(ignored: set[str], kinds: Mapping[str, int]) -> dict[str, int]:
    return {kind: size for kind, size in kinds.items() if kind not in ignored}


# --- FLOPs --------------------------------------------------------------------------------------------------------


def _counted(rank: int, plan: Plan) -> int:
    """Count the FLOPs of a real step with torch, with formulas for the CPU attention kernel added."""
    aten = torch.ops.aten
    formulas = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *_, **__: (
            sdpa_backward_flop_count(g, q, k, v)
        ),
    }
    counts = []
    run = Steps.run

    def counted(steps: Steps, step: int) -> None:
        with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
            run(steps, step)
        counts.append(counter.get_total_flops())

    Steps.run = counted  # type: ignore[method-assign]
    measure_rank(plan, plan.topology(rank), get_device("cpu"))
    return counts[-1]


@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.slow), "full"])
def test_flops_match_torch_and_the_plan(recompute: str) -> None:
    plan = make_plan(1, *overrides(f"{FEW} {TWO_LAYERS} recompute={recompute}"))
    (counted,) = run_ranks(_counted, 1, plan)
    (rehearsed,) = run_rehearsals(plan, 0)
    assert sum(rehearsed.total_flops) == counted
    assert (rehearsed.total_flops.recomputed > 0) == (recompute == "full")
    # torch counts the scores recomputed by the backward kernel; the plan does not.
    model, length = plan.model, plan.config.data.seq_length
    recomputed_scores = 2 * model.num_hidden_layers * model.num_attention_heads * head_dim(model) * length
    per_token = flops_per_token(model, length).full + recomputed_scores
    assert rehearsed.total_flops.forward + rehearsed.total_flops.backward == per_token * plan.tokens_per_step


# --- worlds and steps of any size ---------------------------------------------------------------------------------


def _rehearse_and_count_groups(_: int, plan: Plan, ranks: tuple[int, ...]) -> list[tuple[Rehearsal, int]]:
    import torch.distributed as dist

    dist.destroy_process_group()
    make, made, results = dist.distributed_c10d._new_process_group_helper, [0], []

    def counted(*args: object, **kwargs: object) -> object:
        made[0] += 1
        return make(*args, **kwargs)

    dist.distributed_c10d._new_process_group_helper = counted
    for rank in ranks:
        made[0] = 0
        results.append((module.rehearse(plan, rank), made[0]))
    return results


def test_cost_does_not_depend_on_the_world_size() -> None:
    results = []
    for dp in (4, 512):
        layout = ["trainer.tp=8", "trainer.pp=4", "trainer.zero=0", "model.num_attention_heads=8"]
        plan = make_plan(32 * dp, *layout, f"trainer.global_batch_size={2 * dp}")
        results.append(run_ranks(_rehearse_and_count_groups, 1, plan, (plan.world_size - 1,))[0][0])
    (small, few), (large, many) = results
    assert small.world_size == 128 and large.world_size == 16384
    assert many == few, "equal number of process groups"
    assert large.flops == small.flops
    table = 4 * (16384 - 128)  # the mesh's table of all ranks
    assert large.peak == pytest.approx(small.peak + table, abs=64)
    assert len(large.timeline.bytes) == len(small.timeline.bytes), "equal number of allocations"


@pytest.mark.slow
@pytest.mark.parametrize("layout", [["trainer.pp=2"], ["trainer.pp=2", "trainer.vpp=2"]], ids=["pp2", "pp2·vpp2"])
def test_counts_are_extrapolated_over_micro_batches(layout: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(2, *layout, "trainer.global_batch_size=12", "trainer.micro_batch_size=1")
    (whole,) = run_rehearsals(plan, 0)
    monkeypatch.setattr(module, "MAX_BLOCK_RUNS", 0)
    (part,) = run_rehearsals(plan, 0)
    assert whole.rehearsed_microbatches == 12 > part.rehearsed_microbatches
    assert part.microbatches == 12
    assert part.flops == whole.flops and part.traffic == whole.traffic
    assert part.peak == pytest.approx(whole.peak, rel=0.02)  # one loss per micro batch is saved


# --- allocator -----------------------------------------------------------------------------------------------------


def _allocated(rank: int, plan: Plan) -> tuple[int, int]:
    """Return (peak of torch's allocator, measured peak) of a real run."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        watched = measure_rank(plan, plan.topology(rank), get_device("cpu"))
    results = profiler.profiler.kineto_results
    changes = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
    return max(itertools.accumulate(size for _, size in changes)), watched.peak


@pytest.mark.parametrize("zero", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_the_peak_matches_the_allocator(zero: int) -> None:
    plan = make_plan(1, *overrides(f"zero={zero} {TWO_LAYERS} {MICRO_2} global_batch_size=2"))
    ((allocated, watched),) = run_ranks(_allocated, 1, plan)
    # Differed once by 24 bytes: scalars not yet freed by the interpreter.
    assert watched == pytest.approx(allocated, abs=64)
    assert run_rehearsals(plan, 0)[0].peak == pytest.approx(allocated, abs=64)


# --- real ranks over gloo, measured as a rehearsal measures fake ones ------------------------------------------------

_NOT_WAITED_FOR = ("send", "recv_")  # waiting for these at once would deadlock


class CollectivesOnCopies(TorchDispatchMode):
    """Dispatch mode that runs gloo on copies and waits, so that live tensors do not depend on gloo.

    gloo's threads free their tensors some milliseconds after a collective, which is a full pass of this small model.
    The live bytes would depend on the load of the machine. gloo has no reduce-scatter either: it sums a copy of the
    whole input, which the caller's wait splits and copies back.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if func.namespace == "c10d" and name == "send":
            args = tree_map_only(torch.Tensor, torch.clone, args)
        if func.namespace != "c10d" or name in _NOT_WAITED_FOR:
            return func(*args, **(kwargs or {}))
        copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            return copies.setdefault(id(tensor), (tensor, tensor.clone()))[1]

        out = func(*tree_map_only(torch.Tensor, copy, args), **(kwargs or {}))
        several = isinstance(out, list | tuple)
        dist.Work.unbox(out[-1] if several else out).wait()
        originals = {}
        for original, copied in copies.values():
            original.copy_(copied)
            originals[id(copied)] = original
        done: torch.futures.Future = torch.futures.Future()
        done.set_result(None)
        work = _create_work_from_future(done).boxed()
        if not several:
            return work
        return (*tree_map_only(torch.Tensor, lambda tensor: originals.get(id(tensor), tensor), out[:-1]), work)


def run_rehearsals(plan: Plan, *ranks: int) -> list[Rehearsal]:
    """Rehearse the ranks one after the other in another process."""
    return run_ranks(_rehearse, 1, plan, ranks)[0]


def _real_rank(rank: int, plan: Plan) -> Rehearsal:
    with CollectivesOnCopies():
        return measure_rank(plan, plan.topology(rank), get_device("cpu"))


def _rehearse(_: int, plan: Plan, ranks: tuple[int, ...]) -> list[Rehearsal]:
    dist.destroy_process_group()
    return [rehearse(plan, rank) for rank in ranks]


# --- scripts/rehearse.py ---------------------------------------------------------------------------------------------

TINY = (*SHAPE, "model.num_hidden_layers=2", "trainer.global_batch_size=2")


def run_script(*arguments: str) -> tuple[int, str]:
    """Run the script in a fork of this process; return its status and output."""
    status, output = run_ranks(_main, 1, arguments)[0]
    return status, output


def _main(_: int, arguments: tuple[str, ...]) -> tuple[int, str]:
    dist.destroy_process_group()
    with contextlib.redirect_stdout(io.StringIO()) as output:
        return cli.main(arguments), output.getvalue()


def test_each_stage_has_a_report_and_a_picture(tmp_path: Path) -> None:
    settings = ["trainer.pp=2", "trainer.tp=2", "trainer.precision=bf16", "device.memory_gib=0.0001"]
    status, output = run_script(*TINY, *settings, "--pictures", str(tmp_path))
    assert status == 1, "a rank does not fit"
    assert re.findall(r"^rank (\d): pipeline stage (\d) of 2", output, re.M) == [("0", "1"), ("2", "2")]
    assert "DOES NOT FIT" in output, "ranks that do not fit are rehearsed too"
    for word in ("gathered weights", "layers.*.mlp.gate_up_proj", "reduce_scatter", "read_scalars"):
        assert word in output
    pictures = sorted(tmp_path.iterdir())
    assert len(pictures) == 2 and all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


@pytest.mark.slow
def test_json() -> None:
    status, output = run_script(*TINY, "trainer.tp=2", "trainer.compile=true", "--ranks", "1", "--json")
    assert status == 0
    report = json.loads(output)
    assert "trainer.compile" in report["notes"][0]
    (rank,) = report["ranks"]
    assert rank["rank"] == rank["tp_rank"] == 1
    assert sum(rank["at_peak"].values()) == rank["peak"] == sum(holder["size"] for holder in rank["holders"])
