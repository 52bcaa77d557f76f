"""The plan's memory against torch's caching allocator on the runtime, where weights in 8 and 4 bits are unpacked."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_llama.config import load_config
from megatron_llama.plan import resolve
from megatron_llama.plan.memory import stage_footprints
from megatron_llama.train.metrics_file import read_metrics
from tests.cuda.harness import Runtime, train_words
from tests.paths import CONF

pytestmark = pytest.mark.slow
TOLERANCE = 0.1  # as the plan states
WORKSPACES = 64 << 20  # of cuBLAS on Hopper, which the plan does not count
QLORA = (
    *("finetune=lora", "trainer.precision=bf16", "trainer.micro_batch_size=1", "trainer.global_batch_size=1"),
    *("model.hidden_size=4096", "model.intermediate_size=11008", "model.num_hidden_layers=1", "trainer.steps=2"),
    *("model.num_attention_heads=32", "model.num_key_value_heads=32", "model.vocab_size=1024", "trainer.compile=false"),
)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_quantized_weights(runtime: Runtime, tmp_path: Path, kind: str, recompute: str) -> None:
    settings = (*QLORA, f"finetune.frozen_dtype={kind}", f"trainer.recompute={recompute}")
    runtime.train(tmp_path, *settings).check()
    peak = max(row["peak_memory_bytes"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl"))
    plan = resolve(load_config(train_words(tmp_path, settings)[1:], CONF), 1)
    forecast = stage_footprints(plan)[0].total
    assert (1 - TOLERANCE) * forecast < peak < (1 + TOLERANCE) * forecast + WORKSPACES
