"""Work and memory of a step on the runtime: launches of a block, and the plan's memory against torch's allocator."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from megatron_llama.config import load_config
from megatron_llama.plan import resolve
from megatron_llama.plan.memory import stage_footprints
from megatron_llama.train.metrics_file import read_metrics
from tests.cuda.harness import Runtime, train_words
from tests.cuda.log import kernel_class
from tests.cuda.rows import MEASURED_STEP
from tests.paths import CONF

pytestmark = pytest.mark.slow
OPERATORS = {"norms": 2 * 3, "rotations of q and k": 2 * 2, "SwiGLU": 2}
"""Kernels of a block, forward and backward. A norm's backward pass adds and rounds the weight's gradient."""
PLAIN = 60
"""Kernels of a block that the fused operators replace, at least."""


def _block(runtime: Runtime, folder: Path, **settings: str) -> Counter[str]:
    """Return the kernels of one block of a micro batch by class, from runs with one and two blocks."""
    counted = []
    for layers in (1, 2):
        overrides = (f"model.num_hidden_layers={layers}", "trainer.global_batch_size=2", "trainer.compile=false")
        run = runtime.train(folder / str(layers), *overrides, **settings).check()
        calls = (call for call in run.logs[0].steps[MEASURED_STEP] if call.name == "KERNEL")
        counted.append(Counter(kernel_class(call.fields["name"]) for call in calls))
    return counted[1] - counted[0]


def test_launches_of_a_block(runtime: Runtime, tmp_path: Path) -> None:
    """Without a C compiler Triton cannot launch kernels: the plain operators run."""
    fused = _block(runtime, tmp_path / "fused")
    plain = _block(runtime, tmp_path / "plain", CC="no-such-compiler")
    assert 0 < fused["Triton"] <= sum(OPERATORS.values()) + 2  # and the sums of the norms' weight gradients
    assert plain["Triton"] == 0
    assert plain.total() - fused.total() >= PLAIN, (plain, fused)


TOLERANCE = 0.1  # as the plan states
WORKSPACES = 64 << 20  # of cuBLAS on Hopper, which the plan does not count
QLORA = (
    *("finetune=lora", "trainer.precision=bf16", "trainer.micro_batch_size=1", "trainer.global_batch_size=1"),
    *("model.hidden_size=4096", "model.intermediate_size=11008", "model.num_hidden_layers=1", "trainer.steps=2"),
    *("model.num_attention_heads=32", "model.num_key_value_heads=32", "model.vocab_size=1024", "trainer.compile=false"),
)


GROUPED = (
    *("model=llama3_1b", "model.num_hidden_layers=2", "model.vocab_size=1024", "data.seq_length=2048"),
    *("trainer.precision=fp32", "trainer.micro_batch_size=1", "trainer.global_batch_size=1", "trainer.steps=2"),
)
MEMORY = {
    "int8": (*QLORA, "finetune.frozen_dtype=int8"),
    "nf4": (*QLORA, "finetune.frozen_dtype=nf4"),
    "fp32, grouped heads, eager": (*GROUPED, "trainer.compile=false"),
    "fp32, grouped heads, compiled": (*GROUPED, "trainer.compile=true"),
}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", MEMORY)
def test_memory(runtime: Runtime, tmp_path: Path, name: str, recompute: str) -> None:
    settings = (*MEMORY[name], f"trainer.recompute={recompute}")
    runtime.train(tmp_path, *settings).check()
    peak = max(row["peak_memory_bytes"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl"))
    plan = resolve(load_config(train_words(tmp_path, settings)[1:], CONF), 1)
    forecast = stage_footprints(plan)[0].total
    assert (1 - TOLERANCE) * forecast < peak < (1 + TOLERANCE) * forecast + WORKSPACES
