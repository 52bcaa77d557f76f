"""``build_model`` executes exactly the steps that plan.txt lists, and ``print(model)`` shows the parts that run."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_llama.parallel import assembly
from megatron_llama.plan import Plan
from megatron_llama.plan.steps import applied_steps, build_steps
from tests.compiled import needs_compiler
from tests.layouts.table import DROPPING
from tests.oracle import make_plan, rank_groups, rank_model
from tests.paths import ROOT
from tests.ranks import run_ranks

TABLES = assembly.PARTS, assembly.WRAPPERS, assembly.CHUNKS
BY_LAYOUT = {"tp", "pp"}
"""Steps without a function: the topology and megatron-core's settings."""
LORA = ("finetune=lora", "finetune.frozen_dtype=fp32")
ROWS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "plain": ((), "", ("attend=CpuKernels.attend, rotate=rotate", "activation=swiglu")),
    "exact": (("trainer.exact=true",), "exact", ("ExactColumnLinear", "ExactNorm", "ExactHead", "attend=SharedHeads")),
    "compiled": (
        ("trainer.compile=true", "trainer.recompute=selective"),
        "recompute selective · compile",
        ("ColumnLinear(in_features=32, out_features=64, bias=False, TP=1, traceable_matmul)", "wrapped by recompute"),
    ),
    "float8": (("trainer.float8=rowwise",), "float8 rowwise", ("TP=1, _linear)",)),
    "LoRA": (LORA, "LoRA 8", ("LoraLinear",)),
    "wrapped": (
        ("trainer.mlp_chunks=2", "trainer.recompute=full", DROPPING, "trainer.offload=[activations]"),
        "MLP in 2 chunks · recompute full · random-LTD · offload activations",
        ("wrapped by recompute full, random-LTD, offload", "wrapped by 2 chunks"),
    ),
    "QK-Clip": (("optim.qk_clip=10",), "QK-Clip", ("CpuKernels.attend",)),
}


def _build(rank: int, plan: Plan) -> tuple[list[str], str]:
    """Return the executed steps, and the model's text."""
    executed: list[str] = []

    def recorded(name: str, function: Any) -> Any:
        return lambda *inputs: executed.append(name) or function(*inputs)

    for table in TABLES:
        for name, function in list(table.items()):
            table[name] = recorded(name, function)  # in this forked rank only
    with rank_groups(plan, rank):
        return executed, repr(rank_model(plan, rank).chunks[0])


@needs_compiler
@pytest.mark.parametrize(("settings", "applied", "shown"), ROWS.values(), ids=ROWS)
def test_the_applied_steps_are_executed(settings: tuple[str, ...], applied: str, shown: tuple[str, ...]) -> None:
    plan = make_plan(1, *settings)
    steps = applied_steps(plan)
    assert " · ".join(steps.values()) == applied
    ((executed, text),) = run_ranks(_build, 1, plan)
    assert set(executed) == steps.keys() - BY_LAYOUT
    assert not [part for part in shown if part not in text], text


def test_each_step_has_a_function() -> None:
    names = list(build_steps(make_plan(1)))
    for table in TABLES:
        assert [name for name in names if name in table] == list(table), "in the steps' order"
    assert {name for table in TABLES for name in table} | BY_LAYOUT == set(names)
    tour = " ".join((ROOT / "docs/design/tour.md").read_text(encoding="utf-8").split())
    assert f"in this order: {', '.join(names)}." in tour
