"""Predicted memory against rehearsals and against peaks of real steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness.worker import peak_live_bytes
from megatron_llama.config import load_config
from megatron_llama.optim import build_optimizer
from megatron_llama.plan import Plan, resolve
from megatron_llama.plan.memory import stage_footprints
from megatron_llama.tools.measured_steps import open_steps
from megatron_llama.tools.rehearse.cli import read_rehearsal
from megatron_llama.tools.rehearse.rehearsal import rehearse
from megatron_llama.tools.rehearse.report import MemoryKind
from tests.compiled import needs_compiler
from tests.oracle import rank_data, rank_groups, rank_model
from tests.paths import CONF
from tests.ranks import run_ranks
from tests.rows import overrides, read_table, rows

WITHIN, WITHIN_EXACT = 0.10, 0.13
MODEL = (
    "model.hidden_size=256 model.num_hidden_layers=4 model.num_attention_heads=8 model.num_key_value_heads=4 "
    "model.intermediate_size=704 model.vocab_size=8000 data.seq_length=512 micro_batch_size=2 global_batch_size=8 "
    "precision=bf16"
)
LAYOUTS, QUICK = read_table(__file__)


@pytest.mark.parametrize(("stage", "layout"), rows(LAYOUTS.items(), QUICK))
def test_forecast_is_near_the_rehearsal(stage: int, layout: str) -> None:
    """Compare the forecast of a stage's first rank with its rehearsal."""
    words = {word.partition("=")[0]: word for word in overrides(f"{MODEL} {layout}")}
    plan, *_ = read_rehearsal(list(words.values()))
    forecast = stage_footprints(plan)[stage]
    rehearsed = rehearse(plan, plan.grid.rank(pp=stage))
    within = WITHIN_EXACT if plan.config.trainer.exact else WITHIN
    assert forecast.total == pytest.approx(rehearsed.peak, rel=within), (forecast, rehearsed.at_peak, rehearsed.moment)
    # Adam's step counts are 4-byte tensors. Weights gathered by ZeRO 3 are buffers in the forecast.
    states = rehearsed.at_rest.get(MemoryKind.OPTIMIZER, 0)
    assert forecast.optimizer == pytest.approx(states, abs=4096), "optimizer states"
    assert forecast.host == pytest.approx(rehearsed.most.get(MemoryKind.HOST, 0), rel=WITHIN), "host memory"
    if plan.config.trainer.zero < 3 and plan.num_microbatches > 1:
        most = rehearsed.most[MemoryKind.WEIGHTS] + rehearsed.most.get(MemoryKind.GATHERED, 0)
        assert forecast.weights == pytest.approx(most, rel=2e-3), "shards and compute-dtype copies"


# --- compiled runs, which cannot be rehearsed, against the CPU allocator ---------------------------------------------

# In bf16 an eager run's fp32 copy of a chunk's logits is a third of the memory.
SETTINGS = (
    "model=llama_2m model.hidden_size=64 model.num_hidden_layers=2 model.num_attention_heads=2 "
    "model.num_key_value_heads=1 model.intermediate_size=128 model.vocab_size=32000 data=mock data.seq_length=1024 "
    "micro_batch_size=1 global_batch_size=1 device=cpu"
)


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("compiled_here")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_forecast_is_within_10_percent_of_a_run(precision: str, compiled: bool, cache: Path) -> None:
    words = overrides(f"{SETTINGS} precision={precision} compile={compiled} compile_cache={cache}")
    plan = resolve(load_config(words, CONF), 1)
    (forecast,) = stage_footprints(plan)
    (measured,) = run_ranks(_step_peak, 1, plan, timeout=280)
    assert forecast.total == pytest.approx(measured, rel=WITHIN), forecast


def _step_peak(rank: int, plan: Plan) -> int:
    """Return the peak live bytes of the second step; the first one compiles and creates optimizer states."""
    with rank_groups(plan, rank):
        model = rank_model(plan, rank)
        optimizer = build_optimizer(plan, model)
        with open_steps(plan, plan.topology(rank), model, optimizer, rank_data(plan)) as steps:
            steps.run(1)
            return peak_live_bytes(lambda: steps.run(2))
