"""Memory forecast against the CPU allocator, for compiled runs, which cannot be rehearsed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.harness.worker import peak_live_bytes
from megatron_llama.config import load_config
from megatron_llama.data.batches import build_data
from megatron_llama.devices import get_device
from megatron_llama.optim import build_optimizer
from megatron_llama.parallel import build_model, process_groups
from megatron_llama.plan import Plan, resolve
from megatron_llama.plan.memory import stage_footprints
from megatron_llama.tools.steps import open_steps
from tests.compiled import needs_compiler
from tests.paths import CONF
from tests.ranks import run_ranks

WITHIN = 0.10
# In bf16 an eager run's fp32 copy of a chunk's logits is a third of the memory.
SETTINGS = [
    "model=llama_2m",
    "model.hidden_size=64",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=1",
    "model.intermediate_size=128",
    "model.vocab_size=32000",
    "data=mock",
    "data.seq_length=1024",
    "trainer.micro_batch_size=1",
    "trainer.global_batch_size=1",
    "device=cpu",
]


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("compiled_here")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_forecast_is_within_10_percent_of_a_run(precision: str, compiled: bool, cache: Path) -> None:
    more = [f"trainer.precision={precision}", f"trainer.compile={compiled}", f"trainer.compile_cache={cache}"]
    plan = resolve(load_config([*SETTINGS, *more], CONF), 1)
    (forecast,) = stage_footprints(plan)
    (measured,) = run_ranks(_step_peak, 1, plan, timeout=280)
    assert forecast.total == pytest.approx(measured, rel=WITHIN), forecast


def _step_peak(rank: int, plan: Plan) -> int:
    """Return the peak live bytes of the second step; the first one compiles and creates optimizer states."""
    device, cpu, topology = get_device("cpu"), torch.device("cpu"), plan.topology(rank)
    with process_groups(plan, topology, device, cpu):
        data = build_data(plan, topology, cpu)
        model = build_model(plan, topology, device, cpu)
        optimizer = build_optimizer(plan, model)
        with open_steps(plan, topology, model, optimizer, data) as steps:
            steps.run(1)
            return peak_live_bytes(lambda: steps.run(2))
