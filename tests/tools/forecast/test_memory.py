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
from tests.rows import overrides, rows

WITHIN, WITHIN_EXACT = 0.10, 0.13
MODEL = (
    "model.hidden_size=256 model.num_hidden_layers=4 model.num_attention_heads=8 model.num_key_value_heads=4 "
    "model.intermediate_size=704 model.vocab_size=8000 data.seq_length=512 micro_batch_size=2 global_batch_size=8 "
    "precision=bf16"
)
FULL, ELEMENTWISE, CHUNKS, TWO = "recompute=full", "recompute=elementwise", "mlp_chunks=8", "model.num_hidden_layers=2"
LORA, LORA_ALL = "finetune=lora", "finetune=lora finetune.lora_target_modules=all-linear"
OLMO2, QWEN2, QWEN3 = (f"model.model_type={name}" for name in ("olmo2", "qwen2", "qwen3"))
LONG = "data.seq_length=4096 micro_batch_size=1"
SMALL_VOCABULARY, LONG_SMALL = "data.seq_length=2048 model.vocab_size=512", f"{LONG} model.vocab_size=512"
LAYOUTS = {
    "tp2 pp2, zero 2": (0, f"tp=2 pp=2 {TWO} dp=2 zero=2"),
    "zero 3, full recompute": (0, f"{TWO} dp=2 zero=3 {FULL}"),
    "elementwise": (0, f"{TWO} {ELEMENTWISE} {SMALL_VOCABULARY}"),
    "offload, activations and states, long": (0, f"offload=[activations,optimizer] {SMALL_VOCABULARY}"),
    "exact": (0, "exact=true"),
    "exact, fp32": (0, "exact=true precision=fp32"),
    "exact, tp2": (0, "exact=true tp=2"),
    "exact, zero 1": (0, "exact=true dp=4"),
    "exact, zero 3": (0, "exact=true dp=2 zero=3"),
    "exact, tp2 pp2, zero 2": (0, "exact=true tp=2 pp=2 dp=2 zero=2"),
    "exact, cp2": (0, "exact=true cp=2 cp_comm=ulysses data.seq_length=2048"),
    "fp32": (0, "precision=fp32"),
    "bf16": (0, ""),
    "bf16_sr": (0, "precision=bf16_sr"),
    "one micro batch": (0, "global_batch_size=2"),
    "one micro batch, full": (0, f"global_batch_size=2 {FULL}"),
    "one micro batch, tied": (0, "global_batch_size=2 model.tie_word_embeddings=true"),
    "one micro batch, tp2, large vocabulary": (0, "global_batch_size=2 tp=2 model.vocab_size=32000"),
    "tp2": (0, "tp=2"),
    "tp2 without sp": (0, "tp=2 sp=false"),
    "tp8, copied kv heads": (0, "tp=8"),
    "zero 0": (0, "dp=2 zero=0"),
    "zero 1": (0, "dp=4"),
    "zero 2": (0, "dp=4 zero=2"),
    "zero 3": (0, "dp=2 zero=3"),
    "second copy": (0, "dp=4 zero=3 secondary_group=2"),
    "zero 1, exchanged in int8": (0, "dp=4 grad_reduce=int8"),
    "zero 3, all in int8": (0, "dp=4 zero=3 grad_reduce=int8 param_gather=int8"),
    "hybrid": (0, "dp=4 zero=3 shard_group=2"),
    "selective": (0, "recompute=selective"),
    "elementwise, fp32": (0, f"{ELEMENTWISE} precision=fp32"),
    "offload": (0, "offload=[activations]"),
    "offload, long": (0, f"offload=[activations] {SMALL_VOCABULARY}"),
    "offload, full": (0, f"offload=[activations,optimizer] {FULL}"),
    "tp2 elementwise": (0, f"tp=2 {ELEMENTWISE}"),
    "lora elementwise": (0, f"{LORA_ALL} {ELEMENTWISE}"),
    "full in every 3rd block": (0, f"{FULL} recompute_every=3"),
    "full": (0, FULL),
    "tp2 full": (0, f"tp=2 {FULL}"),
    "mlp chunks": (0, CHUNKS),
    "mlp chunks, long": (0, f"{CHUNKS} {LONG_SMALL}"),
    "mlp chunks, full, long": (0, f"{CHUNKS} {FULL} {LONG_SMALL}"),
    "mlp chunks, full, tp2, long": (0, f"{CHUNKS} {FULL} tp=2 {LONG_SMALL}"),
    "mlp chunks, elementwise, fp32": (0, f"{CHUNKS} {ELEMENTWISE} precision=fp32"),
    "mlp chunks, full, offload, cp2, long": (0, f"{CHUNKS} {FULL} cp=2 offload=[activations] {LONG_SMALL}"),
    "mlp chunks, full, LoRA": (0, f"{CHUNKS} {FULL} {LORA_ALL} {LONG_SMALL}"),
    "pp2, first": (0, "pp=2"),
    "pp2, last": (1, "pp=2"),
    "pp4, third": (2, "pp=4"),
    "pp2 vpp2, first": (0, "pp=2 vpp=2"),
    "pp2 vpp2, last": (1, "pp=2 vpp=2"),
    "pp2 full": (0, f"pp=2 {FULL}"),
    "pp2 zero 3": (0, "pp=2 dp=2 zero=3"),
    "uneven": (1, "pp=2 pipeline_layers=[1,3]"),
    "tied": (0, "model.tie_word_embeddings=true"),
    "lora": (0, LORA),
    "lora on all": (0, LORA_ALL),
    "lora zero 3": (0, f"{LORA} dp=2 zero=3"),
    "lora full": (0, f"{LORA} {FULL}"),
    "lora nf4": (0, f"{LORA} finetune.frozen_dtype=nf4"),
    "documents": (0, "data.document_mask=true"),
    "long": (0, LONG),
    "small vocabulary": (0, "model.vocab_size=512"),
    "cp2": (0, "cp=2"),
    "cp4 tp2, long": (0, f"cp=4 tp=2 {SMALL_VOCABULARY}"),
    "cp4 full, long": (0, f"cp=4 {FULL} {LONG}"),
    "cp2 full, fp32, long": (0, f"cp=2 {FULL} precision=fp32 {LONG_SMALL}"),
    "cp2 ulysses": (0, "cp=2 cp_comm=ulysses"),
    "cp4 ulysses, long": (0, f"cp=4 cp_comm=ulysses {SMALL_VOCABULARY}"),
    "cp2 ulysses, full": (0, f"cp=2 cp_comm=ulysses {FULL}"),
    "qwen2, tp2": (0, f"tp=2 {QWEN2}"),
    "qwen3": (0, QWEN3),
    "qwen3, elementwise": (0, f"{ELEMENTWISE} {QWEN3}"),
    "qwen3, full": (0, f"{FULL} {QWEN3}"),
    "qwen2, lora nf4": (0, f"{LORA_ALL} finetune.frozen_dtype=nf4 {QWEN2}"),
    "qwen3, lora int8": (0, f"{LORA_ALL} finetune.frozen_dtype=int8 {QWEN3}"),
    "olmo2": (0, OLMO2),
    "olmo2, tp2": (0, f"tp=2 {OLMO2}"),
    "olmo2, elementwise": (0, f"{ELEMENTWISE} {OLMO2}"),
    "olmo2, elementwise, long": (0, f"{ELEMENTWISE} {OLMO2} {SMALL_VOCABULARY}"),
    "olmo2, full": (0, f"{FULL} {OLMO2}"),
    "olmo2, lora nf4": (0, f"{LORA_ALL} finetune.frozen_dtype=nf4 {OLMO2}"),
    "biases": (0, "tp=2 model.attention_bias=true model.mlp_bias=true"),
    "QK-Clip, full": (0, f"{FULL} optim.qk_clip=100 {SMALL_VOCABULARY}"),
    "QK-Clip, cp2": (0, f"cp=2 optim.qk_clip=100 {SMALL_VOCABULARY}"),
    "sgd": (0, "optim.name=sgd"),
    "8-bit states on the host": (0, "offload=[optimizer] optim.state_bits=8"),
    "8-bit states, zero 2": (0, "tp=2 dp=2 zero=2 optim.state_bits=8"),
}


@pytest.mark.parametrize(("stage", "layout"), rows(LAYOUTS.items(), {"tp2 pp2, zero 2", "zero 3, full recompute"}))
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
